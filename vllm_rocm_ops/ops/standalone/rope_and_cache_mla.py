"""Fuse RoPE and the write of a paged MLA cache into one launch; kernels: csrc/ops/rope_and_cache.hip.

Replaces vLLM's rotary_embedding and the concat_and_cache_mla after it, with the rounding of `rope_and_cache`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case, case_maker
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention, rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout

__all__ = ["rope_and_cache_mla"]


def _layout(a) -> CacheLayout:
    """Return the layout of one head with the latent as values and the rotated part as keys."""
    rows = a.kv_cache.unsqueeze(2)
    latent = a.kv_c.shape[1]
    return CacheLayout(rows[..., latent:], rows[..., :latent])


def _parts(a) -> rotation.Parts:
    key, value, cache = a.k_pe.unsqueeze(1), a.kv_c.unsqueeze(1), a.kv_cache
    return rotation.Parts(a.q_pe, key, value, _layout(a), cache, cache, (a.kv_c.shape[1], 0), (a.scale, a.scale))


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
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
    yield attention.cache_dtype_contract("kv_cache", a.kv_cache, dtype)
    yield from rotation.token_contract(a, tokens, dtype, size)
    yield from attention.scale_contract("scale", a.scale)


def _inputs(tokens, heads, given, device, generator, fp8_dtype) -> tuple:
    dtype, page, (latent, size) = (
        given.get("dtype", torch.bfloat16),
        given.get("page", 16),
        given.get("sizes", (512, 64)),
    )
    is_fp8, pages = given.get("fp8", False), -(-(tokens + 3) // page)

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


def _cases() -> Iterator[Case]:
    """Yield every kernel, both pairings, slot -1, fewer slots than tokens, padded pages."""
    case = case_maker(_inputs)
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            yield case(kind + "-fp8" * fp8, 3, 16, dtype=dtype, fp8=fp8)
    yield case("neox", 2, 3, is_neox=True, cos_dtype=torch.float32)
    yield case("small-padded", 5, 1, sizes=(32, 16), page=3, padding=8, unmapped=1)
    yield case("no-tokens", 0, 4)


@rotation.op(_parts, _contract, _cases, ("q_pe", "k_pe", "kv_cache"))
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
        cos_sin_cache: [positions, rotary size], q_pe's dtype or float32: cosines, then sines; rotates the first
            elements of a head.
        kv_cache: [pages, N, latent size + size], q_pe's dtype or e4m3; updated in place.
        scale: float32, one element: divides the rows of an e4m3 cache; None for 1.

    Source:
        vLLM's `rotary_embedding` and `concat_and_cache_mla`; the MLA decode of RadeonFlow and of AMD perf-kernels.
    """
    p = _parts(
        rope_and_cache_mla.Arguments(q_pe, k_pe, kv_c, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping, scale)
    )
    for x in (p.query, p.key):
        rotation.rotate(x, positions, cos_sin_cache, is_neox)
    rotation.write(p.layout, p.key, p.value, slot_mapping, p.scales)
