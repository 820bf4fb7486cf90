"""Define the values on the wire between ranks: bf16, or e4m3 with a scale per 128 of them, as csrc/collectives/wire.h has them.

FP8 is used only where $VLLM_ROCM_OPS_ALL_REDUCE_WIRE asks for it, in calls with more values than one shot supports. Its errors are a
launch's only other ones: ranks still have equal bits, and these do not depend on the configuration.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.quantization import LIMIT

BF16, FP8 = "bf16", "fp8"
VARIABLE = "VLLM_ROCM_OPS_ALL_REDUCE_WIRE"
GROUP, VECTOR_GROUP = 128, 16  # values with one scale, in values and in vectors
VALUE_BYTES = {BF16: 2.0, FP8: 1 + 4 / GROUP}


def chosen(wire: str | None = None) -> str:
    """Return what is sent, by default as $VLLM_ROCM_OPS_ALL_REDUCE_WIRE says."""
    wire = getattr(envs, VARIABLE) if wire is None else wire
    if wire not in VALUE_BYTES:
        raise ValueError(f"{VARIABLE} must be {BF16} or {FP8}, got {wire!r}")
    return wire


def received(x: Tensor, fp8: torch.dtype) -> Tensor:
    """Return bf16 values [..., hidden] as they arrive in FP8, in bf16 again.

    The scale is the smallest power of two with which a group's largest value is within the limit of vLLM's quantization. A group with
    an infinity or NaN is NaN.
    """
    hidden = x.shape[-1]
    groups = torch.nn.functional.pad(x.double(), (0, -hidden % GROUP)).unflatten(-1, (-1, GROUP))
    fraction, exponent = torch.frexp(groups.abs().amax(-1, keepdim=True) / LIMIT[fp8])
    exponent = torch.where(fraction > 0.5, exponent, exponent - 1).clamp(min=-127 if LIMIT[fp8] == 448 else -126)
    sent = torch.ldexp(groups, -exponent).float().to(fp8).double()
    back = torch.ldexp(sent, exponent).where(groups.isfinite().all(-1, keepdim=True), torch.nan)
    return back.flatten(-2)[..., :hidden].to(x.dtype)


def summed(inputs: list[Tensor], fp8: torch.dtype) -> Tensor:
    """Return the sum of all ranks' bf16 inputs with FP8 on the wire: of two ranks in one stage, of more in two."""
    total = sum(received(each, fp8).float() for each in inputs).to(inputs[0].dtype)
    return total if len(inputs) == 2 else received(total, fp8)
