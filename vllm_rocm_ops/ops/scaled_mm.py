"""Multiply FP8 matrices with scales per tensor, per token and per output channel; kernels: csrc/gemm/skinny.h.

`scaled_mm_silu_and_mul_quant` has SwiGLU and static quantization in the GEMM's epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import gemm, skinny_gemm, weight_layout
from vllm_rocm_ops.ops.shared import tiled_gemm as tiled
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.tiled_gemm import TiledConfig
from vllm_rocm_ops.ops.silu_and_mul import silu_and_mul_quant

__all__ = ["scaled_mm", "scaled_mm_silu_and_mul_quant"]


def _weight(a) -> gemm.Operand:
    return gemm.weight(a.b, transposed=True)


def _operand_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield "a", "e4m3 [M, K]", describe(a.a), a.a.dim() == 2 and a.a.dtype in LIMIT
    wanted = f"{describe(a.a)[: describe(a.a).index('[')]}[K={a.a.shape[1]}, N] or a shuffled weight of this K"
    holds = a.b.dtype == a.a.dtype and gemm.is_weight(a.b, a.a.shape[1], transposed=True)
    yield "b", wanted, describe(a.b), holds
    m, n = a.a.shape[0], _weight(a).rows
    for name, scale, rows in (("scale_a", a.scale_a, m), ("scale_b", a.scale_b, n)):
        holds = scale.dtype == torch.float32 and scale.numel() in (1, rows)
        yield name, f"float32 with 1 or {rows} elements", describe(scale), holds


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from _operand_contract(a)
    n = _weight(a).rows
    yield "out_dtype", "bfloat16, float16 or float32", str(a.out_dtype), a.out_dtype in gemm.OUT_TYPES
    yield from gemm.bias_contract(a.bias, n, a.out_dtype)


def _allocate(a) -> Tensor:
    return a.a.new_empty((a.a.shape[0], _weight(a).rows), dtype=a.out_dtype)


def _can_implement_operand(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield f"a is {arch.fp8_dtype}, the FP8 dtype of {arch.name}", a.a.dtype == arch.fp8_dtype
    yield "scales are contiguous", a.scale_a.is_contiguous() and a.scale_b.is_contiguous()


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from _can_implement_operand(a, arch)
    yield "bias is contiguous", a.bias is None or a.bias.is_contiguous()
    yield from tiled.can_implement(*_operands(a))


def _operands(a) -> tuple[gemm.Operand, gemm.Operand]:
    return gemm.activations(a.a), _weight(a)


def _scales(a) -> tuple[tuple[Tensor, int, int], tuple[Tensor, int]]:
    return (a.scale_a, int(a.scale_a.numel() > 1), 0), (a.scale_b, int(a.scale_b.numel() > 1))


def _plan(config, out: Tensor, a, arch: Arch) -> list[Launch]:
    product = gemm.Product(out, *_operands(a), *_scales(a), a.bias)
    if isinstance(config, TiledConfig):
        return tiled.launches(config, product, arch, kind="row")
    return skinny_gemm.launch("scaled_mm", config, product, arch)


def _cases() -> Iterator[Case]:
    """Yield every instance, tiles shared by few and many blocks, sizes around tiles, scales and bias in every mix."""
    case = case_maker(_inputs)
    for m in (*range(1, 18), 32, 33, 64):
        yield case(f"m{m}", m, 48, 1024)
    yield case("four-tiles", 3, 200, 1600)
    yield case("shuffled", 5, 80, 640, shuffled=True)
    yield case("per-tensor", 3, 40, 256, per_row=False)
    yield case("bias-fp16", 4, 33, 512, out_dtype=torch.float16, bias=True)
    yield case("fp32-out", 2, 16, 320, out_dtype=torch.float32, bias=True)
    yield case("padded", 5, 32, 512, padding=256)
    yield case("k-tail", 2, 32, 16 * 67)
    yield case("long-k", 2, 32, 2048 + 16)
    yield case("one-column", 2, 1, 128)
    yield case("shortest-k", 2, 17, 16)
    yield case("spikes", 2, 32, 1040, spikes=True)
    yield case("no-tokens", 0, 32, 64)
    yield case("tiles", 65, 131, 400, out_dtype=torch.float16)
    yield case("m97", 97, 131, 1040, bias=True)
    yield case("tiles-padded", 129, 257, 528, padding=256, per_row=False)
    yield case("tiles-shuffled", 70, 272, 320, shuffled=True, out_dtype=torch.float32, bias=True)
    yield case("tiles-long", 66, 100, 1680, spikes=True)


def _inputs(m, n, k, given, device, generator, fp8_dtype) -> tuple:
    padding = given.get("padding", 0)

    def rows(count: int, padding: int) -> Tensor:
        values = torch.randn(count, k, generator=generator)
        values = gemm.with_spikes(values) if given.get("spikes") else values
        return gemm.padded(values, padding).to(fp8_dtype).to(device)[:, :k]

    per_row = given.get("per_row", True)
    out_dtype = given.get("out_dtype", torch.bfloat16)
    scale_a = torch.rand(m if per_row else 1, 1, generator=generator).to(device) + 0.5
    scale_b = torch.rand(n if per_row else 1, 1, generator=generator).to(device) * 0.01
    bias = torch.randn(n, generator=generator).to(out_dtype).to(device) if given.get("bias") else None
    b = weight_layout.shuffle_weight(rows(n, 0)) if given.get("shuffled") else rows(n, 2 * padding).t()
    return rows(m, padding), b, scale_a, scale_b, out_dtype, bias


def _linear(tokens: int, inputs: Inputs, n: int, k: int, per_row: bool, *has_bias: bool) -> tuple:
    """Return a layer's arguments, with scales per row or per tensor."""
    a, b = (inputs.values(rows, k, dtype=inputs.fp8_dtype) for rows in (tokens, n))
    scales = (inputs.scales(rows if per_row else 1, 1) for rows in (tokens, n))
    return a, b.t(), *scales, inputs.dtype, *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=_allocate,
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: tiled.all_configs(*_operands(a), arch),
    cost=lambda config, a, arch: tiled.any_cost(config, *_operands(a), arch),
    plan=_plan,
    problem=lambda a: gemm.problem(*_operands(a)),
    cases=_cases,
    sums=True,
    product=True,
    linear=_linear,
)
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Compute (a @ b) * scale_a * scale_b^T + bias, summed in float32.

    Args:
        a: [M, K], e4m3, K innermost; rows may be strided.
        b: [K, N], a's dtype, K innermost: the view `weight.t()`; or `shuffle_weight(weight)`.
        scale_a: float32, 1 element (per tensor) or M (per token).
        scale_b: float32, 1 element (per tensor) or N (per output channel).
        out_dtype: bf16, fp16 or fp32.
        bias: [N], out_dtype, or None.

    Returns:
        [M, N], out_dtype.

    Source:
        vLLM's `cutlass_scaled_mm`; skinny_gemm and sparse_k of hf-rocm-kernels; amd-fp8-gemm.py of the Inference
        Sprint; 03-matrix-multiplication of AMD perf-kernels.
    """
    exact = torch.float64 if out_dtype == torch.float64 else torch.float32
    weight = b if b.dim() == 2 else weight_layout.plain_weight(b).t()
    product = (a.to(exact) @ weight.to(exact)) * scale_a.to(exact).reshape(-1, 1) * scale_b.to(exact).reshape(1, -1)
    if bias is not None:
        product = product + bias.to(exact)
    return product.to(out_dtype)


# With SwiGLU and quantization


def _gated_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from _operand_contract(a)
    n = _weight(a).rows
    yield "b", "an even number of output channels", str(n), n % 2 == 0
    yield "scale", "float32 with 1 element", describe(a.scale), a.scale.dtype == torch.float32 and a.scale.numel() == 1
    yield "dtype", "bfloat16 or float16", str(a.dtype), a.dtype in gemm.HALVES


def _reads_order(weight, arch: Arch) -> bool:
    return arch.vendor == "amd" or not weight.is_shuffled


def _gated_configs(a, arch: Arch) -> list:
    tokens, weight = _operands(a)
    fitting = skinny_gemm.configs(tokens, weight, arch) if _reads_order(weight, arch) else []
    return [config for config in fitting if config.rows <= 64]  # no kernel has 128 rows


def _can_implement_gated(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from _can_implement_operand(a, arch)
    tokens, weight = operands = _operands(a)
    yield from gemm.can_implement(*operands)
    yield f"there are at most {skinny_gemm.MAX_TOKENS} tokens", tokens.rows <= skinny_gemm.MAX_TOKENS
    yield "N is a multiple of 32", weight.rows % 32 == 0
    stride = weight.k if weight.is_shuffled else weight.stride or 0
    yield "half of b's rows, and 48 more, span less than 2 GB", (weight.rows // 2 + 48) * stride < 2**31
    yield "b is not shuffled on NVIDIA", _reads_order(weight, arch)


def _gated_plan(config, out: Tensor, a, arch: Arch) -> list[Launch]:
    product = gemm.Product(out, *_operands(a), *_scales(a), rounds_to=a.dtype)
    return skinny_gemm.launch("scaled_mm", config, product, arch, kind="silu", out_scale=a.scale)


def _gated_cases() -> Iterator[Case]:
    """Yield every instance, tiles shared by few and many blocks, N and K around tiles, scales in every mix."""
    case = case_maker(_gated_inputs)
    for m in (1, 2, 7, 8, 9, 16, 17, 32, 33, 64):
        yield case(f"m{m}", m, 96, 1024)
    yield case("four-tiles", 3, 224, 1600)
    yield case("part-tile", 3, 160, 256)
    yield case("shuffled", 5, 160, 640, shuffled=True)
    yield case("shuffled-m20", 20, 160, 640, shuffled=True)
    yield case("m65", 65, 160, 640)
    yield case("m97", 97, 96, 528)
    yield case("shuffled-m130", 130, 160, 320, shuffled=True)
    yield case("per-tensor", 3, 64, 256, per_row=False)
    yield case("fp16", 4, 32, 512, out_dtype=torch.float16)
    yield case("padded", 5, 32, 512, padding=256)
    yield case("k-tail", 2, 64, 16 * 67)
    yield case("shortest-k", 2, 32, 16)
    yield case("no-tokens", 0, 32, 64)


def _gated_inputs(m, n, k, given, device, generator, fp8_dtype) -> tuple:
    a, b, scale_a, scale_b, dtype, _ = _inputs(m, n, k, given, device, generator, fp8_dtype)
    return a, b, scale_a, scale_b, torch.tensor([0.0123 * k**0.5 / 16], device=device), dtype


def _gated_linear(tokens: int, inputs: Inputs, n: int, k: int) -> tuple:
    """Return a layer's arguments; the result's scale keeps most results within FP8's limit."""
    *product, dtype = _linear(tokens, inputs, n, k, False)
    return *product, inputs.scales(1) * (k / 16), dtype


