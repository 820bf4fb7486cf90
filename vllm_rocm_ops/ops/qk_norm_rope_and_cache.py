"""Fuse QK RMSNorm per head or over all heads, RoPE, the paged KV cache write and its quantization; kernels: csrc/ops/rope_and_cache.hip.

Replaces three launches, `rms_norm` of queries, `rms_norm` of keys and `rope_and_cache`, and rounds as they do: the norm is rounded to
query's dtype before the rotation, as in Qwen3Attention of vLLM 0.33. vLLM's fused_qk_norm_rope, which writes no cache, does not
round there.

In Qwen3-Next and Qwen3.5 a projection has a gate of attention's output after each query head. Query is a strided view of it, so the split
takes no launch. The norms multiply by 1 + weight (GemmaRMSNorm), and Qwen3.5 uses interleaved M-RoPE: pairs of a head rotate by positions
of time, height or width.

In MiniMax-M2 and OLMo 2 one norm is over all query heads and one over all key heads: weights have all heads, and one block has a token's
queries.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import attention, rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.ops.shared.rowwise import exact

__all__ = ["qk_norm_rope_and_cache"]

LANE_ELEMENTS = 2 * attention.VECTOR  # elements of a head per lane
MAX_HEAD_SIZES = {8: 128, 16: 256}  # by lanes per head
MAX_THREADS = 1024  # of a block that has all heads


def _weights(a) -> tuple[tuple[str, Tensor], ...]:
    return ("q_weight", a.q_weight), ("k_weight", a.k_weight)


def _outs(a) -> tuple[tuple[str, Tensor], ...]:
    return ("query_out", a.query_out), ("key_out", a.key_out)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from rotation.heads_contract(a)
    p = rotation.heads_parts(a)
    dtype, size = a.query.dtype, p.sizes[0]
    over_all = a.q_weight.shape != (size,)
    for (name, x), heads in zip(_weights(a), (p.query.shape[1], p.layout.heads)):
        wanted = f"{dtype} [size={size}], or both of all heads, [{heads * size}]"
        yield name, wanted, describe(x), x.dtype == dtype and x.shape == (size * (heads if over_all else 1),)
    for (name, x), given in zip(_outs(a), (p.query, p.key)):
        tokens, heads = given.shape[:2]
        wanted = f"{dtype} [T={tokens}, {heads}, {size}] or [T, {heads * size}]"
        yield name, wanted, describe(x), x.dtype == dtype and attention.is_heads(x, tokens, heads, size)
    pairs = a.cos_sin_cache.shape[-1] // 2
    for name, value in (("height_pairs", a.height_pairs), ("width_pairs", a.width_pairs)):
        wanted = f"0 or more, and together at most {pairs}, all pairs"
        yield name, wanted, str(value), value >= 0 and rotation.sections(a) <= pairs


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from rotation.can_implement(rotation.heads_parts, a, arch)
    size, largest = _size(a), max(MAX_HEAD_SIZES.values())
    yield f"heads of queries have a multiple of {LANE_ELEMENTS} elements", size % LANE_ELEMENTS == 0
    if is_over_all(a):
        lanes, largest = min(MAX_HEAD_SIZES.items())
        most = MAX_THREADS // lanes
        yield f"a norm is over at most {most} heads", max(_heads(a)) <= most
        yield "norms over all heads multiply by weight, without sections", not _has_offset(a)
    yield f"heads of queries have at most {largest} elements", size <= largest
    for name, x in (*_weights(a), *_outs(a)):
        yield f"{name} is contiguous", x.is_contiguous()
        yield f"{name} is 16-byte aligned", x.data_ptr() % 16 == 0


def _size(a) -> int:
    """Return the size of a head."""
    return CacheLayout(a.key_cache, a.value_cache).key_size


def _heads(a) -> tuple[int, int]:
    """Return the heads of queries and of keys."""
    p = rotation.heads_parts(a)
    return p.query.shape[1], p.layout.heads


def is_over_all(a) -> bool:
    """True if the norms are over all heads."""
    return a.q_weight.shape[0] != _size(a)


def _lanes(a) -> int:
    """Return the lanes per head."""
    return next(lanes for lanes, size in MAX_HEAD_SIZES.items() if _size(a) <= size)


def _configs(a, arch: Arch) -> list[rotation.RopeConfig]:
    size = _size(a)
    if size % LANE_ELEMENTS or size > max(MAX_HEAD_SIZES.values()):
        return []
    found = rotation.configs(a, arch)
    if not is_over_all(a) or not found:
        return found
    lanes, largest = min(MAX_HEAD_SIZES.items())
    threads = -(-max(_heads(a)) * lanes // rotation.WAVE) * rotation.WAVE
    is_supported = size <= largest and threads <= MAX_THREADS and not _has_offset(a)
    return [rotation.RopeConfig(threads)] if is_supported else []


def _first_copied(config: rotation.RopeConfig, a) -> int:
    """Return the first work item that copies values. With norms over all heads, they follow one block of queries and one of keys."""
    return 2 * config.threads if is_over_all(a) else rotation.first_copied(rotation.heads_parts(a), _lanes(a))


def items(config: rotation.RopeConfig, a) -> int:
    """Return the work items of a token, one per thread."""
    p = rotation.heads_parts(a)
    return _first_copied(config, a) + p.layout.heads * (p.sizes[1] // attention.VECTOR)


def _has_offset(a) -> bool:
    """True if the kernels with an offset run."""
    return a.one_plus_weight or rotation.sections(a) > 0


def problem_args(config: rotation.RopeConfig, a, ranks: int = 1) -> dict:
    """Return the fields of the kernels' problem. A norm over all heads takes in this many ranks."""
    p, lanes, size = rotation.heads_parts(a), _lanes(a), _size(a)
    query_heads, kv_heads = (ranks * heads if is_over_all(a) else 1 for heads in _heads(a))
    args = {
        **rotation.problem_fields(p, a, lanes),
        "first_copied": _first_copied(config, a),
        "query_out": a.query_out,
        "key_out": a.key_out,
        "query_weight": a.q_weight,
        "key_weight": a.k_weight,
        "head_vecs": size // LANE_ELEMENTS,
        "inverse_size": 1.0 / (query_heads * size),
        "epsilon": float(a.epsilon),
    }
    if _has_offset(a):
        args |= {
            "weight_offset": float(a.one_plus_weight),
            "height_pairs": a.height_pairs,
            "width_pairs": a.width_pairs,
            "position_stride": a.positions.stride(0) if rotation.sections(a) else 0,
        }
    if is_over_all(a):
        args |= {"inverse_keys_size": 1.0 / (kv_heads * size)}
    return args


