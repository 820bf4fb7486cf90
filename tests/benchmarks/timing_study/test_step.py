"""Test predicted decode steps: launches, costs, and comparisons with published and measured steps."""

import dataclasses
from collections.abc import Callable

import pytest
from marks import full
from pages import step_table
from timing_study import baseline, freeze, h200_profiles, published_steps, step, step_report

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen, machines

pytestmark = full
MI300X = machines.MI300X
NAMES = "llama-3.1-405b-fp8", "deepseek-v3", "glm-4.5-air-fp8", "qwen3-30b-a3b-fp8"
LLAMA, DEEPSEEK, GLM, QWEN = map(model_config.read, NAMES)
KIND_WORDS = {"published", "measured", "fitted", "assumed", "predicted"}


def nodes(config: dict, side: str = "baseline", tokens: int = 1, tp: int = 8, known=lambda *_: None, **given) -> list:
    return step.nodes(config, tp, None, tokens, MI300X, side, known, **given)


def counts(config: dict, **given) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in nodes(config, **given):
        found[node.layer] = found.get(node.layer, 0) + node.count
    return found


def test_a_step_launches_what_vllm_does_in_its_order():
    layers = [layer for layer, _, _ in step.order(LLAMA, 8, None)]
    assert layers[2:17] == [
        "input norm", "qkv", "rotation", "cache write", "attention", "o's input quantization", "o", "all-reduce",
        "post-attention norm", "gate_up", "SwiGLU", "down", "all-reduce", "input norm", "qkv",
    ]  # fmt: skip
    found = counts(LLAMA)
    assert found["all-reduce"] == 2 * 126 + 1 and found["attention"] == found["cache write"] == found["qkv"] == 126
    assert found["inputs, sampling and copies"] == 24
    assert "all-reduce" not in counts(LLAMA, tp=1)
    latent = counts(DEEPSEEK)
    assert latent["W_UK"] == latent["W_UV"] == latent["attention"] == latent["o's input quantization"] == 61
    assert latent["shared down"] == latent["sum with shared experts"] == latent["experts"] == 58
    assert latent["all-reduce"] == 2 * 61 + 1
    assert "o's input quantization" not in counts(model_config.read("tiny-llama")), "nothing there is quantized"


def test_a_step_has_what_is_vllms_in_front_of_experts():
    """Only GLM's norm and router are vLLM's, after the all-reduce."""
    layers = [layer for layer, _, _ in step.order(GLM, 4, None)]
    start = len(layers) - 1 - layers[::-1].index("qkv")
    assert layers[start : start + 16] == [
        "qkv", "rotation", "cache write", "attention", "o's input quantization", "o", "all-reduce", "post-attention norm",
        "router", "routing", "experts", "shared experts' input quantization", "shared gate_up", "shared SwiGLU", "shared down",
        "sum with shared experts",
    ]  # fmt: skip
    found = counts(GLM, tp=4)
    assert found["router"] == found["post-attention norm"] == found["experts"] == found["shared down"] == 45
    assert found["dense post-attention norm"] == found["dense down"] == 1 and found["all-reduce"] == 2 * 46 + 1
    [router] = (node for node in nodes(GLM, tp=4) if node.layer == "router")
    assert (router.op, router.kind, router.stream) == ("", "assumed", step.MAIN)
    assert all(node.op for node in nodes(DEEPSEEK) if node.layer in ("router", "post-attention norm"))


def test_every_call_of_the_model_is_in_its_step():
    for config in (LLAMA, DEEPSEEK, GLM):
        calls = [
            *model_layers.sequence(config, 8),
            *model_layers.attention(config, 8),
            *model_layers.absorbed(config, 8),
        ]
        wanted = {(call.layer, call.op.name) for call in calls if call.count}
        assert wanted == {(node.layer, node.op) for node in nodes(config) if node.op}


