"""Quantize to FP8 and int8 in plain PyTorch with vLLM's conventions: the reference of every op that quantizes.

A scale is the factor that dequantizes. Values are clamped to the format's limit: 448 for e4m3fn, and 224, not 240, for e4m3fnuz.
NaN becomes the positive limit. Dynamic scales are at least 1 / (limit * 512). As in vLLM 0.33, values are multiplied by the inverse
of a static scale, and divided by a dynamic one. vLLM's kernel for groups multiplies by the inverse, too: 0.05 % of values differ by one
step. With float64 input everything before the cast is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

LIMIT = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}
E5M2 = {torch.float8_e5m2: torch.float8_e4m3fn, torch.float8_e5m2fnuz: torch.float8_e4m3fnuz}
"""The e4m3 dtype by the e5m2 dtype of the same GPU."""
OUTPUTS = {"static": " to e4m3", "groups": " to e4m3 by 128"}
"""Kinds of quantized results, with a given scale or a computed one per 128 columns, and their names in a record of times."""
MX_BLOCK = 32  # values that share a scale of an MX format
MX_SCALES = (torch.uint8, torch.float8_e8m0fnu)

# How the input of a linear layer is quantized, as a norm or an activation before it can do.
UNQUANTIZED = "none"
STATIC = "static"  # to e4m3 with a static scale
TENSOR = "tensor"  # with a dynamic scale per tensor, computed by vLLM
TOKEN = "token"  # with a scale per token; weights have one per output channel
BLOCKS = "block"  # with a scale per 1x128; weights have one per 128x128
MX = "mx"  # to e4m3fn on every GPU with an e8m0 scale per 32, as weights

MEANINGS = {
    "scale": "float32, one element: the static scale.",
    "quant_dtype": "float8_e4m3fn or float8_e4m3fnuz; kernels write the GPU's own.",
    "group_size": "Columns that share a scale; kernels take 64 and 128.",
    "is_scale_transposed": "Store scales column-major, with strides (1, rows).",
    "scale_ub": "float32, one element: upper bound of the absolute maximum, or None.",
}
"""The arguments of row-wise ops that quantize."""
RESULTS = {
    "_mxfp8_quant": "The pair (values [..., hidden] of float8_e4m3fn on every GPU, scale [rows, hidden / 32] uint8). "
    "A scale s is\n    2^(s - 127), the smallest power of two that keeps its 32 values within 448.",
    "_per_block_quant": "The pair (values [..., hidden] of quant_dtype, scale [rows, hidden / group_size] float32).",
    "_per_token_quant": "The pair (values [..., hidden] of quant_dtype, scale [rows, 1] float32).",
    "_quant": "[..., hidden], quant_dtype.",
    "": "[..., hidden], input's dtype.",
}
"""Results of row-wise ops, by the end of an op's name."""


def documented(meanings: Mapping[str, str], reference: Callable) -> dict[str, str]:
    """Return the meanings of an op's arguments and results."""
    return {**meanings, "return": next(text for end, text in RESULTS.items() if reference.__name__.endswith(end))}


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp x and round it to nearest even."""
    return x.nan_to_num(nan=LIMIT[dtype]).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)


def absmax(x: torch.Tensor) -> torch.Tensor:
    """Return max(abs(x)) over the last dimension, which stays with size 1. NaNs are ignored."""
    return x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1, keepdim=True)


def static(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantize x with a static scale of one element, with vLLM's rounding."""
    return cast(x * (1.0 / scale.to(x.dtype)).reshape(()), dtype)


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dynamic scale of values with absolute maximum `largest`."""
    return at_least_minimum(largest / LIMIT[dtype], dtype)


def at_least_minimum(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale, raised to vLLM's minimum of a dynamic scale."""
    return scale.clamp(min=1.0 / (LIMIT[dtype] * 512.0))


def per_token(x: torch.Tensor, dtype: torch.dtype, scale_ub: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., hidden] with a dynamic scale per row.

    Args:
        x: [..., hidden], float32 or float64.
        dtype: float8_e4m3fn or float8_e4m3fnuz.
        scale_ub: One element: upper bound of the absolute maximum, or None. NaN bounds nothing.

    Returns:
        The pair (values [..., hidden], scale [rows, 1]).
    """
    largest = absmax(x)
    if scale_ub is not None:
        largest = largest.fmin(scale_ub.to(largest.dtype).reshape(()))
    scale = scale_of(largest, dtype)
    return cast(x / scale, dtype), scale.reshape(-1, 1)


def int8(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., hidden] to int8: x / scale to nearest even, clamped to -127 to 127, NaN as 127.

    Returns the pair (values, scale). Without a given scale there is one per row, absmax / 127 with an absmax of at least 1e-10, as in
    vLLM's per_token_quant_int8.
    """
    scale = absmax(x).clamp(min=1e-10) / 127.0 if scale is None else scale.to(x.dtype).reshape(())
    return (x / scale).nan_to_num(nan=127.0).clamp(-127.0, 127.0).round().to(torch.int8), scale


def mx(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [..., columns] to MX-FP8: e4m3fn values, and s as uint8 for a scale 2^(s - 127) per 32 columns.

    The scale is the smallest that keeps its 32 values within the limit. Infinities get the scale of the largest float32, and are
    clamped.
    """
    fp8, single = torch.float8_e4m3fn, torch.finfo(torch.float32)
    blocks = x.unflatten(-1, (-1, MX_BLOCK))
    fraction, exponent = torch.frexp(absmax(blocks).clamp(single.tiny, single.max))
    limit_fraction, limit_exponent = math.frexp(LIMIT[fp8])
    scale = (exponent - limit_exponent + (fraction > limit_fraction) + 127).clamp(0, 254)
    values = cast(blocks * torch.exp2(127.0 - scale).to(x.dtype), fp8).flatten(-2)
    return values, scale[..., 0].to(torch.uint8)


def e8m0_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Return the float64 numbers 2^(s - 127) of E8M0 scales s; 255 is NaN."""
    exponents = scales.view(torch.uint8).to(torch.float64)
    return torch.exp2(exponents - 127).masked_fill(exponents == 255, torch.nan)


def mx_numbers(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the exact float64 numbers of MX values with scales [rows, columns / 32]; 255 is NaN.

    Values are [rows, columns] of a floating-point type, or E2M1 in bytes [rows, columns / 2].
    """
    numbers = fp4_numbers(values) if values.dtype == torch.uint8 else values.to(torch.float64)
    return numbers * e8m0_numbers(scales).repeat_interleave(MX_BLOCK, 1)


def packed_bits(values: torch.Tensor) -> torch.Tensor:
    """Return values [..., columns] of 0 to 15 as bytes [..., columns / 2], the first of two in the lower half."""
    pairs = values.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpacked_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of `packed_bits`, from bytes or wider integers."""
    packed = packed.contiguous().view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def int4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Return the float64 numbers [..., columns] of INT4 weights [..., columns / 2]: a value less 8."""
    return unpacked_bits(packed).to(torch.float64) - 8


def fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """Return the float64 numbers [..., columns] of E2M1 weights [..., columns / 2]."""
    magnitudes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64, device=packed.device)
    return torch.cat((magnitudes, -magnitudes))[unpacked_bits(packed).to(torch.int64)]
