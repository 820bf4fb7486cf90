"""Break each rule of each op's contract and `can_implement` by an input that breaks no other.

The call is then refused or falls back with that rule's text. Most inputs are variants of cases (argument_mutations.py); BREACHES
has those that change several arguments at once, or miss a bound by little, and FOLLOW says why a rule cannot be broken
alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest
import torch
from argument_mutations import cases, donors, few_cases, grown, laid, moved, on_cpu, resized, together, variants

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch, op, tensors
from vllm_rocm_ops.core.stats import FALLBACK
from vllm_rocm_ops.core.tensors import canonical
from vllm_rocm_ops.ops.shared import gated

OPS = list(op.registered())
ARCH = archs.ARCHS["gfx950"]
Rule = tuple[str, ...]
"""An argument and its requirement, or the text of a `can_implement`'s rule; without numbers and dtypes."""


def plain(text: str) -> str:
    return re.sub(r"(torch\.)?\b(bfloat16|float\d\w*|u?int\d+|e4m3|gfx\d+|sm_\d+)\b|\[[^\]]*\]|\d+", "#", text)


def judge(the_op, arguments: tuple, arch) -> tuple[set[Rule], str, Rule | None]:
    """Return the rules that are checked, the call's message if exactly one is broken, and that rule.

    A contract ends at its first breach.
    """
    rules, broken = set(), []
    tensors = (torch.Tensor, torch.Tensor | None)
    for name, value in zip(the_op.Arguments._fields, arguments):
        if the_op.hints[name] in tensors and not isinstance(value, the_op.hints[name]):
            return rules, "", None
    a = the_op.Arguments(*(canonical(v) if isinstance(v, torch.Tensor) else v for v in arguments))
    for argument, wanted, _, holds in the_op.contract(a):
        rules.add((argument, plain(wanted)))
        if not holds:
            return rules, f"{the_op.name}: {argument} must be {wanted}, got ", (argument, plain(wanted))
    for text, holds in the_op.can_implement(a, arch):
        rules.add((plain(text),))
        broken += [] if holds else [text]
    said = FALLBACK + "the kernels require that " + "; ".join(broken)
    return rules, said, (plain(broken[0]),) if len(broken) == 1 else None


def said_by(the_op, arguments: tuple, arch) -> str:
    """Return the message of a call's error or fallback."""
    try:
        return the_op.explain(*arguments, arch=arch).source
    except ValueError as error:
        return str(error)


# Inputs


def changed(value, change):
    """Return an argument with a change applied.

    A tuple is a tensor's shape, a list is a shape whose rows begin at multiples of 16, and a dictionary has strides.
    """
    if callable(change):
        return change(value)
    if not isinstance(value, torch.Tensor):
        return change
    if isinstance(change, torch.dtype):
        return laid(value, value.stride(), dtype=change)
    if isinstance(change, dict):
        return laid(value, [change.get(d, step) for d, step in enumerate(value.stride())])
    return resized(value, change, room=16 if isinstance(change, list) else 1)


def at(shape: tuple[int, ...], *strides: int):
    """Return a change to this shape with these strides."""
    return lambda value: laid(value, strides, shape)


class Breach:
    """A case of an op with some arguments changed, and the rule that this breaks."""

    def __init__(self, rule: str, of: str, arch: str = ARCH.name, **changes):
        self.rule, self.of, self.arch, self.changes = rule, of, archs.ARCHS[arch], changes
        self.op, _, self.case = of.partition("/")

    def arguments(self, the_op) -> tuple:
        given = the_op.Arguments(*cases(the_op, self.arch.fp8_dtype)[self.case])._asdict()
        for name, change in self.changes.items():
            given[name] = changed(given[name], change)
        return tuple(given.values())


