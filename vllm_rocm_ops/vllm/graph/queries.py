"""Read nodes of vLLM's compiled graphs: equal results, views, what the compiler fuses into, and sums before a norm."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from vllm.compilation.passes.fx_utils import is_func

from vllm_rocm_ops.ops.shared import rowwise

aten = torch.ops.aten
VIEWS = (
    aten.reshape.default,
    aten.view.default,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.permute.default,
)
RESHAPES = aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.clone.default
GEMMS = (aten.mm.default, aten.addmm.default)


def are_alike(result: tuple, other: tuple) -> bool:
    """True if results have equal shapes, dtypes and strides for any token count."""
    return all(
        a.dtype == b.dtype
        and a.dim() == b.dim()
        and all(map(statically_known_true, map(operator.eq, a.shape, b.shape)))
        and all(map(statically_known_true, map(operator.eq, a.stride(), b.stride())))
        for a, b in zip(result, other, strict=True)
    )


def is_view(node: fx.Node) -> bool:
    """True if a node shares another's memory."""
    return node.target in VIEWS or (is_func(node, operator.getitem) and node.args[0].target in VIEWS)


def unviewed(node: fx.Node) -> fx.Node:
    """Return the node that computes a node's values."""
    while node.target in VIEWS or is_func(node, operator.getitem):
        node = node.args[0]
    return node


def is_materialized(node: fx.Node) -> bool:
    """True if the compiler does not fuse into a node: a graph input or output, a GEMM, an op outside PyTorch."""
    node = unviewed(node)
    is_pytorchs = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims", "vllm_ir")
    return node.op != "call_function" or node.target in GEMMS or not is_pytorchs


def gated(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return x and the gate of a product x * sigmoid(gate) of equal shapes, None for other products.

    A gate that is reshaped or copied from heads [tokens, heads, size] is returned before that.
    """
    for x, by in (node.args, node.args[::-1]):
        is_sigmoid = isinstance(x, fx.Node) and isinstance(by, fx.Node) and is_func(by, aten.sigmoid.default)
        if not is_sigmoid or len(by.users) != 1 or x.meta["val"].shape != by.meta["val"].shape:
            continue
        found = gate = by.args[0]
        while gate.target in RESHAPES:
            gate = gate.args[0]
            value, columns = gate.meta["val"], x.meta["val"].shape[-1]
            if value.dim() == 3 and value.stride(2) == 1 and value.shape[1] * value.shape[2] == columns:
                found = gate
        return x, found
    return None


def addends(given: dict[str, object]) -> dict[str, object]:
    """Return a norm's input, addend and its factor if its input is a sum that no other node reads.

    No kernel of the compiler makes its parts, except for a product with a constant. Longer rows would run the general
    kernel. The norm is an op in either case, so that only a launch is saved, which needs no timing.
    """
    total, residual = given["input"], given.get("residual")
    if residual is None or not is_func(total, aten.add.Tensor) or len(total.users) != 1 or total.kwargs:
        return {}
    columns = total.meta["val"].shape[-1]
    if columns > rowwise.ONE_VECTOR or columns % rowwise.VECTOR:
        return {}

    def fits(part: object) -> bool:
        is_rows = isinstance(part, fx.Node) and are_alike((part.meta["val"],), (total.meta["val"],))
        return is_rows and is_materialized(part) and unviewed(part) is not unviewed(residual)

    (term, own), (other, factor) = sorted(map(factored, total.args), key=lambda part: part[1] != 1.0)
    if own != 1.0 or not (fits(term) and fits(other)):
        return {}
    return {"input": term, "addend": other, "addend_factor": factor}


def factored(part: object) -> tuple[object, float]:
    """Return a node and its factor for a product with a constant that one node reads, else the part and 1."""
    if isinstance(part, fx.Node) and is_func(part, aten.mul.Tensor) and len(part.users) == 1:
        node, factor = part.args
        if isinstance(factor, int | float) and factor != 1:
            return node, float(factor)
    return part, 1.0
