"""GEMMs of ROCm/aiter with published times: arguments and grids of fp8gemm_blockscale, i8gemm and bf16gemm."""

from __future__ import annotations

from vllm_rocm_ops.emulator.objects import KernelObject

from .external_kernel import ObjectLaunch, explicit_bytes
from .published import SLOT, Call, Row, laid_out, zeros

WARM_BYTES = 2_500_000  # of inputs, of which 101 copies fit Infinity Cache
# Commits with other launch code: fp8gemm_blockscale zeroed a bias, i8gemm did not zero its output.
CLEARS_BIAS = ("53bfe6a1f747", "3f48668c9d8e")
CLEARS_NOTHING = ("ab99221a28c2", "661dff9f7efe", "b7c5fc6df0f8")


def eight_bits(of: Row, kernel: KernelObject) -> Call:
    """Return the call of fp8gemm_blockscale or i8gemm: a tile per block, K split along the first axis of the grid."""
    (rows, columns), m, n, k = of.tile, of.m, of.n, int(of.k)
    blocks = k // 128  # blocks of K, divided equally among the splits
    split, ran = -(-blocks // -(-blocks // int(of.extra.get("splitK", 1)))), _fewer(m, rows)
    is_scaled_by_block = of.family == "fp8gemm_blockscale"
    names = "C A B SA SB BIAS M N K PA PB PC KS" + " SM SN SK" * is_scaled_by_block
    scales = (4 * ran * (k // 128), 4 * (n // 128) * (k // 128)) if is_scaled_by_block else (4 * ran, 4 * n)
    inputs = {"A": zeros(ran * k), "B": zeros(n * k), "SA": zeros(scales[0]), "SB": zeros(scales[1])}
    values = {"C": zeros(2 * ran * n), **inputs, "BIAS": zeros(4 * n), "M": ran, "N": n, "K": k, "PA": k, "PB": k}
    values |= {"PC": 2 * n, "KS": split}
    if is_scaled_by_block:
        values |= {"SM": ran, "SN": n // 128, "SK": k // 128}
    grid = n // columns * split, -(-m // rows), 1
    cleared = (2 * m * n,) if split > 1 and of.commit not in CLEARS_NOTHING else ()
    cleared += (4 * n,) if is_scaled_by_block and of.commit in CLEARS_BIAS else ()
    return _call(kernel, names, values, inputs, grid, -(-ran // rows), (m + n) * k, cleared)


def bf16(of: Row, kernel: KernelObject) -> Call:
    """Return the call of bf16gemm: a tile per block, K split along the third axis of the grid.

    Blocks along this axis wait for the one that zeroes the output.
    """
    (rows, columns), m, n, k = of.tile, of.m, of.n, int(of.k)
    split, ran = int(of.extra.get("splitK", 1)), _fewer(m, rows)
    names = "D C A B alpha beta SD0 SD1 SC0 SC1 SA0 SA1 SB0 SB1 M N K splitk is_out_b16 Bias add_bias semaphore"
    inputs, out = {"A": zeros(2 * ran * k), "B": zeros(2 * n * k)}, 4 if of.extra.get("out") == "float32" else 2
    values = {"D": zeros(out * ran * n), **inputs, "alpha": 1.0, "beta": 0.0, "SD0": out * n, "SC0": out * n}
    values |= {"SA0": 2 * k, "SB0": 2 * k, "M": ran, "N": n, "K": k, "splitk": split, "is_out_b16": int(out == 2)}
    if explicit_bytes(kernel) > SLOT * names.split().index("semaphore"):
        values["semaphore"] = zeros(4 * 1024)
    grid = -(-n // columns), -(-m // rows), split
    made = _call(kernel, names, values, inputs, grid, -(-ran // rows), 2 * (m + n) * k)
    return made._replace(whole_axis=2)


def _fewer(m: int, rows: int) -> int:
    """Return the rows to run: three tiles at most, as the blocks of others do the same."""
    return min(m, 3 * rows)


def _call(
    kernel: KernelObject,
    names: str,
    values: dict,
    inputs: dict,
    grid: tuple,
    tiles: int,
    bytes: int,
    cleared: tuple = (),
) -> Call:
    """Return a GEMM with `tiles` along the second axis of the launch's grid, and inputs of `bytes`."""
    launch = ObjectLaunch(kernel.name, (grid[0], tiles, grid[2]), (256, 1, 1), laid_out(kernel, names, values))
    return Call(launch, grid, tuple(inputs.values()), bytes >= WARM_BYTES, cleared)
