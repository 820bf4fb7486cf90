"""Multiply few tokens by one weight per head: the small-M batched GEMM of MLA absorption (W_UK, W_UV).

`batched_gemm_rope` also rotates q_pe in the launch of W_UK, with the bits of `rope_and_cache_mla`. Kernels: csrc/gemm/batched.h and
csrc/ops/batched_gemm.hip.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, is_wide_float, overlaps_itself
from vllm_rocm_ops.ops.families import attention, rotation, skinny_gemm
from vllm_rocm_ops.ops.families.gemm import Operand, Product, divisor

__all__ = ["batched_gemm", "batched_gemm_rope"]

TOKENS = (16, 32, 64)  # token limit, by kernel
ROWS, COLUMNS = 16, 64  # of a tile along N, for weights contiguous along K and along N
TRANSPOSED_K = 128  # of weights contiguous along N
UNIT = skinny_gemm.WAVE_SPLIT_K_UNIT
WAVES = 4
# Cost model in microseconds, never checked on a GPU: loads of a tile, start and end of a block.
TILE_US, BLOCK_US = 1.5, 0.5


@dataclass(frozen=True)
class BatchedConfig:
    """`blocks` share the tiles of a head."""

    blocks: int


def _is_transposed(a) -> bool:
    """Return whether the weights are contiguous along N."""
    return a.weights.stride(2) == 1 and a.weights.shape[2] > 1


def _tiles(a) -> int:
    """Return the tiles per head."""
    return a.weights.shape[2] // (COLUMNS if _is_transposed(a) else ROWS)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield "x", "[rows, heads, K] of 16 bits or more", describe(a.x), a.x.dim() == 3 and is_wide_float(a.x)
    rows, heads, k = a.x.shape
    holds = a.weights.dim() == 3 and a.weights.dtype == a.x.dtype and a.weights.shape[:2] == (heads, k)
    yield "weights", f"{a.x.dtype} [heads={heads}, K={k}, N]", describe(a.weights), holds
    if a.out is not None:
        shape = [rows, heads, a.weights.shape[2]]
        holds = a.out.dtype == a.x.dtype and [*a.out.shape] == shape
        yield "out", f"{a.x.dtype} {shape}", describe(a.out), holds
        yield "out", "without overlapping elements", describe(a.out), not overlaps_itself(a.out)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    rows, heads, k = a.x.shape
    n, strides = a.weights.shape[2], a.weights.stride()
    yield "x is bfloat16 or float16", a.x.dtype in attention.ELEMENTS
    yield f"there are at most {TOKENS[-1]} rows", rows <= TOKENS[-1]
    yield "there are 1 to 65535 heads, and K and N are positive", 0 < heads < 2**16 and 0 < k and 0 < n
    if _is_transposed(a):
        yield f"K is {TRANSPOSED_K} for weights contiguous along N", k == TRANSPOSED_K
        yield f"N is a multiple of {COLUMNS} for weights contiguous along N", n % COLUMNS == 0
        steps = strides[:2]
    else:
        yield "weights are contiguous along K or N", strides[1] == 1 or k == 1
        yield f"K is a multiple of {attention.VECTOR}", k % attention.VECTOR == 0
        yield f"N is a multiple of {ROWS}", n % ROWS == 0
        steps = (strides[0], strides[2])
    yield attention.can_implement_heads("x", a.x)
    yield "weights and their strides are 16-byte aligned", _on_vectors(a.weights, *steps)
    if a.out is not None:
        yield attention.can_implement_heads("out", a.out)
        yield "out's row stride is at least N", rows < 2 or a.out.stride(0) >= n
    reach = (rows * a.x.stride(0), k * strides[1], n * strides[2], rows * _row_step(a))
    yield "a head's tensors span less than 1 GB", all(0 <= step < 2**29 for step in reach)


def _on_vectors(x: Tensor, *strides: int) -> bool:
    address = 0 if x.is_meta else x.data_ptr()
    return address % 16 == 0 and not any(stride % attention.VECTOR for stride in strides)


def _row_step(a) -> int:
    """Return the row stride of the result in elements."""
    return a.x.shape[1] * a.weights.shape[2] if a.out is None else a.out.stride(0)


def _rope_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from _contract(a)
    (rows, heads, _), dtype, q = a.x.shape, a.x.dtype, a.q_pe
    holds = q.dim() == 3 and q.dtype == dtype and q.shape[0] >= rows and q.shape[1] == heads and q.shape[2] > 0
    yield "q_pe", f"{dtype} [T >= {rows}, heads={heads}, size]", describe(q), holds
    yield "q_pe", "without overlapping elements", describe(q), not overlaps_itself(q)
    yield from rotation.angles_contract(a, q.shape[0], dtype, q.shape[2])


def _rope_can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    is_transposed = _is_transposed(a)
    yield "weights are contiguous along N", is_transposed
    yield from _can_implement(a, arch) if is_transposed else ()
    yield attention.can_implement_heads("q_pe", a.q_pe)
    yield from rotation.can_implement_angles(a)
    yield "there are fewer than 2^16 blocks per head", _tiles(a) + _rope_blocks(a, arch) < 2**16


def _rope_blocks(a, arch: Arch) -> int:
    """Return the blocks per head that rotate, 8 pairs per thread."""
    pairs = a.q_pe.shape[0] * (a.cos_sin_cache.shape[1] // (2 * rotation.PAIRS))
    return -(-pairs // (WAVES * arch.wave_lanes))


def _configs(a, arch: Arch) -> list[BatchedConfig]:
    """Return one tile per block and, for streamed tiles, four."""
    if a.weights.shape[2] % (COLUMNS if _is_transposed(a) else ROWS):
        return []
    tiles = _tiles(a)
    counts = (tiles,) if _is_transposed(a) else (tiles, -(-tiles // 4))
    return [BatchedConfig(blocks) for blocks in dict.fromkeys(counts)]


def _rope_configs(a, arch: Arch) -> list[BatchedConfig]:
    fits = _is_transposed(a) and a.x.shape[2] == TRANSPOSED_K and len(a.x) <= TOKENS[-1]
    return _configs(a, arch) if fits and a.cos_sin_cache.shape[1] % (2 * rotation.PAIRS) == 0 else []


def _cost(config: BatchedConfig, a, arch: Arch) -> dict[str, float]:
    """Return the launch, and the longer of rounds of blocks and the weights' HBM bytes."""
    heads, k, n = a.weights.shape
    blocks, resident = heads * config.blocks, 4 * arch.compute_units
    of_block = BLOCK_US + TILE_US * -(-_tiles(a) // config.blocks)
    streaming = max(-(-blocks // resident) * of_block, heads * k * n * 2 / (arch.bandwidth_gb_s * 1e3))
    return {"launch": attention.LAUNCH_US, "streaming": streaming}


def _plan(config: BatchedConfig, outputs: Tensor, a, arch: Arch) -> list[Launch]:
    rows, heads, _ = a.x.shape
    if not rows:
        return []
    threads = WAVES * arch.wave_lanes
    args = fields("problem", _problem_fields(config, outputs, a))
    return [Launch("batched_gemm", _symbol(a), (heads, config.blocks, 1), (threads, 1, 1), args)]


def _rope_plan(config: BatchedConfig, outputs: Tensor, a, arch: Arch) -> list[Launch]:
    rows, heads, _ = a.x.shape
    if not len(a.q_pe):
        return []
    threads, blocks = WAVES * arch.wave_lanes, config.blocks if rows else 0
    angles = rotation.angles_fields(a)
    rotated = {**rotation.of_heads(a.q_pe, a.q_pe), "tokens": len(a.q_pe), "rotation": angles}
    rotated["vecs_divisor"] = divisor(angles["rotary_vecs"])
    args = fields("problem", _problem_fields(config, outputs, a)) | fields("q_pe", rotated)
    args |= {"first_block": blocks, "threads": threads}
    grid = heads, blocks + _rope_blocks(a, arch), 1
    return [Launch("batched_gemm", _symbol(a, "_rope"), grid, (threads, 1, 1), args)]


def _symbol(a, rope: str = "") -> str:
    tokens = next(tokens for tokens in TOKENS if tokens >= a.x.shape[0])
    kind = "transposed" if _is_transposed(a) else "wave_splitk"
    return f"batched_gemm{rope}_{attention.ELEMENTS[a.x.dtype]}_{kind}_{tokens}"


def _problem_fields(config: BatchedConfig, outputs: Tensor, a) -> dict:
    """Return the fields of BatchedProblem in csrc/gemm/batched.h."""
    rows, _, k = a.x.shape
    n, size = a.weights.shape[2], a.x.element_size()
    out = outputs if a.out is None else a.out
    step = a.weights.stride(1 if _is_transposed(a) else 2) * size
    steps = -(-k * size // (skinny_gemm.STEP * UNIT)) * UNIT
    product = Product(out, Operand(a.x, rows, k * size, a.x.stride(0) * size), Operand(a.weights, n, k * size, step))
    gemm = skinny_gemm.arguments(product, (_tiles(a), steps, steps), config.blocks, 0)
    return {
        "gemm": gemm | {"n": max(_row_step(a), n)},
        "a_head_stride": a.x.stride(1) * size,
        "b_head_stride": a.weights.stride(0) * size,
        "out_head_stride": (n if a.out is None else a.out.stride(1)) * size,
    }


def _allocate(a) -> Tensor:
    rows, heads, _ = a.x.shape
    return a.x.new_empty((rows, heads, a.weights.shape[2]) if a.out is None else 0)


def _problem(a) -> dict[str, object]:
    heads, k, n = a.weights.shape
    return {"m": a.x.shape[0], "heads": heads, "n": n, "k": k, "side_by_side": "n" if _is_transposed(a) else "k"}


def _rope_problem(a) -> dict[str, object]:
    return {**_problem(a), "tokens": len(a.q_pe), "rotated": a.cos_sin_cache.shape[1]}


def _rope_cost(config: BatchedConfig, a, arch: Arch) -> dict[str, float]:
    """Return the costs of the product, without which there is no streaming, and the bytes of q_pe."""
    terms, moved = _cost(config, a, arch), 2 * a.q_pe.numel() * a.q_pe.element_size()
    return terms | {"streaming": terms["streaming"] * (len(a.x) > 0), "q_pe": moved / (arch.bandwidth_gb_s * 1e3)}


def _baseline(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Run torch.bmm, with the result where vLLM stores it."""
    found = x.new_empty((*x.shape[:2], weights.shape[2])) if out is None else out
    torch.bmm(x.transpose(0, 1), weights, out=found.transpose(0, 1))
    return found


# Cases


def _inputs(m, heads, k, n, given, device, generator, fp8_dtype) -> tuple:
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


def _cases() -> Iterator[Case]:
    """Yield every kernel, K and N around tiles and steps, tokens around limits, strides, several tiles per block."""

    def case(name: str, m: int, heads: int, k: int, n: int, **given) -> Case:
        return Case(name, functools.partial(_inputs, m, heads, k, n, given))

    for dtype, kind in attention.ELEMENTS.items():
        for m in (1, 17, 64):
            yield case(f"{kind}-m{m}", m, 2, 512, 128, dtype=dtype)
            yield case(f"{kind}-transposed-m{m}", m, 2, TRANSPOSED_K, 128, dtype=dtype, transposed=True)
    yield case("heads-8", 4, 8, 512, 128, padding=64)
    yield case("heads-8-transposed", 16, 8, TRANSPOSED_K, 256, transposed=True, padding=64)
    yield case("k-tail", 5, 3, 8 * 67, 48)
    yield case("k-small", 33, 2, 8, 16)
    yield case("out", 18, 3, 192, 32, out=True)
    yield case("out-transposed", 32, 3, TRANSPOSED_K, 64, out=True, transposed=True, padding=8)
    yield case("n-20", 3, 2, 64, 20)
    yield case("no-tokens", 0, 2, 64, 32)


def _rope_inputs(m, heads, n, given, device, generator, fp8_dtype) -> tuple:
    """Return x and q_pe as columns of one tensor, as vLLM has them, unless they are `apart`."""
    k, tokens, size = given.get("k", TRANSPOSED_K), m + given.get("more", 0), given.get("size", 64)
    dtype, rotary = given.get("dtype", torch.bfloat16), given.get("rotary", size)
    _, weights, out = _inputs(m, heads, k, n, {"transposed": True, **given}, device, generator, fp8_dtype)
    q = torch.randn(tokens, heads, k + size, generator=generator).to(dtype).to(device)
    x, q_pe = (part.contiguous() if given.get("apart") else part for part in q.split([k, size], -1))
    positions = torch.randint(0, 97, (tokens,), generator=generator) + given.get("first", 0)
    table = rotation.cos_sin(given.get("first", 0) + 97, rotary, given.get("cos_dtype", dtype), generator)
    return x[:m], weights, q_pe, positions.to(device), table.to(device), given.get("is_neox", False), out


def _rope_cases() -> Iterator[Case]:
    """Yield every kernel, both pairings, partial rotation, more tokens to rotate than to multiply, and none to multiply."""

    def case(name: str, m: int, heads: int, n: int, **given) -> Case:
        return Case(name, functools.partial(_rope_inputs, m, heads, n, given))

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
    allocate=_allocate,
    writes=("out",),
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    baseline=_baseline,
    cases=_cases,
    sums=True,
)
def batched_gemm(x: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute x[:, h] @ weights[h] for each head h, summed in float32.

    Args:
        x: [rows, heads, K], bf16 or fp16; rows and heads may be strided.
        weights: [heads, K, N], x's dtype, contiguous along K or N, as vLLM stores W_UV and W_UK_T.
        out: [rows, heads, N], x's dtype, may be strided: written in place of a new tensor.

    Returns:
        [rows, heads, N], x's dtype; an empty tensor if `out` is given.

    Raises:
        ValueError: An argument breaks the contract; nothing is written.

    Source:
        torch.bmm in vLLM's MLA backends.
    """
    found = _baseline(x, weights, out)
    return found if out is None else found.new_empty(0)


@functools.partial(
    Op,
    contract=_rope_contract,
    can_implement=_rope_can_implement,
    allocate=_allocate,
    mutates=("q_pe",),
    writes=("out",),
    configs=_rope_configs,
    cost=_rope_cost,
    plan=_rope_plan,
    problem=_rope_problem,
    cases=_rope_cases,
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
        positions: [T], int64.
        cos_sin_cache: [positions, rotary size], x's dtype or float32: cosines, then sines; rotates the first elements
            of a head.
        is_neox: Pair the halves of the rotated part; else neighboring elements.
        out: [rows, heads, N], x's dtype, may be strided: written in place of a new tensor.

    Returns:
        [rows, heads, N], x's dtype; an empty tensor if `out` is given.

    Raises:
        ValueError: An argument breaks the contract; nothing is written.

    Source:
        `rotary_embedding` of q_pe and torch.bmm with W_UK_T in vLLM's MLA backends.
    """
    rotation.rotate(q_pe, positions, cos_sin_cache, is_neox)
    return batched_gemm.reference(x, weights, out)
