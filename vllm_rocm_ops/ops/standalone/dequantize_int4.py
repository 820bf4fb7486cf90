"""Dequantize int4 rows to bf16 or fp16, for attention over an int4 cache; kernel: csrc/ops/standalone/dequantize_int4.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, row_stride, rows_of
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.ops.shared.gemm import divisor

__all__ = ["dequantize_int4"]

IN_WORD = 8  # values per int32


@dataclass(frozen=True)
class DequantizeConfig:
    """Threads of a block; each converts one word."""

    threads: int


def _words(a) -> int:
    """Return the words of values per row."""
    return a.quantized.shape[-1] - a.groups


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.quantized.dtype == torch.int32 and a.quantized.dim() > 0
    yield "quantized", "int32 [..., groups + size / 8]", describe(a.quantized), holds
    yield "groups", "positive", str(a.groups), a.groups > 0
    holds = _words(a) > 0 and _words(a) % a.groups == 0
    wanted = f"of a multiple of groups={a.groups} words after the groups' scales"
    yield "quantized", wanted, describe(a.quantized), holds
    yield "dtype", "bfloat16 or float16", str(a.dtype), a.dtype in ELEMENTS


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    lies = row_stride(a.quantized) is not None and a.quantized.stride(-1) == 1
    yield "quantized's rows have one stride and contiguous words", lies
    yield "there are fewer than 2^31 words", rows_of(a.quantized) * _words(a) < 2**31


def _plan(config: DequantizeConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    words, rows = _words(a), rows_of(a.quantized)
    if not rows:
        return []
    args = {
        "quantized": a.quantized,
        "out": out,
        "stride": row_stride(a.quantized),
        "words": words,
        "groups": a.groups,
        "count": rows * words,
        "words_divisor": divisor(words),
        "group_divisor": divisor(words // a.groups),
    }
    symbol, grid = f"dequantize_int4_{ELEMENTS[a.dtype]}", (-(-rows * words // config.threads), 1, 1)
    return [Launch("dequantize_int4", symbol, grid, (config.threads, 1, 1), fields("problem", args))]


def quantize(values: Tensor, groups: int) -> Tensor:
    """Quantize values [..., size] as perf-kernels does: 0 to 15 from the smallest to the largest value of a group."""
    grouped = values.float().unflatten(-1, (groups, -1))
    least, largest = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    pair = torch.cat(((largest - least) / 15, least), -1).half()
    scale, shift = pair.float().unsqueeze(-2).unbind(-1)
    bits = ((grouped - shift) / scale.clamp(min=2.0**-24) + 0.5).clamp(0, 15).to(torch.uint8).flatten(-2)
    packed = bits[..., ::2] | bits[..., 1::2] << 4
    return torch.cat((pair.flatten(-2).view(torch.int32), packed.contiguous().view(torch.int32)), -1)


def _inputs(sizes, groups, dtype, padding, device, generator, fp8_dtype) -> tuple:
    quantized = quantize(torch.randn(*sizes, generator=generator) * 3, groups)
    apart = torch.zeros(*quantized.shape[:-1], quantized.shape[-1] + padding, dtype=torch.int32)
    apart[..., : quantized.shape[-1]] = quantized
    return apart.to(device)[..., : quantized.shape[-1]], groups, dtype


def _cases() -> Iterator[Case]:
    """Yield each dtype, one group and several, rows of one word and longer than a block, no rows, strided rows."""
    for name, shape, groups, dtype, padding in (
        ("bf16", (2, 3, 2, 128), 1, torch.bfloat16, 0),
        ("fp16", (5, 64), 4, torch.float16, 0),
        ("word", (300, 8), 1, torch.float16, 0),
        ("long", (3, 2 * 8 * 300), 2, torch.bfloat16, 0),
        ("padded", (7, 192), 8, torch.float16, 5),
        ("none", (0, 64), 1, torch.bfloat16, 0),
    ):
        yield Case(name, functools.partial(_inputs, shape, groups, dtype, padding))


@functools.partial(
    Op,
    contract=_contract,
    can_implement=_can_implement,
    allocate=lambda a: a.quantized.new_empty((*a.quantized.shape[:-1], IN_WORD * _words(a)), dtype=a.dtype),
    configs=lambda a, arch: [DequantizeConfig(threads=256)],
    default=lambda a, arch: DequantizeConfig(threads=256),
    plan=_plan,
    problem=lambda a: {"rows": rows_of(a.quantized), "size": IN_WORD * _words(a), "groups": a.groups},
    cases=_cases,
)
def dequantize_int4(quantized: Tensor, groups: int = 1, dtype: torch.dtype = torch.float16) -> Tensor:
    """Compute int4 values times their group's scale plus its shift, rounded once.

    Args:
        quantized: [..., groups + size / 8], int32: per group a word with scale (lower half) and shift (upper half) in
            fp16, then the values, eight per word, lowest bits first.
        groups: Groups per row.
        dtype: bf16 or fp16.

    Returns:
        [..., size], dtype. Keys and values [requests, N, heads, size] are an unpaged cache of `paged_attention_decode`.

    Source:
        06-attention-decode.py of AMD perf-kernels, whose int4 cache format this is.
    """
    scale, shift = quantized[..., :groups].contiguous().view(torch.float16).unflatten(-1, (-1, 2)).unbind(-1)
    words = quantized[..., groups:].unflatten(-1, (groups, -1))
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=quantized.device)
    values = (words.unsqueeze(-1) >> shifts & 15).flatten(-2).double()
    return (values * scale.double().unsqueeze(-1) + shift.double().unsqueeze(-1)).flatten(-2).float().to(dtype)
