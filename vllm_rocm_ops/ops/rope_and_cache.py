"""Rotary position embedding, the write of keys and values to a paged cache and their quantisation, in one launch; kernels:
csrc/ops/rope_and_cache.hip.

What vLLM's rotary_embedding does and reshape_and_cache, reshape_and_cache_flash or concat_and_cache_mla after it. A pair is
rotated in fp32 and rounded once, to the dtype of query, before it is quantised.
"""

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
from vllm_rocm_ops.ops.families import attention
from vllm_rocm_ops.ops.families.attention import CacheLayout, CacheStrides
from vllm_rocm_ops.ops.families.gemm import OUT_TYPES, divisor

__all__ = ["rope_and_cache", "rope_and_cache_mla"]

PAIRS = 8  # that a thread rotates
THREADS = (64, 256)


@dataclass(frozen=True)
class RopeConfig:
    """A block has so many threads. A token has as many blocks as its heads need."""

    threads: int


def _exact(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> None:
    """Rotates the first elements of the heads of x [tokens, heads, size] in place."""
    size = cos_sin_cache.shape[1]
    cos, sin = _exact(cos_sin_cache[positions]).to(_exact(x).dtype).unsqueeze(1).chunk(2, -1)
    rotated = x[..., :size]
    one, two = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
    first, second = _exact(one), _exact(two)
    one_out, two_out = first * cos - second * sin, second * cos + first * sin
    one.copy_(one_out)
    two.copy_(two_out)


def _quantized(x: Tensor, scale: Tensor | None, cache: Tensor) -> Tensor:
    """x as the cache has it."""
    if not attention.is_quantized(cache):
        return x.to(cache.dtype)
    return quantization.cast(_exact(x) / (1.0 if scale is None else scale.to(_exact(x).dtype).reshape(())), cache.dtype)


def _write(layout: CacheLayout, keys: Tensor, values: Tensor, slot_mapping: Tensor, scales: tuple) -> None:
    held = slot_mapping >= 0
    slots = slot_mapping[held]
    tokens = [x[: len(held)][held] for x in (keys, values)]
    parts = [_quantized(x, scale, layout.key) for x, scale in zip(tokens, scales)]
    layout.write(slots // layout.page_size, slots % layout.page_size, *parts)


# What both ops are to the kernels


@dataclass(frozen=True)
class Parts:
    """Heads [tokens, heads, size], the caches that they go to, and the tensors to take their addresses from. The offsets are those
    of the first element in the cache tensors."""

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
        return self.layout.key_size, self.layout.value_size


def _gqa(a) -> Parts:
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


def _mla_layout(a) -> CacheLayout:
    """The latent as values and the rotated part as keys of one head."""
    rows = a.kv_cache.unsqueeze(2)
    latent = a.kv_c.shape[1]
    return CacheLayout(rows[..., latent:], rows[..., :latent])


def _mla(a) -> Parts:
    key, value, cache = a.k_pe.unsqueeze(1), a.kv_c.unsqueeze(1), a.kv_cache
    return Parts(a.q_pe, key, value, _mla_layout(a), cache, cache, (a.kv_c.shape[1], 0), (a.scale, a.scale))


def _token_contract(a, tokens: int, dtype: torch.dtype, size: int) -> Iterator[tuple[str, str, str, bool]]:
    yield "positions", f"int64 [T={tokens}]", describe(a.positions), _is_indices(a.positions, tokens)
    c = a.cos_sin_cache
    holds = c.dim() == 2 and c.dtype in (dtype, torch.float32) and 0 < c.shape[1] <= size and c.shape[1] % 2 == 0
    wanted = f"{dtype} or float32 [positions, an even rotary size of at most {size}]"
    yield "cos_sin_cache", wanted, describe(c), holds and c.shape[0] > 0
    wanted, s = f"int64 [at most T={tokens}]", a.slot_mapping
    yield "slot_mapping", wanted, describe(s), s.dim() == 1 and len(s) <= tokens and _is_indices(s, len(s))


def _is_indices(x: Tensor, count: int) -> bool:
    return x.dtype == torch.int64 and x.shape == (count,)


def _cache_dtype(name: str, cache: Tensor, dtype: torch.dtype) -> tuple[str, str, str, bool]:
    holds = cache.dtype == dtype or attention.is_quantized(cache)
    return name, f"of dtype {dtype} or e4m3", describe(cache), holds


def _gqa_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from attention.cache_contract(a.key_cache, a.value_cache)
    layout = CacheLayout(a.key_cache, a.value_cache)
    dtype, key_size = a.query.dtype, layout.key_size
    wanted = f"of 16 bits or more, [T, query heads, size={key_size}] or [T, query heads * size]"
    holds = is_wide_float(a.query) and attention.is_heads(a.query, None, None, key_size)
    yield "query", wanted, describe(a.query), holds
    yield _cache_dtype("key_cache", a.key_cache, dtype)
    tokens = a.query.shape[0]
    for name, x, size in (("key", a.key, key_size), ("value", a.value, layout.value_size)):
        wanted = f"{dtype} [T={tokens}, {layout.heads}, {size}] or [T, {layout.heads * size}]"
        holds = x.dtype == dtype and attention.is_heads(x, tokens, layout.heads, size)
        yield name, wanted, describe(x), holds
    yield from _token_contract(a, tokens, dtype, key_size)
    yield from attention.scale_contract("k_scale", a.k_scale)
    yield from attention.scale_contract("v_scale", a.v_scale)


def _mla_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    dtype = a.q_pe.dtype
    holds = a.q_pe.dim() == 3 and is_wide_float(a.q_pe) and a.q_pe.shape[1] > 0 and a.q_pe.shape[2] > 0
    yield "q_pe", "of 16 bits or more, [T, heads, size]", describe(a.q_pe), holds
    tokens, _, size = a.q_pe.shape
    holds = a.k_pe.dtype == dtype and a.k_pe.shape == (tokens, size)
    yield "k_pe", f"{dtype} [T={tokens}, size={size}]", describe(a.k_pe), holds
    holds = a.kv_c.dtype == dtype and a.kv_c.dim() == 2 and a.kv_c.shape[0] == tokens and a.kv_c.shape[1] > 0
    yield "kv_c", f"{dtype} [T={tokens}, latent size]", describe(a.kv_c), holds
    row = a.kv_c.shape[1] + size
    holds = a.kv_cache.dim() == 3 and a.kv_cache.shape[2] == row and 0 not in a.kv_cache.shape
    yield "kv_cache", f"[pages, N, {row}]", describe(a.kv_cache), holds
    yield _cache_dtype("kv_cache", a.kv_cache, dtype)
    yield from _token_contract(a, tokens, dtype, size)
    yield from attention.scale_contract("scale", a.scale)


def _envelope(parts: Callable[..., Parts], a, arch: Arch) -> Iterator[tuple[str, bool]]:
    p = parts(a)
    yield "query is bfloat16 or float16", p.query.dtype in attention.ELEMENTS
    yield from attention.cache_envelope(p.layout, p.query.dtype, arch)
    for name, x in (("query", p.query), ("key", p.key), ("value", p.value)):
        yield attention.heads_envelope(name, x)
    rotary = a.cos_sin_cache.shape[1]
    yield f"the rotary size is a multiple of {2 * PAIRS}", rotary % (2 * PAIRS) == 0
    for name in ("positions", "cos_sin_cache", "slot_mapping"):
        yield f"{name} is contiguous", getattr(a, name).is_contiguous()
    address = 0 if a.cos_sin_cache.is_meta else a.cos_sin_cache.data_ptr()
    yield "cos_sin_cache is 16-byte aligned", address % 16 == 0
    yield "there are fewer than 2^31 tokens", p.query.shape[0] < 2**31


def _configs(a, arch: Arch) -> list[RopeConfig]:
    return [RopeConfig(threads) for threads in THREADS if a.cos_sin_cache.shape[1] % (2 * PAIRS) == 0]


def _items(p: Parts, rotary: int) -> int:
    """Of a token: what a thread does."""
    key_size, value_size = p.sizes
    rotated = (p.query.shape[1] + p.layout.heads) * (rotary // (2 * PAIRS))
    return rotated + p.layout.heads * ((key_size - rotary + value_size) // attention.VECTOR)


def _plan(parts: Callable[..., Parts], config: RopeConfig, outputs, a, arch: Arch) -> list[Launch]:
    p, rotary = parts(a), a.cos_sin_cache.shape[1]
    tokens = p.query.shape[0]
    if tokens == 0:
        return []
    key_size, value_size = p.sizes
    rotary_vecs, value_vecs = rotary // (2 * PAIRS), value_size // attention.VECTOR
    kept_vecs = (key_size - rotary) // attention.VECTOR

    def of_heads(view: Tensor, tensor: Tensor) -> dict:
        return {"data": tensor, "token_stride": view.stride(0), "head_stride": view.stride(1)}

    def of_cache(tensor: Tensor, scale: Tensor | None, offset: int, strides: CacheStrides) -> dict:
        scale = scale if attention.is_quantized(tensor) else None
        return {"data": tensor, "scale": scale, "offset": offset, **vars(strides)}

    args = {
        "query": of_heads(p.query, a[0]),
        "key": of_heads(p.key, a[1]),
        "value": of_heads(p.value, a[2]),
        "key_cache": of_cache(p.key_cache, p.scales[0], p.offsets[0], p.layout.key_strides()),
        "value_cache": of_cache(p.value_cache, p.scales[1], p.offsets[1], p.layout.value_strides()),
        "positions": a.positions,
        "cos_sin": a.cos_sin_cache,
        "slots": a.slot_mapping,
        "num_slots": len(a.slot_mapping),
        "page_size": p.layout.page_size,
        "query_heads": p.query.shape[1],
        "kv_heads": p.layout.heads,
        "rotary_vecs": rotary_vecs,
        "kept_vecs": kept_vecs,
        "value_vecs": value_vecs,
        "cos_sin_type": OUT_TYPES[a.cos_sin_cache.dtype],
        "is_neox": int(a.is_neox),
        "page_divisor": divisor(p.layout.page_size),
        "rotary_divisor": divisor(rotary_vecs),
        "kept_divisor": divisor(max(kept_vecs, 1)),
        "value_divisor": divisor(value_vecs),
    }
    symbol = f"rope_and_cache_{attention.ELEMENTS[p.query.dtype]}"
    symbol += "_fp8" if attention.is_quantized(p.key_cache) else ""
    grid = (tokens, -(-_items(p, rotary) // config.threads), 1)
    return [
        Launch(
            "rope_and_cache",
            symbol,
            grid,
            (config.threads, 1, 1),
            {**fields("problem", args), "threads": config.threads},
        )
    ]


def _cost(parts: Callable[..., Parts], config: RopeConfig, a, arch: Arch) -> dict[str, float]:
    """A launch and the bytes; idle threads of blocks break ties."""
    p, rotary = parts(a), a.cos_sin_cache.shape[1]
    tokens, size = p.query.shape[0], p.query.element_size()
    of_token = (p.query.shape[1] + p.layout.heads) * rotary * 2 * size
    of_token += p.layout.heads * sum(p.sizes) * (size + p.key_cache.element_size())
    items = _items(p, rotary)
    return {
        "launch": attention.LAUNCH_US,
        "bytes": tokens * of_token / (arch.bandwidth_gb_s * 1e3),
        "idle": 0.001 * (-items % config.threads) / config.threads + 0.0001 * items / config.threads,
    }


def _problem(parts: Callable[..., Parts], a) -> dict[str, object]:
    p = parts(a)
    heads = f"{p.query.shape[1]}:{p.layout.heads}"
    return {"tokens": p.query.shape[0], "heads": heads, "sizes": "+".join(map(str, p.sizes))}


# Cases


def _cos_sin(positions: int, rotary: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    angles = torch.rand(positions, rotary // 2, generator=generator) * 6.3
    return torch.cat((angles.cos(), angles.sin()), 1).to(dtype)


def _slots(tokens: int, slots: int, given: dict, generator: torch.Generator) -> Tensor:
    """Each token in a slot of its own, the second one in none; of the last tokens some may be left."""
    chosen = torch.randperm(slots, generator=generator)[: tokens - given.get("unmapped", 0)]
    chosen[1:2] = -1
    return chosen


def _cache(shape: tuple[int, ...], dtype: torch.dtype, padding: int, generator: torch.Generator) -> Tensor:
    """Old contents; `padding` elements lie between pages."""
    size = torch.Size(shape).numel() // shape[0]
    old = torch.randn(shape[0], size + padding, generator=generator).to(dtype)
    return old[:, :size].unflatten(1, shape[1:])


def _gqa_inputs(tokens, heads, size, given, device, generator, fp8_dtype) -> tuple:
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
        both = _cache((pages, kv_heads, page, 2 * size), kind, given.get("padding", 0), generator).to(device)
        caches = both.transpose(1, 2).split(size, -1)
    else:
        caches = _cache((pages, kv_heads, size // x, page, x), kind, 0, generator).to(device), None
        of_value = (pages, kv_heads, size, page) if layout == "native" else (pages, kv_heads, page // x, size, x)
        caches = caches[0], _cache(of_value, kind, 0, generator).to(device)
    scales = [torch.tensor([s], device=device) if is_fp8 else None for s in (0.037, 0.011)]
    return (
        *(part.unflatten(1, (-1, size)) if given.get("apart") else part for part in parts),
        (torch.randint(0, 97, (tokens,), generator=generator) + first).to(device),
        _cos_sin(first + 97, rotary, given.get("cos_dtype", dtype), generator).to(device),
        given.get("is_neox", True),
        *caches,
        _slots(tokens, pages * page, given, generator).to(device),
        *scales,
    )


def _gqa_cases() -> Iterator[Case]:
    """Every kernel and layout, both kinds of pairs, parts of heads rotated, slot -1, fewer slots than tokens, any page size."""

    def case(name: str, tokens: int, heads: tuple[int, int], size: int, **given) -> Case:
        return Case(name, functools.partial(_gqa_inputs, tokens, heads, size, given))

    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            label = kind + "-fp8" * fp8
            for layout in ("packed", "native", "interleaved"):
                yield case(f"{label}-{layout}", 3, (4, 2), 64, dtype=dtype, fp8=fp8, layout=layout)
    yield case("llama", 2, (16, 1), 128, layout="native")
    yield case("gptj", 3, (2, 1), 64, is_neox=False)
    yield case("gptj-part", 3, (2, 1), 64, rotary=32, is_neox=False, fp8=True, cos_dtype=torch.float32)
    yield case("part", 3, (3, 1), 96, rotary=32, dtype=torch.float16, cos_dtype=torch.float32)
    yield case("page5-padded", 7, (2, 2), 32, page=5, padding=24)
    yield case("unmapped", 4, (2, 1), 64, unmapped=2)
    yield case("odd-rotary", 2, (2, 1), 32, rotary=20)
    yield case("long-context", 3, (1, 1), 32, rotary=16, first=2**16)
    yield case("no-tokens", 0, (2, 1), 64)


def _mla_inputs(tokens, heads, given, device, generator, fp8_dtype) -> tuple:
    dtype, page, (latent, size) = (
        given.get("dtype", torch.bfloat16),
        given.get("page", 16),
        given.get("sizes", (512, 64)),
    )
    is_fp8, pages = given.get("fp8", False), -(-(tokens + 3) // given.get("page", 16))

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    kv = rows(tokens, latent + size)
    return (
        rows(tokens, heads, 2 * size)[..., size:],
        kv[:, latent:],
        kv[:, :latent],
        torch.randint(0, 97, (tokens,), generator=generator).to(device),
        _cos_sin(97, size, given.get("cos_dtype", dtype), generator).to(device),
        given.get("is_neox", False),
        _cache((pages, page, latent + size), fp8_dtype if is_fp8 else dtype, given.get("padding", 0), generator).to(
            device
        ),
        _slots(tokens, pages * page, given, generator).to(device),
        torch.tensor([0.021], device=device) if is_fp8 else None,
    )


def _mla_cases() -> Iterator[Case]:
    """Every kernel, both kinds of pairs, slot -1, fewer slots than tokens, pages apart."""

    def case(name: str, tokens: int, heads: int, **given) -> Case:
        return Case(name, functools.partial(_mla_inputs, tokens, heads, given))

    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            yield case(kind + "-fp8" * fp8, 3, 16, dtype=dtype, fp8=fp8)
    yield case("neox", 2, 3, is_neox=True, cos_dtype=torch.float32)
    yield case("small-padded", 5, 1, sizes=(32, 16), page=3, padding=8, unmapped=1)
    yield case("no-tokens", 0, 4)


def _op(parts: Callable[..., Parts], contract: Callable, cases: Callable, mutates: tuple[str, ...]) -> Callable:
    return lambda reference: Op(
        reference,
        allocate=lambda a: None,
        contract=contract,
        envelope=functools.partial(_envelope, parts),
        configs=_configs,
        cost=functools.partial(_cost, parts),
        plan=functools.partial(_plan, parts),
        problem=functools.partial(_problem, parts),
        cases=cases,
        mutates=mutates,
    )


@_op(_gqa, _gqa_contract, _gqa_cases, ("query", "key", "key_cache", "value_cache"))
def rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Rotates query and key in place, and writes key and value to their slots of a paged cache.

    query [T, query heads * size], key and value [T, heads * size] bf16 or fp16, also [T, heads, size], which may be columns of one
    tensor; positions [T] int64; cos_sin_cache [positions, rotary size] of this dtype or float32, cosines and then sines of
    the first elements of a head, of which is_neox pairs halves, else neighbours. key_cache and value_cache are as
    reshape_and_cache (native) or reshape_and_cache_flash (packed) of vLLM take them, of this dtype or e4m3 with the scales
    (float32, one element, default 1), by which values are divided. slot_mapping int64 has the slots of the first tokens; -1 is none.
    """
    a = rope_and_cache.Arguments(
        query, key, value, positions, cos_sin_cache, is_neox, key_cache, value_cache, slot_mapping, k_scale, v_scale
    )
    p = _gqa(a)
    for x in (p.query, p.key):
        _rotate(x, positions, cos_sin_cache, is_neox)
    _write(p.layout, p.key, p.value, slot_mapping, p.scales)


@_op(_mla, _mla_contract, _mla_cases, ("q_pe", "k_pe", "kv_cache"))
def rope_and_cache_mla(
    q_pe: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    scale: Tensor | None = None,
) -> None:
    """Rotates q_pe and k_pe in place, and writes the rows [kv_c | k_pe] to their slots of a paged MLA cache.

    q_pe [T, heads, size], k_pe [T, size], kv_c [T, latent size] bf16 or fp16, rows and heads may be strided; kv_cache [pages, N,
    latent size + size] of this dtype or e4m3 with one scale. The rest is as of `rope_and_cache`.
    """
    p = _mla(
        rope_and_cache_mla.Arguments(q_pe, k_pe, kv_c, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping, scale)
    )
    for x in (p.query, p.key):
        _rotate(x, positions, cos_sin_cache, is_neox)
    _write(p.layout, p.key, p.value, slot_mapping, p.scales)
