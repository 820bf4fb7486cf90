"""Change a compiled model's whole graph before vLLM splits it, and the ops at which it splits.

vLLM's passes see the pieces after the split, so what crosses an attention op or a cache update is changed here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

from torch import fx

from vllm_rocm_ops.vllm import seam

MODULE = "vllm.compilation.backends"
Change = Callable[[fx.Graph, list[str]], int]
"""Changes a graph, given the splitting ops, and returns how many places it changed."""

_changes: list[Change] = []


def probe() -> None:
    """Raise `Unavailable` unless vLLM splits a graph as expected. Reads a source file: an import would need its kernels."""
    seam.require_function(f"{MODULE}.split_graph", "graph", "splitting_ops")


def before(change: Change) -> None:
    """Have later graphs changed before the split. To be called once a model is loaded, when vLLM's kernels are."""
    if change not in _changes:
        _changes.append(change)
    _wrap()


@functools.cache
def _wrap() -> None:
    module = importlib.import_module(MODULE)
    split = module.split_graph

    @functools.wraps(split)
    def split_graph(graph, splitting_ops):
        if sum(change(graph.graph, splitting_ops) for change in _changes):
            graph.recompile()
        return split(graph, splitting_ops)

    module.split_graph = split_graph


def also_at(name: str, update: str) -> None:
    """Have vLLM split compiled models at an op too, where it splits at its cache update."""
    from vllm.config import CompilationConfig

    split = CompilationConfig.set_splitting_ops_for_v1

    @functools.wraps(split)
    def set_splitting_ops_for_v1(self, *arguments, **keywords):
        split(self, *arguments, **keywords)
        found = self.splitting_ops
        if found and update in found and name not in found:
            found.append(name)

    CompilationConfig.set_splitting_ops_for_v1 = set_splitting_ops_for_v1