def _plan(config: rotation.RopeConfig, outputs, a, arch: Arch) -> list[Launch]:
    kind = f"{'_offset' * _has_offset(a)}{'_all_heads' * is_over_all(a)}_{MAX_HEAD_SIZES[_lanes(a)]}"
    p, args = rotation.heads_parts(a), problem_args(config, a)
    return rotation.launches("qk_norm_rope_and_cache", config, p, items(config, a), args, kind)


def _cost(config: rotation.RopeConfig, a, arch: Arch) -> dict[str, float]:
    p = rotation.heads_parts(a)
    return rotation.cost(config, p, items(config, a), p.sizes[0], arch)


# Cases


def _inputs(tokens, heads, size, given, device, generator, fp8_dtype) -> tuple:
    query, key, value, *rest = rotation.heads_inputs(tokens, heads, size, given, device, generator, fp8_dtype)
    for x in (query, key):
        x.mul_(given.get("factor", 1.0))
    one_plus, sections = given.get("one_plus", False), given.get("sections", (0, 0))
    counts = heads if given.get("over_all", False) else (1, 1)
    weights = (
        ((not one_plus) + 0.2 * torch.randn(count * size, generator=generator)).to(query.dtype).to(device)
        for count in counts
    )
    positions, cos_sin, is_neox, *caches = rest
    outs = [torch.full(x.shape, torch.nan, dtype=x.dtype, device=device) for x in (query, key)]
    if given.get("gated", False):
        by_head = attention.heads(query, size)
        query = torch.cat((by_head, torch.full_like(by_head, torch.nan)), -1)[..., :size]
    if sum(sections):
        others = torch.randint(0, len(cos_sin), (2, tokens), generator=generator).to(device)
        positions = torch.cat((positions[None], others))
    epsilon = given.get("epsilon", 1e-6)
    return query, key, value, *weights, epsilon, positions, cos_sin, is_neox, *outs, *caches, one_plus, *sections


