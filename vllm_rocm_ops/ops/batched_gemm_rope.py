"""Multiply few tokens by W_UK per head, and rotate their q_pe in the same launch, with the bits of `rope_and_cache_mla`.

Kernels: csrc/gemm/batched.h and csrc/ops/batched_gemm.hip.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import apart_contract, describe
from vllm_rocm_ops.ops.batched_gemm import (
    TOKENS,
    TRANSPOSED_K,
    WAVES,
    BatchedConfig,
    batched_gemm,
    inputs,
    is_transposed,
    problem_fields,
    token_limit,
)
from vllm_rocm_ops.ops.shared import attention, rotation
from vllm_rocm_ops.ops.shared.gemm import divisor

__all__ = ["batched_gemm_rope"]


def _product(a) -> tuple:
    """Return the arguments of `batched_gemm`."""
    return batched_gemm.Arguments(a.x, a.weights, a.out, None)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from batched_gemm.contract(_product(a))
    (rows, heads, _), dtype, q = a.x.shape, a.x.dtype, a.q_pe
    holds = q.dim() == 3 and q.dtype == dtype and q.shape[0] >= rows and q.shape[1] == heads and q.shape[2] > 0
    yield "q_pe", f"{dtype} [T >= {rows}, heads={heads}, size]", describe(q), holds
    yield apart_contract("q_pe", q)
    yield from rotation.angles_contract(a, q.shape[0], dtype, q.shape[2])


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield "weights are contiguous along N", is_transposed(a)
    yield from batched_gemm.can_implement(_product(a), arch) if is_transposed(a) else ()
    yield attention.can_implement_heads("q_pe", a.q_pe)
    yield from rotation.can_implement_angles(a)


def _blocks(a, arch: Arch) -> int:
    """Return the blocks per head that rotate, 8 pairs per thread."""
    pairs = a.q_pe.shape[0] * (a.cos_sin_cache.shape[1] // (2 * rotation.PAIRS))
    return -(-pairs // (WAVES * arch.wave_lanes))


def _configs(a, arch: Arch) -> list[BatchedConfig]:
    fits = is_transposed(a) and a.x.shape[2] == TRANSPOSED_K and len(a.x) <= TOKENS[-1]
    fits = fits and a.cos_sin_cache.shape[1] % (2 * rotation.PAIRS) == 0
    return batched_gemm.configs(_product(a), arch) if fits else []


def _plan(config: BatchedConfig, outputs: Tensor, a, arch: Arch) -> list[Launch]:
    rows, heads, _ = a.x.shape
    if not len(a.q_pe):
        return []
    threads, blocks = WAVES * arch.wave_lanes, config.blocks if rows else 0
    angles = rotation.angles_fields(a)
    rotated = {**rotation.of_heads(a.q_pe, a.q_pe), "tokens": len(a.q_pe), "rotation": angles}
    rotated["vecs_divisor"] = divisor(angles["rotary_vecs"])
    args = fields("problem", problem_fields(config, outputs, a)) | fields("q_pe", rotated)
    args |= {"first_block": blocks, "threads": threads}
    grid = heads, blocks + _blocks(a, arch), 1
    symbol = f"batched_gemm_rope_{attention.ELEMENTS[a.x.dtype]}_transposed_{token_limit(rows)}"
    return [Launch("batched_gemm", symbol, grid, (threads, 1, 1), args)]


def _problem(a) -> dict[str, object]:
    return {**batched_gemm.problem(_product(a)), "tokens": len(a.q_pe), "rotated": a.cos_sin_cache.shape[1]}


def _cost(config: BatchedConfig, a, arch: Arch) -> dict[str, float]:
    """Return the costs of the product, without which there is no streaming, and the bytes of q_pe."""
    terms, moved = batched_gemm.cost(config, _product(a), arch), 2 * a.q_pe.numel() * a.q_pe.element_size()
    return terms | {"streaming": terms["streaming"] * (len(a.x) > 0), "q_pe": moved / (arch.bandwidth_gb_s * 1e3)}


# Cases


def _inputs(m, heads, n, given, device, generator, fp8_dtype) -> tuple:
    """Return x and q_pe as columns of one tensor, as vLLM has them, unless they are `apart`."""
    k, tokens, size = given.get("k", TRANSPOSED_K), m + given.get("more", 0), given.get("size", 64)
    dtype, rotary = given.get("dtype", torch.bfloat16), given.get("rotary", size)
    _, weights, out, *_ = inputs(m, heads, k, n, {"transposed": True, **given}, device, generator, fp8_dtype)
    q = torch.randn(tokens, heads, k + size, generator=generator).to(dtype).to(device)
    x, q_pe = (part.contiguous() if given.get("apart") else part for part in q.split([k, size], -1))
    positions = torch.randint(0, 97, (tokens,), generator=generator) + given.get("first", 0)
    table = rotation.cos_sin(given.get("first", 0) + 97, rotary, given.get("cos_dtype", dtype), generator)
    return x[:m], weights, q_pe, positions.to(device), table.to(device), given.get("is_neox", False), out


def _cases() -> Iterator[Case]:
    """Yield every kernel, both pairings, partial rotation, more tokens to rotate than to multiply, and none to multiply."""
    case = case_maker(_inputs)
    for dtype, kind in attention.ELEMENTS.items():
        for m in (1, 17, 64):
            yield case(f"{kind}-m{m}", m, 2, 128, dtype=dtype, is_neox=m == 17)
    yield case("deepseek", 3, 16, 512)
    yield case("neox", 16, 3, 64, is_neox=True, cos_dtype=torch.float32, dtype=torch.float16)
    yield case("part", 5, 2, 64, size=48, rotary=32, cos_dtype=torch.float32)
    yield case("part-neox", 5, 2, 64, size=96, rotary=48, is_neox=True)
    yield case("apart", 4, 2, 64, apart=True, size=16)
    yield case("out", 18, 3, 64, out=True, padding=8)
    yield case("more-tokens", 7, 2, 64, more=70)
    yield case("no-product", 0, 2, 64, more=67)
    yield case("long-context", 2, 2, 64, first=2**16)
    yield case("rotary-20", 3, 2, 64, size=24, rotary=20)
    yield case("k-64", 3, 2, 64, k=64)
    yield case("m65", 65, 2, 64)
    yield case("weights-along-k", 3, 2, 64, transposed=False)
    yield case("no-tokens", 0, 2, 64)


@functools.partial(
    Op,
    contract=_contract,
    can_implement=_can_implement,
    allocate=lambda a: batched_gemm.allocate(_product(a)),
    mutates=("q_pe",),
    writes=("out",),
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    cases=_cases,
    meanings=rotation.MEANINGS,
    sums=True,
)
def batched_gemm_rope(
    x: Tensor,
    weights: Tensor,
    q_pe: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `batched_gemm` of x and weights, and rotate q_pe in place.

    Args:
        x: [rows, heads, K], bf16 or fp16; rows and heads may be strided; may have no rows.
        weights: [heads, K, N], x's dtype, contiguous along N, as vLLM stores W_UK_T.
        q_pe: [T >= rows, heads, size], x's dtype; rows and heads may be strided; may be other columns of x's tensor;
            rotated in place.
        cos_sin_cache: [positions, rotary size], x's dtype or float32: cosines, then sines; rotates the first elements
            of a head.
        out: [rows, heads, N], x's dtype, may be strided: written in place of a new tensor.

    Returns:
        [rows, heads, N], x's dtype; an empty tensor if `out` is given.

    Source:
        `rotary_embedding` of q_pe and torch.bmm with W_UK_T in vLLM's MLA backends.
    """
    rotation.rotate(q_pe, positions, cos_sin_cache, is_neox)
    return batched_gemm.reference(x, weights, out)
