"""Convert weights between their memory layouts.

A weight is plain, [N, K] with K innermost and a row stride that is a multiple of 16 bytes, or in fragment order after
`shuffle_weight`, where each wave reads contiguous kilobytes. An op takes both in the same argument.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.core.tensors import describe

STEP = 64  # bytes along K
FRAGMENT_ROWS, FRAGMENT_BYTES = 16, 16


def shuffle_weight(weight: Tensor) -> Tensor:
    """Return a weight [N, K] in fragment order.

    Args:
        weight: [N, K], any dtype, N a multiple of 16 and K of 64 bytes.

    Returns:
        [N / 16, K / (64 bytes), 4, 16, 16 bytes], which GEMM ops take in place of the weight.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    n, k = weight.shape
    in_step, in_vector = STEP // weight.element_size(), FRAGMENT_BYTES // weight.element_size()
    if n % FRAGMENT_ROWS or k % in_step:
        wanted = f"[a multiple of {FRAGMENT_ROWS}, a multiple of {in_step}]"
        raise ValueError(f"shuffle_weight: weight must be {wanted}, got {describe(weight)}")
    vectors = weight.reshape(n // FRAGMENT_ROWS, FRAGMENT_ROWS, k // in_step, STEP // FRAGMENT_BYTES, in_vector)
    return vectors.permute(0, 2, 3, 1, 4).contiguous()


def fits(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """True if a weight [N, K] can be in fragment order."""
    return shape[0] % FRAGMENT_ROWS == 0 and shape[1] * dtype.itemsize % STEP == 0


def unshuffled(weight: Tensor) -> Tensor:
    """Return a weight that is in fragment order under its plain shape as a plain [N, K]."""
    (n, k), in_vector = weight.shape, FRAGMENT_BYTES // weight.element_size()
    steps = k * weight.element_size() // STEP
    return plain_weight(weight.view(n // FRAGMENT_ROWS, steps, STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, in_vector))


def plain_weight(b: Tensor) -> Tensor:
    """Return a weight as a plain [N, K], from [N, K] or fragment order."""
    if b.dim() == 2:
        return b
    tiles, steps, vectors, rows, in_vector = b.shape
    return b.permute(0, 3, 1, 2, 4).reshape(tiles * rows, steps * vectors * in_vector)
