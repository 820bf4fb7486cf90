"""Fused MoE of ROCm/aiter whose times were published: what fmoe and fmoe_2stages take, and how many blocks are launched.

Tokens go to experts at random, as there; of all tiles of rows three are in the launch, each with as many rows as a tile has on average.
"""

from __future__ import annotations

import struct

import torch

from vllm_rocm_ops.emulator.objects import KernelObject

from .foreign import ObjectLaunch
from .published import Call, Row, laid_out, zeros
from .trace import aligned

ONE = """O X GU XC D XQ GUQ DQ SMQ STP SW SEP dim inter tokens experts Xs GUs Ds Os eGUs eDs eGUQs eDQs eSMQs topk total_tgs ps_deno"""
FIRST = """O X GU XC XQ GUQ SMQ STP SEP dim inter tokens experts Xs GUs Os eGUs eGUQs eSMQs topk splitk activation SW"""
TILES = 3  # of rows, that are in the launch
OTHER = ("_ps_", "_psx_", "_flat", "_emsort")


def call(of: Row, kernel: KernelObject) -> Call:
    """The launch of a row. Raises ValueError for kernels whose blocks take one tile after the other, or sort themselves."""
    name = of.code_object.rpartition("/")[2]
    if any(each in name for each in OTHER):
        raise ValueError(f"{name} has blocks that find their work themselves, which is not modelled")
    (rows, columns), tokens, inter, dim = of.tile, of.m, of.n, int(of.k)
    experts, topk = of.batch_or_experts, int(of.extra["topk"])
    is_one, is_block = of.family == "fmoe", "blockscale" in name
    of_x = 2 if "_a16_" in name else 1
    counts = _counts(tokens, experts, topk)
    tiles, hit = int((-(-counts // rows)).sum()), int((counts > 0).sum())
    scale = 4 * (2 * inter // 128) * (dim // 128) if is_block else 4 * 2 * inter
    scale_down = 4 * (inter // 128) * (dim // 128) if is_block else 4 * dim
    ran = min(tiles, TILES)
    weights = {"GU": zeros(ran * 2 * inter * dim)} | ({"D": zeros(ran * inter * dim)} if is_one else {})
    values = {
        "O": zeros(tokens * (2 * dim if is_one else 4 * topk * inter)),
        "X": zeros(tokens * dim * of_x),
        **weights,
    }
    values |= {"XC": _numbers([ran * rows] * 2), "XQ": zeros(4 * tokens * (dim // 128 if is_block else 1))}
    values |= {
        "GUQ": zeros(ran * scale),
        "STP": _numbers(_sorted(tokens, topk, rows, ran, round(tokens * topk / tiles))),
    }
    values |= {"SW": zeros(4 * ran * rows), "SEP": _numbers(range(ran)), "dim": dim, "inter": inter, "tokens": tokens}
    values |= {"experts": experts, "Xs": dim * of_x, "GUs": dim, "eGUs": 2 * inter * dim, "eGUQs": scale, "topk": topk}
    values |= {"Os": 2 * dim if is_one else 2 * topk * inter, "eSMQs": 4 * inter}
    if is_one:
        values |= {"DQ": zeros(ran * scale_down), "Ds": inter, "eDs": inter * dim, "eDQs": scale_down}
        values |= {"ps_deno": -(-inter // columns)}
    grid = -(-inter // columns), tiles, 1
    launch = ObjectLaunch(
        kernel.name, (grid[0], ran, 1), (256, 1, 1), laid_out(kernel, ONE if is_one else FIRST, values)
    )
    return Call(launch, grid, tuple(weights.values()), True, repeats=tiles / hit)


def _counts(tokens: int, experts: int, topk: int) -> torch.Tensor:
    """How many tokens each expert gets."""
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(topk).indices
    return torch.bincount(chosen.flatten(), minlength=experts)


def _sorted(tokens: int, topk: int, rows: int, tiles: int, filled: int) -> list[int]:
    """The tokens of each tile, spread over all, with their places among a token's experts in the high byte; then none."""
    step = max(1, tokens // (tiles * rows))
    taken = min(max(1, filled), rows)
    found = []
    for tile in range(tiles):
        places = range(tile * taken, (tile + 1) * taken)
        found += [n * step % tokens | n % topk << 24 for n in places] + [tokens | topk << 24] * (rows - taken)
    return found


def _numbers(values) -> torch.Tensor:
    values = list(values)
    return aligned(torch.frombuffer(bytearray(struct.pack(f"<{len(values)}I", *values) + bytes(16)), dtype=torch.uint8))
