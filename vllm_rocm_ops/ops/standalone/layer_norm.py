"""Normalize rows by LayerNorm, with optional FP8 quantization fused; kernels: csrc/ops/standalone/layer_norm.hip.

Rounding matches torch.nn.functional.layer_norm: float32 up to the result, which is rounded once and then quantized.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.quantization import MX_BLOCK
from vllm_rocm_ops.core.tensors import row_stride, rows_of
from vllm_rocm_ops.ops.shared import rowwise
from vllm_rocm_ops.ops.shared.rowwise import RowConfig

__all__ = [
    "layer_norm",
    "layer_norm_dynamic_per_token_quant",
    "layer_norm_mxfp8_quant",
    "layer_norm_per_block_quant",
    "layer_norm_static_fp8_quant",
]

MEANINGS = quantization.MEANINGS | {
    "input": "[..., hidden], bf16 or fp16; rows may be strided.",
    "weight": "[hidden], input's dtype; None for ones.",
    "bias": "[hidden], input's dtype; None for zeros.",
    "epsilon": "Added to the variance.",
}
COLUMNS = {"weight": rowwise.around_one, "bias": rowwise.normal}  # per-column arguments, and their values in cases


def _normalize(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Apply LayerNorm and round once to input's dtype."""
    x = rowwise.exact(input)
    d = x - x.mean(-1, keepdim=True)
    n = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + epsilon)
    n = n if weight is None else n * weight
    return (n if bias is None else n + bias).to(input.dtype)


def _hidden(a) -> int:
    return a.input.shape[-1]


def _configs(a, arch: Arch) -> list[RowConfig]:
    vector = rowwise.is_vector(_hidden(a), a.input, a.weight, a.bias)
    return list(rowwise.configs(_hidden(a), vector, (1, 2, 4), arch))


def _plan(name: str, config: RowConfig, outputs, a, arch: Arch) -> list[Launch]:
    rows = rows_of(a.input)
    if rows == 0:
        return []
    args = {
        "input": a.input,
        "weight": a.weight,
        "bias": a.bias,
        "input_stride": row_stride(a.input),
        "hidden": _hidden(a),
        "inverse_hidden": 1.0 / _hidden(a),
        "threads_per_block": config.threads,
        "epsilon": float(a.epsilon),
        **rowwise.output_args(a, outputs),
    }
    symbol = rowwise.symbol(name, a.input.dtype, config)
    return [Launch("layer_norm", symbol, (rows, 1, 1), (config.threads, 1, 1), args)]


def _op(reference: Callable, baseline: Callable | None = None, mx: bool = False) -> Op:
    make = rowwise.Cases(reference, 1, COLUMNS, MX_BLOCK if mx else 1)

    def cases() -> Iterator[Case]:
        """Yield the cases of all norms, and rows with neither weight nor bias."""
        yield from make.standard()
        yield make.case("no-weight-no-bias-general", (2, 384), weight=None, bias=None, padding=1)

    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, _hidden(a), mx),
        contract=lambda a: rowwise.contract(a, 1, COLUMNS, MX_BLOCK if mx else 1),
        can_implement=lambda a, arch: rowwise.can_implement(a, arch, _hidden(a), COLUMNS),
        configs=_configs,
        default=lambda a, arch: rowwise.default(a, _configs(a, arch), mx),
        plan=functools.partial(_plan, reference.__name__),
        problem=lambda a: rowwise.problem(a, _hidden(a)),
        cases=cases,
        baseline=baseline,
        meanings=quantization.documented(MEANINGS, reference),
    )


def _baseline(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return torch.nn.functional.layer_norm(input, input.shape[-1:], weight, bias, epsilon)


@functools.partial(_op, baseline=_baseline)
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Apply LayerNorm over the last dimension.

    Source:
        torch.nn.functional.layer_norm; layernorm.py of AMD perf-kernels.
    """
    return _normalize(input, weight, bias, epsilon)


@_op
def layer_norm_static_fp8_quant(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
) -> Tensor:
    """Apply LayerNorm, then quantize to FP8 with a static scale.

    Source:
        layernorm.py of AMD perf-kernels, with the quantization of vLLM's RMSNorm ops.
    """
    return quantization.static(rowwise.exact(_normalize(input, weight, bias, epsilon)), scale, quant_dtype)


@_op
def layer_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply LayerNorm, then quantize to FP8 with one dynamic scale per row.

    Source:
        layernorm.py of AMD perf-kernels, with the quantization of vLLM's RMSNorm ops.
    """
    return quantization.per_token(rowwise.exact(_normalize(input, weight, bias, epsilon)), quant_dtype, scale_ub)


@_op
def layer_norm_per_block_quant(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply LayerNorm, then quantize to FP8 with one dynamic scale per `group_size` columns of a row.

    Source:
        layernorm.py of AMD perf-kernels, with the quantization of vLLM's RMSNorm ops.
    """
    return rowwise.per_block(
        _normalize(input, weight, bias, epsilon), quant_dtype, scale_ub, group_size, is_scale_transposed
    )


@functools.partial(_op, mx=True)
def layer_norm_mxfp8_quant(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Apply LayerNorm, then quantize to MX-FP8 with one e8m0 scale per 32 columns of a row.

    Args:
        input: [..., hidden], bf16 or fp16, hidden a multiple of 32; rows may be strided.

    Source:
        The inputs of AITER's small-M MX-FP8 GEMMs (aiter PR 3783), here of `mxfp8_scaled_mm`.
    """
    return rowwise.mx(_normalize(input, weight, bias, epsilon))