def inputs(the_op) -> Iterator[tuple]:
    """Yield variants of each case that is the first to be checked for a rule."""
    others, asked = donors(the_op, ARCH.fp8_dtype), set()
    for base in cases(the_op, ARCH.fp8_dtype).values():
        rules, _, broken = judge(the_op, base, ARCH)
        yield base
        if rules <= asked or broken:
            continue
        asked |= rules
        for i, (name, value) in enumerate(zip(the_op.Arguments._fields, base)):
            for other in variants(value) if value is not None else others.get(name, ()):
                yield (*base[:i], other, *base[i + 1 :])
        yield from together(base)
        there = on_cpu(base)
        for i, value in enumerate(there):
            for other in moved(value) if isinstance(value, torch.Tensor) else ():
                yield (*there[:i], other, *there[i + 1 :])


BYTES = 2**25  # the shortest row length in bytes that is too long

BREACHES = [
    # GEMMs
    Breach("K is a multiple of 8", "batched_gemm/bf16-m1", x=[1, 2, 516], weights=[2, 516, 128]),
    Breach("N is a multiple of 16", "w4a16_gemm/m1", weight=at((1024, 33), 34, 1), scale=at((8, 264), 272, 1)),
    Breach("N is a multiple of 64 for weights", "batched_gemm/bf16-transposed-m1", weights=[2, 128, 72]),
    Breach("N is a multiple of 64 for weights", "batched_gemm_rope/bf16-m1", weights=[2, 128, 72]),
    Breach("N is at least 1", "block_scaled_mm/m1", a=(1, 16), b=(2**30, 16), scale_a=(1, 1), scale_b=(2**23, 1)),
    Breach("N is at least 1", "scaled_mm/m1", a=(1, 16), b=(16, 2**30), scale_b=(1,)),
    Breach("N is at least 1", "scaled_mm_silu_and_mul_quant/m1", a=(1, 16), b=at((16, 2**30), 1, 0), scale_b=(1,)),
    Breach("rows along K are multiples of 16 bytes", "scaled_mm_silu_and_mul_quant/m2", a=[2, 1000], b=[1000, 96]),
    Breach("K is at least 1", "scaled_mm_silu_and_mul_quant/m2", a=at((2, BYTES), 0, 1), b=at((BYTES, 96), 1, 0)),
    Breach("half of b's rows, and 48 more", "scaled_mm_silu_and_mul_quant/m1", b={1: BYTES - 16}),
    Breach("b is not shuffled on NVIDIA", "scaled_mm_silu_and_mul_quant/shuffled", "sm_90"),
    Breach("rows along K are multiples of 16 bytes", "block_scaled_mm/m5", a=[5, 1000], b=[192, 1000]),
    Breach("rows along K are multiples of 16 bytes", "scaled_mm/m2", a=[2, 1000], b=[1000, 48]),
    Breach("rows along K are multiples of 16 bytes", "unquantized_gemm/bf16-m16", x=[16, 500], weight=[80, 500]),
    Breach(
        "K is at least 1, rows along K are below 32 MB",
        "block_scaled_mm/m5",
        a=at((5, BYTES), 0, 1),
        b=at((192, BYTES), 0, 1),
        scale_a=(5, 2**18),
        scale_b=(2, 2**18),
    ),
    Breach("K is at least 1", "scaled_mm/m2", a=at((2, BYTES), 0, 1), b=at((BYTES, 48), 1, 0)),
    Breach(
        "K is at least 1",
        "unquantized_gemm/bf16-m16",
        x=at((16, BYTES // 2), 0, 1),
        weight=at((80, BYTES // 2), 0, 1),
    ),
    Breach("K is at least 1", "scaled_mm/m1", a=(1, 128), b=(128, 2**29), scale_b=(1,)),
    Breach(
        "M and N are below 2^30, M * N is below 2^42",
        "block_scaled_mm/tiles",
        a=(2**30, 400),
        scale_a=at((2**30, 4), 0, 1),
    ),
    Breach("K is below 2^17", "gemm/int8", a=(12, 2**17), b=(2**17, 70)),
    *(
        Breach(f"256 rows by 128 along K of {side} span", "unquantized_gemm/router-m65", **{name: {0: 2**23}})
        for side, name in (("a", "x"), ("b", "weight"))
    ),
    # Experts
    Breach("weight_only", "fused_experts/fp16", weight_only=True),
    Breach("w1_scale and w2_scale", "fused_experts/block", w2_scale=(8,)),
    Breach("hidden_scale", "fused_experts/int8-quantized", hidden_scale=torch.float16),
    Breach("H and I are multiples", "fused_experts/fp16", hidden=[18, 132], w1=[4, 128, 132], w2=[4, 132, 64]),
    Breach("H and I are multiples", "fused_experts/fp16", w1=(4, 120, 120), w2=[4, 120, 60]),
    Breach("out_dtype is the dtype of unscaled weights", "fused_experts/bf16-m70", out_dtype=torch.float16),
    Breach(
        "a token's results have less than 2 GB",
        "fused_experts/bf16-m70",
        hidden=(70, 2**17),
        w1=(4, 128, 2**17),
        w2=(4, 2**17, 64),
        **{name: (70, 2**12) for name in ("topk_ids", "topk_weights")},
    ),
    Breach(
        "rows quantized per token have at most",
        "fused_experts/channel-m70",
        hidden=(70, 2**17),
        w1=(3, 160, 2**17),
        w2=(3, 2**17, 80),
        w2_scale=(3, 2**17),
    ),
    Breach("sm_90 is an AMD GPU", "fused_experts/block-shuffled", "sm_90"),
    Breach("sm_90 has block-scaled matrix instructions", "fused_experts/mx", "sm_90"),
    Breach("sm_90 has block-scaled matrix instructions", "mxfp8_scaled_mm/m1", "sm_90"),
    # Attention
    Breach("k is of q's dtype", "flash_attention/fp8-keys", k=torch.float8_e4m3fnuz, v=torch.float8_e4m3fnuz),
    Breach("a bias is", "flash_attention/bias", bias=torch.float64),
    Breach("k_scale is contiguous", "flash_attention/int8-keys", k_scale={0: 2}),
    Breach("v_scale is contiguous", "flash_attention/int8-keys", v_scale={0: 2}),
    Breach("query_len is at most 8", "mla_decode/bf16-3", query_len=9, q_nope=(9, 3, 512), q_pe=(9, 3, 64)),
    Breach("query_len is at most 8", "paged_attention_decode/bf16-64-packed", query_len=9, query=(9, 3, 64)),
    Breach("there are at most 8192 splits", "mla_decode/bf16-3", block_table=(1, 2**16 + 1)),
    Breach(
        "there are at most 32768 splits",
        "paged_attention_decode/bf16-64-packed",
        fixed_split_size=128,
        block_table=(1, 2**18 + 1),
    ),
    Breach("there are fewer than 2^31 slots", "mla_decode/bf16-3", kv_cache=at((2**27, 16, 576), 0, 576, 1)),
    Breach(
        "there are fewer than 2^31 slots",
        "paged_attention_decode/bf16-64-packed",
        **{name: at((2**27, 16, 1, 64), 0, 64, 64, 1) for name in ("key_cache", "value_cache")},
    ),
    Breach(
        "pages of a native cache have a multiple of 8 slots",
        "paged_attention_decode/bf16-64-native",
        key_cache=(11, 1, 8, 12, 8),
        value_cache=[11, 1, 64, 12],
    ),
    *(
        Breach("the caches span fewer than 2^35", "paged_attention_decode/bf16-64-packed", **{name: {0: 2**33}})
        for name in ("key_cache", "value_cache")
    ),
    *(
        Breach(f"{name}s are aligned", "paged_attention_decode/heads-6-of-2", **{f"{name}_cache": {d: odd}})
        for name, odd in (("key", 2**15 + 8), ("value", 2**15 + 4))
        for d in (0, 1, 2)
    ),
    # Rotation
    Breach(
        "head sizes are multiples of 8",
        "rope_and_cache/bf16-packed",
        query=[3, 4, 68],
        key=[3, 2, 68],
        value=[3, 2, 68],
        **{name: [1, 16, 2, 68] for name in ("key_cache", "value_cache")},
    ),
    Breach(
        "the rotary size is a multiple",
        "rope_and_cache_mla/bf16",
        q_pe=(3, 16, 72),
        k_pe=(3, 72),
        cos_sin_cache=(97, 72),
        kv_cache=[1, 16, 584],
    ),
    Breach(
        "head sizes are multiples of 8",
        "qk_norm_rope_and_cache/bf16-packed",
        value=[3, 2, 68],
        value_cache=[1, 16, 2, 68],
    ),
    *(
        Breach(
            rule,
            "qk_norm_rope_and_cache/bf16-packed",
            **{name: [3, heads, size] for name, heads in (("query", 4), ("key", 2))},
            **{f"{name}_out": (3, heads, size) for name, heads in (("query", 4), ("key", 2))},
            **{name: (size,) for name in ("q_weight", "k_weight")},
            key_cache=[1, 16, 2, size],
        )
        for rule, size in (("a multiple of 16 elements", 72), ("at most 256 elements", 272))
    ),
    *(
        Breach("0 or more", "qk_norm_rope_and_cache/bf16-packed", **{f"{name}_pairs": -1})
        for name in ("height", "width")
    ),
    *(
        Breach("hidden is at least 1", f"sigmoid_and_mul_{kind}/bf16", input=(3, 2**30), gate=(3, 2**30))
        for kind in ("quant", "per_token_quant", "per_block_quant", "mxfp8_quant")
    ),
    Breach(
        "K and V are 128",
        "gated_delta_net_decode/bf16-plain",
        qkvz=(1, 256),
        conv_state=(3, 192, 3),
        conv_weight=(192, 4),
        state=(3, 1, 64, 64),
        norm_weight=(64,),
        out=(1, 64),
    ),
    Breach(
        "tokens have no row_starts",
        "gated_delta_net_decode/tokens-fp32",
        accepted=torch.ones(2, dtype=torch.int32, device="meta"),
        row_starts=torch.ones(3, dtype=torch.int32, device="meta"),
    ),
    # Routing
    Breach("topk is at most 32", "topk_softmax/bf16", topk=33),
    Breach("topk is at most 32", "topk_sigmoid/bf16", topk=33),
    Breach("topk is at most 32", "grouped_topk/deepseek-v3", topk=33),
    Breach("there are at most 512 experts", "topk_softmax/bf16", gating_output=(3, 513)),
    Breach("there are at most 512 experts", "topk_sigmoid/bf16", gating_output=(3, 513)),
    Breach(
        "there are at most 512 experts",
        "grouped_topk/deepseek-v3",
        gating_output=(3, 520),
        e_score_correction_bias=(520,),
    ),
    *(
        Breach("is_padding", f"{name}/padding", is_padding=wrong)
        for name in ("topk_softmax", "topk_sigmoid")
        for wrong in ((6,), torch.uint8)
    ),
    Breach("num_expert_group", "grouped_topk/deepseek-v3", num_expert_group=256),
    Breach("M is at most 64", "router_gemm_topk/fp32-m64", x=[65, 576]),
    Breach("a float32 weight is not shuffled", "router_gemm_topk/fp32-shuffled"),
    Breach("topk is at most 32", "router_gemm_topk/deepseek-m1", topk=33),
    Breach("rows along K are multiples of 16 bytes", "router_gemm_topk/qwen-m7", x=[7, 500], weight=[128, 500]),
    Breach(
        "K is at least 1",
        "router_gemm_topk/qwen-m7",
        x=at((7, BYTES // 2), 0, 1),
        weight=at((128, BYTES // 2), 0, 1),
    ),
    Breach("lanes have 4 or 8 or 16 experts", "router_gemm_topk/64-experts", weight=[66, 512]),
    Breach("num_expert_group", "router_gemm_topk/deepseek-m1", num_expert_group=256),
    Breach("is_padding", "router_gemm_topk/padding", is_padding=(6,)),
    Breach("is_padding", "router_gemm_topk/padding", is_padding=torch.uint8),
    *(
        Breach("e_score_correction_bias is", f"{name}/bf16-bias-bf16", e_score_correction_bias=torch.float64)
        for name in ("topk_softmax", "topk_sigmoid", "grouped_topk")
    ),
    Breach("e_score_correction_bias is", "router_gemm_topk/deepseek-m1", e_score_correction_bias=torch.float64),
]

GATED = [the_op.name for the_op in OPS if inspect.getmodule(the_op.configs) is gated]
CACHE = "one tensor has keys and values"
FOLLOW = {
    ("batched_gemm", "out's row stride is at least N"): "the contract has no overlaps",
    ("fused_experts", "act_scale is contiguous"): "it has one element",
    ("fused_experts", "weight scales are"): "the contract has others with a scale per 32 of K only",
    (
        "fused_experts",
        "there are fewer than # experts",
    ): "with more the tiled kernels serve, which have a bound of their own",
    ("gemm", "is not #, which torch multiplies"): "no arch's kernels multiply it",
    ("mla_decode", "head sizes are multiples"): "the latent's size is fixed",
    ("mla_decode", "out has # bits"): "the contract has query's dtype",
    ("mla_decode", "elements of a"): CACHE,
    ("mla_decode", "values are aligned"): CACHE,
    ("rope_and_cache_mla", "head sizes are multiples"): "key and value are heads, too",
    ("rope_and_cache_mla", "elements of a"): CACHE,
    ("rope_and_cache_mla", "values are aligned"): CACHE,
    ("paged_attention_decode", "head sizes are multiples"): "sizes are listed",
    ("topk", "a lane has at most"): "of the most experts",
    ("topk", "groups, one lane each"): "there is one group",
    **{(name, "at least one-dimensional"): "rows have two halves" for name in GATED},
    ("fused_add_", "None without a residual"): "the op has a residual",
    ("router_gemm_topk", "N is at least"): "a wave has all experts",
    ("stream_memory", "a multiple of # words"): "16-byte aligned",
    ("unquantized_gemm", "N and K are at least"): "K and N are at least 1",
    ("unquantized_gemm", "are not # with #"): "the contract has one dtype",
    ("unquantized_gemm", "which torch multiplies"): "x is bfloat16 or float16",
    ("unquantized_gemm", "supports "): "x is bfloat16 or float16",
    ("unquantized_gemm", "sums fit"): "x is bfloat16 or float16",
    ("unquantized_gemm", "row scales and bias"): "bias is contiguous",
}
"""Rules that another rule implies, by parts of their op's name and of their text."""


ABSENT = re.compile("residual|weight|scoring_func|num_expert_group|topk_group")
"""Arguments that only some of the ops sharing a rule have."""


@pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
def test_each_rule_is_broken_alone(the_op):
    rules, broken = set(), set()

    def add(arguments: tuple, arch) -> Rule | None:
        found, said, alone = judge(the_op, arguments, arch)
        rules.update(found)
        if alone and alone not in broken:
            broken.add(alone)
            assert said_by(the_op, arguments, arch).startswith(said)
        return alone

    for breach in BREACHES:
        if breach.op == the_op.name:
            alone = add(breach.arguments(the_op), breach.arch)
            assert alone and plain(breach.rule) in plain(" ".join(alone)), (breach.of, breach.changes, alone)
    for arguments in inputs(the_op):
        add(arguments, ARCH)
    absent = {rule for rule in rules if (name := ABSENT.match(rule[0])) and name[0] not in the_op.Arguments._fields}
    left = rules - broken - absent
    followed = {rule for rule in left for name, text in FOLLOW if name in the_op.name and text in " ".join(rule)}
    assert left == followed, left - followed


def takes(blocks: tuple[int, int, int], threads: tuple[int, int, int]) -> bool:
    """True if HIP and CUDA take a launch of this size."""
    in_32_bits = all(count * of_block < 2**32 for count, of_block in zip(blocks, threads))
    return in_32_bits and blocks[0] < 2**31 and max(blocks[1:]) <= 65535


@pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
def test_no_planned_launch_is_larger_than_a_driver_takes(the_op):
    """A call that needs a larger one falls back, and says which: so does each op whose grid grows with a size."""
    arch, planned = archs.ARCHS["gfx942"], []
    for base in few_cases(the_op, arch.fp8_dtype):
        for arguments in grown(base):
            try:
                found = the_op.explain(*arguments, arch=arch)
            except ValueError:
                continue
            planned += found.launches
            assert all(takes(l.grid, l.block) for l in found.launches), found
            if launch.LIMIT in found.source:
                assert found.rules[-1] == (found.source.removeprefix(FALLBACK + "the kernels require that "), False)
    assert planned or the_op.name == "mxfp8_scaled_mm"  # gfx950 only


def test_a_launch_of_a_row_per_block_is_bounded_on_both_sides():
    """Its blocks of 64 threads have fewer than 2^32 in all; more than 65535 along y are refused."""

    def rows(count: int):
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((count, 128), (128,)))
        return ops.rms_norm.explain(x, weight, 1e-6, arch="gfx942")

    assert rows(2**26 - 1).launches[0].grid == (2**26 - 1, 1, 1)
    refused = rows(2**26)
    assert refused.source.endswith(f"has {launch.LIMIT}, not grid (67108864, 1, 1) block (64, 1, 1)")
    assert f"  NO  {refused.rules[-1][0]}" in str(refused)
    for grid, fits in (((1, 65535, 65535), True), ((1, 65536, 1), False), ((1, 1, 65536), False)):
        one = launch.Launch("", "copy", grid, (64, 1, 1), ())
        assert (not launch.too_large([one])) == fits == takes(one.grid, one.block)


def planned_for(the_op, arguments: tuple, arch) -> frozenset:
    """Return the kernels of all configurations, by their names; empty if the reference runs."""
    a = the_op.Arguments(*(canonical(v) if isinstance(v, torch.Tensor) else v for v in arguments))
    if not all(holds for *_, holds in the_op.contract(a)) or not all(
        holds for _, holds in the_op.can_implement(a, arch)
    ):
        return frozenset()
    outputs = the_op.allocate(a)
    return frozenset(l.symbol for config in the_op.configs(a, arch) for l in the_op.plan(config, outputs, a, arch))


@pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
def test_steps_are_aligned_as_addresses_are(the_op):
    """A single step off a boundary has other kernels, or none, if an address off it has."""
    arch = archs.ARCHS["gfx950"]
    for name, base in cases(the_op, arch.fp8_dtype).items():
        base = on_cpu(base)
        usual = planned_for(the_op, base, arch)
        for place, value in enumerate(base) if usual else ():
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            for off, other in zip((value.element_size(), 8), moved(value)):
                if planned_for(the_op, (*base[:place], other, *base[place + 1 :]), arch) == usual:
                    continue
                for d in (d for d in range(value.dim()) if value.shape[d] > 1 and value.stride(d)):
                    steps = list(value.stride())
                    steps[d] += max(off // value.element_size(), 1)
                    there = torch.empty(tensors.extent(laid(value, steps)), dtype=value.dtype).as_strided(
                        value.shape, steps
                    )
                    found = planned_for(the_op, (*base[:place], there, *base[place + 1 :]), arch)
                    assert found != usual, (name, the_op.Arguments._fields[place], d, off)
