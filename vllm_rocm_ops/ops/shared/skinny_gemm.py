"""Plan the skinny GEMM kernels of csrc/gemm/skinny.h for few tokens: configurations, cost and launch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from vllm_rocm_ops.core.arch import Arch, BlockScaledCosts
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.ops.shared.gemm import PANEL, Operand, Product, divisor
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP

# Token limits of kernels, by the weight rows of a tile. With 128 rows only for archs that have costs for them.
TOKENS = {64: (16, 32, 64, 96, 128), 128: (96, 128), 16: (8, 16)}
# Groups of tokens, each with its own blocks, of kernels for at least kGroupTokens of csrc/gemm/skinny/epilogue.h.
GROUPS, GROUP_TOKENS = (1, 2, 3, 4), 64
WAVE_SPLIT_K_UNIT = 8  # steps per unit with 16 rows: one K slice per wave
# Stages of csrc/gemm/skinny/nvidia/streamed_tile.h for both consumer groups, by rows and tokens: with one and more blocks per compute
# unit. Above 64 tokens a block is always alone.
STAGE_PANELS = {(64, 16): (20, 8), (64, 32): (16, 8), (64, 64): (12, 6), (64, 96): (10, 10), (64, 128): (8, 8)}
STAGE_PANELS |= {(128, 96): (7, 7), (128, 128): (6, 6)}
SHORTEST = 4  # steps; a block with fewer ends before it streams
# The cost model, where archs agree; `arch.costs` has the rest. Microseconds, fitted to all configurations of the decode shapes on
# H200: `vllm-rocm-ops sweep linear` reports the regret. Latency of a load; epilogue per tile of a block.
LATENCY_US, TILE_EPILOGUE_US = 1.5, 0.5
SPLIT_TILE_US = 1.5  # a block whose share ends within a tile waits for its copies, and other blocks wait for it
SUMMED_AT_ONCE = 8  # partial sums that a block loads at once: at most kBlocksAtOnce in csrc/gemm/skinny/epilogue.h
MANY_AT_ONCE = {64: 2, 128: 1}  # the same above 64 tokens, by rows
# For kernels through LDS only: penalty of two blocks per compute unit, by tokens; share lost while some compute units are
# idle.
CO_RESIDENT_PENALTY_US, IDLE_COST = {16: 1.0, 32: 0.6, 64: 0.0, 96: 0.0, 128: 0.0}, 0.15
MAX_RESIDENT = 4
MAX_TOKENS = 256


@dataclass(frozen=True, repr=False)
class SkinnyConfig:
    """Tiles of `rows` weight rows, with K split into `split_k` equal slices that `blocks` blocks share evenly.

    With `split_k` 0 (stream-K), the steps of all tiles are divided evenly over blocks, across tile boundaries. With 64 rows, each
    wave of a block has 16; with 16 rows, the waves split K. Each of `groups` of tokens has `blocks` blocks.
    """

    rows: int
    split_k: int
    blocks: int
    groups: int = 1

    def __repr__(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"SkinnyConfig(rows={self.rows}, split_k={self.split_k}, blocks={self.blocks}{groups})"


def _division(config: SkinnyConfig, b: Operand, unit: int) -> tuple[int, int, int]:
    """Return the tiles, the steps per tile, and the steps per unit, which divide those; a block has whole units."""
    unit = unit if config.rows >= 64 else WAVE_SPLIT_K_UNIT
    split_k = config.split_k or 1
    of_slice = -(-b.k // (STEP * unit * split_k)) * unit
    return -(-b.rows // config.rows), of_slice * split_k, of_slice if config.split_k else unit


def _tokens_of(rows: int, groups: int, a: Operand) -> int:
    """Return the token limit of the smallest kernel for a group, 0 if none fits."""
    return next((tokens for tokens in TOKENS[rows] if tokens * groups >= a.rows), 0)


def _divides(rows: int, groups: int, a: Operand, arch: Arch) -> bool:
    """True if `arch` has a kernel for tiles of `rows`, and if no group of tokens is empty."""
    tokens = _tokens_of(rows, groups, a)
    if not tokens or (rows, tokens) not in arch.costs.skinny.limits or a.rows > MAX_TOKENS:
        return False
    if groups > 1:
        return tokens >= GROUP_TOKENS and tokens * (groups - 1) < a.rows
    return rows <= GROUP_TOKENS or a.rows > GROUP_TOKENS


def configs(a: Operand, b: Operand, arch: Arch, unit: int = 1) -> list[SkinnyConfig]:
    """Return whole tiles, stream-K and split-K for one to four blocks per compute unit; split-K also for fewer.

    There are none above `MAX_TOKENS` tokens.
    """
    fitting = []
    for rows, groups in itertools.product(TOKENS, GROUPS):
        if not _divides(rows, groups, a, arch):
            continue
        tiles, steps, unit_steps = _division(SkinnyConfig(rows, 0, 1), b, unit)
        most = max(steps // max(SHORTEST, unit_steps), 1)  # slices per tile
        resident = [arch.compute_units * i for i in range(1, MAX_RESIDENT + 1)]
        if rows > GROUP_TOKENS:  # of all groups together, as a block is alone on a compute unit
            resident.insert(0, arch.compute_units // groups)
        of_rows = [SkinnyConfig(rows, 1, min(count, tiles), groups) for count in resident]
        of_rows += [SkinnyConfig(rows, 0, min(count, tiles * most), groups) for count in resident]
        split = [min(count // tiles, most) for count in (arch.compute_units // 4, arch.compute_units // 2, *resident)]
        of_rows += [SkinnyConfig(rows, split_k, tiles * split_k, groups) for split_k in split if split_k > 1]
        fitting += dict.fromkeys(of_rows)
    return fitting


def block_scaled_costs(a: Operand, arch: Arch, unit: int) -> BlockScaledCosts | None:
    """Return an arch's costs of many tokens with a scale per `unit` steps, None if they do not differ from other scales'."""
    return arch.costs.block_scaled if unit > 1 and GROUP_TOKENS < a.rows <= MAX_TOKENS else None


def cost(config: SkinnyConfig, a: Operand, b: Operand, arch: Arch, unit: int = 1) -> dict[str, float]:
    """Return the modeled microseconds of a configuration.

    Rounds of resident slices take the longer of their HBM bytes and the latency bound of a block's loads in flight, or the time to
    issue instructions if that is longer. Blocks that share tiles add synchronization and partial sums.
    """
    tiles, steps, unit_steps = _division(config, b, unit)
    of_blocks = block_scaled_costs(a, arch, unit)
    costs, tokens = of_blocks.skinny if of_blocks else arch.costs.skinny, block_tokens(config, a)
    resident, keeps_up = costs.limits[config.rows, tokens]
    slices = tiles * config.split_k or config.blocks
    longest = -(-tiles * steps // (unit_steps * slices)) * unit_steps * STEP * config.rows  # bytes
    ends = -(-slices // config.blocks) * tiles // slices
    hbm = arch.bandwidth_gb_s * 1e3  # bytes a microsecond
    slices, blocks = slices * config.groups, config.blocks * config.groups
    of_slice = b.rows * b.k / slices / hbm
    at_once = min(blocks, resident * arch.compute_units)
    rounds, rest = divmod(slices, at_once)
    least = max(longest / _in_flight(config, tokens, arch), 1.0) * LATENCY_US
    streaming = rounds * max(at_once * of_slice, least)
    if rest:  # after a round or two blocks are out of step, so the last round is not a separate one
        streaming += rest * of_slice + max(least - rest * of_slice, 0.0) / max(rounds, 1) ** 2
    # Per busiest compute unit.
    max_blocks, max_slices = (-(-count // arch.compute_units) for count in (blocks, slices))
    issuing = max_blocks * costs.block_us + max_slices * longest / keeps_up
    is_many = a.rows > GROUP_TOKENS
    if is_many:
        reads = longest * (1 + min(tokens, a.rows) / config.rows)  # with the tokens
        issuing = max(issuing, max_slices * reads / costs.cache_bytes_per_us[config.rows])
        if config.split_k == 0:
            issuing = max(issuing, slices * reads / costs.apart_bytes_per_us)
    terms = {
        "streaming": max(streaming, issuing),
        "ends": ends * TILE_EPILOGUE_US,
    }
    if _stage_panels(config, tokens, arch):
        terms["ends"] += (max_blocks - 1) * CO_RESIDENT_PENALTY_US[tokens]
        if config.split_k and rest and rounds:
            terms["idle"] = IDLE_COST * streaming * (at_once - rest) / slices
    if config.split_k != 1:
        terms["sharing"] = costs.sharing_us + (SPLIT_TILE_US if config.split_k == 0 else 0.0)
        of_tile = config.rows * a.rows / config.groups * 4
        share = config.blocks / tiles  # per tile and group
        summing = (
            share * of_tile / arch.costs.sums_bytes_per_us + max(share / SUMMED_AT_ONCE - 1, 0) * costs.sum_round_us
        )
        if is_many:
            summing = share / MANY_AT_ONCE[config.rows] * costs.many_round_us
        terms["partials"] = 2 * _partial_bytes(config, a.rows) / hbm + summing
    return terms


def _in_flight(config: SkinnyConfig, tokens: int, arch: Arch) -> float:
    """Return the bytes that a block has in flight: all stages except those that its consumer groups wait for."""
    panels = _stage_panels(config, tokens, arch)
    return max(panels - 4, 4) * PANEL * config.rows if panels else arch.costs.skinny.in_flight[config.rows]


def _stage_panels(config: SkinnyConfig, tokens: int, arch: Arch) -> int:
    """Return the LDS panels of a block, 0 if it streams through registers."""
    if config.rows == 16 or arch.vendor == "amd":
        return 0
    return STAGE_PANELS[config.rows, tokens][config.blocks > arch.compute_units]


def block_tokens(config: SkinnyConfig, a: Operand) -> int:
    """Return the token limit of a configuration's kernel, each of whose blocks has a group of tokens."""
    return _tokens_of(config.rows, config.groups, a)


