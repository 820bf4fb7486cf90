"""Apply the SwiGLU activation, with optional FP8 quantization fused; kernels: csrc/ops/silu_and_mul.hip.

Names, arguments and rounding match vLLM's ops, but results are returned.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.ops.shared import gated, rowwise

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
    """Return silu(gate) * up, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    return _silu(gate) * up


def _rounded_product(input: Tensor) -> Tensor:
    """Return silu(gate) * up, rounded after silu and after the product."""
    gate, up = input.chunk(2, -1)
    return _silu(rowwise.exact(gate)).to(input.dtype) * up


_op = functools.partial(gated.op, module="silu_and_mul")


@_op
def silu_and_mul(input: Tensor) -> Tensor:
    """Compute silu(gate) * up, rounded after silu and after the product.

    Source:
        vLLM's `silu_and_mul`.
    """
    return _rounded_product(input)


@_op
def silu_and_mul_quant(input: Tensor, scale: Tensor, quant_dtype: torch.dtype) -> Tensor:
    """Apply `silu_and_mul`, then quantize to FP8 with a static scale.

    Source:
        vLLM's op of this name; swiglu of hf-rocm-kernels.
    """
    return quantization.static(rowwise.exact(_rounded_product(input)), scale, quant_dtype)


@_op
def silu_and_mul_per_token_quant(
    input: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute silu(gate) * up in float32, then quantize to FP8 with one dynamic scale per row.

    Source:
        vLLM's `silu_and_mul` and `dynamic_per_token_scaled_fp8_quant`, in one launch.
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
    """Compute silu(gate) * up in float32, then quantize to FP8 with one dynamic scale per `group_size` columns.

    Args:
        scale_ub: float32, one element: upper bound of the scale, or None.

    Source:
        vLLM's op of this name.
    """
    return gated.per_block(_product(input), input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def silu_and_mul_mxfp8_quant(input: Tensor) -> tuple[Tensor, Tensor]:
    """Compute silu(gate) * up in float32, then quantize to MX-FP8 with one e8m0 scale per 32 columns.

    Args:
        input: [..., 2 * hidden], bf16 or fp16, hidden a multiple of 32: gate, then up; rows may be strided.

    Source:
        The inputs of AITER's small-M MX-FP8 GEMMs (aiter PR 3783), here of `mxfp8_scaled_mm`.
    """
    return rowwise.mx(_product(input))
