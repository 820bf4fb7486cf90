"""SwiGLU activation with clamped inputs, as gpt-oss and MiniMax-M3 have it, and an optional quantisation behind; kernels:
csrc/ops/silu_and_mul_with_clamp.hip.

The formula is that of vLLM's SiluAndMulWithClamp: gate = min(gate, limit), up = clamp(up, -limit, limit), and the result
gate * sigmoid(alpha * gate) * (up + beta). Roundings are those of vLLM's swiglu_oai_split and swiglu_oai_quantize_mxfp8: fp32 up to
one rounding, which a dynamic quantisation does without. A NaN stays one up to the cast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops.families import gated, rowwise

__all__ = [
    "silu_and_mul_with_clamp",
    "silu_and_mul_with_clamp_mxfp8_quant",
    "silu_and_mul_with_clamp_per_block_quant",
    "silu_and_mul_with_clamp_per_token_quant",
    "silu_and_mul_with_clamp_quant",
]

GPT_OSS = {"limit": 7.0, "alpha": 1.702, "beta": 1.0}  # MiniMax-M3's too


def _product(input: Tensor, limit: float, alpha: float, beta: float) -> Tensor:
    """The result, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1.0 + torch.exp(-alpha * gate)) * (up + beta)


def _contract(a):
    yield "limit", "a number above 0", str(a.limit), a.limit > 0
    for name in ("alpha", "beta"):
        yield name, "a finite number", str(getattr(a, name)), math.isfinite(getattr(a, name))


def _further(a) -> dict[str, float]:
    return {"limit": float(a.limit), "exponent": -float(a.alpha) / math.log(2), "beta": float(a.beta)}


def _cases(make: rowwise.Cases) -> Iterator[Case]:
    """Those of all activations with gpt-oss's numbers and a limit that many values pass; limits that none or nearly all pass, and
    the defaults of alpha and beta."""
    usual = dataclasses.replace(make, further={**GPT_OSS, "limit": 1.0})
    yield from usual.standard()
    yield usual.case("limit-inf", (3, 512), limit=math.inf)
    yield usual.case("limit-small", (3, 512), limit=0.01)
    yield usual.case("silu", (3, 512), limit=7.0, alpha=1.0, beta=0.0)
    yield usual.case("minimax-m3", (2, 3072), **GPT_OSS)
    yield usual.case("negative-alpha", (2, 512), torch.float16, alpha=-0.5, beta=-2.0)


def _op(reference: Callable):
    return gated.op(reference, "silu_and_mul_with_clamp", _further, _contract, _cases)


@_op
def silu_and_mul_with_clamp(input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + beta) of gate = min(gate, limit) and up clamped to [-limit, limit], rounded once.

    input [..., 2 * hidden] bf16 or fp16 holds gate, then up; rows may be strided. limit is above 0, and may be infinite. Returns
    [..., hidden].
    """
    return _product(input, limit, alpha, beta).to(input.dtype)


@_op
def silu_and_mul_with_clamp_quant(
    input: Tensor, limit: float, scale: Tensor, quant_dtype: torch.dtype, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """`silu_and_mul_with_clamp`, then division by `scale` (float32, one element) and the cast to quant_dtype. Returns [..., hidden]."""
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
    """As `silu_and_mul_with_clamp`, in fp32, quantised with one dynamic scale per row.

    scale_ub (float32, one element) bounds the absolute maximum. Returns out [..., hidden] of quant_dtype and scale [rows, 1] float32.
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
    """As `silu_and_mul_with_clamp`, in fp32, quantised with one dynamic scale per `group_size` columns of a row.

    scale_ub (float32, one element) bounds the scale. Returns out [..., hidden] of quant_dtype and scale [rows, hidden / group_size]
    float32, column-major (strides (1, rows)) if is_scale_transposed.
    """
    y = _product(input, limit, alpha, beta)
    return gated.per_block(y, input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def silu_and_mul_with_clamp_mxfp8_quant(
    input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As `silu_and_mul_with_clamp`, in fp32, quantised to MX-FP8, as `mxfp8_scaled_mm` takes it.

    hidden is a multiple of 32. Returns out [..., hidden] float8_e4m3fn, on all GPUs, and scale [rows, hidden / 32] uint8: s for
    2^(s - 127), the least that keeps a group within 448.
    """
    return rowwise.mx(_product(input, limit, alpha, beta))
