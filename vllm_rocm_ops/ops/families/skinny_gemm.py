"""The skinny kernels of csrc/gemm/skinny.h, which multiply a weight with few tokens: their configurations, cost and launch."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.ops.families.gemm import PANEL, Operand, Product, divisor
from vllm_rocm_ops.ops.families.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP

TOKENS = {64: (16, 32, 64), 16: (8, 16)}  # the most that a kernel takes, by the rows of the weight in a tile
WAVE_SPLIT_K_UNIT = 8  # steps of a unit with 16 rows, a K slice of each wave
# All stages of csrc/gemm/skinny/nvidia/streamed_tile.h, of both consumer groups, by tokens: of one block on a compute unit, and of two.
STAGE_PANELS = {16: (20, 8), 32: (16, 8), 64: (12, 6)}
SHORTEST = 4  # steps: with fewer a block is over before it streams
# The model of `cost`, where archs are alike; `arch.costs` has the rest. Microseconds, fitted to all configurations of the decode shapes
# on H200: `vllm-rocm-ops sweep linear` says what the choice costs. That a load takes; of each tile of a block.
LATENCY_US, TILE_EPILOGUE_US = 1.5, 0.5
SPLIT_TILE_US = 1.5  # where a block's share ends within a tile, it waits for its copies and other blocks for it
SUMMED_AT_ONCE = 8  # blocks whose sums a block loads at once: at most kBlocksAtOnce in csrc/gemm/skinny/epilogue.h
# Of kernels through LDS only: that a block takes longer beside another, by tokens; and what is lost of the time in which some
# compute units have no block.
CO_RESIDENT_PENALTY_US, IDLE_COST = {16: 1.0, 32: 0.6, 64: 0.0}, 0.15
MOST_RESIDENT = 4
MOST_TOKENS = TOKENS[64][-1]


@dataclass(frozen=True)
class SkinnyConfig:
    """Tiles have `rows` rows of the weight, and K of each is split into `split_k` equal slices, of which `blocks` blocks take as many
    each; or, with 0, by stream-K, the steps of all tiles are divided evenly, wherever tiles begin or end. With 64 rows, each wave
    of a block has 16 of them; with 16, the waves split K."""

    rows: int
    split_k: int
    blocks: int


def _division(config: SkinnyConfig, b: Operand, unit: int) -> tuple[int, int, int]:
    """Tiles, the steps of one, and the steps of a unit, which one block has together. Steps of a tile are a multiple of those."""
    unit = unit if config.rows == 64 else WAVE_SPLIT_K_UNIT
    split_k = config.split_k or 1
    of_slice = -(-b.k // (STEP * unit * split_k)) * unit
    return -(-b.rows // config.rows), of_slice * split_k, of_slice if config.split_k else unit


def configs(a: Operand, b: Operand, arch: Arch, unit: int = 1) -> list[SkinnyConfig]:
    """Whole tiles, stream-K, or split-K, for as many blocks as the compute units hold at once, one to four each; split-K also for
    fewer."""
    found = []
    for rows, tokens in TOKENS.items():
        if a.rows > tokens[-1]:
            continue
        tiles, steps, unit_steps = _division(SkinnyConfig(rows, 0, 1), b, unit)
        most = max(steps // max(SHORTEST, unit_steps), 1)  # slices of a tile
        resident = [arch.compute_units * i for i in range(1, MOST_RESIDENT + 1)]
        of_rows = [SkinnyConfig(rows, 1, min(count, tiles)) for count in resident]
        of_rows += [SkinnyConfig(rows, 0, min(count, tiles * most)) for count in resident]
        split = [min(count // tiles, most) for count in (arch.compute_units // 4, arch.compute_units // 2, *resident)]
        of_rows += [SkinnyConfig(rows, split_k, tiles * split_k) for split_k in split if split_k > 1]
        found += dict.fromkeys(of_rows)
    return found


def cost(config: SkinnyConfig, a: Operand, b: Operand, arch: Arch, unit: int = 1) -> dict[str, float]:
    """The time of a configuration by a model of the GPU, in microseconds: that of rounds of slices of tiles, as many as there are
    blocks at once, each that of their bytes or the least that a block's loads in flight allow; or that of issuing its instructions;
    and what blocks that share tiles wait for and move."""
    tiles, steps, unit_steps = _division(config, b, unit)
    costs, tokens = arch.costs.skinny, _tokens(config, a)
    resident, keeps_up = costs.limits[config.rows, tokens]
    slices = tiles * config.split_k or config.blocks
    longest = -(-tiles * steps // (unit_steps * slices)) * unit_steps * STEP * config.rows  # bytes
    hbm = arch.bandwidth_gb_s * 1e3  # bytes a microsecond
    of_slice = b.rows * b.k / slices / hbm
    at_once = min(config.blocks, resident * arch.compute_units)
    rounds, rest = divmod(slices, at_once)
    least = max(longest / _in_flight(config, tokens, arch), 1.0) * LATENCY_US
    streaming = rounds * max(at_once * of_slice, least)
    if rest:  # after a round or two, blocks are out of step, so that there is no last one of few
        streaming += rest * of_slice + max(least - rest * of_slice, 0.0) / max(rounds, 1) ** 2
    # Of the compute unit that has the most.
    most_blocks, most_slices = (-(-count // arch.compute_units) for count in (config.blocks, slices))
    issuing = most_blocks * costs.block_us + most_slices * longest / keeps_up
    terms = {
        "streaming": max(streaming, issuing),
        "ends": -(-slices // config.blocks) * tiles // slices * TILE_EPILOGUE_US,
    }
    if _stage_panels(config, tokens, arch):
        terms["ends"] += (most_blocks - 1) * CO_RESIDENT_PENALTY_US[tokens]
        if config.split_k and rest and rounds:
            terms["idle"] = IDLE_COST * streaming * (at_once - rest) / slices
    if config.split_k != 1:
        terms["sharing"] = costs.sharing_us + (SPLIT_TILE_US if config.split_k == 0 else 0.0)
        of_tile = config.rows * a.rows * 4
        share = config.blocks / tiles
        summing = (
            share * of_tile / arch.costs.sums_bytes_per_us + max(share / SUMMED_AT_ONCE - 1, 0) * costs.sum_round_us
        )
        terms["partials"] = 2 * _partial_bytes(config, a.rows) / hbm + summing
    return terms


def _in_flight(config: SkinnyConfig, tokens: int, arch: Arch) -> float:
    """Bytes that a block has under way: of its stages, all but what its two consumer groups wait for, two panels each, or one of three."""
    panels = _stage_panels(config, tokens, arch)
    return max(panels - 4, 4) * PANEL * config.rows if panels else arch.costs.skinny.in_flight[config.rows]


def _stage_panels(config: SkinnyConfig, tokens: int, arch: Arch) -> int:
    """0 where a block streams through registers."""
    if config.rows == 16 or arch.vendor == "amd":
        return 0
    return STAGE_PANELS[tokens][config.blocks > arch.compute_units]


def _tokens(config: SkinnyConfig, a: Operand) -> int:
    """The most that the kernel takes."""
    return next(tokens for tokens in TOKENS[config.rows] if tokens >= a.rows)


def _partial_bytes(config: SkinnyConfig, tokens: int) -> int:
    """What blocks leave of the tiles that they share, at most two each, of so many tokens."""
    return config.blocks * 2 * config.rows * tokens * 4


def _waves(config: SkinnyConfig, arch: Arch) -> int:
    """Of a block: four multiply. Where 64 rows go through registers, a fifth is the producer of the tokens; where through LDS, there
    are two consumer groups."""
    return 4 if config.rows == 16 else 8 if arch.vendor == "nvidia" else 5


def arguments(product: Product, division: tuple[int, int, int], blocks: int, partial_bytes: int) -> dict:
    """The fields of SkinnyProblem in csrc/gemm/skinny/problem.h for so many blocks, divided into tiles, steps of one, and of a unit."""
    b, (tiles, steps, unit) = product.b, division
    units_per_tile = steps // unit
    units_per_block, remainder = divmod(tiles * units_per_tile, blocks)
    if b.is_shuffled:
        row, step, tile = FRAGMENT_BYTES, FRAGMENT_ROWS * STEP, FRAGMENT_ROWS * b.k
    else:
        row, step, tile = b.stride, STEP, FRAGMENT_ROWS * b.stride
    return {
        **product.arguments(tiles, partial_bytes),
        "b_tile": tile,
        "b_row": row,
        "b_step": step,
        "steps_per_tile": steps,
        "steps_per_unit": unit,
        "units_per_block": units_per_block,
        "remainder": remainder,
        "units_per_tile": units_per_tile,
        "remainder_units": remainder * (units_per_block + 1),
        "units_per_tile_divisor": divisor(units_per_tile),
        "units_per_block_divisor": divisor(max(units_per_block, 1)),
        "longer_block_divisor": divisor(units_per_block + 1),
    }


def launch(
    module: str, config: SkinnyConfig, product: Product, arch: Arch, unit: int = 1, kind: str = "", **further
) -> list[Launch]:
    """Return the launch of csrc/ops/<module>.hip's skinny kernel of a kind, whose problem may have further fields."""
    a, b = product.a, product.b
    if a.rows == 0:
        return []
    tokens = _tokens(config, a)
    partial_bytes = 0 if config.split_k == 1 else _partial_bytes(config, max(tokens, 16))
    args = arguments(product, _division(config, b, unit), config.blocks, partial_bytes)
    threads = _waves(config, arch) * arch.wave_lanes
    shape = "skinny" if config.rows == 64 else "narrow"
    symbol = "_".join(filter(None, (module, kind, shape, str(tokens))))
    lds = _stage_panels(config, tokens, arch) * PANEL * (config.rows + tokens)
    return [Launch(module, symbol, (config.blocks, 1, 1), (threads, 1, 1), fields("problem", args | further), lds)]
