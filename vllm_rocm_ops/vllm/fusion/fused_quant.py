"""The ops for a norm or an activation and the quantization of its result, and which of them this machine has.

Whether an op runs is decided when a graph is traced, by conditions that hold for every number of tokens. Where an op was chosen on a
GPU its kernel runs, or vLLM's (native_rows.py), never its reference. This file imports vLLM, so seams import it in their `install` only.
"""

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation, get_input_quant_key
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
    kMxfp8Dynamic,
)
from vllm.platforms import current_platform

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm.linear import native_kernel
from vllm_rocm_ops.vllm.selection import kernel_selection

KEYS = (kFp8StaticTensorSym, kFp8DynamicTokenSym, kFp8Dynamic128Sym)
MX = kMxfp8Dynamic
"""Quantizations by QuantFP8, and that to MX-FP8, which is an op of vLLM's."""
GROUP = 128
DTYPES = (torch.bfloat16, torch.float16)
QUANT_DTYPE = current_platform.fp8_dtype()
NORMS = {
    None: ("rms_norm", "fused_add_rms_norm"),
    kFp8StaticTensorSym: ("rms_norm_static_fp8_quant", "fused_add_rms_norm_static_fp8_quant"),
    kFp8DynamicTokenSym: ("rms_norm_dynamic_per_token_quant",),
    kFp8Dynamic128Sym: ("rms_norm_per_block_quant",),
    MX: ("rms_norm_mxfp8_quant",),
}
ACTIVATIONS = {
    None: ("silu_and_mul",),
    kFp8StaticTensorSym: ("silu_and_mul_quant",),
    kFp8DynamicTokenSym: ("silu_and_mul_per_token_quant",),
    kFp8Dynamic128Sym: ("silu_and_mul_per_block_quant",),
    MX: ("silu_and_mul_mxfp8_quant",),
}
"""The ops by the quantization of their result."""


def has_kernels(name: str) -> bool:
    """Whether this machine has kernels for the op, for rows of any length and number."""
    row, one = torch.empty(2, 2 * GROUP, dtype=DTYPES[0], device="meta"), torch.empty(1, device="meta")
    examples = {"input": row, "residual": row, "weight": row[0], "epsilon": 1e-6, "scale": one}
    examples |= {"quant_dtype": QUANT_DTYPE, "group_size": GROUP}
    op = getattr(ops, name)
    known = {argument: value for argument, value in examples.items() if argument in op.Arguments._fields}
    return native_kernel.has_kernels(op, **known)


def runnable(table: dict[QuantKey | None, tuple[str, ...]]) -> tuple[QuantKey | None, ...]:
    """Return the quantization keys whose ops all have kernels for this machine. The key None stands for no quantization."""
    return tuple(key for key, names in table.items() if all(map(has_kernels, names)))


def op_of(table: dict[QuantKey | None, tuple[str, ...]], key: QuantKey | None, has_residual: bool):
    """Return the op of a table for a quantization, with a residual or without."""
    return getattr(ops, table[key][-1 if has_residual else 0])


def pattern(op, columns: int, dtype: torch.dtype, has_residual: bool, is_bounded: bool, column_major: bool) -> str:
    """Return what tells a norm or an activation with its quantization from another, for all numbers of tokens."""
    traits = " residual" * has_residual + " bound" * is_bounded + " column-major" * column_major
    return f"{op.name} {columns} {kernel_selection.types(dtype)}{traits}"


def in_rows(x: torch.Tensor) -> bool:
    """Whether the rows of x lie at one stride for any number of tokens, which is x's first dimension."""
    step = None
    for size, stride in zip(x.shape[-2:0:-1], x.stride()[-2:0:-1]):
        if size == 1:
            continue
        if step is not None and stride != step:
            return False
        step = stride * size
    return x.stride(-1) == 1 and (step is None or x.stride(0) == step)


def in_heads(x: torch.Tensor) -> bool:
    """Whether the rows of x lie at two strides, as heads [tokens, heads, size] do that are a slice of a wider projection."""
    return x.dim() == 3 and x.stride(-1) == 1 and x.stride(-2) < 2**31


class Quantized(QuantizedActivation):
    """vLLM's pre-quantized activation with a `shape`, which multi-head latent attention reads from its input."""

    @property
    def shape(self) -> torch.Size:
        return self.orig_shape


def key_of(linear: torch.nn.Module | None, columns: int, keys: tuple[QuantKey | None, ...]) -> QuantKey | None:
    """The key of the quantized input that a linear takes, if the key is in `keys` and fits so many columns. Else None."""
    key = None if linear is None else get_input_quant_key(linear)
    if key == kFp8Dynamic128Sym and columns % GROUP != 0:
        return None
    return key if key in keys else None


def made_for(linear: torch.nn.Module, columns: int, keys: tuple[QuantKey | None, ...]) -> QuantKey | None:
    """Return the key of a linear's input in a compiled graph, as `key_of`. MX-FP8 linears take no quantized input elsewhere."""
    is_mx = getattr(linear, "vllm_rocm_ops_is_mx", False) and MX in keys
    return MX if is_mx else key_of(linear, columns, keys)


def silu_and_mul(linear: torch.nn.Module, key: QuantKey, x: torch.Tensor) -> Quantized:
    """silu(first half of x) * second half, quantized as `key` says for `linear`."""
    if key == kFp8StaticTensorSym:
        scale = linear.input_scale
        data = ops.silu_and_mul_quant.call(x, scale, QUANT_DTYPE)
    elif key == kFp8DynamicTokenSym:
        upper_bound = getattr(linear, "input_scale_ub", None)
        data, scale = ops.silu_and_mul_per_token_quant.call(x, QUANT_DTYPE, upper_bound)
    else:
        column_major = getattr(linear, "vllm_rocm_ops_column_major_scales", False)
        data, scale = ops.silu_and_mul_per_block_quant.call(x, QUANT_DTYPE, GROUP, column_major)
    return Quantized(data, scale, x.dtype, data.shape, key)