def test_the_second_stream_costs_only_what_is_longer():
    """The shorter of the two streams is hidden, whichever it is."""
    made = nodes(DEEPSEEK)
    found = step.total(made)
    second = sum(node.count * node.us for node in made if node.stream == step.SECOND)
    beside = sum(node.count * node.us for node in made if node.stream == step.BESIDE)
    everything = sum(node.count * node.us for node in made)
    assert found.hidden_us == pytest.approx(min(second, beside)) and 0 < second < beside
    assert found.us == pytest.approx(everything - second)
    longer = [dataclasses.replace(node, us=100 * node.us) if node.stream == step.SECOND else node for node in made]
    assert step.total(longer).us == pytest.approx(everything + 99 * second - beside)


def test_a_launch_below_the_shortest_published_one_has_a_gap():
    made = nodes(LLAMA, "plugin", known=lambda call, tokens: (1.0, 2, 0.5))
    ours = [node for node in made if node.op and not node.layer.startswith("all-reduce")]
    assert all(node.gap_us == pytest.approx(2 * baseline.MIN_LAUNCH.value - 1.0) for node in ours)
    assert all(node.gap_us == 0 for node in nodes(LLAMA)), "published times in a graph contain it"
    found = step.total(made)
    assert found.gap_us == pytest.approx(sum(node.count * node.gap_us for node in ours))
    assert found.known_us == pytest.approx(sum(node.count for node in ours)) and found.bound_us == found.known_us / 2


Found = Callable[..., dict[str, step.Node]]
"""The nodes of a step by layer, given the time of its one launch, None if no kernel serves it, and the side."""


def steps_with(config: dict, one: str, other: float = 9.0, **us: float | None) -> Found:
    """Return the steps of a model with a launch `one`, an op or a layer; ops without a time in `us` take `other`."""

    def found(time: float | None, side: str = "plugin") -> dict[str, step.Node]:
        def known(call, tokens):
            name = one if one in (call.layer, call.op.name) else call.op.name
            value = (us | {one: time}).get(name, other)
            return value and (value, 1, 0.25)

        return {node.layer: node for node in nodes(config, side, known=known, tp=2 if config is QWEN else 4)}

    return found


def check_one_launch(found: Found, layer: str, op: str, count: int, saves: bool = True) -> dict[str, step.Node]:
    """Check that the launches that a layer names are one where that is faster, and never in the baseline; return this step."""
    names, apart = layer.split(" + "), found(None)
    bound = sum(apart[name].whole_us for name in names) - baseline.GAP.value
    joined = found(bound - 0.1)
    one = joined[layer]
    assert (one.op, one.us, one.launches, one.count) == (op, bound - 0.1, 1, count)
    assert not {*names} & joined.keys()
    for others in (apart, found(bound + 0.1), found(0.1, "baseline")):
        assert layer not in others and all(others[name].count == count for name in names)
    few, many = (step.total(tuple(of.values())) for of in (joined, apart))
    assert many.launches - few.launches == count * (len(names) - 1)
    assert not saves or many.us - few.us == pytest.approx(count * 0.1)
    return joined


def test_gate_up_and_swiglu_are_one_launch_where_that_is_faster():
    """The gap after SwiGLU, which is shorter than the shortest launch, is saved as well."""
    op = "scaled_mm_silu_and_mul_quant"
    found = steps_with(LLAMA, op, 3.0, scaled_mm=54.4, silu_and_mul_quant=1.5, paged_attention_decode=None)
    assert check_one_launch(found, "gate_up + SwiGLU", op, 126)["down"].count == 126
    assert found(None)["SwiGLU"].gap_us == pytest.approx(baseline.MIN_LAUNCH.value - 1.5)


@pytest.mark.parametrize("queries", [True, False])
def test_latents_norms_and_the_cache_write_are_one_launch_where_that_is_faster(queries):
    """The rotation of queries stays. DeepSeek-V2-Lite has no latent of queries."""
    config, op = DEEPSEEK if queries else DEEPSEEK | {"q_lora_rank": None}, "mla_norm_rope_and_cache"
    found = steps_with(config, op, rms_norm_per_block_quant=4.0, rms_norm=3.5, batched_gemm_rope=None)
    layer = " + ".join(["q_a norm", "kv_a norm", "cache write"][not queries :])
    joined = check_one_launch(found, layer, op, 61)
    assert joined["rotation"].count == 61 and [*joined].index(layer) < [*joined].index("rotation")


