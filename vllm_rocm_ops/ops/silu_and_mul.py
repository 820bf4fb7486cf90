"""Apply the SwiGLU activation, with optional FP8 quantization fused; kernels: csrc/ops/silu_and_mul.hip.

Names, arguments and rounding match vLLM's ops, but results are returned.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

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


silu_and_mul_quant, silu_and_mul_per_token_quant, silu_and_mul_per_block_quant, silu_and_mul_mxfp8_quant = (
    gated.quantized_ops(
        _op,
        _product,
        "Apply `silu_and_mul`",
        "Compute silu(gate) * up",
        (
            "vLLM's op of this name; swiglu of hf-rocm-kernels.",
            "vLLM's `silu_and_mul` and `dynamic_per_token_scaled_fp8_quant`, in one launch.",
            "vLLM's op of this name.",
            "The inputs of AITER's small-M MX-FP8 GEMMs (aiter PR 3783), here of `mxfp8_scaled_mm`.",
        ),
        rounded=_rounded_product,
    )
)
