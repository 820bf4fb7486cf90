"""Scale blocks in the op `gemm`: one scale per 1x128 of a and per 128x128 of b; kernels: csrc/ops/standalone/gemm_blocks.hip."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.ops.shared.weight_layout import STEP

MODULE = "gemm_blocks"
UNIT = BLOCK // STEP  # steps per block of K in the skinny kernels


def contract(a) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of block scales."""
    m, (k, n) = a.a.shape[0], a.b.shape
    blocks_n, blocks_k = -(-n // BLOCK), -(-k // BLOCK)
    for name, scale, shape in (("scale_a", a.scale_a, (m, blocks_k)), ("scale_b", a.scale_b, (blocks_k, blocks_n))):
        holds = scale is not None and scale.dtype == torch.float32 and scale.shape == shape
        got = "none" if scale is None else describe(scale)
        yield name, f"float32 {list(shape)}, one scale per block", got, holds


def can_implement(a) -> Iterator[tuple[str, bool]]:
    """Yield the rules that block scales add to other scales'."""
    reaches = [sum((size - 1) * step for size, step in zip(t.shape, t.stride())) for t in (a.scale_a, a.scale_b)]
    yield "block scales span fewer than 2^29 elements", max(reaches) < 2**29


def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a [M, K] and b [K, N] times their scales."""
    k, n = b.shape
    of_a = scale_a.to(a.dtype).repeat_interleave(BLOCK, 1)[:, :k]
    of_b = scale_b.to(b.dtype).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:k, :n]
    return a * of_a, b * of_b
