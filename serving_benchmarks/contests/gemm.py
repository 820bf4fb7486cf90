"""Define the contest fp8-mm: C = A @ B^T in e4m3 with scales per 1x128 of A and per 128x128 of B.

A [M, K], B [N, K] and their scales [M, K / 128] and [N / 128, K / 128] are column-major, so kernels that need contiguous K transpose
first, which is timed. C [M, N] is bf16 and row-major. Values are normal, rounded to bf16 and then e4m3; scales are normal, so half of them
are negative. The contest's e4m3 is e4m3fnuz; on other GPUs it is the GPU's.
"""

from __future__ import annotations

import torch

from contests.contest import Contest, Sizes, Stage, normal, problems
from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared.gemm import BLOCK

TESTS = """
    64 64 128 6635, 64 1536 7168 6635, 64 3072 1536 1236, 64 576 7168 542, 96 7168 256 1234, 96 7168 2048 4153,
    96 4608 7168 412, 128 7168 2304 624, 128 512 7168 2514, 512 4096 512 543, 512 1536 7168 12341
"""
BENCHMARKS = """
    1024 1536 7168 8135, 1024 3072 1536 6251, 1024 576 7168 12346, 1024 7168 256 5364, 1024 7168 2048 6132,
    1024 4608 7168 7531, 1024 7168 2304 12345, 1024 512 7168 6563, 1024 4096 512 17512, 6144 1536 7168 6543,
    6144 3072 1536 234, 6144 576 7168 9863, 6144 7168 256 764243, 6144 7168 2048 76547, 6144 4608 7168 65436,
    6144 7168 2304 452345, 6144 512 7168 12341, 6144 4096 512 45245
"""
REDUCED = """
    64 64 128 6635, 64 192 512 6635, 96 320 256 1234, 128 576 384 2514
"""
FLOORS = {0: 8.63, 5: 25.89, 9: 51.78, 14: 155.30, 3: 3.17, 12: 17.27}  # microseconds, from the task


def _make(sizes: Sizes, seed: int, device: str, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    drawn = normal(seed, device, torch.bfloat16)
    a, b = (drawn(k, columns).to(fp8_dtype).t() for columns in (m, n))
    blocks = -(-k // BLOCK)
    scale_a, scale_b = (drawn(blocks, columns, dtype=torch.float32).t() for columns in (m, -(-n // BLOCK)))
    return a, b, scale_a, scale_b, torch.zeros(m, n, dtype=torch.bfloat16, device=device)


def _values(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B multiplied by their scales."""
    a, b, scale_a, scale_b, _ = data
    n, k = b.shape
    scale_b = scale_b.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return a.float() * scale_a.repeat_interleave(BLOCK, 1)[:, :k], b.float() * scale_b


def _reference(data: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    a, b = _values(data)
    return ((a @ b.t()).to(data[-1].dtype),)


def _terms(data: tuple[torch.Tensor, ...]) -> torch.Tensor:
    a, b = _values(data)
    return a.abs() @ b.abs().t()


def _ours(data: tuple[torch.Tensor, ...], stage: Stage) -> torch.Tensor:
    a, b, scale_a, scale_b, c = data
    with stage("transpose a"):
        a = a.contiguous()
    with stage("transpose b"):
        b, scale_b = b.contiguous(), scale_b.contiguous()
    with stage("product"):
        return ops.block_scaled_mm(a, b, scale_a, scale_b, c.dtype)


CONTEST = Contest(
    name="gemm",
    make=_make,
    reference=_reference,
    ours=_ours,
    flops=lambda sizes: 2.0 * sizes["m"] * sizes["n"] * sizes["k"],
    tests=problems("m n k seed", TESTS),
    benchmarks=problems("m n k seed", BENCHMARKS),
    reduced=problems("m n k seed", REDUCED),
    rtol=2e-2,
    atol=1e-3,
    outputs=("c",),
    floors=FLOORS,
    terms=_terms,
)
