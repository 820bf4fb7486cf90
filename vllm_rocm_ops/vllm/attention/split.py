"""Change a compiled model's whole graph before vLLM splits it, and the ops at which it splits.

vLLM's passes see the pieces after the split, so what crosses an attention op or a cache update is changed here.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable

import torch
from torch import fx

from vllm_rocm_ops.core import op
from vllm_rocm_ops.vllm import seam

MODULE, LAYER = "vllm.compilation.backends", "vllm.model_executor.layers.attention.attention"
ATTENTION = "vllm::unified_attention_with_output"
ARGUMENTS = (
    *("query", "key", "value", "output", "layer_name", "output_scale", "output_block_scale"),
    "kv_cache_dummy_dep",
)
"""The first arguments of vLLM's attention op."""
Change = Callable[[fx.Graph, list[str]], int]
"""Changes a graph, given the splitting ops, and returns how many places it changed."""

_changes: list[Change] = []


def probe() -> None:
    """Raise `Unavailable` unless vLLM splits a graph and calls attention as expected.

    Reads source files: an import would need vLLM's kernels.
    """
    seam.require_function(f"{MODULE}.split_graph", "graph", "splitting_ops")
    seam.require_function(f"{LAYER}.{ATTENTION.partition('::')[2]}", *ARGUMENTS)


def probe_layer_ops() -> None:
    """Raise `Unavailable` unless an op can find its layer by name, and vLLM's splitting ops can be added to."""
    from vllm.config import CompilationConfig
    from vllm.model_executor.layers.attention import attention
    from vllm.utils import torch_utils

    seam.require_parameters(attention.get_attention_context, "layer_name")
    for name in ("LayerNameType", "_encode_layer_name", "_resolve_layer_name"):
        seam.require(hasattr(torch_utils, name), name)
    seam.require_parameters(CompilationConfig.set_splitting_ops_for_v1)


def define(
    function: Callable,
    *mutates: str,
    around: Callable[[Callable], Callable] = lambda function: function,
    fake: Callable = lambda *_: None,
) -> None:
    """Register an op of a layer with its outputs as mutated arguments, or as `fake` returns. As in vLLM's own op, the cache is no argument.

    The op calls the function with what is `around` it.
    """
    from vllm.utils.torch_utils import LayerNameType

    function.__annotations__["layer_name"] = LayerNameType
    op.define(around(function), fake, like=function, mutates=mutates)


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
        operators = self.splitting_ops
        if operators and update in operators and name not in operators:
            operators.append(name)

    CompilationConfig.set_splitting_ops_for_v1 = set_splitting_ops_for_v1


# Nodes of a graph that Dynamo traced


def op_of(node: fx.Node) -> str:
    """Return the name of the op that a node calls in any overload, empty for other nodes."""
    name = getattr(node.target, "_qualified_op_name", None) or getattr(node.target, "name", str)
    name = (name() if callable(name) else name).partition(".")[0]
    return name if node.op == "call_function" and "::" in name else ""


MAY_ALIAS = "view", "reshape", "flatten", "unflatten", "to", "contiguous"
"""Methods whose result may be their tensor's memory."""
MAKERS = (
    *(operator.add, operator.mul, operator.matmul, torch._C._nn.linear, torch.addmm, torch.mm, torch._scaled_mm),
    torch.nn.functional.embedding,
)
"""Functions besides ops whose result is memory of its own."""


def makes_memory(node: fx.Node) -> bool:
    """True if a node's result is memory of its own."""
    return bool(op_of(node)) or (node.op == "call_function" and node.target in MAKERS)


def calls_method(node: object, *names: str) -> bool:
    """True if a node calls one of a tensor's methods."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names
