"""One op for a norm or an activation and the quantization of its result, handed to the linear that consumes it.

A linear says through vLLM's `get_input_quant_key` which quantized input it takes. Imports vLLM; seams import this file
from their `install`.
"""

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation, get_input_quant_key
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)
from vllm.platforms import current_platform

KEYS = (kFp8StaticTensorSym, kFp8DynamicTokenSym, kFp8Dynamic128Sym)
GROUP = 128
DTYPES = (torch.bfloat16, torch.float16)
QUANT_DTYPE = current_platform.fp8_dtype()

ops = torch.ops.vllm_rocm_ops


class Handed(QuantizedActivation):
    """vLLM's pre-quantized activation, with the `shape` that multi-head latent attention reads from its input."""

    @property
    def shape(self) -> torch.Size:
        return self.orig_shape


def key_of(linear: torch.nn.Module | None, columns: int) -> QuantKey | None:
    """The quantized input of so many columns that a linear takes and the ops make, if there is one."""
    key = None if linear is None else get_input_quant_key(linear)
    if key == kFp8Dynamic128Sym and columns % GROUP != 0:
        return None
    return key if key in KEYS else None


def rms_norm(
    linear: torch.nn.Module, key: QuantKey, x: torch.Tensor, residual: torch.Tensor | None, weight, epsilon: float
) -> Handed:
    """RMSNorm of x, or of `residual += x`, quantized as `key` says for `linear`."""
    if key == kFp8StaticTensorSym:
        scale = linear.input_scale
        if residual is None:
            data = ops.rms_norm_static_fp8_quant(x, weight, scale, epsilon, QUANT_DTYPE)
        else:
            data = ops.fused_add_rms_norm_static_fp8_quant(x, residual, weight, scale, epsilon, QUANT_DTYPE)
    elif key == kFp8DynamicTokenSym:
        upper_bound = getattr(linear, "input_scale_ub", None)
        data, scale = ops.rms_norm_dynamic_per_token_quant(x, weight, epsilon, QUANT_DTYPE, upper_bound, residual)
    else:
        column_major = getattr(linear, "vllm_rocm_ops_column_major_scales", False)
        data, scale = ops.rms_norm_per_block_quant(x, weight, epsilon, QUANT_DTYPE, GROUP, column_major, None, residual)
    return Handed(data, scale, x.dtype, data.shape, key)


def silu_and_mul(linear: torch.nn.Module, key: QuantKey, x: torch.Tensor) -> Handed:
    """silu(first half of x) * second half, quantized as `key` says for `linear`."""
    if key == kFp8StaticTensorSym:
        scale = linear.input_scale
        data = ops.silu_and_mul_quant(x, scale, QUANT_DTYPE)
    elif key == kFp8DynamicTokenSym:
        upper_bound = getattr(linear, "input_scale_ub", None)
        data, scale = ops.silu_and_mul_per_token_quant(x, QUANT_DTYPE, upper_bound)
    else:
        column_major = getattr(linear, "vllm_rocm_ops_column_major_scales", False)
        data, scale = ops.silu_and_mul_per_block_quant(x, QUANT_DTYPE, GROUP, column_major)
    return Handed(data, scale, x.dtype, data.shape, key)