@pytest.mark.parametrize(("config", "layers"), [(LLAMA, 126), (QWEN, 48)], ids=["llama", "qwen"])
def test_rotation_and_cache_write_are_one_launch_where_that_is_faster(config, layers):
    """The norms before them are in it."""
    norms, op = ("norms of q and k + ", "qk_norm_rope_and_cache") if config is QWEN else ("", "rope_and_cache")
    layer = f"{norms}rotation + cache write"
    joined = check_one_launch(steps_with(config, op), layer, op, layers)
    assert joined[layer].floor_us < 0.1, "caches are not read"
    assert "norms of q and k" not in steps_with(DEEPSEEK, op)(None).keys() | steps_with(LLAMA, op)(None).keys()


def test_experts_take_hidden_states_that_the_norm_quantizes_where_that_is_faster():
    """A layer with shared experts has two launches fewer: their quantization, and the routed experts'."""

    def found(both: float | None, side: str = "plugin", tp: int = 1) -> list:
        def known(call, tokens) -> tuple | None:
            us = {"fused_add_rms_norm": 3.0, "rms_norm_and_per_block_quant": both}.get(call.op.name, 20.0)
            return us and (us, (4 - (call.parameters[6:] == (True,))) if call.layer == "experts" else 1, 0.25)

        return nodes(DEEPSEEK, side, known=known, tp=tp)

    apart, limit = {node.layer: node for node in found(None)}, 60.0
    joined = {node.layer: node for node in found(3.5)}
    norm, experts = joined["post-attention norm"], joined["experts"]
    assert (norm.op, norm.us, norm.count) == ("rms_norm_and_per_block_quant", 3.5, 58)
    assert (experts.launches, apart["experts"].launches) == (3, 4)
    assert "shared experts' input quantization" in apart and "shared experts' input quantization" not in joined
    for tp in 1, 8:  # with 8 ranks, either norm is fused with the all-reduce
        few, many = (step.total(found(us, tp=tp)) for us in (3.5, None))
        assert many.launches - few.launches == 2 * 58
    for others in (found(limit), found(None), found(0.1, "baseline")):
        assert [node.op for node in others if node.layer == "post-attention norm"] == ["fused_add_rms_norm"]


@pytest.mark.parametrize(
    ("config", "tp", "layer", "us", "has"),
    [
        (DEEPSEEK, 8, "q_a norm + kv_a norm + cache write", 3.0, ""),
        (DEEPSEEK, 1, "post-attention norm", 3.0, "rms_norm_and_per_block_quant"),
        (LLAMA, 8, "gate_up + SwiGLU", 9.0, ", predicted + published"),
    ],
)
def test_one_launch_is_beside_those_of_the_baseline(config, tp, layer, us, has):
    lines = list(step_report.lines(config, tp, None, [1], MI300X, 4096, lambda call, tokens: (us, 1, 0.25)))
    [row] = (line for line in lines if line.startswith(layer))
    theirs = sum(node.us for node in nodes(config) if node.layer in layer.split(" + "))
    assert f"  {theirs:.1f}, " in row and has in row and row.endswith(f"  {us}, predicted +-25%")


def test_times_of_a_profiler_lose_what_it_adds():
    time = baseline.published(MI300X, "scaled_mm", (16384, 2048, True), 1)
    assert time.us == pytest.approx(12.32 - MI300X["profiled"]) and time.kind == "published"
    assert baseline.published(MI300X, "block_scaled_mm", (7168, 256), 16).us == baseline.MIN_LAUNCH.value, "no less"
    graph = baseline.published(MI300X, "scaled_mm", (13312, 16384, True), 1)
    assert graph.us == 77.64 and "torch._scaled_mm" in graph.source
    between = baseline.published(MI300X, "scaled_mm", (2304, 16384, True), 4)
    assert 14.94 < between.us < 16.3
    assert baseline.published(MI300X, "scaled_mm", (2304, 4096, False), 4) is None
    assert baseline.published(machines.MI325X, "scaled_mm", (2304, 16384, False), 1) is None


