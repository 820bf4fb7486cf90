"""Dequantize MXFP8 or MXFP4 weights to bf16; kernel: csrc/ops/mx_dequantize.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import MX_BLOCK, MX_SCALES, mx_numbers
from vllm_rocm_ops.core.tensors import aligned, describe, row_stride
from vllm_rocm_ops.ops.mx_gemm import FORMATS, random_weight
from vllm_rocm_ops.ops.shared.gemm import divisor

__all__ = ["mx_dequantize"]

CHUNK = 8  # values per thread


@dataclass(frozen=True)
class DequantizeConfig:
    """Threads per block, of which each converts eight values."""

    threads: int


def _sizes(a) -> tuple[int, int]:
    """Return N and K."""
    n, columns = a.weight.shape
    return n, columns * (1 if a.weight.dtype == torch.float8_e4m3fn else 2)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.weight.dim() == 2 and a.weight.dtype in FORMATS and _sizes(a)[1] % MX_BLOCK == 0
    yield "weight", f"float8_e4m3fn [N, K a multiple of {MX_BLOCK}] or uint8 [N, K / 2]", describe(a.weight), holds
    n, k = _sizes(a)
    holds = a.scale.dtype in MX_SCALES and a.scale.shape == (n, k // MX_BLOCK)
    yield "scale", f"uint8 or float8_e8m0fnu [N={n}, K={k} / {MX_BLOCK}]", describe(a.scale), holds


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    n, k = _sizes(a)
    for name in ("weight", "scale"):
        rows = getattr(a, name)
        yield f"{name} has K innermost", rows.shape[1] == 1 or rows.stride(1) == 1
    yield "rows of weight are 4-byte aligned", aligned(a.weight, 4)
    yield "N * K is below 2^34", n * k < 2**34


def _plan(config: DequantizeConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    n, k = _sizes(a)
    if n * k == 0:
        return []
    args = {
        "weight": a.weight,
        "scale": a.scale,
        "out": out,
        "weight_row": row_stride(a.weight),
        "scale_row": row_stride(a.scale),
        "chunks": k // CHUNK,
        "count": n * k // CHUNK,
        "chunks_divisor": divisor(k // CHUNK),
    }
    symbol, grid = f"mx_dequantize_{FORMATS[a.weight.dtype]}", (-(-n * k // CHUNK // config.threads), 1, 1)
    return [Launch("mx_dequantize", symbol, grid, (config.threads, 1, 1), fields("problem", args))]


def _cases() -> Iterator[Case]:
    """Yield rows shorter and longer than a block, strides, hard scales, and none."""
    for name in FORMATS.values():
        case = case_maker(functools.partial(_inputs, name))
        yield case(f"{name}-short", 9, 96)
        yield case(f"{name}-long", 2, 4128)
        yield case(f"{name}-padded", 5, 64, padding=32)
        yield case(f"{name}-scales-extreme", 4, 96, extreme=True)
        yield case(f"{name}-none", 0, 64)


def _inputs(form: str, n, k, given, device, generator, fp8_dtype) -> tuple:
    return random_weight(form, n, k, given, device, generator)


@functools.partial(
    Op,
    allocate=lambda a: a.weight.new_empty(_sizes(a), dtype=torch.bfloat16),
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: [DequantizeConfig(threads=256)],
    default=lambda a, arch: DequantizeConfig(threads=256),
    plan=_plan,
    problem=lambda a: dict(zip("nk", _sizes(a))),
    cases=_cases,
)
def mx_dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Dequantize an MX weight to bf16, rounded once.

    Args:
        weight: [N, K] of float8_e4m3fn, or [N, K / 2] of uint8, as for `mx_gemm`; K a multiple of 32.
        scale: [N, K / 32], uint8 or float8_e8m0fnu: s for 2^(s - 127), 255 for NaN.

    Returns:
        [N, K], bf16.

    Source:
        dequant_mxfp8_to_bf16 and dequant_mxfp4 of vLLM's emulation.
    """
    return mx_numbers(weight, scale).to(torch.bfloat16)
