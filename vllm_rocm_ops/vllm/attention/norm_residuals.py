"""Let norms update their residual in place across the points where vLLM splits a model, where nothing reads it later.

vLLM's RMSNorm calls its op so that the op may write to the residual, GemmaRMSNorm (Gemma, Qwen3-Next, Qwen3.5) so that it may not. Within
a piece the pass sees who reads a residual (graph/rewrite.py). A residual that comes from another piece it must not change, so that it
leaves the norm to the compiler: the norm after each attention layer. This seam looks at the whole graph before vLLM splits it, and turns
the second kind of call into the first where neither the norm's input nor its residual has a later reader. Then vLLM's own pass marks
the residual as one that may be changed.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import split
from vllm_rocm_ops.vllm.graph import compiled_ops

ADD_NORM = "vllm_ir::fused_add_rms_norm"


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a node's values may be."""
    while split.calls_method(node, *split.MAY_ALIAS):
        node = node.args[0]
    return node


def is_last(node: fx.Node, reader: fx.Node) -> bool:
    """True if a node's memory is a result within the graph that nothing reads after `reader`."""
    owner = memory_of(node)
    is_part = owner.target is operator.getitem and bool(split.op_of(owner.args[0]))  # else a view of a tensor
    if not is_part and not split.makes_memory(owner):
        return False
    aliases = [owner]
    for alias in aliases:
        aliases += [user for user in alias.users if split.calls_method(user, *split.MAY_ALIAS)]
    return all(user <= reader or split.calls_method(user, "size") for alias in aliases for user in alias.users)


def donate(graph: fx.Graph, splitting_ops: list[str]) -> int:
    """Let norms update residuals that nothing reads later, and return how many."""
    op, changed = torch.ops.vllm_ir.fused_add_rms_norm, 0
    for node in graph.find_nodes(op="call_function", target=op.default):
        if all(isinstance(x, fx.Node) and is_last(x, node) for x in node.args[:2]):
            node.target = op.maybe_inplace
            changed += 1
    return changed


def decide(config, decided) -> str:
    """Have graphs changed, once a model is loaded. Nothing depends on times."""
    split.before(donate)
    return ""


def probe() -> None:
    """Raise `Unavailable` unless vLLM splits a graph and has both forms of the op."""
    import vllm.ir.ops  # noqa: F401

    split.probe()
    for form in ("default", "maybe_inplace"):
        seam.require(hasattr(torch.ops.vllm_ir.fused_add_rms_norm, form), f"{ADD_NORM}.{form}")


def install() -> None:
    """Have `donate` added to the changes before a split."""
    compiled_ops.deciders.append(decide)


SEAM = seam.Seam(
    name="norm_residuals",
    replaces="vllm_ir::fused_add_rms_norm of GemmaRMSNorm by its form that updates the residual, in the graph that "
    "vllm.compilation.backends.split_graph splits",
    probe=probe,
    install=install,
    requires=("norm", "fusion"),
)
