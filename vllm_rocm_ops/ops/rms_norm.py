"""RMSNorm with an optional residual add in front and an optional e4m3 quantisation behind; kernels: csrc/ops/rms_norm.hip.

Names, arguments and roundings are those of the ops in vLLM 0.33.0's wheel, but results are returned. `residual` is
updated in place. `rms_norm_and_per_block_quant` has no such name there. With `one_plus_weight`, 1 + weight takes the weight's place, in float32 and with one rounding behind it, as in
vLLM's GemmaRMSNorm.
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
from vllm_rocm_ops.ops.families.gemm import BLOCK, divisor
from vllm_rocm_ops.ops.families.rowwise import RowConfig

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


def _add(input: Tensor, residual: Tensor | None) -> Tensor:
    """input + residual unrounded, which the residual takes over, rounded."""
    if residual is None:
        return rowwise.exact(input)
    z = rowwise.exact(input) + rowwise.exact(residual)
    residual.copy_(z)
    return z


def _scaled(z: Tensor, epsilon: float) -> Tensor:
    z = rowwise.exact(z)
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + epsilon)


def _normalize(z: Tensor, weight: Tensor | None, epsilon: float, one_plus_weight: bool) -> Tensor:
    """RMSNorm of z in z's dtype, rounded once, as vLLM's plain and static ops do."""
    n = _scaled(z, epsilon)
    if weight is None:
        return n.to(z.dtype)
    return (n * (1.0 + rowwise.exact(weight) if one_plus_weight else weight)).to(z.dtype)


def _normalize_unrounded(z: Tensor, weight: Tensor, epsilon: float, one_plus_weight: bool) -> Tensor:
    """RMSNorm of an unrounded z in weight's dtype, rounded before the weight too, as vLLM's dynamic ops do; with 1 + weight rounded
    once."""
    if one_plus_weight:
        return _normalize(z, weight, epsilon, True).to(weight.dtype)
    return _scaled(z, epsilon).to(weight.dtype) * weight


def _hidden(a) -> int:
    return a.input.shape[-1]


def _one_plus(a) -> bool:
    """Whether 1 + weight takes the weight's place; without a weight there are ones either way."""
    return a.one_plus_weight and a.weight is not None


def _configs(a, arch: Arch) -> list[RowConfig]:
    vector = rowwise.is_vector(_hidden(a), a.input, getattr(a, "residual", None), a.weight)
    return list(
        rowwise.configs(_hidden(a), vector, (1,) if _one_plus(a) or rowwise.heads(a.input) else (1, 2, 4), arch)
    )


def _plan(name: str, how_to_store: Callable, config: RowConfig, outputs, a, arch: Arch) -> list[Launch]:
    if rows_of(a.input) == 0:
        return []
    residual, heads = getattr(a, "residual", None), rowwise.heads(a.input)
    if heads is not None:
        name += "_heads"
        rows = {**heads._asdict(), **divisor(heads.inner_count)}
    else:
        residual_stride = 0 if residual is None else row_stride(residual)
        rows = {"input_stride": row_stride(a.input), "residual": residual, "residual_stride": residual_stride}
    if residual is not None and not name.startswith("fused_add_"):
        name = "fused_add_" + name
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
    """Inputs that reach every path: those of all norms, 1 + weight, and heads that are a part of wider rows, as Qwen3's q and k are."""
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

    def of(reference: Callable) -> Op:
        make = rowwise.Cases(reference, 1, {"weight": rowwise.around_one}, whole)
        return Op(
            reference,
            allocate=lambda a: allocate(a, _hidden(a)),
            contract=lambda a: rowwise.contract(a, 1, whole=whole),
            envelope=lambda a, arch: rowwise.envelope(a, arch, _hidden(a), two_strides=whole == 1),
            configs=_configs,
            default=lambda a, arch: rowwise.default(a, _configs(a, arch), whole > 1),
            plan=functools.partial(_plan, reference.__name__, how_to_store),
            problem=lambda a: rowwise.problem(a, _hidden(a)),
            cases=functools.partial(_cases, make),
            mutates=mutates,
        )

    return of