def _partial_bytes(config: SkinnyConfig, tokens: int) -> int:
    """Return the bytes of a group's partial sums: at most two tiles per block, with `tokens` tokens."""
    return config.blocks * 2 * config.rows * tokens * 4


def _waves(config: SkinnyConfig, tokens: int, arch: Arch) -> int:
    """Return the waves per block, four of which multiply.

    With more rows, AMD has a fifth wave that produces tokens, and a sixth above 64 tokens; NVIDIA has two consumer groups.
    """
    return 4 if config.rows == 16 else 8 if arch.vendor == "nvidia" else 5 if tokens <= 64 else 6


def arguments(
    product: Product, division: tuple[int, int, int], blocks: int, partial_bytes: int, groups: int = 1
) -> dict:
    """Return the fields of SkinnyProblem in csrc/gemm/skinny/problem.h; `division` is as of `_division`."""
    b, (tiles, steps, unit) = product.b, division
    units_per_tile = steps // unit
    units_per_block, remainder = divmod(tiles * units_per_tile, blocks)
    if b.is_shuffled:
        row, step, tile = FRAGMENT_BYTES, FRAGMENT_ROWS * STEP, FRAGMENT_ROWS * b.k
    else:
        row, step, tile = b.stride, STEP, FRAGMENT_ROWS * b.stride
    return {
        **product.arguments(groups * tiles, groups * partial_bytes),
        "b_tile": tile,
        "b_row": row,
        "b_step": step,
        "steps_per_tile": steps,
        "steps_per_unit": unit,
        "units_per_block": units_per_block,
        "remainder": remainder,
        "units_per_tile": units_per_tile,
        "remainder_units": remainder * (units_per_block + 1),
        "group_partials": partial_bytes // 4,
        "group_tiles": tiles,
        "units_per_tile_divisor": divisor(units_per_tile),
        "units_per_block_divisor": divisor(max(units_per_block, 1)),
        "longer_block_divisor": divisor(units_per_block + 1),
    }


def launch(
    module: str, config: SkinnyConfig, product: Product, arch: Arch, unit: int = 1, kind: str = "", **further
) -> list[Launch]:
    """Return the launch of a skinny kernel in csrc/ops/<module>.hip; `further` are more fields of its problem."""
    a, b = product.a, product.b
    if a.rows == 0:
        return []
    tokens = block_tokens(config, a)
    partial_bytes = 0 if config.split_k == 1 else _partial_bytes(config, max(tokens, 16))
    args = arguments(product, _division(config, b, unit), config.blocks, partial_bytes, config.groups)
    threads = _waves(config, tokens, arch) * arch.wave_lanes
    shape = {64: "skinny", 128: "wide", 16: "wave_splitk"}[config.rows]
    symbol = "_".join(filter(None, (module, kind, shape, str(tokens))))
    lds = _stage_panels(config, tokens, arch) * PANEL * (config.rows + tokens)
    return [
        Launch(
            module, symbol, (config.blocks, config.groups, 1), (threads, 1, 1), fields("problem", args | further), lds
        )
    ]
