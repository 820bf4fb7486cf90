"""Fuse RoPE, the paged KV cache write and its quantization into one launch; kernels: csrc/ops/rope_and_cache.hip.

Replaces vLLM's rotary_embedding and the reshape_and_cache or reshape_and_cache_flash after it. A pair is
rotated in float32 and rounded once, to query's dtype, before quantization.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case, case_maker
from vllm_rocm_ops.ops.shared import rotation

__all__ = ["rope_and_cache"]


def _cases() -> Iterator[Case]:
    """Yield the cases on heads, Llama's, no scales, and an odd page size."""
    case = case_maker(rotation.heads_inputs)
    yield from rotation.heads_cases(case)
    yield case("llama", 2, (16, 1), 128, layout="native")
    yield case("gptj-part", 3, (2, 1), 64, rotary=32, is_neox=False, fp8=True, cos_dtype=torch.float32)
    yield case("page5-padded", 7, (2, 2), 32, page=5, padding=24)
    yield case("unscaled", 3, (2, 1), 64, fp8=True, scaled=False)


@rotation.op(rotation.heads_parts, rotation.heads_contract, _cases, ("query", "key", "key_cache", "value_cache"))
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
