"""SwiGLU activation with an optional e4m3 quantisation behind; kernels: csrc/ops/silu_and_mul.hip.

Names, arguments and roundings are those of vLLM's ops, but results are returned.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.ops.families import gated, rowwise

__all__ = [
    "silu_and_mul",
    "silu_and_mul_mxfp8_quant",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_per_token_quant",
    "silu_and_mul_quant",
]


def _silu(gate: Tensor) -> Tensor:
    return gate / (1.0 + torch.exp(-gate))


def _product(input: Tensor) -> Tensor:
    """silu(gate) * up, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    return _silu(gate) * up


def _rounded_product(input: Tensor) -> Tensor:
    """silu(gate) * up, rounded after silu and after the product."""
    gate, up = input.chunk(2, -1)
    return _silu(rowwise.exact(gate)).to(input.dtype) * up


_op = functools.partial(gated.op, module="silu_and_mul")


@_op
def silu_and_mul(input: Tensor) -> Tensor:
    """silu(gate) * up, rounded after silu and after the product.

    input [..., 2 * hidden] bf16 or fp16 holds gate, then up; rows may be strided. Returns [..., hidden].
    """
    return _rounded_product(input)


@_op
def silu_and_mul_quant(input: Tensor, scale: Tensor, quant_dtype: torch.dtype) -> Tensor:
    """`silu_and_mul`, then division by `scale` (float32, one element) and the cast to quant_dtype.

    input [..., 2 * hidden] bf16 or fp16. Returns [..., hidden].
    """
    return quantization.static(rowwise.exact(_rounded_product(input)), scale, quant_dtype)


@_op
def silu_and_mul_per_token_quant(
    input: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, quantised with one dynamic scale per row.

    input [..., 2 * hidden] bf16 or fp16; scale_ub (float32, one element) bounds the absolute maximum. Returns
    out [..., hidden] of quant_dtype and scale [rows, 1] float32.
    """
    return quantization.per_token(_product(input), quant_dtype, scale_ub)


@_op
def silu_and_mul_per_block_quant(
    input: Tensor,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, quantised with one dynamic scale per `group_size` columns of a row.

    input [..., 2 * hidden] bf16 or fp16; scale_ub (float32, one element) bounds the scale. Returns out [..., hidden]
    of quant_dtype and scale [rows, hidden / group_size] float32, column-major (strides (1, rows)) if
    is_scale_transposed.
    """
    return gated.per_block(_product(input), input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def silu_and_mul_mxfp8_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, quantised to MX-FP8, as `mxfp8_scaled_mm` takes it: one e8m0 scale per 32 columns of a row.

    input [..., 2 * hidden] bf16 or fp16, hidden a multiple of 32. Returns out [..., hidden] float8_e4m3fn, on all GPUs, and scale
    [rows, hidden / 32] uint8: s for 2^(s - 127), the least that keeps a group within 448.
    """
    return rowwise.mx(_product(input))
