"""Define the formats of values on the wire between ranks: bf16, or e4m3 with a scale per 128 values (csrc/collectives/wire.h).

FP8 is sent only if $VLLM_ROCM_OPS_ALL_REDUCE_WIRE is fp8, in calls with more values than one shot supports that are predicted to be faster
with it. It makes sums less exact. They still have equal bits on all ranks, whatever the configuration of the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.quantization import LIMIT

BF16, FP8 = "bf16", "fp8"
VARIABLE = "VLLM_ROCM_OPS_ALL_REDUCE_WIRE"
GROUP_VALUES, GROUP_VECTORS = 128, 16  # with one scale
VALUE_BYTES = {BF16: 2.0, FP8: 1 + 4 / GROUP_VALUES}


def allowed() -> tuple[str, ...]:
    """Return the wire formats that $VLLM_ROCM_OPS_ALL_REDUCE_WIRE allows. Raises ValueError for an unknown value."""
    given = getattr(envs, VARIABLE)
    if given not in VALUE_BYTES:
        raise ValueError(f"{VARIABLE} must be {BF16} or {FP8}, got {given!r}")
    return tuple(dict.fromkeys((given, BF16)))


def quant_dequant(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Return bf16 x [..., hidden] quantized to FP8 for the wire and dequantized to bf16.

    A group's scale is the smallest power of two with which its absmax is at most the largest FP8 value. A group with an infinity or
    NaN becomes NaN.
    """
    hidden = x.shape[-1]
    groups = torch.nn.functional.pad(x.double(), (0, -hidden % GROUP_VALUES)).unflatten(-1, (-1, GROUP_VALUES))
    fraction, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True) / LIMIT[fp8])
    exponent = torch.where(fraction > 0.5, exponent, exponent - 1).clamp(min=-127 if LIMIT[fp8] == 448 else -126)
    quantized = torch.ldexp(groups, -exponent).float().to(fp8).double()
    dequantized = torch.ldexp(quantized, exponent).where(groups.isfinite().all(-1, keepdim=True), torch.nan)
    return dequantized.flatten(-2)[..., :hidden].to(x.dtype)


def fp8_sum(inputs: list[Tensor], fp8: torch.dtype) -> Tensor:
    """Return the kernels' sum of the ranks' bf16 inputs with FP8 on the wire: in one stage for two ranks, in two for more."""
    total = sum(quant_dequant(each, fp8).float() for each in inputs).to(inputs[0].dtype)
    return total if len(inputs) == 2 else quant_dequant(total, fp8)