def test_wv_split_kq_is_the_baseline_of_few_rows_of_static_per_tensor_fp8():
    """vLLM 0.32 calls it up to 4 rows, 0.11 with one row; row-wise checkpoints never reach it."""

    def found(tokens: int, by_token: bool = False, **given):
        return baseline.published(MI300X, "scaled_mm", (13312, 16384, by_token), tokens, **given)

    for rows, skinny in ((1, 4), (4, 4), (1, 1)):
        time = found(rows, skinny=skinny)
        assert time.kind == "predicted" and "wvSplitKQ" in time.source and 51.9 < time.us < 57
    assert found(1, skinny=1).source != found(1).source, "other kernels"
    assert all([*row["us"]] == ["1", "2", "3", "4"] for row in baseline.TABLE if row.get("skinny") == 4)
    for other in (found(5), found(1, True), found(2, skinny=1), found(1, skinny=0)):
        assert other.kind == "published" and "hipBLASLt" in other.source and other.us > 75
    one, two = (published_steps.predicted(batch)[1] for batch in (1, 2))
    assert two - one > 2500, "the published releases call it with one row only"
    gate = next(node for node in nodes(LLAMA) if node.layer == "gate_up")
    assert gate.source == found(1).source


def test_a_speedup_is_the_range_over_the_costs_of_a_launch():
    """Both ends take the same cost on both sides."""
    assert baseline.launch_costs(MI300X) == (1.381, 3.84) and baseline.launch_costs(machines.MI355X)[0] == 1.461
    known = step.frozen_time(MI300X)
    ends = []
    for us in baseline.launch_costs(MI300X):
        stock, plugin = (step.total(nodes(DEEPSEEK, side, known=known, launch=us)).us for side in step.SIDES)
        ends.append(stock / plugin)
    said = step_report.ratio(DEEPSEEK, 8, None, 1, MI300X, known, 4096)
    assert said.startswith(f"{min(ends):.2f} to {max(ends):.2f}x with 1.4 to 3.8 us") and ends[1] - ends[0] > 0.3
    assert step_table.speedup("MI300X", "DeepSeek-V3", 1) == f"{min(ends):.2f} to {max(ends):.2f}x"
    lines = [*step_report.lines(DEEPSEEK, 8, None, [1], MI300X, 4096, known)]
    assert f"predicted speedup, 1 tokens: {said}" in lines and not hasattr(baseline, "MAX_GAP")


def test_kernels_without_a_published_time_use_the_rule():
    [head] = (node for node in nodes(LLAMA) if node.layer == "lm_head")
    read = 2 * (16032 * 16384 + 16384)
    assert head.kind == "assumed" and head.source.startswith("rule: ")
    assert head.us == pytest.approx(baseline.LAUNCH.value + read / MI300X["hbm_bandwidth"] / 1e3)
    assert head.floor_us == pytest.approx(read / MI300X["hbm_bandwidth"] / 1e3)


def test_bytes_are_those_of_the_keys_and_of_the_experts_that_are_hit():
    attention = {
        context: next(n for n in nodes(LLAMA, context=context) if n.layer == "attention") for context in (1024, 4096)
    }
    few, many = (attention[context].floor_us * MI300X["hbm_bandwidth"] * 1e3 for context in (1024, 4096))
    assert many - few == pytest.approx(3072 * 2 * 128 * 2, rel=0.01)
    experts = [next(n for n in nodes(DEEPSEEK, tokens=tokens) if n.layer == "experts") for tokens in (1, 64)]
    assert experts[1].floor_us / experts[0].floor_us == pytest.approx((1 - (31 / 32) ** 64) * 32, rel=0.02)


