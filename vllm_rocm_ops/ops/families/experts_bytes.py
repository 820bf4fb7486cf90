"""The tiled kernels of fused_experts for weights of 8 bits other than e4m3 with e4m3: csrc/ops/fused_experts_tiled_bytes.hip."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.core.quantization import E5M2
from vllm_rocm_ops.ops.families.experts import scheme
from vllm_rocm_ops.ops.families.rowwise import ELEMENTS

MODULE = "fused_experts_tiled_bytes"


def kernels(a, weight: Tensor, scale: Tensor | None, tokens: torch.dtype) -> tuple[str, str] | None:
    """The module, and what the symbols of its kernels say of types and scales; None where the kernels are others'. `tokens` is what
    the tokens are in front of their quantisation."""
    name = "int8" if weight.dtype == torch.int8 else "e5m2" if weight.dtype in E5M2 else "e4m3"
    if a.weight_only:
        return MODULE, f"{name}_with_{ELEMENTS[tokens]}"
    if name == "e4m3":
        return None
    return MODULE, name if name == "int8" else f"{name}_{'block' if scheme(weight, scale) == 'block' else 'row'}"
