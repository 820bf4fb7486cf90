"""Normalize rows by RMSNorm, with an optional residual add and FP8 quantization fused; kernels: csrc/ops/rms_norm.hip.

Names, arguments and rounding match the ops in vLLM 0.33.0's wheel, except `rms_norm_and_per_block_quant`, which it lacks; results are
returned. `residual` is updated in place.
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
from vllm_rocm_ops.ops.shared.gemm import BLOCK, divisor
from vllm_rocm_ops.ops.shared.rowwise import RowConfig

__all__ = [
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm",
    "rms_norm_and_per_block_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_mxfp8_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
]

MEANINGS = quantization.MEANINGS | {
    "input": "[..., hidden], bf16 or fp16; rows may be strided, also at two strides, as heads of wider rows.",
    "residual": "[..., hidden], input's dtype, or None; becomes input + residual, rounded, in place.",
    "weight": "[hidden], input's dtype.",
    "epsilon": "Added to the mean square.",
    "one_plus_weight": "Multiply by 1 + weight, in float32 and rounded once, as GemmaRMSNorm does.",
    "addend": "[..., hidden], input's dtype, or None: input + addend_factor * addend, rounded, replaces input. Needs a residual.",
    "addend_factor": "Factor of addend.",
}


def _add(input: Tensor, residual: Tensor | None, addend: Tensor | None, factor: float) -> Tensor:
    """Return the sum of input and residual unrounded, and store it rounded in residual. An addend comes first, rounded."""
    if residual is None:
        return rowwise.exact(input)
    if addend is not None:
        input = (rowwise.exact(input) + factor * rowwise.exact(addend)).to(input.dtype)
    z = rowwise.exact(input) + rowwise.exact(residual)
    residual.copy_(z)
    return z


def _scaled(z: Tensor, epsilon: float) -> Tensor:
    z = rowwise.exact(z)
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + epsilon)


def _normalize(z: Tensor, weight: Tensor | None, epsilon: float, one_plus_weight: bool) -> Tensor:
    """Normalize z and round once to its dtype, as vLLM's plain and static ops do."""
    n = _scaled(z, epsilon)
    if weight is None:
        return n.to(z.dtype)
    return (n * (1.0 + rowwise.exact(weight) if one_plus_weight else weight)).to(z.dtype)


def _normalize_unrounded(z: Tensor, weight: Tensor, epsilon: float, one_plus_weight: bool) -> Tensor:
    """Normalize an unrounded z, as vLLM's dynamic ops do.

    The result is rounded to weight's dtype before and after the multiplication by weight; with 1 + weight only after it.
    """
    if one_plus_weight:
        return _normalize(z, weight, epsilon, True).to(weight.dtype)
    return _scaled(z, epsilon).to(weight.dtype) * weight


def _hidden(a) -> int:
    return a.input.shape[-1]


def _one_plus(a) -> bool:
    """True if the kernel multiplies by 1 + weight. Without a weight it multiplies by ones either way."""
    return a.one_plus_weight and a.weight is not None


def _configs(a, arch: Arch) -> list[RowConfig]:
    residual, addend = getattr(a, "residual", None), getattr(a, "addend", None)
    vector = rowwise.is_vector(_hidden(a), a.input, residual, addend, a.weight)
    has_few = _one_plus(a) or rowwise.heads(a.input) or addend is not None
    return list(rowwise.configs(_hidden(a), vector, (1,) if has_few else (1, 2, 4), arch))


def _plan(name: str, how_to_store: Callable, config: RowConfig, outputs, a, arch: Arch) -> list[Launch]:
    if rows_of(a.input) == 0:
        return []
    residual, addend, heads = getattr(a, "residual", None), getattr(a, "addend", None), rowwise.heads(a.input)
    if heads is not None:
        name += "_heads"
        rows = {**heads._asdict(), **divisor(heads.inner_count)}
    else:
        residual_stride = 0 if residual is None else row_stride(residual)
        rows = {"input_stride": row_stride(a.input), "residual": residual, "residual_stride": residual_stride}
    if residual is not None and not name.startswith("fused_add_"):
        name = "fused_add_" + name
    if addend is not None:
        name = name.replace("fused_add_", "fused_add_sum_")
        rows |= {"addend": addend, "addend_factor": float(a.addend_factor)}
    if _one_plus(a):
        name += "_one_plus"
    hidden = _hidden(a)
    args = {
        "input": a.input,
        **rows,
        "weight": a.weight,
        "hidden": hidden,
        "threads_per_block": config.threads,
        "inverse_hidden": 1.0 / hidden,
        "epsilon": float(a.epsilon),
        **how_to_store(a, outputs),
    }
    symbol = rowwise.symbol(name, a.input.dtype, config)
    return [Launch("rms_norm", symbol, (rows_of(a.input), 1, 1), (config.threads, 1, 1), args)]


