"""Fuse RoPE, the paged KV cache write and its quantization into one launch; kernels: csrc/ops/rope_and_cache.hip.

Replaces vLLM's rotary_embedding and the reshape_and_cache, reshape_and_cache_flash or concat_and_cache_mla after it. A pair is
rotated in float32 and rounded once, to query's dtype, before quantization.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention, rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout

__all__ = ["rope_and_cache", "rope_and_cache_mla"]


def _mla_layout(a) -> CacheLayout:
    """Return the layout of one head with the latent as values and the rotated part as keys."""
    rows = a.kv_cache.unsqueeze(2)
    latent = a.kv_c.shape[1]
    return CacheLayout(rows[..., latent:], rows[..., :latent])


def _mla(a) -> rotation.Parts:
    key, value, cache = a.k_pe.unsqueeze(1), a.kv_c.unsqueeze(1), a.kv_cache
    return rotation.Parts(a.q_pe, key, value, _mla_layout(a), cache, cache, (a.kv_c.shape[1], 0), (a.scale, a.scale))


def _mla_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    dtype = a.q_pe.dtype
    holds = a.q_pe.dim() == 3 and is_wide_float(a.q_pe) and a.q_pe.shape[1] > 0 and a.q_pe.shape[2] > 0
    yield "q_pe", "floating point of 16 bits or more, [T, heads, size]", describe(a.q_pe), holds
    tokens, _, size = a.q_pe.shape
    holds = a.k_pe.dtype == dtype and a.k_pe.shape == (tokens, size)
    yield "k_pe", f"{dtype} [T={tokens}, size={size}]", describe(a.k_pe), holds
    holds = a.kv_c.dtype == dtype and a.kv_c.dim() == 2 and a.kv_c.shape[0] == tokens and a.kv_c.shape[1] > 0
    yield "kv_c", f"{dtype} [T={tokens}, latent size]", describe(a.kv_c), holds
    row = a.kv_c.shape[1] + size
    holds = a.kv_cache.dim() == 3 and a.kv_cache.shape[2] == row and 0 not in a.kv_cache.shape
    yield "kv_cache", f"[pages, N, {row}]", describe(a.kv_cache), holds
    yield rotation.cache_dtype("kv_cache", a.kv_cache, dtype)
    yield from rotation.token_contract(a, tokens, dtype, size)
    yield from attention.scale_contract("scale", a.scale)


def _items(p: rotation.Parts, a) -> int:
    """Return the work items of a token, one per thread."""
    copied = (sum(p.sizes) - a.cos_sin_cache.shape[1]) // attention.VECTOR
    return rotation.first_copied(p, rotation.rotary_vecs(a)) + p.layout.heads * copied


def _plan(parts: Callable[..., rotation.Parts], config, outputs, a, arch: Arch) -> list[Launch]:
    p = parts(a)
    args = rotation.problem_fields(p, a, rotation.rotary_vecs(a))
    return rotation.launches("rope_and_cache", config, p, _items(p, a), args)


def _cost(parts: Callable[..., rotation.Parts], config, a, arch: Arch) -> dict[str, float]:
    p = parts(a)
    return rotation.cost(config, p, _items(p, a), a.cos_sin_cache.shape[1], arch)


# Cases


def _gqa_cases() -> Iterator[Case]:
    """Yield every kernel and layout, both pairings, partial rotation, slot -1, fewer slots, no scales, any page size."""

    def case(name: str, tokens: int, heads: tuple[int, int], size: int, **given) -> Case:
        return Case(name, functools.partial(rotation.heads_inputs, tokens, heads, size, given))

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
    for layout in ("native", "interleaved"):
        yield case(f"pages-{layout}", 7, (2, 2), 32, page=8, layout=layout)
    yield case("unscaled", 3, (2, 1), 64, fp8=True, scaled=False)
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
        rotation.cos_sin(97, size, given.get("cos_dtype", dtype), generator).to(device),
        given.get("is_neox", False),
        rotation.old_cache(
            (pages, page, latent + size), fp8_dtype if is_fp8 else dtype, given.get("padding", 0), generator
        ).to(device),
        rotation.slots(tokens, pages * page, given, generator).to(device),
        torch.tensor([0.021], device=device) if is_fp8 else None,
    )


def _mla_cases() -> Iterator[Case]:
    """Yield every kernel, both pairings, slot -1, fewer slots than tokens, padded pages."""

    def case(name: str, tokens: int, heads: int, **given) -> Case:
        return Case(name, functools.partial(_mla_inputs, tokens, heads, given))

    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            yield case(kind + "-fp8" * fp8, 3, 16, dtype=dtype, fp8=fp8)
    yield case("neox", 2, 3, is_neox=True, cos_dtype=torch.float32)
    yield case("small-padded", 5, 1, sizes=(32, 16), page=3, padding=8, unmapped=1)
    yield case("no-tokens", 0, 4)


def _op(
    parts: Callable[..., rotation.Parts], contract: Callable, cases: Callable, mutates: tuple[str, ...]
) -> Callable:
    return lambda reference: Op(
        reference,
        allocate=lambda a: None,
        contract=contract,
        can_implement=functools.partial(rotation.can_implement, parts),
        configs=rotation.configs,
        cost=functools.partial(_cost, parts),
        plan=functools.partial(_plan, parts),
        problem=functools.partial(rotation.problem, parts),
        cases=cases,
        mutates=mutates,
    )


@_op(rotation.heads_parts, rotation.heads_contract, _gqa_cases, ("query", "key", "key_cache", "value_cache"))
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
    """Rotate query and key in place, and write key and value to their slots of a paged cache.

    Args:
        query: [T, query heads * size] or [T, query heads, size], bf16 or fp16; rotated in place. May be columns of one
            qkv tensor.
        key: [T, heads * size] or [T, heads, size], query's dtype; rotated in place.
        value: [T, heads * size] or [T, heads, size], query's dtype.
        positions: [T], int64.
        cos_sin_cache: [positions, rotary size], query's dtype or float32: cosines, then sines; rotates the first
            elements of a head.
        is_neox: Pair the halves of the rotated part; else neighboring elements.
        key_cache: Native (reshape_and_cache) or packed (reshape_and_cache_flash) layout; query's dtype or e4m3; updated
            in place.
        value_cache: As key_cache.
        slot_mapping: [at most T], int64: cache slots of the first tokens; -1 skips a token.
        k_scale: float32, one element: divides keys of an e4m3 cache; None for 1.
        v_scale: float32, one element: divides values of an e4m3 cache; None for 1.

    Raises:
        ValueError: An argument breaks the contract; nothing is written.

    Source:
        vLLM's `rotary_embedding`, `reshape_and_cache` and `reshape_and_cache_flash`.
    """
    a = rope_and_cache.Arguments(
        query, key, value, positions, cos_sin_cache, is_neox, key_cache, value_cache, slot_mapping, k_scale, v_scale
    )
    p = rotation.heads_parts(a)
    for x in (p.query, p.key):
        rotation.rotate(x, positions, cos_sin_cache, is_neox)
    rotation.write(p.layout, p.key, p.value, slot_mapping, p.scales)


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
    """Rotate q_pe and k_pe in place, and write the rows [kv_c | k_pe] to their slots of a paged MLA cache.

    Args:
        q_pe: [T, heads, size], bf16 or fp16; rows and heads may be strided; rotated in place.
        k_pe: [T, size], q_pe's dtype; rows may be strided; rotated in place.
        kv_c: [T, latent size], q_pe's dtype; rows may be strided.
        positions: [T], int64.
        cos_sin_cache: [positions, rotary size], q_pe's dtype or float32: cosines, then sines; rotates the first
            elements of a head.
        is_neox: Pair the halves of the rotated part; else neighboring elements.
        kv_cache: [pages, N, latent size + size], q_pe's dtype or e4m3; updated in place.
        slot_mapping: [at most T], int64: cache slots of the first tokens; -1 skips a token.
        scale: float32, one element: divides the rows of an e4m3 cache; None for 1.

    Raises:
        ValueError: An argument breaks the contract; nothing is written.

    Source:
        vLLM's `rotary_embedding` and `concat_and_cache_mla`; the MLA decode of RadeonFlow and of AMD perf-kernels.
    """
    p = _mla(
        rope_and_cache_mla.Arguments(q_pe, k_pe, kv_c, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping, scale)
    )
    for x in (p.query, p.key):
        rotation.rotate(x, positions, cos_sin_cache, is_neox)
    rotation.write(p.layout, p.key, p.value, slot_mapping, p.scales)
