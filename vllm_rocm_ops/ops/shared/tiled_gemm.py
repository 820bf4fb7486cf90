"""Plan the tiled GEMM kernels for many tokens, of scaled_mm and block_scaled_mm: csrc/ops/scaled_mm_tiled.hip."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_rocm_ops.core.arch import Arch, BlockScaledCosts
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.ops.shared import gemm, skinny_gemm
from vllm_rocm_ops.ops.shared.gemm import PANEL, Operand, Product, divisor
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP

MODULE = "scaled_mm_tiled"
TILES = ((64, 128), (128, 128), (256, 256))  # tokens and weight rows of an output tile
THREADS = {128: 256, 256: 512}  # per block, by rows of its tile
RESIDENT = {128: 2, 256: 1}  # blocks per compute unit, by rows of a tile
SPLIT_K = (1, 2, 3, 4, 6, 8, 12, 16)
GROUP_M = 8  # kGroupM of csrc/gemm/tiled/rasterize.h: tiles along M whose blocks run next to each other

# The cost model. Never measured on an AMD GPU: rates are shares of peak.
FLOPS_PER_BYTE = 500  # peak matrix FLOPs per HBM byte, about equal on all archs
RATE = {64: 0.35, 128: 0.45, 256: 0.55}  # share of peak, by tokens of a tile: larger tiles read fewer operands
SINGLE_BLOCK_RATE = 0.6  # share of the rate with one resident block of two
LATENCY_US = 2.0  # from a block's first load to its first multiplication, and from its last to its results
SHARING_US = 2.0  # for the last block of a tile to arrive and see the others' sums


@dataclass(frozen=True)
class TiledConfig:
    """Tiles of `tokens` x `rows` results; K is split into `split_k` slices, one block each."""

    tokens: int
    rows: int
    split_k: int


def is_for(a: Operand) -> bool:
    """True if tiled kernels serve this many tokens."""
    return a.rows > skinny_gemm.GROUP_TOKENS


def can_implement(a: Operand, b: Operand) -> Iterator[tuple[str, bool]]:
    """Yield the rules of skinny kernels, and for many tokens those that tiled ones add."""
    yield from gemm.can_implement(a, b)
    if not is_for(a):
        return
    for name, operand, rows in (("a", a, max(t for t, _ in TILES)), ("b", b, max(r for _, r in TILES))):
        reach = rows * (operand.stride or operand.k) + operand.k
        yield f"{rows} rows of {name} span less than 2 GB", reach < 2**31
    yield "M and N are below 2^30, M * N is below 2^42", max(a.rows, b.rows) < 2**30 and a.rows * b.rows < 2**42


def _tiles(config: TiledConfig, a: Operand, b: Operand) -> tuple[int, int]:
    return -(-a.rows // config.tokens), -(-b.rows // config.rows)


def _panels(a: Operand) -> int:
    return -(-a.k // PANEL)


def _fits(tokens: int, rows: int, arch: Arch) -> bool:
    """True if LDS holds two panels of a tile, and eight waves its sums at 128 per lane."""
    return 2 * (tokens + rows) * PANEL <= arch.lds_bytes and tokens * rows <= 8 * arch.wave_lanes * 128


def lds_bytes(tokens: int, rows: int, arch: Arch) -> int:
    """Return the LDS bytes of a block: kBuffers of csrc/device/*/lds_async.h, which fit two blocks of 128 x 128."""
    return (tokens + rows) * PANEL * (arch.lds_bytes // (4 * 128 * PANEL))


def configs(a: Operand, b: Operand, arch: Arch) -> list[TiledConfig]:
    """Return every tile size, with split-K while all blocks are resident."""
    fitting = []
    for tokens, rows in TILES:
        if not _fits(tokens, rows, arch):
            continue
        for split_k in SPLIT_K:
            config = TiledConfig(tokens, rows, split_k)
            tiles_m, tiles_n = _tiles(config, a, b)
            at_once = RESIDENT[rows] * arch.compute_units
            if split_k == 1 or (split_k <= _panels(a) and tiles_m * tiles_n * split_k <= at_once):
                fitting.append(config)
    return fitting


def cost(
    config: TiledConfig, a: Operand, b: Operand, arch: Arch, of_blocks: BlockScaledCosts | None = None
) -> dict[str, float]:
    """Return the modeled microseconds of a configuration, with the costs `of_blocks` if they are given.

    The longer of the busiest compute unit's multiplications and the HBM bytes, plus latency that nothing hides, plus the combine of
    shared tiles.
    """
    if of_blocks:
        rate, resident = of_blocks.tile_rate[config.tokens], of_blocks.tile_resident[config.tokens]
        latency_us, sharing_us = of_blocks.tile_latency_us, of_blocks.tile_sharing_us
    else:
        rate, resident = RATE[config.tokens], RESIDENT[config.rows]
        latency_us, sharing_us = LATENCY_US, SHARING_US
    tiles_m, tiles_n = _tiles(config, a, b)
    results = config.tokens * config.rows
    blocks = -(-tiles_m * tiles_n * config.split_k // arch.compute_units)  # per compute unit
    single = blocks % resident
    bandwidth = arch.bandwidth_gb_s * 1e3  # bytes / us
    rate = rate * FLOPS_PER_BYTE * bandwidth / arch.compute_units  # flops / us
    of_block = 2 * results * PANEL * -(-_panels(a) // config.split_k) / rate
    bytes_moved = (a.rows + b.rows) * a.k + 2 * a.rows * b.rows
    of_sums = results * 4 / arch.costs.tiled_sums_bytes_per_us
    return {
        "multiplying": max((blocks - single + single / SINGLE_BLOCK_RATE) * of_block, bytes_moved / bandwidth),
        "latency": -(-blocks // resident) * latency_us,
        "sharing": sharing_us + config.split_k * of_sums if config.split_k > 1 else 0.0,
    }


def all_configs(a: Operand, b: Operand, arch: Arch, unit: int = 1) -> list[skinny_gemm.SkinnyConfig | TiledConfig]:
    """Return the configurations of skinny and tiled kernels; `unit` as of skinny_gemm.py."""
    return skinny_gemm.configs(a, b, arch, unit) + (configs(a, b, arch) if is_for(a) else [])


def any_cost(
    config: skinny_gemm.SkinnyConfig | TiledConfig, a: Operand, b: Operand, arch: Arch, unit: int = 1
) -> dict[str, float]:
    """Return the modeled microseconds of a configuration of either kind."""
    if not isinstance(config, TiledConfig):
        return skinny_gemm.cost(config, a, b, arch, unit)
    of_blocks = skinny_gemm.block_scaled_costs(a, arch, unit)
    return cost(config, a, b, arch, of_blocks) if of_blocks else beside_skinny(cost(config, a, b, arch), a, arch)


def beside_skinny(terms: dict[str, float], a: Operand, arch: Arch) -> dict[str, float]:
    """Return the terms of a tiled kernel's cost, to compare with skinny kernels."""
    of = arch.costs.tiled_ratio if a.rows <= skinny_gemm.MAX_TOKENS else 1.0
    return {name: value * of for name, value in terms.items()}


def tiles(config: TiledConfig, a: Operand, b: Operand) -> int:
    """Return the output tiles."""
    tiles_m, tiles_n = _tiles(config, a, b)
    return tiles_m * tiles_n


def partial_bytes(config: TiledConfig, a: Operand, b: Operand) -> int:
    """Return the bytes of partial sums that blocks leave to the last block of a shared tile."""
    return tiles(config, a, b) * config.split_k * config.tokens * config.rows * 4 if config.split_k > 1 else 0


def division(config: TiledConfig, a: Operand, b: Operand) -> dict:
    """Return the fields of a kernel's problem that divide its work."""
    tiles_m, tiles_n = _tiles(config, a, b)
    return {
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "tiles": tiles_m * tiles_n,
        "split_k": config.split_k,
        "panels_per_slice": _panels(a) // config.split_k,
        "remainder": _panels(a) % config.split_k,
        "tiles_divisor": divisor(tiles_m * tiles_n),
        "group_divisor": divisor(GROUP_M * tiles_n),
        "last_group_divisor": divisor(tiles_m % GROUP_M or GROUP_M),
    }


def launch(module: str, kind: str, config: TiledConfig, a: Operand, b: Operand, arch: Arch, problem: dict) -> Launch:
    """Return the launch of a kernel in csrc/ops/<module>.hip, one block per slice of each tile."""
    symbol = f"{module}_{kind}_{config.tokens}x{config.rows}"
    grid, lds = tiles(config, a, b) * config.split_k, lds_bytes(config.tokens, config.rows, arch)
    return Launch(module, symbol, (grid, 1, 1), (THREADS[config.rows], 1, 1), fields("problem", problem), lds)


def launches(config: TiledConfig, product: Product, arch: Arch, kind: str) -> list[Launch]:
    """Return the launches of a GEMM; out is row-major. `kind` is "row", "block" or "block_e8m0"."""
    a, b = product.a, product.b
    if a.rows == 0:
        return []
    if b.is_shuffled:
        fragment = FRAGMENT_ROWS * FRAGMENT_BYTES
        tile, row, vec, step = FRAGMENT_ROWS * b.k, FRAGMENT_BYTES, fragment, FRAGMENT_ROWS * STEP
    else:
        tile, row, vec, step = FRAGMENT_ROWS * b.stride, b.stride, FRAGMENT_BYTES, STEP
    args = {
        **product.arguments(tiles(config, a, b), partial_bytes(config, a, b)),
        **division(config, a, b),
        "b_tile": tile,
        "b_row": row,
        "b_vec": vec,
        "b_step": step,
    }
    return [launch(MODULE, kind, config, a, b, arch, args)]