@_op()
def rms_norm(input: Tensor, weight: Tensor | None, epsilon: float, one_plus_weight: bool = False) -> Tensor:
    """RMSNorm over the last dimension.

    input [..., hidden] bf16 or fp16, rows may be strided, also at two strides, as heads that are a part of wider rows;
    weight [hidden] or None for ones; with one_plus_weight, 1 + weight takes its place. Returns [..., hidden].
    """
    return _normalize(input, weight, epsilon, one_plus_weight)


@_op(mutates=("residual",))
def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float, one_plus_weight: bool = False
) -> Tensor:
    """residual += input, in place, then RMSNorm of the (rounded) residual.

    input, residual [..., hidden] bf16 or fp16; weight [hidden] or None for ones. Returns [..., hidden].
    """
    _add(input, residual)
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
    """RMSNorm, then division by `scale` (float32, one element) and the cast to quant_dtype. Returns [..., hidden]."""
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
) -> Tensor:
    """residual += input, in place, then `rms_norm_static_fp8_quant` of the (rounded) residual."""
    _add(input, residual)
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
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then quantisation with one dynamic scale per row.

    With `residual`, residual += input in place first; the norm sees the unrounded sum. scale_ub (float32, one element)
    bounds the absolute maximum. Returns out [..., hidden] of quant_dtype and scale [rows, 1] float32.
    """
    n = _normalize_unrounded(_add(input, residual), weight, epsilon, one_plus_weight)
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
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then quantisation with one dynamic scale per `group_size` columns of a row.

    As `rms_norm_dynamic_per_token_quant`, but scale is [rows, hidden / group_size], column-major (strides (1, rows)) if
    is_scale_transposed.
    """
    n = _normalize_unrounded(_add(input, residual), weight, epsilon, one_plus_weight)
    return rowwise.per_block(n, quant_dtype, scale_ub, group_size, is_scale_transposed)


@_op(mutates=("residual",), whole=MX_BLOCK, allocate=functools.partial(rowwise.allocate, mx=True))
def rms_norm_mxfp8_quant(
    input: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None, one_plus_weight: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then quantisation to MX-FP8, as `mxfp8_scaled_mm` takes it: one e8m0 scale per 32 columns of a row.

    With `residual`, residual += input in place first; the norm sees the rounded sum. The values quantised are those of `rms_norm`
    or `fused_add_rms_norm`, rounded to input's dtype. hidden is a multiple of 32. Returns out [..., hidden] float8_e4m3fn, on all
    GPUs, and scale [rows, hidden / 32] uint8: s for 2^(s - 127), the least that keeps a group within 448.
    """
    if residual is not None:
        _add(input, residual)
    return rowwise.mx(_normalize(input if residual is None else residual, weight, epsilon, one_plus_weight))


@_op(mutates=("residual",), whole=BLOCK, allocate=_allocate_both, how_to_store=_both_args)
def rms_norm_and_per_block_quant(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    quant_dtype: torch.dtype,
    residual: Tensor | None = None,
    one_plus_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm, and the quantisation of its result with one dynamic scale per 128 columns of a row beside it.

    The result is that of `rms_norm` or, with `residual`, which takes the sum over, of `fused_add_rms_norm`. Quantised is the rounded
    result, as `fused_experts` quantises its tokens: a router reads the one, experts the other. hidden is a multiple of 128. Returns
    out [..., hidden] of input's dtype, quantised [..., hidden] of quant_dtype and scale [rows, hidden / 128] float32.
    """
    if residual is not None:
        _add(input, residual)
    out = _normalize(input if residual is None else residual, weight, epsilon, one_plus_weight)
    return out, *rowwise.per_block(out, quant_dtype, None, BLOCK, False)
