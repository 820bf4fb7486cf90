"""SwiGLU activation with an optional e4m3 quantisation behind; kernels: csrc/ops/silu_and_mul.hip.

Names, arguments and roundings are those of vLLM's ops, but results are returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import quantization
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.families import rowwise
from vllm_rocm_ops.families.rowwise import VECTOR, RowConfig
from vllm_rocm_ops.launch import Launch
from vllm_rocm_ops.op import Op
from vllm_rocm_ops.tensors import row_stride, rows_of

__all__ = [
    "silu_and_mul",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_per_token_quant",
    "silu_and_mul_quant",
]


def _silu(gate: Tensor) -> Tensor:
    return gate / (1.0 + torch.exp(-gate))


def _product(input: Tensor) -> Tensor:
    """silu(gate) * up, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    return _silu(gate) * up


def _rounded_product(input: Tensor) -> Tensor:
    """silu(gate) * up, rounded after silu and after the product."""
    gate, up = input.chunk(2, -1)
    return _silu(rowwise.exact(gate)).to(input.dtype) * up


def _hidden(a) -> int:
    return a.input.shape[-1] // 2


def _contract(a):
    yield "input", "[..., 2 * hidden]", str(list(a.input.shape)), a.input.dim() >= 1 and a.input.shape[-1] % 2 == 0
    yield from rowwise.contract(a, 2)


def _per_token(a) -> bool:
    return hasattr(a, "scale_ub") and not hasattr(a, "group_size")


def _configs(a, arch: Arch) -> list[RowConfig]:
    vector = rowwise.is_vector(_hidden(a), a.input)
    if _per_token(a):
        return list(rowwise.configs(_hidden(a), vector, (1, 2, 4, 8), arch))
    split = [RowConfig(threads, 1) for threads in (128, 256, 512)] if vector else []
    return split + list(rowwise.configs(_hidden(a), False, (), arch))


def _default(a, arch: Arch) -> RowConfig:
    """Per token, the fewest vectors per thread with at most 512 threads. Otherwise small blocks, to have more of them, until
    there is work for all compute units. Measured on H200, either is within 5 % of the best."""
    fitting = _configs(a, arch)
    if _per_token(a) or fitting[0].vectors_per_thread == 0:
        return next((c for c in fitting if c.threads <= 512), fitting[0])
    return fitting[1] if rows_of(a.input) * (_hidden(a) // VECTOR) >= 1024 * arch.compute_units else fitting[0]


def _plan(name: str, config: RowConfig, outputs, a, arch: Arch) -> list[Launch]:
    if rows_of(a.input) == 0:
        return []
    hidden = _hidden(a)
    blocks = 1
    if config.vectors_per_thread and not _per_token(a):
        blocks = -(-hidden // (VECTOR * config.vectors_per_thread * config.threads))
    args = {
        "input": a.input,
        "input_stride": row_stride(a.input),
        "hidden": hidden,
        "threads_per_block": config.threads,
        **rowwise.output_args(a, outputs),
    }
    symbol = rowwise.symbol(name, a.input.dtype, config)
    return [Launch("silu_and_mul", symbol, (rows_of(a.input), blocks, 1), (config.threads, 1, 1), args)]


def _op(reference: Callable) -> Op:
    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, _hidden(a)),
        contract=_contract,
        envelope=lambda a, arch: rowwise.envelope(a, arch, _hidden(a)),
        configs=_configs,
        default=_default,
        plan=functools.partial(_plan, reference.__name__),
        problem=lambda a: rowwise.problem(a, _hidden(a)),
        cases=rowwise.Cases(reference, 2, {}).standard,
    )


@_op
def silu_and_mul(input: Tensor) -> Tensor:
    """silu(gate) * up, rounded after silu and after the product.

    input [..., 2 * hidden] bf16 or fp16 holds gate, then up; rows may be strided. Returns [..., hidden].
    """
    return _rounded_product(input)


@_op
def silu_and_mul_quant(input: Tensor, scale: Tensor, quant_dtype: torch.dtype) -> Tensor:
    """`silu_and_mul`, then division by `scale` (float32, one element) and the cast to quant_dtype.

    input [..., 2 * hidden] bf16 or fp16. Returns [..., hidden].
    """
    return quantization.static(rowwise.exact(_rounded_product(input)), scale, quant_dtype)


@_op
def silu_and_mul_per_token_quant(
    input: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, quantised with one dynamic scale per row.

    input [..., 2 * hidden] bf16 or fp16; scale_ub (float32, one element) bounds the absolute maximum. Returns
    out [..., hidden] of quant_dtype and scale [rows, 1] float32.
    """
    return quantization.per_token(_product(input), quant_dtype, scale_ub)


@_op
def silu_and_mul_per_block_quant(
    input: Tensor,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, quantised with one dynamic scale per `group_size` columns of a row.

    input [..., 2 * hidden] bf16 or fp16; scale_ub (float32, one element) bounds the scale. Returns out [..., hidden]
    of quant_dtype and scale [rows, hidden / group_size] float32, column-major (strides (1, rows)) if
    is_scale_transposed.
    """
    y = _product(input).unflatten(-1, (-1, group_size))
    scale = quantization.scale_of(quantization.absmax(y), quant_dtype)
    if scale_ub is not None:
        scale = quantization.at_least_minimum(scale.fmin(scale_ub.to(scale.dtype).reshape(())), quant_dtype)
    scales = rowwise.scales(input, rows_of(input), input.shape[-1] // 2 // group_size, is_scale_transposed)
    return quantization.cast(y / scale, quant_dtype).flatten(-2), scales.copy_(scale.view(scales.shape))