def _allocate_both(a, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the plain output, the quantized one and its scales."""
    x = a.input
    out, quantized = (x.new_empty((*x.shape[:-1], hidden), dtype=dtype) for dtype in (x.dtype, a.quant_dtype))
    return out, quantized, rowwise.scales(x, rows_of(x), hidden // BLOCK, False)


def _both_args(a, outputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, object]:
    """Return the arguments of PlainAndPerBlock in csrc/ops/rms_norm.hip."""
    out, quantized, scale_out = outputs
    return {"out": out, "quantized": quantized, "scale_out": scale_out}


def _cases(make: rowwise.Cases) -> Iterator[Case]:
    """Yield the cases of all norms, 1 + weight, addends, and heads of wider rows, as Qwen3's q and k are."""
    yield from make.standard()
    for dtype, label in rowwise.ELEMENTS.items():
        offset = {"weight": rowwise.normal, "one_plus_weight": True}
        yield make.case(f"{label}-one-plus", (3, 1920), dtype, **offset)
        yield make.case(f"{label}-one-plus-general", (2, 384), dtype, padding=1, **offset)
        if make.parameters.get("residual") != Tensor:
            given = {"residual": None} if "residual" in make.parameters else {}
            yield make.case(f"{label}-one-plus-no-residual", (2, 384), dtype, **given, **offset)
            if make.whole == 1:
                yield make.case(f"{label}-one-plus-heads", (3, 8, 128), dtype, heads_of=9216, **given, **offset)
            else:
                shape = 2, 3 * make.whole
                yield make.case(f"{label}-one-plus-no-residual-general", shape, dtype, padding=1, **given, **offset)
        if "addend" in make.parameters:
            yield make.case(f"{label}-addend", (3, 1920), dtype, addend=True, addend_factor=2.5)
            yield make.case(f"{label}-addend-corners", (5, 1024), dtype, rowwise.corners, addend=True)
            yield make.case(f"{label}-addend-special", (9, 512), dtype, rowwise.special, addend=True)
            yield make.case(f"{label}-addend-general", (2, 384), dtype, padding=1, addend=True, addend_factor=0.4)
            yield make.case(f"{label}-one-plus-addend", (3, 4096), dtype, padding=8, addend=True, **offset)
            yield make.case(f"{label}-one-plus-addend-general", (2, 384), dtype, padding=1, addend=True, **offset)
    if make.parameters["weight"] != Tensor:
        yield make.case("one-plus-no-weight", (2, 512), weight=None, one_plus_weight=True)
    if make.parameters.get("residual") == Tensor or make.whole > 1:
        return
    given = {"residual": None} if "residual" in make.parameters else {}
    for tokens, count in ((1, 64), (3, 64), (3, 8), (64, 4), (64, 8), (64, 64)):
        yield make.case(f"{tokens}x{count}-heads", (tokens, count, 128), heads_of=9216, **given)
    yield make.case("fp16-heads", (5, 3, 1024), torch.float16, heads_of=4096, **given)
    yield make.case("heads-general", (3, 5, 384), heads_of=2049, **given)
    yield make.case("fp16-heads-general", (3, 5, 384), torch.float16, heads_of=2049, **given)


def _op(
    mutates: tuple[str, ...] = (),
    whole: int = 1,
    allocate: Callable = rowwise.allocate,
    how_to_store: Callable = rowwise.output_args,
) -> Callable[[Callable], Op]:
    """Make an op of a reference. Rows are a multiple of `whole` elements, where the op has groups of one size only."""

    def make_op(reference: Callable) -> Op:
        make = rowwise.Cases(reference, 1, {"weight": rowwise.around_one}, whole)
        return Op(
            reference,
            allocate=lambda a: allocate(a, _hidden(a)),
            contract=lambda a: rowwise.contract(a, 1, whole=whole),
            can_implement=lambda a, arch: rowwise.can_implement(a, arch, _hidden(a), two_strides=whole == 1),
            configs=_configs,
            default=lambda a, arch: rowwise.default(a, _configs(a, arch), whole > 1),
            plan=functools.partial(_plan, reference.__name__, how_to_store),
            problem=lambda a: rowwise.problem(a, _hidden(a)),
            cases=functools.partial(_cases, make),
            mutates=mutates,
            meanings=quantization.documented(MEANINGS, reference),
        )

    return make_op


@_op()
def rms_norm(input: Tensor, weight: Tensor | None, epsilon: float, one_plus_weight: bool = False) -> Tensor:
    """Apply RMSNorm over the last dimension.

    Args:
        weight: [hidden], input's dtype; None for ones.

    Source:
        vLLM's `rms_norm` and GemmaRMSNorm; rmsnorm.py of AMD perf-kernels.
    """
    return _normalize(input, weight, epsilon, one_plus_weight)


@_op(mutates=("residual",))
def fused_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> Tensor:
    """Add input to residual in place, then apply RMSNorm to the rounded sum.

    Args:
        input: [..., hidden], bf16 or fp16; rows may be strided.
        residual: [..., hidden], input's dtype; becomes input + residual, rounded, in place.
        weight: [hidden], input's dtype; None for ones.

    Source:
        vLLM's `fused_add_rms_norm`.
    """
    _add(input, residual, addend, addend_factor)
    return _normalize(residual, weight, epsilon, one_plus_weight)


@_op()
def rms_norm_static_fp8_quant(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    one_plus_weight: bool = False,
) -> Tensor:
    """Apply RMSNorm, then quantize to FP8 with a static scale.

    Source:
        vLLM's op of this name.
    """
    return quantization.static(rowwise.exact(_normalize(input, weight, epsilon, one_plus_weight)), scale, quant_dtype)


@_op(mutates=("residual",))
def fused_add_rms_norm_static_fp8_quant(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    scale: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> Tensor:
    """Add input to residual in place, then apply `rms_norm_static_fp8_quant` to the rounded sum.

    Args:
        input: [..., hidden], bf16 or fp16; rows may be strided.
        residual: [..., hidden], input's dtype; becomes input + residual, rounded, in place.

    Source:
        vLLM's op of this name; residual_rms of hf-rocm-kernels.
    """
    _add(input, residual, addend, addend_factor)
    return quantization.static(
        rowwise.exact(_normalize(residual, weight, epsilon, one_plus_weight)), scale, quant_dtype
    )


@_op(mutates=("residual",))
def rms_norm_dynamic_per_token_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm, then quantize to FP8 with one dynamic scale per row.

    With a residual the norm reads the unrounded sum input + residual.

    Source:
        vLLM's op of this name.
    """
    n = _normalize_unrounded(_add(input, residual, addend, addend_factor), weight, epsilon, one_plus_weight)
    return quantization.per_token(rowwise.exact(n), quant_dtype, scale_ub)


@_op(mutates=("residual",))
def rms_norm_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm, then quantize to FP8 with one dynamic scale per `group_size` columns of a row.

    With a residual the norm reads the unrounded sum input + residual.

    Source:
        vLLM's op of this name.
    """
    n = _normalize_unrounded(_add(input, residual, addend, addend_factor), weight, epsilon, one_plus_weight)
    return rowwise.per_block(n, quant_dtype, scale_ub, group_size, is_scale_transposed)


@_op(mutates=("residual",), whole=MX_BLOCK, allocate=functools.partial(rowwise.allocate, mx=True))
def rms_norm_mxfp8_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm, then quantize to MX-FP8 with one e8m0 scale per 32 columns of a row.

    The result of `rms_norm` or `fused_add_rms_norm` is quantized, rounded to input's dtype.

    Args:
        input: [..., hidden], bf16 or fp16, hidden a multiple of 32; rows may be strided.

    Source:
        The inputs of AITER's small-M MX-FP8 GEMMs (aiter PR 3783), here of `mxfp8_scaled_mm`.
    """
    if residual is not None:
        _add(input, residual, addend, addend_factor)
    return rowwise.mx(_normalize(input if residual is None else residual, weight, epsilon, one_plus_weight))


@_op(mutates=("residual",), whole=BLOCK, allocate=_allocate_both, how_to_store=_both_args)
def rms_norm_and_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
    addend: Tensor | None = None,
    addend_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply RMSNorm, and return the result both plain and quantized to FP8 per 128 columns of a row.

    The result equals `rms_norm`, or `fused_add_rms_norm` with a residual. It is quantized after rounding, as
    `fused_experts` quantizes its tokens: a router reads the plain result, experts the quantized one.

    Args:
        input: [..., hidden], bf16 or fp16, hidden a multiple of 128; rows may be strided.

    Returns:
        The triple (out [..., hidden] of input's dtype, values [..., hidden] of quant_dtype, scale [rows, hidden / 128]
        float32).

    Source:
        vLLM's `rms_norm` or `fused_add_rms_norm` and the quantization in its MoE layers, in one launch.
    """
    if residual is not None:
        _add(input, residual, addend, addend_factor)
    out = _normalize(input if residual is None else residual, weight, epsilon, one_plus_weight)
    return out, *rowwise.per_block(out, quant_dtype, None, BLOCK, False)
