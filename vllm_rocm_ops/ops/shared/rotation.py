"""Share code between the ops that apply RoPE and write a paged cache; kernels: csrc/ops/rope_and_cache.hip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention
from vllm_rocm_ops.ops.shared.attention import CacheLayout, CacheStrides
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES, divisor
from vllm_rocm_ops.ops.shared.rowwise import exact

PAIRS = 8  # per thread
THREADS = (64, 256)
WAVE = 64  # largest number of lanes
MEANINGS = {
    "value": "[T, heads * size] or [T, heads, size], query's dtype.",
    "positions": "[T], int64.",
    "cos_sin_cache": "[positions, rotary size], query's dtype or float32: cosines, then sines; rotates the first elements of a head.",
    "is_neox": "Pair the halves of the rotated part; else neighboring elements.",
    "key_cache": "Native (reshape_and_cache) or packed (reshape_and_cache_flash) layout; query's dtype or e4m3; updated in place.",
    "value_cache": "As key_cache.",
    "slot_mapping": "[at most T], int64: cache slots of the first tokens; -1 skips a token.",
    "k_scale": "float32, one element: divides keys of an e4m3 cache; None for 1.",
    "v_scale": "float32, one element: divides values of an e4m3 cache; None for 1.",
}
"""Arguments of ops that rotate or write a cache."""


@dataclass(frozen=True)
class RopeConfig:
    """Threads of a block. A token has the blocks that its heads need."""

    threads: int


def rotate(
    x: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool, height_pairs: int = 0, width_pairs: int = 0
) -> None:
    """Rotate the first elements of the heads of x [tokens, heads, size] in place."""
    size = cos_sin_cache.shape[1]
    angles = exact(cos_sin_cache[positions]).to(exact(x).dtype)
    if height_pairs + width_pairs:
        angles = _by_sections(angles.unflatten(-1, (2, -1)), height_pairs, width_pairs).flatten(1)
    cos, sin = angles.unsqueeze(1).chunk(2, -1)
    rotated = x[..., :size]
    left, right = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
    first, second = exact(left), exact(right)
    left_out, right_out = first * cos - second * sin, second * cos + first * sin
    left.copy_(left_out)
    right.copy_(right_out)


def _by_sections(angles: Tensor, height_pairs: int, width_pairs: int) -> Tensor:
    """Choose each pair's angle by time, height or width: [3, tokens, 2, pairs] -> [tokens, 2, pairs]."""
    pair = torch.arange(angles.shape[-1], device=angles.device)
    is_height = (pair % 3 == 1) & (pair < 3 * height_pairs)
    is_width = (pair % 3 == 2) & (pair < 3 * width_pairs)
    return torch.where(is_width, angles[2], torch.where(is_height, angles[1], angles[0]))


def _quantized(x: Tensor, scale: Tensor | None, cache: Tensor) -> Tensor:
    """Return x in the cache's dtype, divided by the scale of an e4m3 cache."""
    if not attention.is_quantized(cache):
        return x.to(cache.dtype)
    return quantization.cast(exact(x) / (1.0 if scale is None else scale.to(exact(x).dtype).reshape(())), cache.dtype)


