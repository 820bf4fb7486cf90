"""Let norms update their residual in place across the points where vLLM splits a model, if nothing reads it later.

vLLM's RMSNorm calls `fused_add_rms_norm.maybe_inplace`, which may overwrite the residual, GemmaRMSNorm (Gemma, Qwen3-Next, Qwen3.5) the
overload `default`, which may not. Within a piece of the model the pass sees all readers of a residual (graph/rewrite.py). It must not
overwrite one from another piece, so it leaves the norm after each attention layer to the compiler. This seam sees the whole graph before
vLLM splits it, and changes `default` to `maybe_inplace` where neither the norm's input nor its residual has a later reader. Then vLLM's
own pass marks the residual as one that may be overwritten.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import split
from vllm_rocm_ops.vllm.graph import compiled_ops

ADD_NORM = "vllm_ir::fused_add_rms_norm"


def is_last(node: fx.Node, reader: fx.Node) -> bool:
    """True if the graph itself allocates a node's memory, and nothing reads it after `reader`."""
    owner = node
    while split.calls_method(owner, *split.MAY_ALIAS):
        owner = owner.args[0]
    is_part = owner.target is operator.getitem and bool(split.op_of(owner.args[0]))  # else a view of a tensor
    if not is_part and not split.makes_memory(owner):
        return False
    aliases = [owner]
    for alias in aliases:
        aliases += [user for user in alias.users if split.calls_method(user, *split.MAY_ALIAS)]
    return all(user <= reader or split.calls_method(user, "size") for alias in aliases for user in alias.users)


def donate(graph: fx.Graph, splitting_ops: list[str]) -> int:
    """Change norms whose residual nothing reads later to `maybe_inplace`, and return their number."""
    op, changed = torch.ops.vllm_ir.fused_add_rms_norm, 0
    for node in graph.find_nodes(op="call_function", target=op.default):
        if all(isinstance(x, fx.Node) and is_last(x, node) for x in node.args[:2]):
            node.target = op.maybe_inplace
            changed += 1
    return changed


def decide(config, decided) -> str:
    """Register `donate` once a model is loaded. It needs no times."""
    split.before(donate)
    return ""


def probe() -> None:
    """Raise `Unavailable` unless vLLM splits a graph and has both forms of the op."""
    import vllm.ir.ops  # noqa: F401

    split.probe()
    for form in ("default", "maybe_inplace"):
        seam.require(hasattr(torch.ops.vllm_ir.fused_add_rms_norm, form), f"{ADD_NORM}.{form}")


SEAM = seam.Seam(
    name="norm_residuals",
    replaces="vllm_ir::fused_add_rms_norm of GemmaRMSNorm by its form that updates the residual, in the graph that "
    "vllm.compilation.backends.split_graph splits",
    probe=probe,
    install=lambda: compiled_ops.deciders.append(decide),
    requires=("norm", "fusion"),
)
