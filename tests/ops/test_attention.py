"""The ops of attention: bugs that their cases catch, and what no case of test_ops.py says."""

from __future__ import annotations

import pytest
from test_planted_bugs import WRONG, kernels, plant, require_caught  # noqa: F401

from vllm_rocm_ops import ops

LEAVES = "leaves another "

# As in test_planted_bugs.py.
BUGS = {
    "pairs rotated the wrong way": (
        "ops/rope_and_cache.hip",
        "rounded_product(x, cos) - rounded_product(y, sin), rounded_product(y, cos) + rounded_product(x, sin)",
        "rounded_product(x, cos) + rounded_product(y, sin), rounded_product(y, cos) - rounded_product(x, sin)",
        ops.rope_and_cache,
        "gptj",
        "gfx942",
        LEAVES + "query",
    ),
    "halves rotated as neighbours": (
        "ops/rope_and_cache.hip",
        "p.is_neox ? vec * kChunk : 2 * vec * kChunk",
        "2 * vec * kChunk",
        ops.rope_and_cache_mla,
        "neox",
        "gfx950",
        LEAVES + "q_pe|argument",
    ),
    "keys unrotated in the cache": (
        "ops/rope_and_cache.hip",
        "store(p.key_cache, head, first, vecs[0]);",
        "store(p.key_cache, head, first, pack<T>(x));",
        ops.rope_and_cache,
        "bf16-native",
        "gfx942",
        LEAVES + "key_cache",
    ),
    "slot off by one": (
        "ops/rope_and_cache.hip",
        "mem::load<i64>(p.slots + token) : -1",
        "mem::load<i64>(p.slots + token) + 1 : -1",
        ops.rope_and_cache,
        "fp16-packed",
        "gfx950",
        LEAVES + "key_cache",
    ),
    "slot -1 written": (
        "ops/rope_and_cache.hip",
        "is_cached = at >= 0;",
        "is_cached = token < p.num_slots;",
        ops.rope_and_cache_mla,
        "bf16-fp8",
        "gfx942",
        "is in no tensor",
    ),
    "slots read behind the last": (
        "ops/rope_and_cache.hip",
        "token < p.num_slots ? mem::load",
        "token >= 0 ? mem::load",
        ops.rope_and_cache,
        "unmapped",
        "gfx942",
        "argument",
    ),
    "scale of K used for V": (
        "ops/rope_and_cache.hip",
        "Scale(cache.scale ? mem::load<float>(cache.scale) : 1.0f)",
        "Scale(mem::load<float>(p.key_cache.scale))",
        ops.rope_and_cache,
        "bf16-fp8-interleaved",
        "gfx950",
        LEAVES + "value_cache",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug, plant, monkeypatch):  # noqa: F811
    require_caught(BUGS[bug], plant, monkeypatch)