def test_experts_of_the_model_are_scaled_to_random_routing():
    """The model's tokens go to all experts in turn: 32 tokens hit all 256, at random 63.8 %."""
    for tokens, share in ((32, 1 - (31 / 32) ** 32), (1, 1)):
        made = nodes(DEEPSEEK, "plugin", tokens=tokens, known=lambda call, tokens: (100.0, 4, None))
        [experts] = (node for node in made if node.layer == "experts")
        assert experts.us == pytest.approx(100 * share)


def test_all_reduces_grow_with_their_bytes():
    small, large = (baseline.all_reduce(MI300X, kilobytes, True).us for kilobytes in (14, 1536))
    assert small == 5.2 and large == pytest.approx(5.2 + 1.2 * (12.9 - 6.3))
    assert baseline.all_reduce(machines.MI355X, 768, True).us == 9.6
    assert baseline.all_reduce(machines.MI355X, 2304, True).us == pytest.approx(12.9 + 3.3), "the last slope goes on"


def test_all_reduces_are_vllms_own_where_aiter_is_off():
    for machine, kilobytes, own in ((MI300X, 2048, 36.6), (MI300X, 2, 7.2), (machines.MI355X, 768, 16.0)):
        time = baseline.all_reduce(machine, kilobytes, False)
        assert (time.us, time.kind) == (own, "published") and own > baseline.all_reduce(machine, kilobytes, True).us
    for config, tokens, us in ((LLAMA, 64, 36.6), (DEEPSEEK, 64, 5.2 + 1.2 * (10.15 - 6.3))):
        for side in step.SIDES:
            [node] = (node for node in nodes(config, side, tokens=tokens) if node.layer == "all-reduce")
            assert node.us == pytest.approx(us, abs=0.2)


def test_an_all_reduce_and_the_norm_behind_it_are_one_launch_where_that_is_faster():
    """They are one launch for few tokens of a model whose norm is the plugin's, and two in the baseline.

    The time is the published kernel's at its size, plus twice its bytes on a link and a block's reads.
    """

    def found(tokens: int, side: str = "plugin", norm_us: float = 4.0, **given) -> dict:
        known = {"known": lambda call, tokens: (norm_us, 1, 0.25)}
        return {node.layer: node for node in nodes(LLAMA, side, tokens=tokens, **known, **given)}

    joined = found(1)
    counted = {layer: node.count for layer, node in joined.items() if "all-reduce" in layer or "norm" in layer}
    names = "input norm", "post-attention norm", "final norm"
    assert counted == dict(zip([f"all-reduce + {name}" for name in names], (125, 126, 1)))
    node = joined["all-reduce + post-attention norm"]
    assert (node.launches, node.kind, node.band) == (1, "predicted", None) and "aiter#3549" in node.source
    assert 5.2 < node.us < 5.2 + 4 and node.floor_us > 0
    assert "all-reduce" in found(1, norm_us=2.0, aiter=True) and "all-reduce" in found(1, "baseline"), (
        "two launches are faster"
    )
    assert "all-reduce" in found(129), "a launch takes 128 rows"
    assert found(1, tp=1).keys() >= {"input norm", "post-attention norm"}
    own = [baseline.fused_all_reduce(machine, 8, 1, 5120).us for machine in (MI300X, machines.MI355X)]
    assert own == pytest.approx([5.8, 6.1], abs=0.1), "the published 5.2 reads half as much, and exchanges nothing"
    assert (
        baseline.fused_all_reduce(MI300X, 9, 1, 5120) is None is baseline.fused_all_reduce(machines.MI325X, 8, 1, 5120)
    )