def _cases() -> Iterator[Case]:
    """Yield the cases of `rope_and_cache`, head sizes 16 to 256, an epsilon that matters, 1 + weight, gates, sections, one norm of all heads."""
    case = case_maker(_inputs)
    yield from rotation.heads_cases(case)
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            yield case(f"{kind}{'-fp8' * fp8}-256", 2, (3, 1), 256, dtype=dtype, fp8=fp8)
    yield case("qwen3", 2, (32, 4), 128, layout="native")
    yield case("glm-4.5", 2, (12, 1), 128, rotary=64, apart=True, epsilon=1e-5)
    yield case("gptj-part", 3, (2, 1), 128, rotary=32, is_neox=False, fp8=True, cos_dtype=torch.float32)
    yield case("odd-lanes", 3, (3, 2), 80, rotary=16)
    yield case("one-lane", 2, (5, 3), 16)
    yield case("epsilon", 3, (2, 1), 128, factor=2.0**-9, epsilon=1e-5)
    yield case("large", 3, (2, 1), 128, factor=2.0**60)
    yield case("page5-padded", 7, (2, 2), 32, page=5, padding=24, apart=True)
    yield case("large-heads", 2, (1, 1), 512)
    qwen3_next = {"rotary": 64, "one_plus": True, "gated": True}
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for size in (128, 256):
                yield case(f"{kind}{'-fp8' * fp8}-one-plus-{size}", 2, (3, 1), size, dtype=dtype, fp8=fp8, **qwen3_next)
            given = {"dtype": dtype, "fp8": fp8, "sections": (11, 10), "layout": "native", **qwen3_next}
            yield case(f"{kind}{'-fp8' * fp8}-sections", 3, (2, 1), 256, **given)
    yield case("qwen3-next", 2, (16, 2), 256, layout="native", **qwen3_next)
    yield case("qwen3.5-page544", 2, (2, 1), 256, sections=(11, 10), page=544, **qwen3_next)
    yield case("one-plus-gptj", 3, (2, 1), 64, rotary=32, is_neox=False, one_plus=True, apart=True)
    yield case("sections-plain-weights", 3, (2, 1), 128, sections=(20, 20))
    yield case("sections-gptj", 3, (2, 1), 64, is_neox=False, sections=(7, 3), cos_dtype=torch.float32)
    yield case("sections-most-height", 3, (2, 1), 64, sections=(11, 0))
    yield case("one-plus-epsilon", 3, (2, 1), 128, factor=2.0**-9, epsilon=1e-5, one_plus=True)
    yield case("one-plus-unmapped", 4, (2, 1), 64, unmapped=2, **(qwen3_next | {"rotary": 16}))
    yield case("sections-no-tokens", 0, (2, 1), 64, sections=(3, 3), one_plus=True)
    over_all = {"rotary": 64, "over_all": True}
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            given = {"dtype": dtype, "fp8": fp8, "layout": "native", **over_all}
            yield case(f"{kind}{'-fp8' * fp8}-over-all", 3, (6, 2), 128, **given)
    yield case("minimax-m2", 2, (48, 8), 128, **over_all)
    yield case("minimax-m2-tp8", 4, (6, 1), 128, unmapped=1, epsilon=1e-5, factor=2.0**-9, **over_all)
    yield case("olmo-2", 2, (40, 40), 128, over_all=True, layout="interleaved")
    yield case("over-all-odd-lanes", 3, (17, 3), 80, rotary=16, is_neox=False, over_all=True, apart=True)
    yield case("over-all-most-heads", 1, (128, 1), 32, over_all=True)
    yield case("over-all-too-many-heads", 1, (129, 1), 16, over_all=True)
    yield case("over-all-large-heads", 1, (2, 1), 256, over_all=True)
    yield case("over-all-one-plus", 2, (2, 1), 64, one_plus=True, over_all=True)
    yield case("over-all-no-tokens", 0, (2, 1), 64, over_all=True)


