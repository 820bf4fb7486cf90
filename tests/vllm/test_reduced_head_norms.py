"""Test the launch whose head norms are over all ranks: its place in graphs, joint measurements, a step, and an engine of two ranks."""

import functools

import checkpoints
import pytest
import torch
from engines import STEPS
from fakes import Fake
from on_cpu import GroupClock, OverGloo
from test_reduced_norms import (  # noqa: F401
    TP,
    both,
    choice,
    choices,
    compiled,
    engine_of_two,
    group_of,
    worker_of_one_norm,
)
from test_rope_and_cache_seam import HEADS, KV_HEADS, OVER_RANKS, SIZE, TOGETHER, Layer, dynamo, found, job, traced  # noqa: F401
from vllm.distributed import parallel_state

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import qk_norm
from vllm_rocm_ops.core import arguments
from vllm_rocm_ops.vllm import coverage
from vllm_rocm_ops.vllm.attention import reduced_head_norms, rope_and_cache, rope_pre_attention
from vllm_rocm_ops.vllm.graph import all_reduce_norm, all_reduce_timing
from vllm_rocm_ops.vllm.selection import kernel_selection

LAUNCH = "all_reduce_qk_norm_rope_and_cache"
SHAPE = f"{HEADS}:{KV_HEADS}x{SIZE}/{SIZE} bfloat16 auto over-all"


def layer_of_two(rank: int = 0, cache: str = "auto") -> Layer:
    """Return a layer whose norms are over two ranks; weights differ."""
    made = Layer("TRITON_ATTN", TOGETHER, cache)
    for norm in made.norms:
        norm.tp_world, norm.tp_rank, norm.workspace = 2, rank, None
        norm.weight.data = norm.weight.data * (1 + rank)
    made.front()  # has the cache written
    return made


class Doubled:
    """A group of two ranks with the same inputs, which may serve some token counts."""

    def __init__(self, most: int):
        self.most, self.calls = most, 0

    def __call__(self, op, *args):
        self.calls += 1
        return qk_norm.run_fallback(lambda squares: 2 * squares, 2, args)

    def unsupported(self, op, *args):
        arguments.checked(op, op.Arguments(*args))  # as the launch's rules do
        return "too many" * (len(args[0]) > self.most)


@pytest.fixture
def doubled(monkeypatch):
    """Have vLLM's group of ranks double what it sums."""
    monkeypatch.setattr(parallel_state, "_TP", Fake(device_communicator=None, all_reduce=lambda x: 2 * x))


def comparison(layer: Layer, reduce, ranks: int = 2, rank: int = 0) -> reduced_head_norms.Comparison:
    """Return the only comparison of a layer."""
    group = Fake(world_size=ranks, rank_in_group=rank, device=torch.device("cpu"))
    [made] = rope_and_cache.reduced(None, torch.nn.ModuleList([layer]), group, reduce)
    return made


@pytest.mark.usefixtures("doubled")
def test_norms_over_ranks_are_found_for_their_group(found, monkeypatch):  # noqa: F811
    """The ranks measure them together. They stay vLLM's where it has no op for them, or in another group; the rotation need not."""
    layer, others = layer_of_two(), Fake(world_size=4, device=None)
    [front] = found(layer)
    assert front.op is ops.rope_and_cache and front.norms == ()
    made = comparison(layer, Doubled(101))
    assert str(made.key) == f"{LAUNCH} {SHAPE} 2-ranks" and made.token_counts() == [1, 2, 4, 8, 16, 32, 64, 101]
    assert [*rope_and_cache.reduced(None, torch.nn.ModuleList([layer]), others, None)] == []
    named = [name for kind, _, name in coverage.layers(layer) if kind == "norms"]
    assert len(named) == 2 and all("sums over ranks" in name for name in named)
    for serves in (False, True):
        made.apply(all_reduce_norm.GroupAllReduce(None, {made.call: choice(8 * serves)}), None)
        assert [taken for kind, taken, _ in coverage.layers(layer) if kind == "norms"] == [serves] * 2
        assert (layer.rotary_emb._forward_method.__name__ == "marked") == serves
    monkeypatch.setattr(rope_pre_attention, "has_reduced_op", lambda: False)
    assert [*rope_and_cache.reduced(None, torch.nn.ModuleList([layer]), made.group, None)] == []


def test_another_form_of_vllms_op_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(rope_pre_attention, "OPERANDS", [*rope_pre_attention.OPERANDS, "bias"])
    rope_pre_attention.has_reduced_op.cache_clear()
    assert not rope_pre_attention.has_reduced_op() and not rope_pre_attention.has_reduced_op()
    rope_pre_attention.has_reduced_op.cache_clear()
    assert caplog.text.count("head norms over ranks stay vLLM's") == 1