@functools.partial(
    Op,
    allocate=lambda a: a.a.new_empty((a.a.shape[0], _weight(a).rows // 2)),
    contract=_gated_contract,
    can_implement=_can_implement_gated,
    configs=_gated_configs,
    cost=lambda config, a, arch: skinny_gemm.cost(config, *_operands(a), arch),
    plan=_gated_plan,
    problem=lambda a: gemm.problem(*_operands(a)),
    cases=_gated_cases,
    sums=True,
    linear=_gated_linear,
)
def scaled_mm_silu_and_mul_quant(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Multiply by a weight [gate | up] as `scaled_mm` does, then apply `silu_and_mul_quant`.

    The first N / 2 columns of b are gate, the others up. Kernels take up to 256 tokens.

    Args:
        a: [M, K], e4m3, K innermost; rows may be strided.
        b: [K, N], a's dtype, K innermost: the view `weight.t()`; or `shuffle_weight(weight)`.
        scale_a: float32, 1 element (per tensor) or M (per token).
        scale_b: float32, 1 element (per tensor) or N (per output channel).
        scale: float32, one element: the static scale of the result.
        dtype: bf16 or fp16, to which the sums are rounded before the activation.

    Returns:
        [M, N / 2], a's dtype.

    Source:
        vLLM's `cutlass_scaled_mm` and `silu_and_mul_quant`, in one launch.
    """
    product = scaled_mm.reference(a, b, scale_a, scale_b, dtype)
    return silu_and_mul_quant.reference(product, scale, a.dtype)