def test_the_sum_with_shared_experts_is_part_of_the_launch_after_it():
    """The sum stays a launch where the all-reduce does, with many tokens, on one rank and in the baseline."""

    def found(**given) -> dict:
        return {node.layer: node for node in nodes(DEEPSEEK, known=lambda call, tokens: (4.0, 1, 0.25), **given)}

    joined, names = found(side="plugin"), ("input norm", "final norm")
    one = [joined[f"all-reduce + sum with shared experts + {name}"] for name in names]
    assert [node.count for node in one] == [57, 1] and "sum with shared experts" not in joined
    assert one[0].us == pytest.approx(joined["all-reduce + input norm"].us + baseline.ADDEND.value)
    for others in (found(side="plugin", tokens=293), found(side="plugin", tp=1), found(side="baseline")):
        assert others["sum with shared experts"].count == 58


def test_every_constant_says_where_it_is_from():
    found = [
        each for of in (baseline, published_steps) for each in vars(of).values() if isinstance(each, machines.Constant)
    ]
    assert len(found) > 10 and all(each.source and each.unit and each.kind in KIND_WORDS for each in found)
    assert KIND_WORDS == set(baseline.KINDS)
    for row in baseline.TABLE:
        assert row["kind"] in KIND_WORDS and row["source"] and row["timer"] in ("graph", "profiler")


def test_a_published_step_admits_gaps_that_give_it_back():
    """A gap at either end of the interval and its all-reduce add up to the published step."""
    for each in published_steps.admitted():
        us, kernels, launches, reduce, count = published_steps.predicted(each.batch)
        larger = reduce - published_steps.predicted(1)[3]
        for gap, small in zip(each.gap, (published_steps.SLOWEST, published_steps.FASTEST)):
            assert kernels + launches * gap + count * (small.value + larger) == pytest.approx(each.published * 1e3)
        assert kernels + count * each.reduce == pytest.approx(each.published * 1e3)
        assert us == pytest.approx(each.predicted * 1e3) and kernels + count * reduce == pytest.approx(us)


def test_a_published_step_has_its_share_of_the_prefill():
    alone = step.total(nodes(LLAMA, tokens=64, context=128 + 1024, skinny=1, aiter=False)).us
    assert published_steps.predicted(64)[0] - alone == pytest.approx(624, abs=1)


def test_the_baselines_experts_have_the_sort_of_tokens_and_the_quantization_in_front():
    least, most = (next(n for n in nodes(DEEPSEEK, launch=us) if n.layer == "experts") for us in (0.0, 3.0))
    assert least.launches == most.launches == 4 and most.us - least.us == pytest.approx(2 * 3.0)


def test_the_band_of_a_step_holds_every_published_step():
    low, high = published_steps.spread()
    assert low < 1 < high
    for each in published_steps.admitted():
        assert low <= each.published / each.predicted <= high
    made = step.total(nodes(LLAMA, "plugin", known=lambda call, tokens: (10.0, 1, 0.2)))
    least, most = step_report.interval(made)
    assert least == pytest.approx((made.us - made.bound_us) * low / 1e3)
    assert most == pytest.approx((made.us + made.bound_us) * high / 1e3) and made.bound_us > 0


def test_batch_1_of_both_releases_is_predicted_within_sixteen_percent():
    assert all(abs(each.ratio - 1) < 0.16 for each in published_steps.admitted() if each.batch == 1)


def test_steps_of_other_engines_are_held_out_of_the_band():
    """Nothing is fitted to them, and points outside the band are bold."""
    low, high = published_steps.spread()
    outside = 0
    for other in published_steps.OTHERS:
        ratios = [ms / published_steps.other_ms(other, batch) for batch, ms in other.ms.items()]
        outside += sum(not low <= ratio <= high for ratio in ratios)
    shown = step_table.others()
    assert shown.count("**") == 2 * outside > 0
    [lite] = (line for line in shown.splitlines() if "DeepSeek-V2-Lite" in line)
    assert "4.5 / 3.0 = **1.50**" in lite and high < 1.5


