"""Multiply bf16 or fp16 matrices: lm_head, routers and other unquantized layers. Above 64 tokens the op `gemm`'s kernels run where they are faster."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import describe, is_wide_float, row_stride, rows_of
from vllm_rocm_ops.ops.gemm import gemm as products_of_any
from vllm_rocm_ops.ops.shared import gemm, skinny_gemm, weight_layout
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig
from vllm_rocm_ops.ops.shared.tiled_gemm import TiledConfig, beside_skinny

__all__ = ["unquantized_gemm"]


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.x.dim() >= 1 and is_wide_float(a.x)
    yield "x", "at least one-dimensional, floating point of 16 bits or more", describe(a.x), holds
    k = a.x.shape[-1]
    wanted = f"{a.x.dtype} [N, K={k}] or a shuffled weight of this K"
    yield "weight", wanted, describe(a.weight), a.weight.dtype == a.x.dtype and gemm.is_weight(a.weight, k)
    n = gemm.weight(a.weight).rows
    yield from gemm.bias_contract(a.bias, n, a.x.dtype)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield "x is bfloat16 or float16", a.x.dtype in gemm.HALVES
    most = skinny_gemm.MAX_TOKENS
    yield f"M is at most {most}, or the weight is not shuffled", rows_of(a.x) <= most or a.weight.dim() == 2
    yield "bias is contiguous", a.bias is None or a.bias.is_contiguous()
    yield from gemm.can_implement(gemm.activations(a.x), gemm.weight(a.weight))
    if _is_many(a):
        yield from products_of_any.can_implement(_as_products_of_any(a), arch)


def _is_many(a) -> bool:
    """True if the tiled kernels of csrc/ops/gemm.hip serve this many tokens, and read this weight."""
    return rows_of(a.x) > skinny_gemm.GROUP_TOKENS and a.weight.dim() == 2


def _as_products_of_any(a):
    """Return the arguments of the op `gemm` for the same GEMM."""
    k = a.x.shape[-1]
    rows = a.x.as_strided((rows_of(a.x), k), (row_stride(a.x) or k, 1))
    return products_of_any.Arguments(rows, a.weight.t(), a.x.dtype, bias=a.bias)


def _configs(a, arch: Arch) -> list[SkinnyConfig | TiledConfig]:
    few = skinny_gemm.configs(gemm.activations(a.x), gemm.weight(a.weight), arch)
    return few + (products_of_any.configs(_as_products_of_any(a), arch) if _is_many(a) else [])


def _cost(config: SkinnyConfig | TiledConfig, a, arch: Arch) -> dict[str, float]:
    if not isinstance(config, SkinnyConfig):
        return beside_skinny(products_of_any.cost(config, _as_products_of_any(a), arch), gemm.activations(a.x), arch)
    return skinny_gemm.cost(config, gemm.activations(a.x), gemm.weight(a.weight), arch)


def _plan(config: SkinnyConfig | TiledConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    if not isinstance(config, SkinnyConfig):
        (launch,) = products_of_any.plan(config, out, _as_products_of_any(a), arch)
        return [launch._replace(args=launch.args | {"problem.a.data": a.x, "problem.b.data": a.weight})]
    product = gemm.Product(out, gemm.activations(a.x), gemm.weight(a.weight), bias=a.bias)
    return skinny_gemm.launch("unquantized_gemm", config, product, arch, kind=gemm.HALVES[a.x.dtype])


def _cases() -> Iterator[Case]:
    """Yield every instance, shared tiles, sizes around tiles, bias, strides."""
    case = case_maker(_inputs)
    for dtype, kind in gemm.HALVES.items():
        for m in (1, 16, 17, 33, 64, 65, 97):
            yield case(f"{kind}-m{m}", m, 80, 512, dtype=dtype)
    yield case("bias", 4, 33, 256, bias=True)
    yield case("k-tail", 2, 32, 8 * 67)
    yield case("shuffled", 3, 144, 352, shuffled=True)
    yield case("shuffled-m130", 130, 144, 352, shuffled=True)
    yield case("padded", 5, 32, 256, padding=128)
    yield case("sequences", (2, 3), 32, 64)
    yield case("no-tokens", 0, 32, 64)
    yield case("router-m65", 65, 256, 448)
    yield case("router-m130", (2, 65), 72, 264, padding=8, dtype=torch.float16, bias=True)


def _inputs(tokens, n, k, given, device, generator, fp8_dtype) -> tuple:
    dtype, padding = given.get("dtype", torch.bfloat16), given.get("padding", 0)

    def rows(*shape: int, padding: int) -> Tensor:
        values = torch.randn(*shape, k, generator=generator)
        return gemm.padded(values, padding).to(dtype).to(device)[..., :k]

    weight = weight_layout.shuffle_weight(rows(n, padding=0)) if given.get("shuffled") else rows(n, padding=2 * padding)
    bias = torch.randn(n, generator=generator).to(dtype).to(device) if given.get("bias") else None
    return rows(*(tokens if isinstance(tokens, tuple) else (tokens,)), padding=padding), weight, bias


def _linear(tokens: int, inputs: Inputs, n: int, k: int, *has_bias: bool) -> tuple:
    """Return a layer's arguments."""
    return inputs.values(tokens, k), inputs.values(n, k), *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=lambda a: a.x.new_empty((*a.x.shape[:-1], gemm.weight(a.weight).rows)),
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=lambda a: gemm.problem(gemm.activations(a.x), gemm.weight(a.weight)),
    cases=_cases,
    sums=True,
    product=True,
    linear=_linear,
    baseline=torch.nn.functional.linear,
)
def unquantized_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ weight^T + bias, summed in float32.

    Args:
        x: [..., K], bf16 or fp16, K innermost; rows may be strided.
        weight: [N, K], x's dtype, K innermost; rows may be strided. Or `shuffle_weight(weight)`.
        bias: [N], x's dtype, or None.

    Returns:
        [..., N], x's dtype.

    Source:
        torch.nn.functional.linear and vLLM's rocm_unquantized_gemm; 03-matrix-multiplication of AMD perf-kernels.
    """
    return torch.nn.functional.linear(x, weight_layout.plain_weight(weight), bias)