@pytest.mark.usefixtures("dynamo")
def test_one_op_is_in_the_place_of_vllms():
    """It reads the projection's result, and attention reads what it returns."""
    module = traced(True, OVER_RANKS)
    assert rope_and_cache.rewrite(module.graph, [rope_and_cache.TORCH_OP]) == 1
    module.graph.lint()
    nodes = {getattr(node.target, "__name__", node.name): node for node in module.graph.nodes}
    [plugin] = module.graph.find_nodes(
        op="call_function", target=torch.ops.vllm_rocm_ops.reduced_attention_front.default
    )
    assert plugin.args[2:] == (HEADS, KV_HEADS, SIZE, "a") and plugin.args[0].name == "qkv"
    attention = next(n for n in module.graph.nodes if n.target is torch.ops.vllm.unified_attention_with_output)
    assert [x.args for x in attention.args[:2]] == [(plugin, 0), (plugin, 1)]
    assert attention.kwargs["kv_cache_dummy_dep"] is None
    assert not {"minimax_qk_norm_fusion", "unified_kv_cache_update", "marked_rotation.default"} & {*nodes}


@pytest.mark.usefixtures("dynamo")
def test_the_rotation_alone():
    """It is served beside vLLM's op, in place, where the ranks did not time the launch to be faster."""
    module = traced(False, OVER_RANKS)
    assert rope_and_cache.rewrite(module.graph, [rope_and_cache.TORCH_OP]) == 1
    targets = [node.target for node in module.graph.nodes]
    assert torch.ops.vllm.minimax_qk_norm_fusion in targets
    assert torch.ops.vllm_rocm_ops.attention_front.default in targets


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("most", [1, 3])
def test_a_step(found, monkeypatch, most, cache):  # noqa: F811
    """It has the exact norms, by one launch or by vLLM's op. A profile run writes no cache."""
    layer = layer_of_two(cache=cache)
    found(layer)  # sets the configuration
    made = comparison(layer, Doubled(8))
    made.apply(all_reduce_norm.GroupAllReduce(made.reduce, {made.call: choice(most)}), None)
    [qkv, _], (positions, slots, empty) = made.inputs(3, 0)
    context = "vllm.model_executor.layers.attention.attention.get_attention_context"
    for given, written in (((layer.attn, empty.clone(), slots[:2, None]), 2), ((layer.attn, empty[:0], None), 0)):
        monkeypatch.setattr(context, lambda name, given=given: (None, *given))
        q, k = torch.ops.vllm_rocm_ops.reduced_attention_front(qkv, positions, HEADS, KV_HEADS, SIZE, "layer")
        cached = given[1] if written else empty
        got = made.results((q, k, cached), [])
        for place, (x, exact) in enumerate(zip(got, made.exact([qkv, qkv], (positions, slots, empty)), strict=True)):
            rows = 3 if place < 2 else written
            rounding = 2**-3 if place >= 2 and cache == "fp8" else 2**-6
            torch.testing.assert_close(x[:rows].float(), exact[:rows], rtol=rounding, atol=rounding)
            assert place < 2 or not x[rows:].any()
    assert made.reduce.calls == (2 if most == 3 else 0)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("wrong", [False, True])
def test_ranks_measure_together(found, monkeypatch, wrong):  # noqa: F811
    """Their results differ, and are checked on each rank; a wrong one is off on all."""
    monkeypatch.setattr(all_reduce_timing, "finders", [rope_and_cache.reduced])
    found()  # sets the configuration

    def rank(group):
        group, worker = group_of(group), worker_of_one_norm()
        parallel_state._TP = Fake(device_communicator=None, all_reduce=group.device_communicator.all_reduce)
        layer = layer_of_two(group.rank_in_group)
        worker.model_runner.get_model().layers = torch.nn.ModuleList([layer])
        create = functools.partial(OverGloo, flips=wrong)
        all_reduce_timing.before_compiling(worker, group, GroupClock(4), create)
        shared = all_reduce_norm.groups.get(TP)
        serves = [n for n in range(6) if shared and shared.serves(reduced_head_norms.Call(SHAPE), n)]
        return serves, layer.rotary_emb._forward_method.__name__

    served, forward = both(rank)
    record = kernel_selection.record_here()
    [key] = [key for key in record.shapes if key.op == LAUNCH] or [None]
    if wrong:
        assert (served, forward, key) == ([], "forward_native", None)
        assert record.off[LAUNCH].startswith("rank 0: relative error 0.")
        return
    assert (served, forward, str(key)) == ([1, 2], "marked", f"{LAUNCH} {SHAPE} 2-ranks")
    assert [(n, timed.plugin_us) for n, timed in sorted(record.shapes[key].items())] == [(1, 1.0), (2, 1.0), (4, 3.0)]
    assert all(0 < timed.error < 0.01 for timed in record.shapes[key].values())


@pytest.mark.slow
def test_two_ranks_in_the_engine(engines):
    """Steps of few tokens have one launch per layer and rank, others vLLM's op and one launch. One rank without it has equal tokens."""
    of = "minimax_m2", "mixed"
    answer = engine_of_two(engines, "5", "cache-head-norms", of, VLLM_ROCM_OPS_ATTENTION="1")
    assert answer["tokens"] == engines.run_one(job(engines, of, "0", compiled=False))["tokens"]
    layers, steps = checkpoints.LLAMA["num_hidden_layers"], STEPS - 1
    for rank in (answer["stats"], *answer["other_ranks"]):
        assert rank[LAUNCH] == {"one launch": layers * steps} and sum(rank["rope_and_cache"].values()) == layers
    assert "in no graph" not in answer["output"]