def test_gaps_and_streams_of_h200_profiles_are_predicted_within_seven_percent():
    """Both models at batch 1, 8 and 32 on both sides are predicted with measured kernel times."""
    found = list(h200_profiles.profiles())
    held = {(each.name.split("-")[4], each.side, each.batch) for each in found if not each.fitted}
    assert len(found) == 16 and sum(each.fitted for each in found) == 2
    assert {("llama", side, batch) for side in ("with", "without") for batch in (1, 8, 32)} < {
        (name.rstrip("-"), side, batch) for name, side, batch in held
    }
    assert all(abs(each.error) < 0.07 for each in found)
    deepseek = [each for each in found if "whole" in each.name]
    assert len(deepseek) == 6 and all(each.hidden > 0 for each in deepseek)
    alone = [each._replace(predicted=each.predicted + each.hidden).error for each in deepseek if each.side == "without"]
    assert min(alone) > 0.07, "one stream would not do"


@pytest.mark.parametrize("product", freeze.PRODUCTS)
@pytest.mark.parametrize(("name", "tp"), freeze.MODELS.items())
def test_every_call_of_a_frozen_model_has_a_frozen_time(name, tp, product):
    machine = machines.named(product)
    for tokens in freeze.TOKENS:
        made = step.nodes(model_config.read(name), tp, None, tokens, machine, "plugin", step.frozen_time(machine))
        assert all(node.kind == "predicted" for node in made if node.op)


def test_frozen_times_are_those_of_the_side_with_the_plugin():
    known = step.frozen_time(MI300X)
    made = nodes(DEEPSEEK, "plugin", tokens=8, known=known)
    values = frozen.newest()["calls"]
    [call] = (call for call in model_layers.calls(DEEPSEEK, 8) if call.layer == "q_b")
    [node] = (node for node in made if node.layer == "q_b")
    found = values[frozen.key("MI300X", call, 8)]
    assert any(known(call, 1) != known(call, 8) for call in model_layers.calls(DEEPSEEK, 8))
    assert (node.us, node.launches, node.band) == tuple(found[name] for name in ("us", "launches", "band"))
    assert all(node.kind == "predicted" for node in made if node.op)
    with pytest.raises(ValueError, match="tokens must be one of .* for frozen predictions of MI300X, got 16"):
        nodes(DEEPSEEK, "plugin", tokens=16, known=known)
    lacking = step.frozen_time(MI300X, {name: each for name, each in values.items() if "batched_gemm" not in name})
    [rule] = (node for node in nodes(DEEPSEEK, "plugin", tokens=8, known=lacking) if node.layer == "W_UK")
    assert rule.kind == "assumed" and rule.us > baseline.LAUNCH.value


def test_the_worst_launches_are_above_their_bytes_and_not_hidden():
    made = nodes(DEEPSEEK, "plugin", tokens=8, known=step.frozen_time(MI300X))
    found = step.worst(made)
    costs = [node.cost_us for node in found]
    assert (
        len(found) == 10 and costs == sorted(costs, reverse=True) and step.SECOND not in {node.stream for node in found}
    )
    others = [node for node in made if node not in found and node.stream != step.SECOND]
    assert max(node.cost_us for node in others) <= costs[-1]
    causes = {node.layer: step.cause(node) for node in found}
    assert causes["all-reduce + post-attention norm"].startswith("8-GPU synchronization")
    assert step.cause(next(node for node in made if node.layer == "embedding")).startswith("not a plugin op")
    assert causes["attention"].startswith("latency: bytes explain ") and causes["experts"].startswith("bandwidth: ")
    rows = [row for row in step_table.worst().splitlines() if row.startswith("| ") and "---" not in row]
    assert len(rows) == 1 + 4 * step_table.MAX and not any("| shared" in row for row in rows)


def test_a_step_must_be_of_a_side_and_a_product_with_times():
    with pytest.raises(
        ValueError, match=r"side must be baseline or plugin \(baseline on MI300X and MI355X\), got stock on MI300X"
    ):
        nodes(LLAMA, "stock")
    with pytest.raises(ValueError, match="got baseline on MI325X"):
        step.nodes(LLAMA, 8, None, 1, machines.MI325X, "baseline", lambda *_: None)
    assert step_report.sides(machines.MI325X) == ("plugin",) and step_report.sides(MI300X) == step.SIDES
