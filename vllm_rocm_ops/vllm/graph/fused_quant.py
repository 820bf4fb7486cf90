"""List the ops that fuse a norm or an activation with a quantization, and find those that this machine runs.

An op is selected when a graph is traced, by conditions that hold for every token count. A selected op on a GPU runs its
kernel or vLLM's (vllm_row_kernels.py), never its reference. This file imports vLLM, so seams import it inside `install`
only.
"""

import functools

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
)
from vllm.platforms import current_platform

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.quantization import BLOCKS, STATIC, TOKEN, UNQUANTIZED
from vllm_rocm_ops.ops.shared import by_quantization
from vllm_rocm_ops.vllm import compat
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import mxfp8_linear
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import ONE_PLUS, Pattern

input_quant_key = compat.input_quant_key_getter()  # here, as eager activations ask in every call

KEYS = (kFp8StaticTensorSym, kFp8DynamicTokenSym, kFp8Dynamic128Sym)
MX = kMxfp8Dynamic
"""Quantizations by QuantFP8, and the quantization to MX-FP8, which is an op of vLLM's."""
GROUP = 128
DTYPES = (torch.bfloat16, torch.float16)
QUANT_DTYPE = current_platform.fp8_dtype()
OF_KIND = {UNQUANTIZED: None, STATIC: KEYS[0], TOKEN: KEYS[1], BLOCKS: KEYS[2], quantization.MX: MX}
NORMS, ACTIVATIONS, GATES, EXPERT_GATES = (
    {OF_KIND[kind]: names for kind, names in table.items()}
    for table in (
        by_quantization.NORMS,
        by_quantization.ACTIVATIONS,
        by_quantization.GATES,
        by_quantization.EXPERT_GATES,
    )
)
"""The ops, by vLLM's key of their result's quantization."""


def has_kernels(name: str) -> bool:
    """True if this machine has kernels for the op, for any row length and row count."""
    row, scale = torch.empty(2, 2 * GROUP, dtype=DTYPES[0], device="meta"), torch.empty(1, device="meta")
    examples = {"input": row, "residual": row, "gate": row, "weight": row[0], "epsilon": 1e-6, "scale": scale}
    examples |= {"quant_dtype": QUANT_DTYPE, "group_size": GROUP, "tokens": row, "expert_gate": row[:1]}
    op = getattr(ops, name)
    known = {argument: value for argument, value in examples.items() if argument in op.Arguments._fields}
    return linear_base.has_kernels(op, **known)


def runnable(table: dict[QuantKey | None, tuple[str, ...]]) -> tuple[QuantKey | None, ...]:
    """Return the quantization keys whose ops all have kernels for this machine. None stands for no quantization."""
    return tuple(key for key, names in table.items() if all(map(has_kernels, names)))


@functools.cache
def runnable_gates() -> tuple[QuantKey | None, ...]:
    """Return `runnable` for the gates of shared experts."""
    return runnable(EXPERT_GATES)


def op_of(table: dict[QuantKey | None, tuple[str, ...]], key: QuantKey | None, has_residual: bool):
    """Return the op of a table for a quantization, with or without a residual."""
    return getattr(ops, table[key][-1 if has_residual else 0])


def pattern(
    op,
    columns: int,
    dtype: torch.dtype,
    has_residual: bool,
    is_bounded: bool,
    column_major: bool,
    one_plus: bool = False,
) -> Pattern:
    """Return the pattern of a norm or an activation with its quantization."""
    traits = " residual" * has_residual + " bound" * is_bounded + " column-major" * column_major + ONE_PLUS * one_plus
    shape = f"{columns} {kernel_selection.types(dtype)}{traits}"
    return Pattern(op.name, shape, columns, has_residual, column_major)


def in_rows(x: torch.Tensor) -> bool:
    """True if rows have one stride, for any size of the first dimension, the token count."""
    step = None
    for size, stride in zip(x.shape[-2:0:-1], x.stride()[-2:0:-1]):
        if size == 1:
            continue
        if step is not None and stride != step:
            return False
        step = stride * size
    return x.stride(-1) == 1 and (step is None or x.stride(0) == step)


def in_heads(x: torch.Tensor) -> bool:
    """True if rows have two strides, as heads [tokens, heads, size] in a slice of a wider projection."""
    return x.dim() == 3 and x.stride(-1) == 1 and x.stride(-2) < 2**31


class Quantized(QuantizedActivation):
    """Add a `shape` to vLLM's pre-quantized activation. MLA reads it from its input."""

    @property
    def shape(self) -> torch.Size:
        return self.orig_shape


def key_of(linear: torch.nn.Module | None, columns: int, keys: tuple[QuantKey | None, ...]) -> QuantKey | None:
    """Return the key of the quantized input that a linear accepts, None if the key is not in `keys` or does not fit."""
    key = None if linear is None else input_quant_key(linear)
    if key == kFp8Dynamic128Sym and columns % GROUP != 0:
        return None
    return key if key in keys else None


def made_for(linear: torch.nn.Module, columns: int, keys: tuple[QuantKey | None, ...]) -> QuantKey | None:
    """Return the key of a linear's input, as `key_of`, or the one of MX-FP8: in a compiled graph, and of a shared expert with a gate."""
    is_mx = getattr(linear, "vllm_rocm_ops_is_mx", False) and MX in keys
    return MX if is_mx else key_of(linear, columns, keys)


def silu_and_mul(linear: torch.nn.Module, key: QuantKey | None, x: torch.Tensor, *gate: torch.Tensor):
    """Return silu(first half of x) * second half, quantized by `key` for `linear`; a tensor without a key.

    `gate` is nothing, or a shared expert's tokens and its gate's weight, which multiplies.
    """
    op = op_of(EXPERT_GATES if gate else ACTIVATIONS, key, False)
    if key is None:
        return op.call(x, *gate)
    if key == kFp8StaticTensorSym:
        scale = linear.input_scale
        data = op.call(x, *gate, scale, QUANT_DTYPE)
    elif key == MX:
        return mxfp8_linear.QuantizedRows(*op.call(x, *gate), x.dtype)
    elif key == kFp8DynamicTokenSym:
        upper_bound = getattr(linear, "input_scale_ub", None)
        data, scale = op.call(x, *gate, QUANT_DTYPE, upper_bound)
    else:
        column_major = getattr(linear, "vllm_rocm_ops_column_major_scales", False)
        data, scale = op.call(x, *gate, QUANT_DTYPE, GROUP, column_major)
    return Quantized(data, scale, x.dtype, data.shape, key)
