"""Plan wave split-K kernels whose weights have a scale per group of K (csrc/gemm/skinny/wave_split_k.h): configurations and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.tensors import aligned, row_stride
from vllm_rocm_ops.ops.shared import gemm, skinny_gemm
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig

STEP = 32  # along K: 64 bytes of a bf16 token
WAVES = 4  # per block, which split K

# The cost model: weight bytes per microsecond of a compute unit, and microseconds, as timing/ predicts them for Llama-3.3-70B's INT4
# layers and one token on MI300X.
UNIT_BYTES_PER_US = 13e3
LATENCY_US, SHARING_US, BLOCK_US = 2.0, 3.0, 1.3
SUMMED_AT_ONCE = 2  # partial sums that a block loads at once (kBlocksAtOnce of csrc/gemm/skinny/epilogue.h)
SUM_ROUND_US = 0.3


class Sizes(NamedTuple):
    """A product of bf16 tokens and grouped weights, and its kernel.

    `rows` are a tile's, `steps_at_once` a slice's, and `weight_bytes` a value's. A compute unit streams `unit_bytes_per_us`, and a block
    at most `block_bytes_per_us`. Where blocks overlap, a compute unit's blocks wait for memory and for each other at the same time.
    With `many_sums`, the partial sums of both tiles of a stream-K block count.
    """

    m: int
    n: int
    k: int
    rows: int
    steps_at_once: int
    weight_bytes: float
    unit_bytes_per_us: float = UNIT_BYTES_PER_US
    overlap: bool = False
    block_bytes_per_us: float = math.inf
    many_sums: bool = False


def kernel_tokens(limits: tuple[int, ...], m: int) -> int:
    """Return the token limit of the smallest kernel, or of the largest."""
    return next((tokens for tokens in limits if tokens >= m), limits[-1])


def division(config: SkinnyConfig, of: Sizes) -> tuple[int, int, int]:
    """Return the tiles, the steps per tile, and the steps per unit, a slice per wave; a block has whole units."""
    unit, split_k = WAVES * of.steps_at_once, config.split_k or 1
    of_slice = -(-of.k // (STEP * unit * split_k)) * unit
    return -(-of.n // of.rows), of_slice * split_k, of_slice if config.split_k else unit


def configs(of: Sizes, limits: dict[str, tuple[int, ...]], arch: Arch) -> list[SkinnyConfig]:
    """Return whole tiles, split-K and stream-K for a half to four blocks per compute unit; none beyond the last of `limits`."""
    if of.m > limits[arch.vendor][-1]:
        return []
    tiles, steps, unit = division(SkinnyConfig(of.rows, 0, 1), of)
    most, units = steps // unit, arch.compute_units
    resident = [units * i for i in range(1, skinny_gemm.MAX_RESIDENT + 1)]
    splits = sorted({min(max(count // max(tiles, 1), 1), most) for count in (units // 4, units // 2, *resident)})
    found = [SkinnyConfig(of.rows, split_k, tiles * split_k) for split_k in splits]
    found += [SkinnyConfig(of.rows, 0, min(count, tiles * most)) for count in resident]
    return list(dict.fromkeys(found))


def cost(config: SkinnyConfig, of: Sizes, arch: Arch) -> dict[str, float]:
    """Return the modeled microseconds of the busiest compute unit; blocks that share tiles add a synchronization and partial sums."""
    tiles, steps, unit = division(config, of)
    hbm = arch.bandwidth_gb_s * 1e3
    slices = tiles * config.split_k or config.blocks
    longest = -(-tiles * steps // (unit * slices)) * unit * STEP * config.rows * of.weight_bytes
    blocks = -(-config.blocks // arch.compute_units)
    waiting = blocks if of.overlap else 1
    streaming = (
        of.n * of.k * of.weight_bytes / hbm,
        blocks * longest / of.unit_bytes_per_us,
        longest / of.block_bytes_per_us,
    )
    terms = {
        "streaming": LATENCY_US / waiting + max(streaming),
        "blocks": blocks * BLOCK_US,
    }
    if config.split_k != 1:
        of_tile, share = config.rows * of.m * 4, config.blocks / max(tiles, 1)
        terms["sharing"] = (SHARING_US + share / SUMMED_AT_ONCE * SUM_ROUND_US) / waiting
        parts = config.blocks + (tiles if of.many_sums and not config.split_k else 0)
        terms["partials"] = 2 * parts * of_tile / hbm
    return terms


def rules(a, m: int, n: int, k: int, limits: dict[str, tuple[int, ...]], arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield each rule of the kernels about sizes, tokens `x` and `bias`, and whether it holds; `limits` are TOKENS of their file."""
    rows, most = gemm.activations(a.x), limits[arch.vendor][-1]
    yield "x is bfloat16", a.x.dtype == torch.bfloat16
    yield f"M is at most {most} on {arch.vendor.upper()}", m <= most
    yield "N and K are at least 1, N below 2^30, K below 2^24", 0 < n < 2**30 and 0 < k < 2**24
    yield "rows of x have one stride, a multiple of 16 bytes below 32 MB", gemm.is_stride(rows.stride) and aligned(a.x)
    yield "bias is contiguous", a.bias is None or a.bias.is_contiguous()


def launches(
    module: str,
    kind: object,
    limits: dict[str, tuple[int, ...]],
    out: Tensor,
    a,
    config: SkinnyConfig,
    of: Sizes,
    arch: Arch,
    **more: int,
) -> list[Launch]:
    """Return the launch of a kernel of this kind, for the smallest of the token limits that suffices, with `more` arguments.

    A block has the partial sums of at most two tiles. Without tokens there is no launch.
    """
    if of.m == 0:
        return []
    weight = gemm.Operand(a.weight, of.n, 2 * of.k, row_stride(a.weight) * a.weight.element_size())
    product = gemm.Product(out, gemm.activations(a.x), weight, scale_b=(a.scale, row_stride(a.scale)), bias=a.bias)
    tokens = kernel_tokens(limits[arch.vendor], of.m)
    partial_bytes = 0 if config.split_k == 1 else config.blocks * 2 * config.rows * tokens * 4
    args = skinny_gemm.arguments(product, division(config, of), config.blocks, partial_bytes)
    grid, block = (config.blocks, 1, 1), (WAVES * arch.wave_lanes, 1, 1)
    return [Launch(module, f"{module}_{kind}_wave_splitk_{tokens}", grid, block, fields("problem", args | more))]


def tokens_of(tokens: int | tuple[int, ...], k: int, given: dict, generator: torch.Generator) -> Tensor:
    """Return the tokens of a case, float32: normal values, or small ones with spikes."""
    x = torch.randn(*(tokens if isinstance(tokens, tuple) else (tokens,)), k, generator=generator)
    return gemm.with_spikes(x) if given.get("spikes") else x
