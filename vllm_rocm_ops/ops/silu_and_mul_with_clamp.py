"""Apply SwiGLU with clamped inputs, as in gpt-oss and MiniMax-M3, with optional FP8 quantization fused.

Kernels: csrc/ops/silu_and_mul_with_clamp.hip. The formula follows vLLM's SiluAndMulWithClamp: gate = min(gate, limit),
up = clamp(up, -limit, limit), result = gate * sigmoid(alpha * gate) * (up + beta). Rounding matches vLLM's swiglu_oai_split and
swiglu_oai_quantize_mxfp8: float32, then one rounding. Dynamic quantization reads the unrounded result. NaN propagates up to
the cast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops.shared import gated, rowwise

__all__ = [
    "silu_and_mul_with_clamp",
    "silu_and_mul_with_clamp_mxfp8_quant",
    "silu_and_mul_with_clamp_per_block_quant",
    "silu_and_mul_with_clamp_per_token_quant",
    "silu_and_mul_with_clamp_quant",
]

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}  # MiniMax-M3's too
MEANINGS = gated.MEANINGS | {
    "limit": "Upper bound of gate, and of the absolute value of up; above 0, may be infinite.",
    "alpha": "Factor of gate in the sigmoid.",
    "beta": "Added to up.",
}


def _product(input: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    """Return the activation, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    return gated.activated(gate, up, limit, alpha, beta)


def _contract(a):
    yield "limit", "a number above 0", str(a.limit), a.limit > 0
    for name in ("alpha", "beta"):
        yield name, "a finite number", str(getattr(a, name)), math.isfinite(getattr(a, name))


def _further(a) -> dict[str, float]:
    return {"limit": float(a.limit), "exponent": -float(a.alpha) / math.log(2), "beta": float(a.beta)}


def _cases(make: rowwise.Cases) -> Iterator[Case]:
    """Yield the cases of all activations with gpt-oss's constants and a limit that clamps many values.

    More cases have limits that clamp none or nearly all values, and the defaults of alpha and beta.
    """
    usual = dataclasses.replace(make, further={**GPT_OSS, "limit": 1.0})
    yield from usual.standard()
    yield usual.case("limit-inf", (3, 512), limit=math.inf)
    yield usual.case("limit-small", (3, 512), limit=0.01)
    yield usual.case("silu", (3, 512), limit=7.0, alpha=1.0, beta=0.0)
    yield usual.case("minimax-m3", (2, 3072), **GPT_OSS)
    yield usual.case("negative-alpha", (2, 512), torch.float16, alpha=-0.5, beta=-2.0)


def _op(reference: Callable):
    return gated.op(reference, "silu_and_mul_with_clamp", _further, _contract, _cases, MEANINGS)


@_op
def silu_and_mul_with_clamp(input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Clamp gate and up, then compute gate * sigmoid(alpha * gate) * (up + beta), rounded once.

    Source:
        vLLM's SiluAndMulWithClamp and swiglu_oai_split.
    """
    return _product(input, limit, alpha, beta).to(input.dtype)


@_op
def silu_and_mul_with_clamp_quant(
    input: Tensor, limit: float, scale: Tensor, quant_dtype: torch.dtype, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """Apply `silu_and_mul_with_clamp`, then quantize to FP8 with a static scale.

    Source:
        vLLM's SiluAndMulWithClamp and `static_scaled_fp8_quant`, in one launch.
    """
    return quantization.static(rowwise.exact(_product(input, limit, alpha, beta).to(input.dtype)), scale, quant_dtype)


@_op
def silu_and_mul_with_clamp_per_token_quant(
    input: Tensor,
    limit: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_clamp` in float32, then quantize to FP8 with one dynamic scale per row.

    Source:
        vLLM's SiluAndMulWithClamp and `dynamic_per_token_scaled_fp8_quant`, in one launch.
    """
    return quantization.per_token(_product(input, limit, alpha, beta), quant_dtype, scale_ub)


@_op
def silu_and_mul_with_clamp_per_block_quant(
    input: Tensor,
    limit: float,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_clamp` in float32, then quantize to FP8 per `group_size` columns.

    Args:
        scale_ub: float32, one element: upper bound of the scale, or None.

    Source:
        vLLM's SiluAndMulWithClamp, with the quantization of `silu_and_mul_per_block_quant`.
    """
    y = _product(input, limit, alpha, beta)
    return gated.per_block(y, input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def silu_and_mul_with_clamp_mxfp8_quant(
    input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_clamp` in float32, then quantize to MX-FP8 with one e8m0 scale per 32 columns.

    Args:
        input: [..., 2 * hidden], bf16 or fp16, hidden a multiple of 32: gate, then up; rows may be strided.

    Source:
        vLLM's swiglu_oai_quantize_mxfp8; the inputs of `mxfp8_scaled_mm`.
    """
    return rowwise.mx(_product(input, limit, alpha, beta))
