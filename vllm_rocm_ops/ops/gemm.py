"""What the products of activations with a weight share: sizes, weight layouts, and the skinny kernels of csrc/device/skinny.h.

A weight is plain, [N, K] with K innermost and rows at any stride of 16 bytes, or in fragment order, as `shuffle_weight`
leaves it, where each wave reads contiguous kilobytes. An op takes either in the same argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.launch import I64, Counters, Launch, Workspace
from vllm_rocm_ops.op import describe, row_stride, rows_of

OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TOKENS = {64: (16, 32, 64), 16: (8, 16)}  # the most that a kernel takes, by the rows of the weight in a tile
STEP = 64  # bytes of K
NARROW_UNIT = 8  # steps of a unit with 16 rows, a turn of each wave
FRAGMENT_ROWS, FRAGMENT_BYTES = 16, 16
BLOCK = 128  # of K and of N per block scale
PANEL = 2 * STEP  # bytes of K of what LDS holds at a time
# Of csrc/device/nvidia/wide.h, of both teams, by tokens: of one block on a compute unit, and of two.
RING_PANELS = {16: (20, 8), 32: (16, 8), 64: (12, 6)}
SHORTEST = 4  # steps: with fewer a block is over before it streams
# What a kernel of so many rows and tokens is limited by, by the lanes of a wave: blocks that a compute unit holds at once, for
# registers and LDS; and bytes of weight a microsecond that it keeps up with, as measured on H200 and as emulated, by the cycles
# that instructions are issued in.
LIMITS = {
    32: {
        (16, 8): (4, 15e3),
        (16, 16): (3, 8e3),
        (64, 16): (2, 58e3),
        (64, 32): (2, 52e3),
        (64, 64): (2, 38e3),
    },
    64: {
        (16, 8): (4, 45e3),
        (16, 16): (4, 45e3),
        (64, 16): (3, 84e3),
        (64, 32): (3, 56e3),
        (64, 64): (2, 35e3),
    },
}
# Bytes that a long stream through registers keeps under way: fitted on H200, as the emulator counts them on AMD. Tiles of 16 rows keep
# 24e3 there since their loads no longer drain; that alone would move 105 of the recorded choices, beside constants that no AMD
# GPU has confirmed, so it waits for a model of the whole GPU.
IN_FLIGHT = {32: {16: 12e3}, 64: {16: 12.5e3, 64: 27e3}}
# Microseconds, fitted to all configurations of the decode shapes on H200: `serving_benchmarks/gemm.py --sweep` says what the choice
# costs. That a load takes; of each tile of a block.
LATENCY_US, END_US = 1.5, 0.5
# That a compute unit issues instructions for what a block does once: emulated on AMD, among LIMITS on H200.
BLOCK_US = {32: 0.0, 64: 1.3}
SHARING_US = {
    32: 3.0,
    64: 5.0,
}  # that blocks which share tiles take longer; on AMD as of kernels through registers on H200
DRAIN_US = 1.5  # where a block's share ends within a tile, it waits for its copies and other blocks for it
SUMMED = {32: 150e3, 64: 60e3}  # bytes of partial sums a microsecond that a block reads
# Of kernels through LDS only: that a block takes longer beside another, by tokens; and what is lost of the time in which some
# compute units have no block.
CROWDED_US, IDLE = {16: 1.0, 32: 0.6, 64: 0.0}, 0.15
MOST_RESIDENT = 4
MOST_TOKENS = TOKENS[64][-1]


@dataclass(frozen=True)
class SkinnyConfig:
    """Tiles have `rows` rows of the weight, and each is divided into `parts` equal parts along K, of which `blocks` blocks take as
    many each; or, with 0, the steps of all tiles are divided evenly, wherever tiles begin or end. With 64 rows, each wave of a
    block has 16 of them; with 16, the waves take K in turns."""

    rows: int
    parts: int
    blocks: int


def shuffle_weight(weight: Tensor) -> Tensor:
    """A weight [N, K] in fragment order: [N / 16, K / (64 bytes), 4, 16, 16 bytes]. N must be a multiple of 16, K of 64 bytes."""
    n, k = weight.shape
    in_step, in_piece = STEP // weight.element_size(), FRAGMENT_BYTES // weight.element_size()
    if n % FRAGMENT_ROWS or k % in_step:
        wanted = f"[a multiple of {FRAGMENT_ROWS}, a multiple of {in_step}]"
        raise ValueError(f"shuffle_weight: weight must be {wanted}, got {describe(weight)}")
    pieces = weight.reshape(n // FRAGMENT_ROWS, FRAGMENT_ROWS, k // in_step, STEP // FRAGMENT_BYTES, in_piece)
    return pieces.permute(0, 2, 3, 1, 4).contiguous()


def plain_weight(b: Tensor) -> Tensor:
    """A weight as [N, K], from [N, K] or fragment order."""
    if b.dim() == 2:
        return b
    tiles, steps, pieces, rows, in_piece = b.shape
    return b.permute(0, 3, 1, 2, 4).reshape(tiles * rows, steps * pieces * in_piece)


class Operand(NamedTuple):
    """An argument of a product as rows along K. `k` and `stride`, from row to row, count bytes; the stride is None where
    no single number says it, and 0 in fragment order."""

    tensor: Tensor
    rows: int
    k: int
    stride: int | None

    @property
    def is_shuffled(self) -> bool:
        return self.tensor.dim() == 5


def activations(a: Tensor) -> Operand:
    """a [..., K]."""
    size, stride = a.element_size(), row_stride(a)
    return Operand(a, rows_of(a), a.shape[-1] * size, None if stride is None or a.stride(-1) != 1 else stride * size)


def weight(b: Tensor, transposed: bool = False) -> Operand:
    """b [N, K], or [K, N] if transposed, or in fragment order."""
    if b.dim() == 5:
        tiles, steps, pieces, rows, in_piece = b.shape
        return Operand(b, tiles * rows, steps * pieces * in_piece * b.element_size(), 0)
    return activations(b.t() if transposed else b)._replace(tensor=b)


def is_weight(b: Tensor, k: int, transposed: bool = False) -> bool:
    """Whether a tensor is a weight of so many elements along K, in either layout."""
    if b.dim() == 2:
        return b.shape[0 if transposed else 1] == k
    fragment = (STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, FRAGMENT_BYTES // b.element_size())
    return b.dim() == 5 and b.shape[2:] == fragment and weight(b).k == k * b.element_size()


def bias_contract(bias: Tensor | None, n: int, dtype: torch.dtype) -> Iterator[tuple[str, str, str, bool]]:
    """What a bias must be, where there is one."""
    if bias is not None:
        yield "bias", f"{dtype} [N={n}]", describe(bias), bias.shape == (n,) and bias.dtype == dtype


def problem(a: Operand, b: Operand) -> dict[str, int]:
    """What a tuned row is keyed by."""
    return {"m": a.rows, "n": b.rows, "k": a.k // a.tensor.element_size()}


def envelope(a: Operand, b: Operand) -> Iterator[tuple[str, bool]]:
    """What all kernels need."""
    yield "N is at least 1 and below 2^30", 0 < b.rows < 2**30
    yield "rows are at least 1 long and below 32 MB, N of them below 64 GB", 0 < a.k < 2**25 and b.rows * a.k < 2**36
    yield "rows are a multiple of 16 bytes long", a.k % 16 == 0
    for name, operand in (("a", a), ("b", b)):
        yield f"{name} is 16-byte aligned", operand.tensor.data_ptr() % 16 == 0
        if operand.is_shuffled:
            yield f"{name} in fragment order is contiguous", operand.tensor.is_contiguous()
        else:
            yield f"{name}'s rows lie at one stride, a multiple of 16 bytes below 32 MB", _is_stride(operand.stride)


def _is_stride(stride: int | None) -> bool:
    return stride is not None and stride % 16 == 0 and 0 <= stride < 2**25


def padded(rows: Tensor, padding: int) -> Tensor:
    """A copy whose rows have so many zeros more behind them: what cases cut views with a row stride from."""
    return torch.nn.functional.pad(rows, (0, padding))


def _division(config: SkinnyConfig, b: Operand, unit: int) -> tuple[int, int, int]:
    """Tiles, the steps of one, and the steps that no border between blocks parts. Steps of a tile are a multiple of those."""
    unit = unit if config.rows == 64 else NARROW_UNIT
    parts = config.parts or 1
    of_part = -(-b.k // (STEP * unit * parts)) * unit
    return -(-b.rows // config.rows), of_part * parts, of_part if config.parts else unit


def configs(a: Operand, b: Operand, arch: Arch, unit: int = 1) -> list[SkinnyConfig]:
    """Whole tiles, steps divided evenly, or each tile in parts, for as many blocks as the compute units hold at once, one to four
    each; in parts also for fewer."""
    found = []
    for rows, tokens in TOKENS.items():
        if a.rows > tokens[-1]:
            continue
        tiles, steps, unit_steps = _division(SkinnyConfig(rows, 0, 1), b, unit)
        most = max(steps // max(SHORTEST, unit_steps), 1)  # parts of a tile
        held = [arch.compute_units * i for i in range(1, MOST_RESIDENT + 1)]
        of_rows = [SkinnyConfig(rows, 1, min(count, tiles)) for count in held]
        of_rows += [SkinnyConfig(rows, 0, min(count, tiles * most)) for count in held]
        parted = [min(count // tiles, most) for count in (arch.compute_units // 4, arch.compute_units // 2, *held)]
        of_rows += [SkinnyConfig(rows, parts, tiles * parts) for parts in parted if parts > 1]
        found += dict.fromkeys(of_rows)
    return found


def cost(config: SkinnyConfig, a: Operand, b: Operand, arch: Arch, unit: int = 1) -> dict[str, float]:
    """The time of a configuration by a model of the GPU, in microseconds: that of rounds of parts of tiles, as many as there are
    blocks at once, each that of their bytes or the least that a block's loads in flight allow; or that of issuing its instructions;
    and what blocks that share tiles wait for and move."""
    tiles, steps, unit_steps = _division(config, b, unit)
    lanes, tokens = arch.wave_lanes, _tokens(config, a)
    resident, keeps_up = LIMITS[lanes][config.rows, tokens]
    parts = tiles * config.parts or config.blocks
    longest = -(-tiles * steps // (unit_steps * parts)) * unit_steps * STEP * config.rows  # bytes
    hbm = arch.bandwidth_gb_s * 1e3  # bytes a microsecond
    of_part = b.rows * b.k / parts / hbm
    at_once = min(config.blocks, resident * arch.compute_units)
    rounds, rest = divmod(parts, at_once)
    least = max(longest / _in_flight(config, tokens, arch), 1.0) * LATENCY_US
    streaming = rounds * max(at_once * of_part, least)
    if rest:  # after a round or two, blocks are out of step, so that there is no last one of few
        streaming += rest * of_part + max(least - rest * of_part, 0.0) / max(rounds, 1) ** 2
    # Of the compute unit that has the most.
    most_blocks, most_parts = (-(-count // arch.compute_units) for count in (config.blocks, parts))
    issuing = most_blocks * BLOCK_US[lanes] + most_parts * longest / keeps_up
    terms = {"streaming": max(streaming, issuing), "ends": -(-parts // config.blocks) * tiles // parts * END_US}
    if _ring_panels(config, tokens, arch):
        terms["ends"] += (most_blocks - 1) * CROWDED_US[tokens]
        if config.parts and rest and rounds:
            terms["idle"] = IDLE * streaming * (at_once - rest) / parts
    if config.parts != 1:
        terms["sharing"] = SHARING_US[lanes] + (DRAIN_US if config.parts == 0 else 0.0)
        of_tile = config.rows * a.rows * 4
        terms["partials"] = 2 * _partial_bytes(config, a.rows) / hbm + config.blocks / tiles * of_tile / SUMMED[lanes]
    return terms


def _in_flight(config: SkinnyConfig, tokens: int, arch: Arch) -> float:
    """Bytes that a block has under way: of a ring, all but what its two teams wait for, two panels each, or one of three."""
    panels = _ring_panels(config, tokens, arch)
    return max(panels - 4, 4) * PANEL * config.rows if panels else IN_FLIGHT[arch.wave_lanes][config.rows]


def _ring_panels(config: SkinnyConfig, tokens: int, arch: Arch) -> int:
    """0 where a block streams through registers."""
    if config.rows == 16 or arch.wave_lanes == 64:
        return 0
    return RING_PANELS[tokens][config.blocks > arch.compute_units]


def _tokens(config: SkinnyConfig, a: Operand) -> int:
    """The most that the kernel takes."""
    return next(tokens for tokens in TOKENS[config.rows] if tokens >= a.rows)


def _partial_bytes(config: SkinnyConfig, tokens: int) -> int:
    """What blocks leave of the tiles that they share, at most two each, of so many tokens."""
    return config.blocks * 2 * config.rows * tokens * 4


def _waves(config: SkinnyConfig, arch: Arch) -> int:
    """Of a block: four multiply; where 64 rows go through registers, another brings the tokens, where through LDS, there are
    two teams."""
    return 4 if config.rows == 16 else 8 if arch.wave_lanes == 32 else 5


class Product(NamedTuple):
    """out [M, N] = a @ b^T with scales and a bias, where there are any. Scales come with the elements between them: from row to row
    of a (0 for one scale) and from block to block of its K; from row to row of b, or block of rows."""

    out: Tensor
    a: Operand
    b: Operand
    scale_a: tuple[Tensor | Workspace | None, int, int] = (None, 0, 0)
    scale_b: tuple[Tensor | Workspace | None, int] = (None, 0)
    bias: Tensor | None = None


def divisor(value: int) -> tuple[int, int]:
    """A Divisor of csrc/device/divisor.h, by which kernels divide whole numbers below 2^31."""
    shift = (value - 1).bit_length()
    inverse = -(-(1 << 31 + shift) // value)
    return inverse - (inverse >> 31 << 32), shift  # as an int


def arguments(product: Product, division: tuple[int, int, int], blocks: int, partial_bytes: int) -> tuple:
    """The Product of csrc/device/skinny.h that so many blocks compute, divided into tiles, steps of one, and of a unit. Without
    partial sums no tile is shared."""
    out, a, b, scale_a, scale_b, bias = product
    tiles, steps, unit = division
    tile_units = steps // unit
    units, longer = divmod(tiles * tile_units, blocks)
    if b.is_shuffled:
        row, step, tile = FRAGMENT_BYTES, FRAGMENT_ROWS * STEP, FRAGMENT_ROWS * b.k
    else:
        row, step, tile = b.stride, STEP, FRAGMENT_ROWS * b.stride
    return (
        a.tensor,
        b.tensor,
        out,
        Workspace(partial_bytes) if partial_bytes else None,
        Counters(tiles) if partial_bytes else None,
        scale_a[0],
        scale_b[0],
        bias,
        I64(tile),
        a.stride,
        row,
        step,
        a.rows,
        b.rows,
        a.k,
        *scale_a[1:],
        *scale_b[1:],
        OUT_TYPES[out.dtype],
        steps,
        unit,
        units,
        longer,
        tile_units,
        longer * (units + 1),
        *divisor(tile_units),
        *divisor(max(units, 1)),
        *divisor(units + 1),
    )


def launch(
    module: str, config: SkinnyConfig, product: Product, arch: Arch, unit: int = 1, kind: str = ""
) -> list[Launch]:
    """The launch of csrc/ops/<module>.hip's skinny kernel of that kind."""
    a, b = product.a, product.b
    if a.rows == 0:
        return []
    tokens = _tokens(config, a)
    partial_bytes = 0 if config.parts == 1 else _partial_bytes(config, max(tokens, 16))
    args = arguments(product, _division(config, b, unit), config.blocks, partial_bytes)
    threads = _waves(config, arch) * arch.wave_lanes
    shape = "skinny" if config.rows == 64 else "narrow"
    symbol = "_".join(filter(None, (module, kind, shape, str(tokens))))
    lds = _ring_panels(config, tokens, arch) * PANEL * (config.rows + tokens)
    return [Launch(module, symbol, (config.blocks, 1, 1), (threads, 1, 1), args, lds)]
