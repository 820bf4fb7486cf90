"""Apply SwiGLU with clamped inputs, as in gpt-oss and MiniMax-M3, with optional FP8 quantization fused.

Kernels: csrc/ops/silu_and_mul_with_clamp.hip. The formula follows vLLM's SiluAndMulWithClamp: gate = min(gate, limit),
up = clamp(up, -limit, limit), result = gate * sigmoid(alpha * gate) * (up + beta). Rounding matches vLLM's swiglu_oai_split and
swiglu_oai_quantize_mxfp8: float32, then one rounding. Dynamic quantization reads the unrounded result. NaN propagates up to
the cast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

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


def _product(input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
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


_op = functools.partial(
    gated.op,
    module="silu_and_mul_with_clamp",
    further=_further,
    contract=_contract,
    cases=_cases,
    meanings=MEANINGS,
)


@_op
def silu_and_mul_with_clamp(input: Tensor, limit: float, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """Clamp gate and up, then compute gate * sigmoid(alpha * gate) * (up + beta), rounded once.

    Source:
        vLLM's SiluAndMulWithClamp and swiglu_oai_split.
    """
    return _product(input, limit, alpha, beta).to(input.dtype)


(
    silu_and_mul_with_clamp_quant,
    silu_and_mul_with_clamp_per_token_quant,
    silu_and_mul_with_clamp_per_block_quant,
    silu_and_mul_with_clamp_mxfp8_quant,
) = gated.quantized_ops(
    _op,
    _product,
    "Apply `silu_and_mul_with_clamp`",
    "Compute `silu_and_mul_with_clamp`",
    (
        "vLLM's SiluAndMulWithClamp and `static_scaled_fp8_quant`, in one launch.",
        "vLLM's SiluAndMulWithClamp and `dynamic_per_token_scaled_fp8_quant`, in one launch.",
        "vLLM's SiluAndMulWithClamp, with the quantization of `silu_and_mul_per_block_quant`.",
        "vLLM's swiglu_oai_quantize_mxfp8; the inputs of `mxfp8_scaled_mm`.",
    ),
)