def write(layout: CacheLayout, keys: Tensor, values: Tensor, slot_mapping: Tensor, scales: tuple) -> None:
    """Write keys and values to their slots of a cache."""
    held = slot_mapping >= 0
    slots = slot_mapping[held]
    tokens = [x[: len(held)][held] for x in (keys, values)]
    parts = [_quantized(x, scale, layout.key) for x, scale in zip(tokens, scales)]
    layout.write(slots // layout.page_size, slots % layout.page_size, *parts)


# Rules and plans


@dataclass(frozen=True)
class Parts:
    """Heads [tokens, heads, size], their caches, and the tensors that have their addresses.

    `offsets` are the first elements' offsets in the cache tensors.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    layout: CacheLayout
    key_cache: Tensor
    value_cache: Tensor
    offsets: tuple[int, int]
    scales: tuple[Tensor | None, Tensor | None]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the head sizes of keys and values."""
        return self.layout.key_size, self.layout.value_size


def heads_parts(a) -> Parts:
    """Return the parts of an op with key and value caches."""
    layout = CacheLayout(a.key_cache, a.value_cache)
    key_size, value_size = layout.key_size, layout.value_size
    return Parts(
        attention.heads(a.query, key_size),
        attention.heads(a.key, key_size),
        attention.heads(a.value, value_size),
        layout,
        a.key_cache,
        a.value_cache,
        (0, 0),
        (a.k_scale, a.v_scale),
    )


def angles_contract(a, tokens: int, dtype: torch.dtype, size: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of positions, and of cosines and sines."""
    shape = (3, tokens) if (has_three := sections(a) > 0) else (tokens,)
    wanted = f"int64 [{'3, ' * has_three}T={tokens}]"
    yield "positions", wanted, describe(a.positions), a.positions.dtype == torch.int64 and a.positions.shape == shape
    c = a.cos_sin_cache
    holds = c.dim() == 2 and c.dtype in (dtype, torch.float32) and 0 < c.shape[1] <= size and c.shape[1] % 2 == 0
    wanted = f"{dtype} or float32 [positions, an even rotary size of at most {size}]"
    yield "cos_sin_cache", wanted, describe(c), holds and c.shape[0] > 0


def token_contract(a, tokens: int, dtype: torch.dtype, size: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of positions, cosines and sines, and slots."""
    yield from angles_contract(a, tokens, dtype, size)
    wanted, s = f"int64 [at most T={tokens}]", a.slot_mapping
    yield "slot_mapping", wanted, describe(s), s.dim() == 1 and len(s) <= tokens and _is_indices(s, len(s))


def _is_indices(x: Tensor, count: int) -> bool:
    return x.dtype == torch.int64 and x.shape == (count,)


def heads_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of an op with key and value caches."""
    yield from attention.cache_contract(a.key_cache, a.value_cache)
    layout = CacheLayout(a.key_cache, a.value_cache)
    dtype, key_size = a.query.dtype, layout.key_size
    wanted = f"floating point of 16 bits or more, [T, query heads, size={key_size}] or [T, query heads * size]"
    holds = is_wide_float(a.query) and attention.is_heads(a.query, None, None, key_size)
    yield "query", wanted, describe(a.query), holds
    yield attention.cache_dtype_contract("key_cache", a.key_cache, dtype)
    tokens = a.query.shape[0]
    for name, x, size in (("key", a.key, key_size), ("value", a.value, layout.value_size)):
        wanted = f"{dtype} [T={tokens}, {layout.heads}, {size}] or [T, {layout.heads * size}]"
        holds = x.dtype == dtype and attention.is_heads(x, tokens, layout.heads, size)
        yield name, wanted, describe(x), holds
    yield from token_contract(a, tokens, dtype, key_size)
    yield from attention.scale_contract("k_scale", a.k_scale)
    yield from attention.scale_contract("v_scale", a.v_scale)


def can_implement(parts: Callable[..., Parts], a, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield the rules of the kernels."""
    p = parts(a)
    yield "query is bfloat16 or float16", p.query.dtype in attention.ELEMENTS
    yield from attention.can_implement_cache(p.layout, p.query.dtype, arch)
    for name, x in (("query", p.query), ("key", p.key), ("value", p.value)):
        yield attention.can_implement_heads(name, x)
    yield from can_implement_angles(a)
    yield "slot_mapping is contiguous", a.slot_mapping.is_contiguous()


def can_implement_angles(a) -> Iterator[tuple[str, bool]]:
    """Yield the rules of positions, and of cosines and sines."""
    yield f"the rotary size is a multiple of {2 * PAIRS}", a.cos_sin_cache.shape[1] % (2 * PAIRS) == 0
    rows = a.positions[:1].flatten() if sections(a) > 0 else a.positions
    for name, x in (("positions", rows), ("cos_sin_cache", a.cos_sin_cache)):
        yield f"{name} is contiguous", x.is_contiguous()
    yield "cos_sin_cache is 16-byte aligned", a.cos_sin_cache.data_ptr() % 16 == 0


def sections(a) -> int:
    """Return the pairs that an op's arguments rotate by another position than time."""
    return getattr(a, "height_pairs", 0) + getattr(a, "width_pairs", 0)


def rotary_vecs(a) -> int:
    """Return the threads that rotate a head."""
    return a.cos_sin_cache.shape[1] // (2 * PAIRS)


def angles_fields(a) -> dict:
    """Return the fields of `Rotation` in csrc/attention/rotation.h."""
    return {
        "positions": a.positions,
        "cos_sin": a.cos_sin_cache,
        "rotary_vecs": rotary_vecs(a),
        "cos_sin_type": OUT_TYPES[a.cos_sin_cache.dtype],
        "is_neox": int(a.is_neox),
    }


def configs(a, arch: Arch) -> list[RopeConfig]:
    """Return the block sizes, if the rotary size fits."""
    return [RopeConfig(threads) for threads in THREADS if a.cos_sin_cache.shape[1] % (2 * PAIRS) == 0]


def of_heads(view: Tensor, tensor: Tensor) -> dict:
    """Return the fields of `Heads` in csrc/attention/rope_and_cache.h: a view's strides, and the tensor with its address."""
    return {"data": tensor, "token_stride": view.stride(0), "head_stride": view.stride(1)}


def first_copied(p: Parts, lanes: int) -> int:
    """Return the first work item that copies, with `lanes` items per rotated head: no wave both rotates and copies."""
    return -(-(p.query.shape[1] + p.layout.heads) * lanes // WAVE) * WAVE


def problem_fields(p: Parts, a, lanes: int) -> dict:
    """Return the fields of RopeAndCacheProblem, with `lanes` work items per rotated head."""
    (key_size, value_size), rotary = p.sizes, a.cos_sin_cache.shape[1]
    kept_vecs, value_vecs = (key_size - rotary) // attention.VECTOR, value_size // attention.VECTOR

    def of_cache(tensor: Tensor, scale: Tensor | None, offset: int, strides: CacheStrides) -> dict:
        scale = scale if attention.is_quantized(tensor) else None
        return {"data": tensor, "scale": scale, "offset": offset, **vars(strides)}

    return {
        "query": of_heads(p.query, a[0]),
        "key": of_heads(p.key, a[1]),
        "value": of_heads(p.value, a[2]),
        "key_cache": of_cache(p.key_cache, p.scales[0], p.offsets[0], p.layout.key_strides()),
        "value_cache": of_cache(p.value_cache, p.scales[1], p.offsets[1], p.layout.value_strides()),
        **angles_fields(a),
        "slots": a.slot_mapping,
        "num_slots": len(a.slot_mapping),
        "page_size": p.layout.page_size,
        "query_heads": p.query.shape[1],
        "kv_heads": p.layout.heads,
        "kept_vecs": kept_vecs,
        "value_vecs": value_vecs,
        "first_copied": first_copied(p, lanes),
        "page_divisor": divisor(p.layout.page_size),
        "rotary_divisor": divisor(rotary_vecs(a)),
        "kept_divisor": divisor(max(kept_vecs, 1)),
        "value_divisor": divisor(value_vecs),
    }


def launches(name: str, config: RopeConfig, p: Parts, items: int, args: dict, kind: str = "") -> list[Launch]:
    """Return the launch of a kernel with `items` work items per token, one per thread; nothing without tokens."""
    if p.query.shape[0] == 0:
        return []
    symbol = f"{name}_{attention.ELEMENTS[p.query.dtype]}" + "_fp8" * attention.is_quantized(p.key_cache) + kind
    grid = p.query.shape[0], -(-items // config.threads), 1
    given = {**fields("problem", args), "threads": config.threads}
    return [Launch("rope_and_cache", symbol, grid, (config.threads, 1, 1), given)]


def cost(config: RopeConfig, p: Parts, items: int, rotated: int, arch: Arch) -> dict[str, float]:
    """Return the launch and the HBM bytes, with `rotated` elements per head read and written; idle threads break ties."""
    tokens, size = p.query.shape[0], p.query.element_size()
    of_token = (p.query.shape[1] + p.layout.heads) * rotated * 2 * size
    of_token += p.layout.heads * sum(p.sizes) * (size + p.key_cache.element_size())
    return {
        "launch": attention.LAUNCH_US,
        "bytes": tokens * of_token / (arch.bandwidth_gb_s * 1e3),
        "idle": 0.001 * (-items % config.threads) / config.threads + 0.0001 * items / config.threads,
    }


def problem(parts: Callable[..., Parts], a) -> dict[str, object]:
    """Return the key of a tuned row."""
    p = parts(a)
    heads = f"{p.query.shape[1]}:{p.layout.heads}"
    return {"tokens": p.query.shape[0], "heads": heads, "sizes": "+".join(map(str, p.sizes))}


def _items(p: Parts, a) -> int:
    """Return the work items of a token without a norm, one per thread."""
    copied = (sum(p.sizes) - a.cos_sin_cache.shape[1]) // attention.VECTOR
    return first_copied(p, rotary_vecs(a)) + p.layout.heads * copied


def _plan(parts: Callable[..., Parts], config, outputs, a, arch: Arch) -> list[Launch]:
    p = parts(a)
    args = problem_fields(p, a, rotary_vecs(a))
    return launches("rope_and_cache", config, p, _items(p, a), args)


def _cost(parts: Callable[..., Parts], config, a, arch: Arch) -> dict[str, float]:
    p = parts(a)
    return cost(config, p, _items(p, a), a.cos_sin_cache.shape[1], arch)


def op(parts: Callable[..., Parts], contract: Callable, cases: Callable, mutates: tuple[str, ...]) -> Callable:
    """Return a decorator that makes an op without a norm of its reference."""
    return lambda reference: Op(
        reference,
        allocate=lambda a: None,
        contract=contract,
        can_implement=functools.partial(can_implement, parts),
        configs=configs,
        cost=functools.partial(_cost, parts),
        plan=functools.partial(_plan, parts),
        problem=functools.partial(problem, parts),
        cases=cases,
        meanings=MEANINGS,
        mutates=mutates,
    )


# Cases


def cos_sin(positions: int, rotary: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return cosines and sines of random angles [positions, rotary]."""
    angles = torch.rand(positions, rotary // 2, generator=generator) * 6.3
    return torch.cat((angles.cos(), angles.sin()), 1).to(dtype)


def slots(tokens: int, slots: int, given: dict, generator: torch.Generator) -> Tensor:
    """Return a random slot per token, -1 for the second token, and none for `unmapped` last tokens."""
    chosen = torch.randperm(slots, generator=generator)[: tokens - given.get("unmapped", 0)]
    chosen[1:2] = -1
    return chosen


def old_cache(shape: tuple[int, ...], dtype: torch.dtype, padding: int, generator: torch.Generator) -> Tensor:
    """Return a cache with random contents and `padding` elements between pages."""
    size = torch.Size(shape).numel() // shape[0]
    old = torch.randn(shape[0], size + padding, generator=generator).to(dtype)
    return old[:, :size].unflatten(1, shape[1:])


def heads_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """Yield cases of both ops on heads: every kernel and layout, both pairings, partial rotation, slot -1, fewer slots, any page."""
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for layout in ("packed", "native", "interleaved"):
                yield case(f"{kind}{'-fp8' * fp8}-{layout}", 3, (4, 2), 64, dtype=dtype, fp8=fp8, layout=layout)
    yield case("gptj", 3, (2, 1), 64, is_neox=False)
    yield case("part", 3, (3, 1), 96, rotary=32, dtype=torch.float16, cos_dtype=torch.float32)
    for layout in ("native", "interleaved"):
        yield case(f"pages-{layout}", 7, (2, 2), 32, page=8, layout=layout)
    yield case("unmapped", 4, (2, 1), 64, unmapped=2)
    yield case("odd-rotary", 2, (2, 1), 32, rotary=20)
    yield case("long-context", 3, (1, 1), 32, rotary=16, first=2**16)
    yield case("no-tokens", 0, (2, 1), 64)


def heads_inputs(tokens, heads, size, given, device, generator, fp8_dtype) -> tuple:
    """Return the arguments of `rope_and_cache`."""
    query_heads, kv_heads = heads
    dtype, rotary, page = given.get("dtype", torch.bfloat16), given.get("rotary", size), given.get("page", 16)
    is_fp8, pages = given.get("fp8", False), -(-(tokens + 3) // given.get("page", 16))
    first = given.get("first", 0)  # of the positions
    kind = fp8_dtype if is_fp8 else dtype
    rows = torch.randn(tokens, (query_heads + 2 * kv_heads) * size, generator=generator).to(dtype).to(device)
    parts = rows.split([query_heads * size, kv_heads * size, kv_heads * size], 1)
    x = 16 if is_fp8 else 8
    layout = given.get("layout", "packed")
    if layout == "packed":
        both = old_cache((pages, kv_heads, page, 2 * size), kind, given.get("padding", 0), generator).to(device)
        caches = both.transpose(1, 2).split(size, -1)
    else:
        caches = old_cache((pages, kv_heads, size // x, page, x), kind, 0, generator).to(device), None
        of_value = (pages, kv_heads, size, page) if layout == "native" else (pages, kv_heads, page // x, size, x)
        caches = caches[0], old_cache(of_value, kind, 0, generator).to(device)
    scaled = is_fp8 and given.get("scaled", True)
    scales = [torch.tensor([s], device=device) if scaled else None for s in (0.037, 0.011)]
    return (
        *(part.unflatten(1, (-1, size)) if given.get("apart") else part for part in parts),
        (torch.randint(0, 97, (tokens,), generator=generator) + first).to(device),
        cos_sin(first + 97, rotary, given.get("cos_dtype", dtype), generator).to(device),
        given.get("is_neox", True),
        *caches,
        slots(tokens, pages * page, given, generator).to(device),
        *scales,
    )
