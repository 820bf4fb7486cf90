"""Multiply few tokens by one weight per head: the small-M batched GEMM of MLA absorption (W_UK, W_UV).

With `out_scales` W_UV's result is quantized for o_proj, in the same launch. Kernels: csrc/gemm/batched.h, batched_quant.h.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, Workspace, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import apart_contract, describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention, rowwise, skinny_gemm
from vllm_rocm_ops.ops.shared.gemm import BLOCK, Operand, Product

__all__ = ["batched_gemm"]

QUANT_MODULE = "batched_gemm_quant"  # its kernels, with out_scales
TOKENS = (16, 32, 64)  # token limit, by kernel
ROWS, COLUMNS = 16, 64  # of a tile along N, for weights contiguous along K and along N
TRANSPOSED_K = 128  # of weights contiguous along N
UNIT = skinny_gemm.WAVE_SPLIT_K_UNIT
WAVES = 4
# Cost model in microseconds, never checked on a GPU: loads of a tile, start and end of a block.
TILE_US, BLOCK_US = 1.5, 0.5
ARRIVAL_US = 1.0  # products are stored, counted, and loaded by the head's last block
OUT_VECTOR = 8  # bytes per store of a quantized result


@dataclass(frozen=True)
class BatchedConfig:
    """`blocks` share the tiles of a head."""

    blocks: int


def is_transposed(a) -> bool:
    """True if the weights are contiguous along N."""
    return a.weights.stride(2) == 1 and a.weights.shape[2] > 1


def tiles(a) -> int:
    """Return the tiles per head."""
    return a.weights.shape[2] // (COLUMNS if is_transposed(a) else ROWS)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield "x", "[rows, heads, K] of 16 bits or more", describe(a.x), a.x.dim() == 3 and is_wide_float(a.x)
    rows, heads, k = a.x.shape
    holds = a.weights.dim() == 3 and a.weights.dtype == a.x.dtype and a.weights.shape[:2] == (heads, k)
    yield "weights", f"{a.x.dtype} [heads={heads}, K={k}, N]", describe(a.weights), holds
    quantizes = a.out_scales is not None
    if quantizes:
        yield "weights", f"N={BLOCK} columns with out_scales", describe(a.weights), a.weights.shape[2] == BLOCK
        yield "out", "a tensor with out_scales", "None", a.out is not None
        holds = a.out_scales.dtype == torch.float32 and a.out_scales.shape == (rows, heads)
        yield "out_scales", f"float32 {[rows, heads]}", describe(a.out_scales), holds
        yield apart_contract("out_scales", a.out_scales)
    if a.out is not None:
        shape = [rows, heads, a.weights.shape[2]]
        dtype, holds = ("e4m3", attention.is_quantized(a.out)) if quantizes else (a.x.dtype, a.out.dtype == a.x.dtype)
        yield "out", f"{dtype} {shape}", describe(a.out), holds and [*a.out.shape] == shape
        yield apart_contract("out", a.out)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    rows, heads, k = a.x.shape
    n, strides = a.weights.shape[2], a.weights.stride()
    yield "x is bfloat16 or float16", a.x.dtype in attention.ELEMENTS
    yield f"there are at most {TOKENS[-1]} rows", rows <= TOKENS[-1]
    yield "there are 1 to 65535 heads, and K and N are positive", 0 < heads < 2**16 and 0 < k and 0 < n
    if is_transposed(a):
        yield f"K is {TRANSPOSED_K} for weights contiguous along N", k == TRANSPOSED_K
        yield f"N is a multiple of {COLUMNS} for weights contiguous along N", n % COLUMNS == 0
        steps = strides[:2]
    else:
        yield "weights are contiguous along K or N", strides[1] == 1 or k == 1
        yield f"K is a multiple of {attention.VECTOR}", k % attention.VECTOR == 0
        yield f"N is a multiple of {ROWS}", n % ROWS == 0
        steps = (strides[0], strides[2])
    yield attention.can_implement_heads("x", a.x)
    yield "weights and their strides are 16-byte aligned", attention.on_vectors(a.weights, *steps)
    if a.out_scales is not None:
        yield "weights are contiguous along K with out_scales", not is_transposed(a)
        yield f"out is {arch.fp8_dtype}, the FP8 dtype of {arch.name}", a.out.dtype == arch.fp8_dtype
        aligned = attention.on_vectors(a.out, *a.out.stride()[:2], elements=OUT_VECTOR)
        yield f"out's heads are contiguous and {OUT_VECTOR}-byte aligned", a.out.stride(2) == 1 and aligned
    elif a.out is not None:
        yield attention.can_implement_heads("out", a.out)
        yield "out's row stride is at least N", rows < 2 or a.out.stride(0) >= n
    reach = (rows * a.x.stride(0), k * strides[1], n * strides[2], rows * _row_step(a))
    yield "a head's tensors span less than 1 GB", all(0 <= step < 2**29 for step in reach)


def _row_step(a) -> int:
    """Return the row stride of the result in elements."""
    return a.x.shape[1] * a.weights.shape[2] if a.out is None else a.out.stride(0)


def _configs(a, arch: Arch) -> list[BatchedConfig]:
    """Return one tile per block and, for streamed tiles without quantization, four."""
    if a.weights.shape[2] % (COLUMNS if is_transposed(a) else ROWS):
        return []
    count, quantizes = tiles(a), a.out_scales is not None
    if quantizes and is_transposed(a):
        return []
    counts = (count,) if quantizes or is_transposed(a) else (count, -(-count // 4))
    return [BatchedConfig(blocks) for blocks in dict.fromkeys(counts)]


def _cost(config: BatchedConfig, a, arch: Arch) -> dict[str, float]:
    """Return the launch, the longer of rounds of blocks and the weights' HBM bytes, and the last block's quantization."""
    heads, k, n = a.weights.shape
    blocks, resident = heads * config.blocks, 4 * arch.compute_units
    of_block = BLOCK_US + TILE_US * -(-tiles(a) // config.blocks)
    streaming = max(-(-blocks // resident) * of_block, heads * k * n * 2 / (arch.bandwidth_gb_s * 1e3))
    arrival = {} if a.out_scales is None else {"arrival": ARRIVAL_US}
    return {"launch": attention.LAUNCH_US, "streaming": streaming, **arrival}


def _plan(config: BatchedConfig, outputs: Tensor, a, arch: Arch) -> list[Launch]:
    rows, heads, _ = a.x.shape
    if not rows:
        return []
    n, args = a.weights.shape[2], problem_fields(config, outputs, a)
    module, kind, tokens = "batched_gemm", "_transposed" if is_transposed(a) else "_wave_splitk", token_limit(rows)
    if a.out_scales is not None:
        module, kind = QUANT_MODULE, ""
        args["gemm"] |= {"partials": Workspace(heads * tokens * n * 4), "counters": Counters(heads)}
        row, head = a.out_scales.stride()
        args |= {"out_stride": a.out.stride(0), "scales": a.out_scales}
        args |= {"scales_stride": row, "scales_head_stride": head}
    symbol = f"{module}_{attention.ELEMENTS[a.x.dtype]}{kind}_{tokens}"
    grid, threads = (heads, config.blocks, 1), WAVES * arch.wave_lanes
    return [Launch(module, symbol, grid, (threads, 1, 1), fields("problem", args))]


def token_limit(rows: int) -> int:
    """Return the token limit of the kernel for this many rows."""
    return next(tokens for tokens in TOKENS if tokens >= rows)


def problem_fields(config: BatchedConfig, outputs: Tensor, a) -> dict:
    """Return the fields of BatchedProblem in csrc/gemm/batched.h."""
    rows, _, k = a.x.shape
    n, size, along_n = a.weights.shape[2], a.x.element_size(), is_transposed(a)
    out = outputs if a.out is None else a.out
    step = a.weights.stride(1 if along_n else 2) * size
    steps = -(-k * size // (skinny_gemm.STEP * UNIT)) * UNIT
    left, right = Operand(a.x, rows, k * size, a.x.stride(0) * size), Operand(a.weights, n, k * size, step)
    product = Product(out, left, right, rounds_to=a.x.dtype)
    gemm = skinny_gemm.arguments(product, (tiles(a), steps, steps), config.blocks, 0)
    return {
        "gemm": gemm | {"n": max(_row_step(a), n)},
        "a_head_stride": a.x.stride(1) * size,
        "b_head_stride": a.weights.stride(0) * size,
        "out_head_stride": (n if a.out is None else a.out.stride(1)) * out.element_size(),
    }


def _allocate(a) -> Tensor:
    rows, heads, _ = a.x.shape
    return a.x.new_empty((rows, heads, a.weights.shape[2]) if a.out is None else 0)


def _problem(a) -> dict[str, object]:
    heads, k, n = a.weights.shape
    side = "n" if is_transposed(a) else "k"
    return {"m": a.x.shape[0], "heads": heads, "n": n, "k": k, "side_by_side": side, "quant": a.out_scales is not None}


def _baseline(x: Tensor, weights: Tensor, out: Tensor | None = None, out_scales: Tensor | None = None) -> Tensor:
    """Run torch.bmm, with the result where vLLM stores it, and the quantization."""
    if out_scales is not None:
        product = torch.bmm(x.transpose(0, 1), weights).transpose(0, 1).flatten(1)
        values, scales = rowwise.per_block(product, out.dtype, None, BLOCK, False)
        out.view(torch.uint8).copy_(values.view(torch.uint8).view(out.shape))
        out_scales.copy_(scales)
        return out
    result = x.new_empty((*x.shape[:2], weights.shape[2])) if out is None else out
    torch.bmm(x.transpose(0, 1), weights, out=result.transpose(0, 1))
    return result


# Cases


def inputs(m, heads, k, n, given, device, generator, fp8_dtype) -> tuple:
    """Return x, weights and `out` of a case, as vLLM stores them."""
    dtype, extra = given.get("dtype", torch.bfloat16), given.get("padding", 0)
    x = torch.randn(m, heads, k + extra, generator=generator).to(dtype).to(device)[..., :k]
    both = torch.randn(heads, n + extra, k, generator=generator).to(dtype)  # as vLLM stores both projections
    if given.get("transposed"):
        both = torch.randn(heads, k + extra, n, generator=generator).to(dtype).to(device)
        weight = both[:, :k]
    else:
        weight = both.to(device)[:, :n].transpose(1, 2)
    out = None
    if given.get("out"):
        out = torch.full((m, heads + 1, n + 8), math.nan).to(dtype).to(device)[:, 1:, :n]
    return x, weight, out


def _quantized(m, heads, k, given, device, generator, fp8_dtype) -> tuple:
    extra = given.get("padding", 0)
    x, weight, _ = inputs(m, heads, k, BLOCK, given, device, generator, fp8_dtype)
    x *= given.get("factor", 1.0)
    x[: m // 2] *= not given.get("zeros")
    out = torch.full((m, heads + bool(extra), BLOCK + extra), math.nan).to(fp8_dtype).to(device)
    scales = torch.full((heads, m) if given.get("columns") else (m, heads), math.nan, device=device)
    return x, weight, out[:, bool(extra) :, :BLOCK], scales.t() if given.get("columns") else scales


def _cases() -> Iterator[Case]:
    """Yield every kernel, K and N around tiles and steps, tokens around limits, strides, several tiles per block.

    With quantization also both orders of scales, rows of zeros, and results beyond a scale's limits.
    """
    case = case_maker(inputs)

    def quant(name: str, m: int, heads: int, k: int, **given) -> Case:
        return Case(f"quant-{name}", functools.partial(_quantized, m, heads, k, given))

    for dtype, kind in attention.ELEMENTS.items():
        for m in (1, 17, 64):
            yield case(f"{kind}-m{m}", m, 2, 512, 128, dtype=dtype)
            yield quant(f"{kind}-m{m}", m, 2, 512, dtype=dtype)
            yield case(f"{kind}-transposed-m{m}", m, 2, TRANSPOSED_K, 128, dtype=dtype, transposed=True)
    yield case("heads-8", 4, 8, 512, 128, padding=64)
    yield case("heads-8-transposed", 16, 8, TRANSPOSED_K, 256, transposed=True, padding=64)
    yield case("k-tail", 5, 3, 8 * 67, 48)
    yield case("k-small", 33, 2, 8, 16)
    yield case("out", 18, 3, 192, 32, out=True)
    yield case("out-transposed", 32, 3, TRANSPOSED_K, 64, out=True, transposed=True, padding=8)
    yield case("n-20", 3, 2, 64, 20)
    yield case("no-tokens", 0, 2, 64, 32)
    yield quant("columns", 8, 8, 512, columns=True)
    yield quant("k-tail", 5, 3, 8 * 67, padding=16)
    yield quant("k-small", 33, 2, 8)
    yield quant("k-long", 16, 1, 1024 + 32)
    yield quant("zeros", 4, 2, 64, zeros=True)
    yield quant("small", 3, 2, 64, factor=2.0**-40)
    yield quant("large", 3, 2, 64, factor=2.0**100)
    yield quant("transposed", 3, 2, TRANSPOSED_K, transposed=True)
    yield quant("no-tokens", 0, 2, 64)


@functools.partial(
    Op,
    contract=_contract,
    can_implement=_can_implement,
    allocate=_allocate,
    writes=("out", "out_scales"),
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    baseline=_baseline,
    cases=_cases,
    sums=True,
    product=True,
)
def batched_gemm(x: Tensor, weights: Tensor, out: Tensor | None = None, out_scales: Tensor | None = None) -> Tensor:
    """Compute x[:, h] @ weights[h] for each head h, summed in float32, optionally quantized with a scale per head.

    Args:
        x: [rows, heads, K], bf16 or fp16; rows and heads may be strided.
        weights: [heads, K, N], x's dtype, contiguous along K or N, as vLLM stores W_UV and W_UK_T.
        out: [rows, heads, N], x's dtype, or e4m3 with `out_scales`, may be strided: written in place of a new tensor.
        out_scales: [rows, heads], float32, may be strided, for N = 128: written. The result is rounded to x's dtype and
            quantized: a scale is the largest magnitude over e4m3's limit, at least 1 / (512 * limit).

    Returns:
        [rows, heads, N], x's dtype; an empty tensor if `out` is given.

    Source:
        torch.bmm in vLLM's MLA backends, and per_token_group_quant of o_proj's input.
    """
    result = _baseline(x, weights, out, out_scales)
    return result if out is None else x.new_empty(0)
