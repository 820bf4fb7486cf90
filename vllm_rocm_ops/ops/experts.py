"""What the kernels of fused_experts share: sizes, and how weights are scaled. `a` are the op's arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.ops.gemm import BLOCK
from vllm_rocm_ops.quantization import MX_BLOCK, MX_SCALES

HALVES = (torch.bfloat16, torch.float16)


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


def expected(a) -> tuple[int, float]:
    """All experts that tokens choose from, here or not, and the tokens that each gets if all are as likely."""
    routed = len(a.w1) - a.shared_experts
    of_all = max(routed if a.expert_map is None else len(a.expert_map), routed, 1)
    return of_all, a.topk_ids.numel() / of_all
