"""Run the MXFP8 GEMM in Triton with `tl.dot_scaled`, a baseline of mxfp8_scaled_mm. This file imports Triton.

A program computes an output tile over all of K. Tiles are 64 x 128 x 128 with 8 warps: the fallback of vLLM and SGLang, according to
AITER's pull request 3783.
"""

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K, WARPS = 64, 128, 128, 8
GROUP = 32  # elements of K per scale


@triton.jit
def _multiply(
    a,
    b,
    scale_a,
    scale_b,
    out,
    M,
    N,
    K,
    a_row,
    b_row,
    scale_a_row,
    scale_b_row,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    depth, groups = tl.arange(0, TILE_K), tl.arange(0, TILE_K // GROUP)
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    has_row, has_column = (rows < M)[:, None], (columns < N)[:, None]
    for first in range(0, K, TILE_K):
        x = tl.load(a + rows[:, None] * a_row + first + depth[None, :], mask=has_row, other=0.0)
        w = tl.load(b + columns[:, None] * b_row + first + depth[None, :], mask=has_column, other=0.0)
        places = first // GROUP + groups[None, :]
        x_scale = tl.load(scale_a + rows[:, None] * scale_a_row + places, mask=has_row, other=0)
        w_scale = tl.load(scale_b + columns[:, None] * scale_b_row + places, mask=has_column, other=0)
        sums += tl.dot_scaled(x, x_scale, "e4m3", w.T, w_scale, "e4m3")
    to = out + rows[:, None] * N + columns[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=has_row & (columns < N)[None, :])


def dot_scaled(a, b, scale_a, scale_b, out_dtype, bias=None) -> torch.Tensor:
    """Compute mxfp8_scaled_mm. Raises ValueError for arguments that the kernel does not support."""
    (m, k), n = a.shape, len(b)
    if k % TILE_K or bias is not None or len(scale_b) != n:
        raise ValueError(f"K={k} must be a multiple of {TILE_K}, each row of b must have scales, and bias must be None")
    out = a.new_empty(m, n, dtype=out_dtype)
    scales = [scale.view(torch.uint8) for scale in (scale_a, scale_b)]
    strides = [rows.stride(0) for rows in (a, b, *scales)]
    grid = -(-m // TILE_M), -(-n // TILE_N)
    tiles = {"TILE_M": TILE_M, "TILE_N": TILE_N, "TILE_K": TILE_K, "GROUP": GROUP}
    _multiply[grid](a, b, *scales, out, m, n, k, *strides, **tiles, num_warps=WARPS)
    return out
