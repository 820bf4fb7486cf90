"""Multiply rows by the sigmoid of a gate and quantize them to FP8; kernels: csrc/ops/sigmoid_and_mul.hip.

Replaces two launches between attention and o_proj in Qwen3-Next and Qwen3.5: the product, which vLLM's compiler generates, and o_proj's
input quantization. The gate may be a strided view of the qkv projection's result. As in vLLM's compiled graph, a static scale divides the
rounded product, while a dynamic scale is of the unrounded product, as in `silu_and_mul`'s quantizations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops.shared import gated, rowwise

__all__ = [
    "sigmoid_and_mul_mxfp8_quant",
    "sigmoid_and_mul_per_block_quant",
    "sigmoid_and_mul_per_token_quant",
    "sigmoid_and_mul_quant",
]

MEANINGS = quantization.MEANINGS | {
    "input": "[..., hidden], bf16 or fp16; rows may be strided.",
    "gate": "As input, or [rows, heads, hidden / heads] for input [rows, hidden]; rows and heads may be strided.",
}


def _product(input: Tensor, gate: Tensor) -> Tensor:
    """Return input * sigmoid(gate), unrounded."""
    return rowwise.exact(input) * torch.sigmoid(rowwise.exact(gate)).reshape(input.shape)


def _cases(make: rowwise.Cases) -> Iterator[Case]:
    """Yield all activations' cases, one TP8 rank of Qwen3.5, heads of 64, contiguous gates, and heads of no whole vectors."""
    yield from make.standard()
    yield make.case("tp8", (8, 512), padding=512)
    yield make.case("heads-of-64", (3, 1024), head_size=64, between=2)
    yield make.case("gate-in-rows", (3, 1024), head_size=0)
    if make.whole == 1 and "group_size" not in make.parameters:
        yield make.case("heads-of-20", (3, 240), torch.float16, head_size=20)
    yield make.case("heads-of-96-general", (3, 384), head_size=96, padding=1)


_op = functools.partial(gated.op, module="sigmoid_and_mul", cases=_cases, meanings=MEANINGS)


@_op
def sigmoid_and_mul_quant(input: Tensor, gate: Tensor, scale: Tensor, quant_dtype: torch.dtype) -> Tensor:
    """Multiply input by the sigmoid of the gate, then quantize to FP8 with a static scale.

    Source:
        The output gate of vLLM's Qwen3NextAttention and `static_scaled_fp8_quant`, in one launch.
    """
    product = _product(input, gate).to(input.dtype)
    return quantization.static(rowwise.exact(product), scale, quant_dtype)


@_op
def sigmoid_and_mul_per_token_quant(
    input: Tensor, gate: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply input by the sigmoid of the gate in float32, then quantize to FP8 with one dynamic scale per row.

    Source:
        The output gate of vLLM's Qwen3NextAttention and `dynamic_per_token_scaled_fp8_quant`, in one launch.
    """
    return quantization.per_token(_product(input, gate), quant_dtype, scale_ub)


@_op
def sigmoid_and_mul_per_block_quant(
    input: Tensor,
    gate: Tensor,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply input by the sigmoid of the gate in float32, then quantize to FP8 per `group_size` columns.

    Args:
        scale_ub: float32, one element: upper bound of the scale, or None.

    Source:
        The output gate of vLLM's Qwen3NextAttention and `per_token_group_quant_fp8`, in one launch.
    """
    y = _product(input, gate)
    return gated.per_block(y, input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def sigmoid_and_mul_mxfp8_quant(input: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply input by the sigmoid of the gate in float32, then quantize to MX-FP8 with one e8m0 scale per 32 columns.

    Args:
        input: [..., hidden], bf16 or fp16, hidden a multiple of 32; rows may be strided.

    Source:
        The output gate of vLLM's Qwen3NextAttention and `mxfp8_quantize`, in one launch.
    """
    return rowwise.mx(_product(input, gate))