def queries_and_keys(a) -> tuple[Tensor, Tensor]:
    """Return the heads [tokens, heads, size] of queries and of keys."""
    p = rotation.heads_parts(a)
    return p.query, p.key


def mean_square(x: Tensor, over_all: bool) -> Tensor:
    """Return the mean square of each head [tokens, heads, size], or of all heads of a token, with `size` and `heads` kept as 1."""
    return exact(x).square().mean((1, 2) if over_all else 2, keepdim=True)


def run_with_means(a, means: list[Tensor]) -> None:
    """Run the op in plain PyTorch, given the mean squares of queries and keys."""
    p, size = rotation.heads_parts(a), _size(a)
    outs = [attention.heads(out, size) for _, out in _outs(a)]
    for x, (_, weight), mean, out in zip((p.query, p.key), _weights(a), means, outs):
        w = (1.0 + exact(weight) if a.one_plus_weight else weight).unflatten(0, (-1, size))
        out.copy_((exact(x) * torch.rsqrt(mean + a.epsilon) * w).to(x.dtype))
        rotation.rotate(out, a.positions, a.cos_sin_cache, a.is_neox, a.height_pairs, a.width_pairs)
    rotation.write(p.layout, outs[1], p.value, a.slot_mapping, p.scales)


@functools.partial(
    Op,
    allocate=lambda a: None,
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=functools.partial(rotation.problem, rotation.heads_parts),
    cases=_cases,
    meanings=rotation.MEANINGS,
    mutates=("key_cache", "value_cache"),
    writes=("query_out", "key_out"),
    inexact=("key_cache",),
    sums=True,
)
def qk_norm_rope_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    query_out: Tensor,
    key_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    one_plus_weight: bool = False,
    height_pairs: int = 0,
    width_pairs: int = 0,
) -> None:
    """Normalize and rotate query and key into new tensors, and write key and value to a paged cache.

    Args:
        query: [T, query heads * size] or [T, query heads, size], bf16 or fp16; unchanged. May be columns of one qkv
            tensor, with a stride between heads, as where each is followed by its gate.
        key: [T, heads * size] or [T, heads, size], query's dtype; unchanged.
        q_weight: [size], query's dtype: RMSNorm weight of each query head. [query heads * size]: of one norm over all query heads,
            as k_weight then is.
        k_weight: [size] or [heads * size], query's dtype: as q_weight, of keys.
        epsilon: Added to the mean square.
        query_out: As query: receives the normalized and rotated queries.
        key_out: As key: receives the normalized and rotated keys.
        positions: [T], int64; with pairs of height or width [3, T]: of time, height and width.
        one_plus_weight: Multiply by 1 + weight, as GemmaRMSNorm does.
        height_pairs: Number of pairs 1, 4, 7, ... that rotate by the position of height.
        width_pairs: Number of pairs 2, 5, 8, ... that rotate by the position of width.

    Source:
        vLLM's Qwen3Attention: `rms_norm` of q and k, `rotary_embedding`, `reshape_and_cache`. Its Qwen3NextAttention, MRotaryEmbedding
        with interleaved sections, and MiniMaxText01RMSNormTP with one rank.
    """
    a = qk_norm_rope_and_cache.Arguments(
        query, key, value, q_weight, k_weight, epsilon, positions, cos_sin_cache, is_neox, query_out, key_out,
        key_cache, value_cache, slot_mapping, k_scale, v_scale, one_plus_weight, height_pairs, width_pairs,
    )  # fmt: skip
    run_with_means(a, [mean_square(x, is_over_all(a)) for x in queries_and_keys(a)])
