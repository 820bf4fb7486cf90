"""Test the tiled kernels at the sizes of RadeonFlow's GEMM contest.

The last tile of each GEMM, which has the tails, runs in the blocks of the configuration that the cost model chooses.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from contests import gemm as contest
from marks import CHIPS, few_of

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.correctness import FLOOR, check, generator_of
from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared import gemm, tiled_gemm
from vllm_rocm_ops.ops.shared.gemm import BLOCK

DIES = 8

PROBLEMS = (*contest.CONTEST.tests, *contest.CONTEST.benchmarks)
SHAPES = [(sizes["m"], sizes["n"], sizes["k"]) for sizes in PROBLEMS]


def e4m3(rows: int, k: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Return values of all magnitudes up to 16, in either format, without NaN."""
    magnitude = torch.randint(-87, 88, (rows, k), generator=generator, dtype=torch.int8)
    return torch.where(magnitude < 0, -magnitude | -128, magnitude).view(dtype)


def blocks_of_tile(tile: int, tiles: int, slices: int) -> list[int]:
    """Return the blocks of a tile.

    The hardware deals blocks to the dies in turn; each die takes consecutive pieces of work, slice by slice.
    """
    blocks = tiles * slices
    block_of_piece = np.concatenate([np.arange(die, blocks, DIES) for die in range(DIES)])
    return [int(block_of_piece[s * tiles + tile]) for s in range(slices)]


@pytest.mark.parametrize("arch_name", CHIPS)
@pytest.mark.parametrize("m, n, k", few_of(SHAPES, lambda shape: frozenset(enumerate(shape))))
def test_last_tile_of_contest_shape(m, n, k, arch_name):
    emulator = Emulator(arch_name)
    arch, generator = emulator.arch, generator_of(f"{m} {n} {k}")
    a, b = (e4m3(rows, k, generator, arch.fp8_dtype) for rows in (m, n))
    scale_a = torch.rand(-(-k // BLOCK), m, generator=generator).t() + 0.5  # column-major, as in the contest
    scale_b = torch.rand(-(-n // BLOCK), -(-k // BLOCK), generator=generator) + 0.5
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
    operands = gemm.activations(a), gemm.weight(b)
    config = min(
        tiled_gemm.configs(*operands, arch),
        key=lambda config: sum(tiled_gemm.cost(config, *operands, arch).values()),
    )
    scales = (scale_a, *scale_a.stride()), (scale_b, scale_b.stride(0))
    (planned,) = tiled_gemm.launches(config, gemm.Product(out, *operands, *scales), arch, kind="block")
    tiles = planned.grid[0] // config.split_k

    def memory(arg):
        if isinstance(arg, Workspace):
            return torch.full((arg // 4,), float("nan"))
        return torch.zeros(arg, dtype=torch.int32) if isinstance(arg, Counters) else arg

    path = launch.code_object(planned.module, arch_name)
    emulator.run(path, planned.with_each(memory), blocks=blocks_of_tile(tiles - 1, tiles, config.split_k))

    rows, columns = (m - 1) // config.tokens * config.tokens, (n - 1) // config.rows * config.rows
    assert out[:rows].isnan().all() and out[rows:, :columns].isnan().all(), "only the last tile is written"

    def reference(exact: torch.dtype) -> torch.Tensor:
        tokens = a[rows:].to(exact) * scale_a[rows:].to(exact).repeat_interleave(BLOCK, 1)[:, :k]
        of_rows = scale_b.to(exact).repeat_interleave(BLOCK, 0)[columns:n].repeat_interleave(BLOCK, 1)[:, :k]
        return tokens @ (b[columns:].to(exact) * of_rows).t()

    tile = out[rows:, columns:].contiguous()
    check("tile", tile, reference(torch.float32).bfloat16(), reference(torch.float64), count_ulps=False, floor=FLOOR)
    assert emulator.last.lds_conflict_cycles == 0
