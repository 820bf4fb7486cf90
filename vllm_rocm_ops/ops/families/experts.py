"""What the kernels of fused_experts share: sizes, and how weights are scaled. `a` are the op's arguments."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_rocm_ops.core.quantization import E5M2, MX_BLOCK, MX_SCALES
from vllm_rocm_ops.ops.families.gemm import BLOCK
from vllm_rocm_ops.ops.families.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS

HALVES = (torch.bfloat16, torch.float16)


BYTES = (torch.int8, *E5M2)
"""Weights that the tiled kernels alone multiply, beside those of all kernels."""


def activation_dtype(a) -> torch.dtype | None:
    """What tokens are quantised to in front of a product; None where they stay as they are."""
    dtype = a.w1.dtype
    return None if a.weight_only or dtype in HALVES else E5M2.get(dtype, dtype)


def intermediate(a) -> int:
    """Columns between the two products."""
    return a.w1.shape[1] // 2


def slots(a) -> int:
    """Experts that a token goes to."""
    return a.topk_ids.shape[1] + a.shared_experts


def scheme(weight: Tensor, scale: Tensor | None) -> str:
    """How a weight [E, N, K] is scaled: "none", "tensor", "channel", "block" (of 128x128, all float32), or "mx" (e8m0 per 1x32);
    "unknown" where its scale fits none."""
    if scale is None:
        return "none"
    experts, n, k = weight.shape
    if scale.dtype in MX_SCALES:
        holds = weight.dtype == torch.float8_e4m3fn and scale.shape == (experts, n, k / MX_BLOCK)
        return "mx" if holds else "unknown"
    shapes = {
        (experts,): "tensor",
        (experts, n): "channel",
        (experts, n, 1): "channel",
        (experts, -(-n // BLOCK), -(-k // BLOCK)): "block",
    }
    return shapes.get(tuple(scale.shape), "unknown")


def scale_strides(weight: Tensor, scale: Tensor | None) -> tuple[int, int]:
    """Elements of a contiguous scale from expert to expert, and from row, or block of rows, to the next."""
    experts, _, k = weight.shape
    rows = {"none": 0, "tensor": 0, "channel": 1, "block": -(-k // BLOCK), "mx": k // MX_BLOCK}
    return 0 if scale is None else scale.numel() // experts, rows[scheme(weight, scale)]


def weight_strides(a, weight: Tensor) -> tuple[int, int, int]:
    """Bytes of an expert's weight from 16 rows to the next 16, from row to row of these, and from 16 bytes of a row to the next 16."""
    if a.shuffled:
        return FRAGMENT_ROWS * weight.shape[2] * weight.element_size(), FRAGMENT_BYTES, FRAGMENT_ROWS * FRAGMENT_BYTES
    row = weight.stride(1) * weight.element_size()
    return FRAGMENT_ROWS * row, row, FRAGMENT_BYTES


def _odds(a) -> tuple[int, float]:
    """Experts that ids choose here, and how likely a token goes to one of them, if all experts, here or not, are as likely."""
    routed = len(a.w1) - a.shared_experts
    of_all = max(routed if a.expert_map is None else len(a.expert_map), routed, 1)
    return routed, min(a.topk_ids.shape[1] / of_all, 1.0)


def expected_pairs(a) -> float:
    """Pairs of tokens and our experts."""
    routed, odds = _odds(a)
    return a.hidden.shape[0] * (routed * odds + a.shared_experts)


def expected_tiles(a, tokens: int) -> float:
    """Tiles of so many tokens of one expert: of each as many as k tokens for which more than k * tokens go there."""
    (routed, odds), m = _odds(a), a.hidden.shape[0]
    mean, deviation = m * odds, math.sqrt(2 * m * odds * (1.0 - odds)) or 1e-9
    more = (math.erfc((k * tokens + 0.5 - mean) / deviation) / 2 for k in range(1, -(-m // tokens)))
    return routed * (1.0 - (1.0 - odds) ** m + sum(more)) + a.shared_experts * -(-m // tokens)


def expected_hit(a) -> float:
    """Experts with a token."""
    return expected_tiles(a, max(a.hidden.shape[0], 1))
