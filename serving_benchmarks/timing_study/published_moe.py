"""Fused MoE of ROCm/aiter with published times: arguments and grids of fmoe and fmoe_2stages.

Tokens go to experts at random, as in aiter's benchmark; the launch has three tiles of rows, each filled to the average.
"""

from __future__ import annotations

import torch

from vllm_rocm_ops.emulator.objects import KernelObject

from .external_kernel import ObjectLaunch
from .published import Call, Row, laid_out, numbers, zeros

ONE = """O X GU XC D XQ GUQ DQ SMQ STP SW SEP dim inter tokens experts Xs GUs Ds Os eGUs eDs eGUQs eDQs eSMQs topk total_tgs ps_deno"""
FIRST = """O X GU XC XQ GUQ SMQ STP SEP dim inter tokens experts Xs GUs Os eGUs eGUQs eSMQs topk splitk activation SW"""
TILES = 3  # tiles of rows in the launch
PERSISTENT, BY_DIE, SORTING = ("_ps_", "_psx_"), "_psx_", ("_flat", "_emsort")
WEIGHTS = {"fmoe": (32, 64), "fmoe_2stages": (32,)}  # offsets of their pointers


def call(of: Row, kernel: KernelObject) -> Call:
    """Return the launches of a row: one or, for persistent kernels, one with one round of tiles and one with two.

    Blocks of a persistent kernel that no tile is left for are not launched: they end at once, and a sample of the grid
    could be of them alone. Raises ValueError for kernels that sort tokens themselves, or whose few tiles go to the
    blocks of few dies.
    """
    name = of.code_object.rpartition("/")[2]
    if any(each in name for each in SORTING):
        raise ValueError(f"{name} sorts tokens itself, which is not modeled")
    (rows, columns), topk = of.tile, int(of.extra["topk"])
    counts, across = _counts(of.m, of.batch_or_experts, topk), -(-of.n // columns)
    tiles, hit = int((-(-counts // rows)).sum()), int((counts > 0).sum())
    filled = round(of.m * topk / tiles)
    units = of.units
    if not any(each in name for each in PERSISTENT) or units < across:
        made = _launch(of, kernel, (across, min(tiles, TILES), 1), min(tiles, TILES), filled)
        weights = tuple(made.args[at] for at in WEIGHTS[of.family])
        return Call(made, (across, tiles, 1), weights, True, repeats=tiles / hit)
    turn = units // across
    if tiles < turn and BY_DIE in name:
        raise ValueError(f"{name} gives {tiles} tiles, fewer than its blocks, to few dies, which is not modeled")
    grid = (units if tiles >= turn else tiles * across, 1, 1)
    one, two = (_launch(of, kernel, grid, min(tiles, turn * turns), filled, turn * across) for turns in (1, 2))
    made = Call(one, grid, tuple(one.args[at] for at in WEIGHTS[of.family]), True)
    return made if tiles <= turn else made._replace(second=two, beyond=(tiles - turn) / (min(tiles, 2 * turn) - turn))


def _launch(of: Row, kernel: KernelObject, grid: tuple, tiles: int, filled: int, workers: int = 0) -> ObjectLaunch:
    """Return a launch with `tiles` tiles of rows, each of a different expert and with `filled` tokens.

    XC has the sorted places and the tokens, which give the end of X and the stride of XQ's transposed block scales.
    """
    name = of.code_object.rpartition("/")[2]
    (rows, columns), tokens, inter, dim, topk = of.tile, of.m, of.n, int(of.k), int(of.extra["topk"])
    is_one, is_block, of_x = of.family == "fmoe", "blockscale" in name, 2 if "_a16_" in name else 1
    scale = 4 * (2 * inter // 128) * (dim // 128) if is_block else 4 * 2 * inter
    room = tokens + 1  # places without a token read one beyond
    values = {"O": zeros(room * (2 * dim if is_one else 4 * topk * inter)), "X": zeros(room * dim * of_x)}
    values |= {"GU": zeros(tiles * 2 * inter * dim), "XC": numbers([tiles * rows, tokens])}
    values |= {"XQ": zeros(8 * (room + rows) * (dim // 128 if is_block else 1)), "GUQ": zeros(tiles * scale)}
    values |= {"STP": numbers(_sorted(tokens, topk, rows, tiles, filled)), "SW": zeros(4 * tiles * rows)}
    values |= {"SEP": numbers(range(tiles)), "dim": dim, "inter": inter, "tokens": tokens, "topk": topk}
    values |= {"experts": of.batch_or_experts, "Xs": dim * of_x, "GUs": dim, "eGUs": 2 * inter * dim, "eGUQs": scale}
    values |= {"Os": 2 * dim if is_one else 2 * topk * inter, "eSMQs": 4 * inter}
    if is_one:
        down = 4 * (inter // 128) * (dim // 128) if is_block else 4 * dim
        values |= {"D": zeros(tiles * inter * dim), "DQ": zeros(tiles * down), "Ds": inter, "eDs": inter * dim}
        values |= {"eDQs": down, "ps_deno": -(-inter // columns), "total_tgs": workers}
    return ObjectLaunch(kernel.name, grid, (256, 1, 1), laid_out(kernel, ONE if is_one else FIRST, values))


def _counts(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """Return the number of tokens of each expert."""
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(topk).indices
    return torch.bincount(chosen.flatten(), minlength=experts)


def _sorted(tokens: int, topk: int, rows: int, tiles: int, filled: int) -> list[int]:
    """Return the tokens of each tile, spread over all, with the index of the expert among a token's in the high byte.

    Places without a token follow.
    """
    step = max(1, tokens // (tiles * rows))
    taken = min(max(1, filled), rows)
    found = []
    for tile in range(tiles):
        places = range(tile * taken, (tile + 1) * taken)
        found += [n * step % tokens | n % topk << 24 for n in places] + [tokens | topk << 24] * (rows - taken)
    return found
