"""LayerNorm with an optional e4m3 quantisation behind; kernels: csrc/ops/layer_norm.hip.

Roundings are those of torch.nn.functional.layer_norm: fp32 up to the result, which is rounded once and then quantised.
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
from vllm_rocm_ops.ops.families import rowwise
from vllm_rocm_ops.ops.families.rowwise import RowConfig

__all__ = [
    "layer_norm",
    "layer_norm_dynamic_per_token_quant",
    "layer_norm_mxfp8_quant",
    "layer_norm_per_block_quant",
    "layer_norm_static_fp8_quant",
]

COLUMNS = {"weight": rowwise.around_one, "bias": rowwise.normal}  # with an element for each column, as cases fill them


def _normalize(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm in input's dtype, rounded once."""
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


def _op(reference: Callable, peer: Callable | None = None, mx: bool = False) -> Op:
    make = rowwise.Cases(reference, 1, COLUMNS, MX_BLOCK if mx else 1)

    def cases() -> Iterator[Case]:
        """As for the other norms, and rows with neither weight nor bias."""
        yield from make.standard()
        yield make.case("no-weight-no-bias-general", (2, 384), weight=None, bias=None, padding=1)

    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, _hidden(a), mx),
        contract=lambda a: rowwise.contract(a, 1, COLUMNS, MX_BLOCK if mx else 1),
        envelope=lambda a, arch: rowwise.envelope(a, arch, _hidden(a), COLUMNS),
        configs=_configs,
        default=lambda a, arch: rowwise.default(a, _configs(a, arch), mx),
        plan=functools.partial(_plan, reference.__name__),
        problem=lambda a: rowwise.problem(a, _hidden(a)),
        cases=cases,
        peer=peer,
    )


def _peer(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    return torch.nn.functional.layer_norm(input, input.shape[-1:], weight, bias, epsilon)


@functools.partial(_op, peer=_peer)
def layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension.

    input [..., hidden] bf16 or fp16, rows may be strided; weight [hidden] or None for ones; bias [hidden] or None for
    zeros. Returns [..., hidden].
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
    """`layer_norm`, then division by `scale` (float32, one element) and the cast to quant_dtype. Returns [..., hidden]."""
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
    """`layer_norm`, then quantisation with one dynamic scale per row.

    scale_ub (float32, one element) bounds the absolute maximum. Returns out [..., hidden] of quant_dtype and scale
    [rows, 1] float32.
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
    """`layer_norm`, then quantisation with one dynamic scale per `group_size` columns of a row.

    As `layer_norm_dynamic_per_token_quant`, but scale is [rows, hidden / group_size], column-major (strides (1, rows)) if
    is_scale_transposed.
    """
    return rowwise.per_block(
        _normalize(input, weight, bias, epsilon), quant_dtype, scale_ub, group_size, is_scale_transposed
    )


@functools.partial(_op, mx=True)
def layer_norm_mxfp8_quant(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """`layer_norm`, then quantisation to MX-FP8, as `mxfp8_scaled_mm` takes it: one e8m0 scale per 32 columns of a row.

    hidden is a multiple of 32. Returns out [..., hidden] float8_e4m3fn, on all GPUs, and scale [rows, hidden / 32] uint8: s for
    2^(s - 127), the least that keeps a group within 448.
    """
    return rowwise.mx(_normalize(input, weight, bias, epsilon))
