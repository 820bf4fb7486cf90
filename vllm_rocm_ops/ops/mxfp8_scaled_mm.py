"""Multiply MX-FP8 matrices: e4m3fn with one e8m0 scale per 32 along K; kernels: csrc/ops/mxfp8_scaled_mm.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import (
    MX_BLOCK as BLOCK,
)  # elements along K per scale; rows of b that may share scales
from vllm_rocm_ops.core.quantization import MX_SCALES, mx_numbers
from vllm_rocm_ops.core.tensors import aligned, describe, row_stride
from vllm_rocm_ops.ops.shared import gemm
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES, Product, activations, bias_contract, weight
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.skinny_gemm import arguments

__all__ = ["mxfp8_scaled_mm"]

UNIT_BYTES = 256  # along K
WAVES = 4  # per block


class Kernel(NamedTuple):
    """Properties of a kernel.

    `rows` is the tile's rows of b, `resident` the blocks that a compute unit runs at once, `prefetch` the units that a block
    prefetches.
    """

    rows: int
    resident: int
    prefetch: int


STREAMS = {16: Kernel(64, 3, 3), 32: Kernel(64, 3, 3), 64: Kernel(64, 2, 3)}  # by the tile's tokens
TILES = {64: Kernel(64, 4, 1), 128: Kernel(128, 2, 1)}

# The cost model: clock of a compute unit, and bytes from its cache and matrix FLOPs per cycle.
LATENCY_US, SHARING_US = 1.0, 0.8
CLOCK_MHZ, CACHE_BYTES, FLOPS = 2400, 64, 8192


@dataclass(frozen=True)
class MxConfig:
    """Tiles of up to `tokens` tokens, whose units are divided evenly over `blocks` blocks.

    With `streams` 1, b goes from HBM to registers; with 0 both operands go through LDS.
    """

    tokens: int
    streams: int
    blocks: int

    @property
    def kernel(self) -> Kernel:
        return (STREAMS if self.streams else TILES)[self.tokens]


def _sizes(a) -> tuple[int, int, int]:
    """Return M, N and K."""
    return *a.a.shape[:1], *a.b.shape


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    fp8 = torch.float8_e4m3fn
    holds = a.a.dim() == 2 and a.a.dtype == fp8 and a.a.shape[1] % BLOCK == 0
    yield "a", f"float8_e4m3fn [M, K a multiple of {BLOCK}]", describe(a.a), holds
    k = a.a.shape[1]
    yield "b", f"float8_e4m3fn [N, K={k}]", describe(a.b), a.b.dim() == 2 and a.b.dtype == fp8 and a.b.shape[1] == k
    m, n, _ = _sizes(a)
    of_b = dict.fromkeys((n, -(-n // BLOCK)))
    for name, scale, rows in (("scale_a", a.scale_a, (m,)), ("scale_b", a.scale_b, of_b)):
        wanted = " or ".join(f"[{r}, {k // BLOCK}]" for r in rows)
        holds = scale.dtype in MX_SCALES and scale.shape in [(r, k // BLOCK) for r in rows]
        yield name, f"uint8 or float8_e8m0fnu {wanted}", describe(scale), holds
    yield "out_dtype", "bfloat16, float16 or float32", str(a.out_dtype), a.out_dtype in OUT_TYPES
    yield from bias_contract(a.bias, n, a.out_dtype)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    m, n, k = _sizes(a)
    yield f"{arch.name} has block-scaled matrix instructions", arch.block_scales
    yield "N and K are at least 1, M * N * K is below 2^50", n > 0 and k > 0 and m * n * k < 2**50
    yield "M and N are below 2^30", max(m, n) < 2**30
    for name in ("a", "b", "scale_a", "scale_b"):
        rows = getattr(a, name)
        yield f"{name} has K innermost", rows.shape[1] == 1 or rows.stride(1) == 1
        yield f"{name}'s row stride is below 16 MB", max(row_stride(rows), k) < 2**24
    for name in ("a", "b"):
        yield f"rows of {name} are 16-byte aligned", aligned(getattr(a, name))
    yield "bias is contiguous", a.bias is None or a.bias.is_contiguous()


def _has_words(a) -> bool:
    """True if the scales of every 128 along K are aligned words."""
    return a.a.shape[1] % (4 * BLOCK) == 0 and aligned(a.scale_a, 4) and aligned(a.scale_b, 4)


def _units(config: MxConfig, a) -> tuple[int, int]:
    """Return the tiles, and the units per tile."""
    m, n, k = _sizes(a)
    return -(-m // config.tokens) * -(-n // config.kernel.rows), -(-k // UNIT_BYTES)


def _is_shared(config: MxConfig, a) -> bool:
    """True if blocks share tiles."""
    tiles, units_per_tile = _units(config, a)
    return tiles * units_per_tile % config.blocks != 0 or tiles * units_per_tile // config.blocks % units_per_tile != 0


def _configs(a, arch: Arch) -> list[MxConfig]:
    """Return the kernels that fit M, each with several block counts.

    The counts are one block per tile, one to `resident` blocks per compute unit, and one block per two units.
    """
    if not arch.block_scales:
        return []
    m, _, _ = _sizes(a)
    fitting = [(64, 0)]
    if _has_words(a):
        fitting += [(tokens, 1) for tokens in STREAMS if tokens >= m][:1] or [(128, 0)]
    configs = []
    for tokens, streams in fitting:
        any_number = MxConfig(tokens, streams, 1)
        (tiles, units_per_tile), resident = _units(any_number, a), any_number.kernel.resident
        units, most = max(tiles * units_per_tile, 1), resident * arch.compute_units
        blocks = {min(arch.compute_units * i, units) for i in range(1, resident + 1)}
        blocks |= {max(tiles, 1), min(-(-units // 2), most)}
        configs += [MxConfig(tokens, streams, count) for count in sorted(blocks)]
    return configs


def _cost(config: MxConfig, a, arch: Arch) -> dict[str, float]:
    """Return the modeled microseconds of the busiest compute unit.

    A unit takes the longest of its HBM bytes of b, its cache bytes, its FLOPs and the latency of loads in flight. Blocks that share
    tiles add a synchronization.
    """
    m, (tiles, units_per_tile) = a.a.shape[0], _units(config, a)
    tokens, (rows, resident, prefetch) = config.tokens, config.kernel
    blocks = -(-config.blocks // arch.compute_units)  # per compute unit
    hbm = arch.bandwidth_gb_s * 1e3 / arch.compute_units  # bytes / us
    of_unit = max(
        rows * (UNIT_BYTES + UNIT_BYTES // BLOCK) / -(-m // tokens) / hbm if m else 0.0,
        (tokens + rows) * UNIT_BYTES / CACHE_BYTES / CLOCK_MHZ,
        2 * tokens * rows * UNIT_BYTES / FLOPS / CLOCK_MHZ,
        LATENCY_US / (prefetch * min(blocks, resident)),
    )
    sharing = 0.0
    if _is_shared(config, a):
        sums = blocks * 2 * rows * min(tokens, m) * 4  # bytes written, and read again
        sharing = SHARING_US * (2 + config.blocks / tiles / 16) + sums / hbm
    return {"multiplying": -(-tiles * units_per_tile // config.blocks) * blocks * of_unit, "sharing": sharing}


def _plan(config: MxConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    if a.a.shape[0] == 0:
        return []
    partial_bytes = config.blocks * 2 * config.tokens * config.kernel.rows * 4 if _is_shared(config, a) else 0
    scale_a, scale_b = (a.scale_a, row_stride(a.scale_a), 1), (a.scale_b, row_stride(a.scale_b))
    product = Product(out, activations(a.a), weight(a.b), scale_a, scale_b, a.bias)
    args = arguments(product, (*_units(config, a), 1), config.blocks, partial_bytes)
    args["scale_b_shift"] = 0 if a.scale_b.shape[0] == a.b.shape[0] else BLOCK.bit_length() - 1
    args["blocks"] = config.blocks
    symbol = f"mxfp8_scaled_mm_{'stream' if config.streams else 'tile'}_{config.tokens}"
    symbol += "" if _has_words(a) else "_bytes"
    grid, block = (config.blocks, 1, 1), (WAVES * arch.wave_lanes, 1, 1)
    return [Launch("mxfp8_scaled_mm", symbol, grid, block, fields("problem", args))]


def _cases() -> Iterator[Case]:
    """Yield every instance, tiles shared by one, two and many blocks, sizes around tiles and units, strides, odd scales."""
    case = case_maker(_inputs)
    for m in range(1, 18):
        yield case(f"m{m}", m, 48, 512)
    for m in (33, 64, 65, 130):
        yield case(f"m{m}", m, 80, 768)
    yield case("m530", 530, 200, 128)
    yield case("tiles", 3, 200, 1280)
    yield case("long-k", 2, 32, 4096)
    for k in (32, 96, 128, 352, 384, 1152):
        yield case(f"k{k}", 5, 40, k)
    yield case("k-tail-m70", 70, 130, 416)
    yield case("one-column", 2, 1, 256)
    yield case("bias-fp16", 4, 33, 512, out_dtype=torch.float16, bias=True)
    yield case("bias-fp32-m70", 70, 68, 256, out_dtype=torch.float32, bias=True)
    yield case("padded", 5, 72, 512, padding=256)
    yield case("padded-m65", 65, 72, 256, padding=64)
    yield case("scales-32-rows", 20, 96, 512, shared_scales=True)
    yield case("scales-e8m0", 2, 40, 256, scale_dtype=torch.float8_e8m0fnu)
    yield case("scales-extreme", 17, 70, 512, extreme=True)
    yield case("scales-extreme-m66", 66, 70, 512, extreme=True)
    yield case("spikes", 2, 32, 1280, spikes=True)
    yield case("no-tokens", 0, 32, 64)


def _inputs(m, n, k, given, device, generator, fp8_dtype) -> tuple:
    padding = given.get("padding", 0)

    def rows(count: int, padding: int) -> Tensor:
        values = torch.randn(count, k, generator=generator)
        values = gemm.with_spikes(values) if given.get("spikes") else values
        storage = torch.full((count, k + padding), torch.nan)  # padding must not be read
        storage[:, :k] = values
        return storage.to(torch.float8_e4m3fn).to(device)[:, :k]

    def scales(count: int, padding: int) -> Tensor:
        drawn = torch.randint(120, 134, (count, k // BLOCK), generator=generator, dtype=torch.uint8)
        storage = torch.full((count, k // BLOCK + padding // BLOCK), 255, dtype=torch.uint8)
        storage[:, : k // BLOCK] = drawn
        return storage

    of_a = scales(m, 3 * padding)
    of_b = scales(-(-n // BLOCK) if given.get("shared_scales") else n, 2 * padding)
    if given.get("extreme"):
        of_a[:, 0], of_b[:, 0] = 254, 0
        of_a[:, 1], of_b[:, 1] = 0, 254
        of_a[:, 2], of_b[:, 2] = 0, 0
        of_a[:, 3:8] = 127
        of_a[1, 9] = of_b[n - 1, 15] = of_b[3, 2] = 255
    scale_dtype = given.get("scale_dtype", torch.uint8)
    scale_a, scale_b = (s.view(scale_dtype).to(device)[:, : k // BLOCK] for s in (of_a, of_b))
    out_dtype = given.get("out_dtype", torch.bfloat16)
    bias = torch.randn(n, generator=generator).to(out_dtype).to(device) if given.get("bias") else None
    return rows(m, padding), rows(n, 2 * padding), scale_a, scale_b, out_dtype, bias


def _linear(tokens: int, inputs: Inputs, n: int, k: int, *has_bias: bool) -> tuple:
    """Return a layer's arguments."""
    a, b = (inputs.values(rows, k, dtype=torch.float8_e4m3fn) for rows in (tokens, n))
    scales = (inputs.exponents(rows, k // BLOCK) for rows in (tokens, n))
    return a, b, *scales, inputs.dtype, *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=lambda a: a.a.new_empty((a.a.shape[0], a.b.shape[0]), dtype=a.out_dtype),
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=lambda a: dict(zip("mnk", _sizes(a))),
    cases=_cases,
    sums=True,
    product=True,
    linear=_linear,
)
def mxfp8_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute a @ b^T + bias of MX-FP8 matrices; kernels sum in float32.

    Args:
        a: [M, K], float8_e4m3fn, K innermost and a multiple of 32; rows may be strided.
        b: [N, K], float8_e4m3fn, K innermost; rows may be strided.
        scale_a: [M, K / 32], uint8 or float8_e8m0fnu: s for 2^(s - 127), 255 for NaN.
        scale_b: [N, K / 32], or [ceil(N / 32), K / 32] where 32 rows share a scale; dtype as scale_a.
        out_dtype: bf16, fp16 or fp32.
        bias: [N], out_dtype, or None.

    Returns:
        [M, N], out_dtype.

    Source:
        smallm_mxfp8_gemv and smallm_mxfp8_mfma of aiter PR 3783; vLLM's MXFP8 linear layers.
    """
    if scale_b.shape[0] != b.shape[0]:
        scale_b = scale_b.view(torch.uint8).repeat_interleave(BLOCK, 0)[: b.shape[0]]
    product = mx_numbers(a, scale_a) @ mx_numbers(b, scale_b).t()
    if bias is not None:
        product = product + bias.to(torch.float64)
    return product.to(out_dtype)
