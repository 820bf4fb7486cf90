"""Test the launch that normalizes heads, rotates and writes the cache: its place in graphs, when it serves, and results."""

import checkpoints
import fakes
import on_cpu
import pytest
import test_selection
import torch
from engines import LOADED, STEPS
from fakes import Fake, change, check_and_time, parameter, require_near, set_config, spoil
from marks import full
from test_families import INSTALLED, NOT_ON_CPU
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.fx.experimental.proxy_tensor import make_fx
from vllm._aiter_ops import rocm_aiter_ops
from vllm.config import CompilationConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.attention import (
    backends,
    decoder,
    reduced_head_norms,
    rope_and_cache,
    rope_pre_attention,
    split,
)
from vllm_rocm_ops.vllm.graph import all_reduce_timing, compilation, compiled_ops, markers, model_queries
from vllm_rocm_ops.vllm.selection import kernel_timing
from vllm_rocm_ops.vllm.selection.key import COMPILED

ON_GPU = torch.cuda.is_available()
HEADS, KV_HEADS, SIZE = 6, 2, 64
PLAIN, NORMED = ops.rope_and_cache, ops.qk_norm_rope_and_cache
LAYERS = checkpoints.LLAMA["num_hidden_layers"]

# A layer


OVER_ALL, TOGETHER, OVER_RANKS = "over all heads", "over all heads, by one method", "over the heads of all ranks"
"""Norms of queries and keys, besides one per head."""


def norm(heads: int, last: float, normed: bool | str) -> torch.nn.Module:
    """Return vLLM's norm of heads."""
    size = SIZE * heads if normed in (OVER_ALL, TOGETHER) else SIZE
    if normed == TOGETHER:  # without its group of ranks
        made = MiniMaxText01RMSNormTP.__new__(MiniMaxText01RMSNormTP)
        torch.nn.Module.__init__(made)
        made.weight, made.variance_epsilon, made.tp_world = parameter(torch.ones(size).bfloat16()), 1e-6, 1
    else:
        made = RMSNorm(size, dtype=torch.bfloat16)
        made.vllm_forward = made.forward_native  # it compiles nothing
    made.weight.data = torch.linspace(0.5, last, size).bfloat16()
    return made


class Layer(torch.nn.Module):
    """The parts of an attention layer that the plugin uses."""

    def __init__(
        self, member: str, normed: bool | str, cache_dtype: str = "auto", is_neox: bool = True, rotary: int = SIZE
    ):
        super().__init__()
        self.rotary_emb = RotaryEmbedding(SIZE, rotary, 64, 10000.0, is_neox, torch.bfloat16)
        self.rotary_emb._forward_method = self.rotary_emb.forward_native
        if normed:
            self.q_norm, self.k_norm = norm(HEADS, 2, normed), norm(KV_HEADS, 1, normed)
        backend = backends.made(decoder.BACKENDS[member])
        self.attn = attn = Attention.__new__(Attention)
        torch.nn.Module.__init__(attn)
        attn.impl = backend.get_impl_cls()(HEADS, SIZE, 0.1, KV_HEADS, None, None, cache_dtype)
        attn.attn_backend, attn.attn_type, attn.query_quant = backend, "decoder", None
        attn.num_heads, attn.num_kv_heads, attn.head_size, attn.head_size_v = HEADS, KV_HEADS, SIZE, SIZE
        attn.kv_sharing_target_layer_name, attn.use_direct_call = None, False
        attn._k_scale, attn._v_scale = torch.tensor(0.02), torch.tensor(0.03)

    @property
    def norms(self) -> tuple:
        return (self.q_norm, self.k_norm) if {"q_norm", "k_norm"} <= {*self._modules} else ()

    def front(self) -> rope_pre_attention.RopePreAttention:
        self.attn.impl.do_kv_cache_update = self.write
        return rope_pre_attention.RopePreAttention(self, self.norms, (0, 0), torch.bfloat16, COMPILED)

    def write(self, attn, key, value, cache, slots) -> None:
        """Write as vLLM's backends do."""
        served = attn.impl.rocm_ops
        rotation.write(CacheLayout(*served.caches(attn, cache)), key, value, slots, served.scales(attn))


CASES = [
    ("TRITON_ATTN", False, "auto", True, SIZE),
    ("TRITON_ATTN", True, "auto", True, SIZE),
    ("TRITON_ATTN", True, "fp8", True, SIZE // 2),
    ("TRITON_ATTN", False, "fp8", False, SIZE),
    ("ROCM_ATTN", False, "auto", True, SIZE),
    ("ROCM_ATTN", True, "auto", False, SIZE // 2),
    ("ROCM_ATTN", OVER_ALL, "auto", True, SIZE),
    ("TRITON_ATTN", TOGETHER, "fp8", True, SIZE // 2),
]


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kernel_is_measured_beside_vllms_layers(case):
    """The emulated kernel is as close to exact q, k and cache rows as vLLM's."""
    layer = Layer(*case)
    front, (_, normed, cache, is_neox, rotary) = layer.front(), case
    shape = f"{HEADS}:{KV_HEADS}x{SIZE}/{rotary} bfloat16 {cache}{'' if is_neox else ' interleaved'}"
    shape += " over-all" * (normed in (OVER_ALL, TOGETHER))
    assert str(front.key) == f"{(NORMED if normed else PLAIN).name} {shape} compiled"
    assert front.key.has_one_choice
    require_near(front)


@pytest.mark.parametrize("normed", [False, TOGETHER])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_aiters_shuffled_cache_is_written(configuration, monkeypatch, normed, cache):
    """It is compared in a cache of that order, which has keys and values in planes."""
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    layer = Layer("ROCM_AITER_FA", normed, cache)
    assert not any(rope_and_cache.unsupported_features(layer.attn, layer.rotary_emb, torch.bfloat16))
    front = layer.front()
    assert front.cache(40, "cpu").shape == (3, 2, 16, KV_HEADS * SIZE)
    assert CacheLayout(*layer.attn.impl.rocm_ops.caches(layer.attn, front.cache(40, "cpu"))).is_interleaved
    require_near(front)


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("part", ["query_out", "key_out", "key_cache", "value_cache"])
def test_each_result_is_checked(part, monkeypatch):
    spoil(monkeypatch, NORMED, part)
    with pytest.raises(kernel_timing.Mismatch):
        check_and_time(Layer("TRITON_ATTN", True).front())


UNSUPPORTED = {
    "a backend": [("attn.impl.rocm_ops",)],
    "a rotation of sections": [("rotary_emb", torch.nn.Identity())],
    "a rotation by a custom op": [("rotary_emb._forward_method", lambda *_: None)],
    "a rotation of other heads": [("rotary_emb.head_size", 32)],
    "a table in float32": [("rotary_emb.cos_sin_cache", torch.zeros(64, SIZE))],
    "an encoder": [("attn.attn_type", "encoder_only")],
    "a shared cache": [("attn.kv_sharing_target_layer_name", "0")],
    "a direct call": [("attn.use_direct_call", True)],
    "a write in attention": [("attn.attn_backend", Fake(forward_includes_kv_cache_update=True))],
    "queries in FP8": [("attn.query_quant", object()), ("attn.impl.supports_quant_query_input", True)],
    "values of another size": [("attn.head_size_v", 32)],
    "a cache of": [("attn.impl.kv_cache_dtype", "int8_per_token_head")],
    "rows that must not": [("attn.impl.rocm_ops.is_batch_invariant", True)],
}


@pytest.mark.usefixtures("configuration")
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_unsupported_layers_are_not_served(what):
    layer = Layer("TRITON_ATTN", True)

    def reasons() -> list[str]:
        return [*rope_and_cache.unsupported_features(layer.attn, layer.rotary_emb, torch.bfloat16)]

    assert reasons() == []
    for changed in UNSUPPORTED[what]:
        change(layer, *changed)
    assert len(reasons()) == 1


@pytest.fixture
def found(configuration, monkeypatch):
    """Return a function for the launches that may serve layers."""

    def fronts(*layers: Layer, compiles: bool = True, splits: bool = True, partitions: bool = False, **passes) -> list:
        settings = Fake(pass_config=Fake(fuse_norm_quant=False, **passes), use_inductor_graph_partition=partitions)
        settings.splitting_ops = [rope_and_cache.UPDATE] if splits else []
        set_config(monkeypatch, compilation_config=settings, model_config=Fake(dtype=torch.bfloat16))
        monkeypatch.setattr(compilation, "is_compiled", lambda config, model: compiles)
        return [*rope_and_cache.pre_attentions(torch.nn.ModuleList(layers), compiles)]

    return fronts


def test_it_serves_compiled_models_that_vllm_does_not_fuse(found):
    """It serves compiled models that vLLM splits at the update, unless one of vLLM's passes fuses the rotation."""
    layer = Layer("TRITON_ATTN", True)
    [front] = found(layer)
    assert str(front.key).endswith(" compiled") and not front.runs_unmeasured()
    assert found(layer, compiles=False) == found(layer, splits=False) == found(layer, partitions=True) == []
    for name in rope_and_cache.PASSES:
        assert found(layer, **{name: True}) == [] and len(found(layer, **{name: False})) == 1


NORMS = {
    "one norm": ("k_norm",),
    "a norm of all heads": ("q_norm.weight", parameter(torch.ones(256).bfloat16())),
    "weights in float32": ("q_norm.weight", parameter(torch.ones(SIZE))),
    "norms that are not supported": ("k_norm", torch.nn.LayerNorm(SIZE)),
    "a part of a head": ("k_norm.variance_size_override", 32),
    "two epsilons": ("k_norm.variance_epsilon", 1e-3),
}


@pytest.mark.parametrize("what", NORMS)
def test_other_norms_stay_the_compilers(found, what):
    layer = Layer("TRITON_ATTN", True)
    [front] = found(layer)
    assert front.op is NORMED and front.norms == layer.norms
    change(layer, *NORMS[what])
    [front] = found(layer)
    assert front.op is PLAIN and front.norms == ()


NORMS_TOGETHER = {
    "one of a head": ("k_norm.weight", parameter(torch.ones(SIZE).bfloat16())),
    "weights in float32": ("k_norm.weight", parameter(torch.ones(KV_HEADS * SIZE))),
    "two epsilons": ("k_norm.variance_epsilon", 1e-3),
    "a method with other arguments": ("q_norm.__class__.forward_qk", lambda q_norm, k_norm, qkv: None),
}


@pytest.mark.parametrize("what", NORMS_TOGETHER)
def test_norms_over_all_heads_that_stay_vllms(found, monkeypatch, what):
    """They are served where the norms are known, and marked only while they are served."""
    monkeypatch.setattr(markers, "_normalize", [])
    monkeypatch.setattr(MiniMaxText01RMSNormTP, "forward_qk", staticmethod(MiniMaxText01RMSNormTP.forward_qk))
    layer = Layer("TRITON_ATTN", TOGETHER)
    [front] = found(layer)
    assert front.op is NORMED and front.traits.over_all
    for serves in (True, False):
        front.apply_decision(serves)
        assert [getattr(norm, model_queries.MARKED) for norm in layer.norms] == [serves] * 2
        reached = [taken for kind, taken, _ in coverage.layers(layer) if kind == "norms"]
        assert reached == [serves] * 2
    change(layer, *NORMS_TOGETHER[what])
    [front] = found(layer)
    assert front.op is PLAIN and front.norms == ()


def test_layers_that_share_a_rotation_are_served_together(found):
    """The marker tells nothing of a layer: one that lacks something leaves all to vLLM, as does one that loses."""
    layers = [Layer("TRITON_ATTN", False) for _ in range(2)]
    layers[1].rotary_emb = rotary = layers[0].rotary_emb
    fronts = found(*layers)
    assert len(fronts) == 2
    fronts[1].pattern = fronts[1].pattern._replace(shape="other")
    for choices in ((True, False), (False, True), (False, False)):
        for one, choice in zip(fronts, choices):
            one.apply_decision(choice)
        assert rotary._forward_method == rotary.forward_native
    for one in fronts:
        one.apply_decision(True)
    assert rotary._forward_method.__name__ == "marked"
    assert len(found(*layers)) == 2 and rotary._forward_method == rotary.forward_native, "another model of the process"
    fronts[0].apply_decision(True)
    assert rotary._forward_method.__name__ == "marked"
    layers[1].attn.use_direct_call = True
    assert found(*layers) == []
    layers[1].attn.use_direct_call = False
    layers[1].q_norm, layers[1].k_norm = Layer("TRITON_ATTN", True).norms
    assert found(*layers) == []


# The graph


class Traced(torch.nn.Module):
    """A layer as vLLM's models are, up to attention."""

    def __init__(self, normed: bool, change: str = ""):
        super().__init__()
        self.normed, self.change = normed, change
        self.q_weight, self.k_weight = (torch.nn.Parameter(torch.ones(SIZE).bfloat16()) for _ in range(2))
        self.q_all, self.k_all = (torch.ones(heads * SIZE).bfloat16() for heads in (HEADS, KV_HEADS))

    def forward(self, qkv, positions, table):
        qkv = qkv * 2
        sizes = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
        q, k, v = qkv.split(sizes, dim=-1)
        if self.change == "a result that is not split":
            q = q + 1
        if self.change == "a copy that may be none":
            k, v = k.contiguous(), k
        read = q if self.change == "queries read" else qkv if self.change == "the projection read" else None
        if self.change == OVER_RANKS:
            of_ranks = HEADS * SIZE, KV_HEADS * SIZE, 0, 2, 1e-6, None
            q, k = torch.ops.vllm.minimax_qk_norm_fusion(qkv, self.q_all, self.k_all, *of_ranks)
        elif self.change == TOGETHER:
            q, k = markers.BOTH_NORMS(q, k, self.q_all, self.k_all, 1e-6)
        elif self.normed:
            q_weight, k_weight = self.q_weight.data, self.k_weight.data
            epsilon = 1e-5 if self.change == "two epsilons" else 1e-6
            q = torch.ops.vllm_ir.rms_norm.default(q.view(-1, HEADS, SIZE), q_weight, 1e-6).view(q.shape)
            if self.change != "one norm":
                k = torch.ops.vllm_ir.rms_norm(k.reshape(-1, KV_HEADS, SIZE), k_weight, epsilon).reshape(k.shape)
        asks = self.normed and self.change != "norms that are not asked for"
        q, k = markers.ROTATION(positions, q, k, table, [SIZE, SIZE], True, asks)
        if self.change == "rotated queries read":
            read = q
        if self.change == "scaled queries":
            q = q * 2
        output = torch.empty(qkv.shape[0], HEADS, SIZE, dtype=qkv.dtype)
        q, k, v = q.view(-1, HEADS, SIZE), k.view(-1, KV_HEADS, SIZE), v.view(-1, KV_HEADS, SIZE)
        dep = None
        if self.change != "a shared cache":
            dep = torch.ops.vllm.unified_kv_cache_update(k, v, "a" if self.change != "another layer" else "b")
        given = q, k, v * 1 if self.change == "other values" else v, output, "a"
        torch.ops.vllm.unified_attention_with_output(*given, kv_cache_dummy_dep=dep)
        return output if read is None else (output, read + 1)


def traced(normed: bool, change: str = "") -> torch.fx.GraphModule:
    """Return the graph that vLLM's backend gets."""
    rows, table = torch.zeros(3, (HEADS + 2 * KV_HEADS) * SIZE).bfloat16(), torch.zeros(9, SIZE).bfloat16()
    return fakes.traced(Traced(normed, change), rows, torch.zeros(3).long(), table)


ALWAYS_SERVED = "", "a result that is not split"
OF_NORMS = "two epsilons", "one norm", "norms that are not asked for", TOGETHER
SERVED_WITH_NORMS = (
    *("queries read", "the projection read", "a copy that may be none", "norms that are not asked for"),
    TOGETHER,
)
NEVER_SERVED = "rotated queries read", "scaled queries", "a shared cache", "another layer", "other values"
CHANGES = [*ALWAYS_SERVED, *SERVED_WITH_NORMS, *OF_NORMS[:2], *NEVER_SERVED]
CASES_OF_GRAPHS = [(normed, what) for normed in (False, True) for what in CHANGES if normed or what not in OF_NORMS]


@pytest.fixture
def dynamo(configuration):
    import vllm.ir.ops  # noqa: F401
    from vllm.model_executor.layers.attention import attention  # noqa: F401

    if not hasattr(torch.ops.vllm_rocm_ops, rope_and_cache.NAME):
        split.define(rope_and_cache.attention_front, "q", "k", "q_out", "k_out")


@pytest.mark.parametrize(("normed", "change"), CASES_OF_GRAPHS)
def test_where_the_op_replaces_a_rotation(dynamo, monkeypatch, normed, change):
    """Only where nothing else reads what it replaces, or what it rotates in place. The log has both."""
    monkeypatch.setattr(markers, "_normalize", [MiniMaxText01RMSNormTP.forward_qk])
    module, said = traced(normed, change), []
    before = str(module.graph)
    plugin_serves = change in ALWAYS_SERVED or (normed and change in SERVED_WITH_NORMS)
    monkeypatch.setattr(rope_and_cache.logger, "info", lambda text, *values: said.append(text % values))
    assert rope_and_cache.rewrite(module.graph, [rope_and_cache.TORCH_OP]) == plugin_serves
    [line] = said
    assert ("one launch in 1 layers" in line, "1 rotations stay" in line) == (plugin_serves, not plugin_serves)
    targets = [node.target for node in module.graph.nodes]
    plugin = torch.ops.vllm_rocm_ops.attention_front.default
    if not plugin_serves:
        assert str(module.graph) == before and plugin not in targets
        return
    module.graph.lint()
    assert targets.count(plugin) == 1 and markers.ROTATION not in targets
    assert torch.ops.vllm.unified_kv_cache_update not in targets
    assert (torch.ops.vllm_ir.rms_norm.default in targets) == (change == "norms that are not asked for")
    assert targets.index(plugin) < targets.index(torch.ops.vllm.unified_attention_with_output)


@pytest.mark.parametrize("normed", [False, True])
def test_the_op_gets_what_the_launches_got(dynamo, normed):
    """Attention reads what the op writes."""
    module = traced(normed)
    rope_and_cache.rewrite(module.graph, [rope_and_cache.TORCH_OP])
    [node] = (node for node in module.graph.nodes if node.target is torch.ops.vllm_rocm_ops.attention_front.default)
    q, k, v, q_weight, k_weight, epsilon, positions, table, is_neox, q_out, k_out, *traits, name = node.args
    assert traits == [False, 0, 0]
    attention = next(n for n in module.graph.nodes if n.target is torch.ops.vllm.unified_attention_with_output)
    assert [part.args[0].args[1] for part in (q, k, v)] == [0, 1, 2] if not normed else True
    assert [x.args[1:] for x in (q, k, v)] == [(-1, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert attention.args[:2] == ((q_out, k_out) if normed else (q, k)) and attention.args[2] is v
    assert attention.kwargs["kv_cache_dummy_dep"] is None and (name, is_neox) == ("a", True)
    assert "positions" in positions.name and "table" in table.name
    if normed:
        assert ("q_weight" in str(q_weight.args), "k_weight" in str(k_weight.args), epsilon) == (True, True, 1e-6)
        assert [out.args for out in (q_out, k_out)] == [(q,), (k,)]
    else:
        assert (q_weight, k_weight, q_out, k_out) == (None,) * 4


# A step


@pytest.fixture
def stepped(configuration, monkeypatch):
    """Return a function that runs the op for a layer, and returns q, k and the cache, and what vLLM's layers return."""

    def run(layer: Layer, has_cache: bool = True) -> tuple[list, list]:
        one = layer.front()
        qkv, positions, slots, cache = one.inputs(3, 0)
        given = layer.attn, cache if has_cache else cache[:0], slots[:2, None] if has_cache else None
        context = "vllm.model_executor.layers.attention.attention.get_attention_context"
        monkeypatch.setattr(context, lambda name: (None, *given))
        wanted = one.baseline_outputs(one.graph_outputs(qkv, positions), qkv, slots, cache.clone())
        (q, k, v), norm = one.parts(qkv.clone()), one.weights() or (None, None, 0.0)
        outs = [torch.full_like(x, torch.nan).contiguous() for x in (q, k)] if one.norms else [None, None]
        angles = positions, layer.rotary_emb.cos_sin_cache, layer.rotary_emb.is_neox_style
        rope_and_cache.attention_front(q, k, v, *norm, *angles, *outs, False, 0, 0, "layer")
        impl = layer.attn.impl

        def rows(of: torch.Tensor) -> torch.Tensor:
            layout = CacheLayout(*impl.rocm_ops.backend.caches(impl, layer.attn, of))
            places = slots // layout.page_size, slots % layout.page_size
            return torch.stack([layout.keys(*places), layout.values(*places)], 1)

        found = *(outs if one.norms else (q, k)), rows(cache)
        return [x.float() for x in found], [x.float() for x in (*wanted[:2], rows(wanted[2]))]

    return run


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("normed", [False, True, OVER_ALL])
@pytest.mark.parametrize("member", ["TRITON_ATTN", "ROCM_ATTN"])
def test_a_padded_step_writes_its_own_slots_only(stepped, member, normed, served):
    """It writes the slots there are, of fewer tokens than a padded graph has, in any backend."""
    layer = Layer(member, normed)
    if not served:  # as where the cache has another order
        layer.front()
        layer.attn.impl.rocm_ops.caches, kept = lambda *_: None, layer.attn.impl.rocm_ops.caches
        layer.write = lambda attn, k, v, cache, slots: rotation.write(
            CacheLayout(*kept(attn, cache)), k, v, slots, (None, None)
        )
    (q, k, cache), (wanted_q, wanted_k, wanted) = stepped(layer)
    torch.testing.assert_close(q, wanted_q, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(k, wanted_k, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(cache[:2], wanted[:2], rtol=2**-6, atol=2**-6)
    assert wanted[2].any() and not cache[2].any()


@pytest.mark.parametrize("normed", [False, True, TOGETHER])
def test_a_run_without_a_cache_writes_none(stepped, normed):
    """vLLM's profile run has no slots."""
    (q, k, cache), (wanted_q, wanted_k, _) = stepped(Layer("TRITON_ATTN", normed), has_cache=False)
    torch.testing.assert_close(q, wanted_q, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(k, wanted_k, rtol=2**-6, atol=2**-6)
    assert not cache.any()


def test_a_marker_computes_vllms_rotation(configuration):
    """Outside of a trace, too, and with one argument less."""
    layer = Layer("TRITON_ATTN", False)
    rotary, generator = layer.rotary_emb, torch.Generator().manual_seed(0)
    q, k = (torch.randn(3, heads * SIZE, generator=generator).bfloat16() for heads in (HEADS, KV_HEADS))
    positions, marked = torch.tensor([3, 0, 50]), markers.of_rotation(rotary, False)
    wanted = rotary.forward_native(positions, q, k)
    made = markers.ROTATION(positions, q, k, rotary.cos_sin_cache, [SIZE, SIZE], True, False)
    for found in (made, marked(positions, q, k)):
        assert all(map(torch.equal, found, wanted))
    assert torch.equal(marked(positions, q)[0], wanted[0]) and marked(positions, q)[1] is None


def test_a_marker_computes_both_norms(configuration, monkeypatch):
    """In a trace it is one node, of the queries, keys and weights that vLLM's method got; outside vLLM's method runs."""
    monkeypatch.setattr(markers, "_normalize", [])
    monkeypatch.setattr(MiniMaxText01RMSNormTP, "forward_qk", staticmethod(MiniMaxText01RMSNormTP.forward_qk))
    norms = Layer("TRITON_ATTN", TOGETHER).norms
    rows = [torch.randn(3, heads * SIZE).bfloat16() for heads in (HEADS, KV_HEADS)]
    wanted = MiniMaxText01RMSNormTP.forward_qk(*norms, *rows)

    def traced() -> list:
        torch._dynamo.reset()
        kept = EagerAndRecordGraphs()
        run = torch.compile(lambda q, k: MiniMaxText01RMSNormTP.forward_qk(*norms, q, k), backend=kept, fullgraph=True)
        assert all(map(torch.equal, run(*rows), wanted))
        return [node.target for node in kept.graphs[0].graph.nodes if node.op == "call_function"]

    assert markers.BOTH_NORMS not in traced()
    for marks in (True, False):
        markers.of_norms(norms, marks)
        assert all(map(torch.equal, MiniMaxText01RMSNormTP.forward_qk(*norms, *rows), wanted))
        assert traced().count(markers.BOTH_NORMS) == marks
    given = *rows, *(norm.weight.data for norm in norms)
    module = make_fx(lambda *tensors: markers.BOTH_NORMS(*tensors, 1e-6), tracing_mode="fake")(*given)
    [marker] = module.graph.find_nodes(op="call_function", target=markers.BOTH_NORMS)
    markers.lower(marker, {})  # where no op takes it
    module.recompile()
    assert all(map(torch.equal, module(*given), wanted))
    assert not module.graph.find_nodes(op="call_function", target=markers.BOTH_NORMS)


# The seam


def test_the_seam_needs_its_hooks(configuration, monkeypatch):
    rope_and_cache.probe()
    monkeypatch.setattr(split, "MODULE", "vllm.compilation.counter")
    with pytest.raises(seam.Unavailable, match="split_graph"):
        rope_and_cache.probe()


def test_graphs_are_changed_before_they_are_split(dynamo, monkeypatch):
    """They are, only where vLLM splits at the op."""
    from vllm.compilation import backends as compilation

    given = []
    monkeypatch.setattr(compilation, "split_graph", lambda graph, splitting_ops: given.append(graph.code))
    monkeypatch.setattr(CompilationConfig, "set_splitting_ops_for_v1", lambda self: None)
    monkeypatch.setattr(compiled_ops, "pattern_finders", [])
    monkeypatch.setattr(split, "define", lambda *_, **__: None)
    monkeypatch.setattr(all_reduce_timing, "finders", [])
    monkeypatch.setattr(split, "_changes", [])
    rope_and_cache.install()
    assert compiled_ops.pattern_finders == [rope_and_cache.pre_attentions]
    splits, whole = (
        Fake(splitting_ops=[name]) for name in (rope_and_cache.UPDATE, "vllm::unified_attention_with_output")
    )
    for settings in (splits, splits, whole):
        CompilationConfig.set_splitting_ops_for_v1(settings)
    assert splits.splitting_ops == [rope_and_cache.UPDATE, rope_and_cache.TORCH_OP, reduced_head_norms.TORCH_OP]
    assert rope_and_cache.TORCH_OP not in whole.splitting_ops
    split._wrap.cache_clear()
    for _ in range(2):
        split.before(rope_and_cache.rewrite)
    split._wrap.cache_clear()
    assert split._changes == [rope_and_cache.rewrite]
    for splitting_ops in (splits.splitting_ops, []):
        compilation.split_graph(traced(False), splitting_ops)
    assert ["attention_front" in code for code in given] == [True, False]


# In the engine

MODELS = {("llama", "static"): PLAIN, ("qwen3", "token"): NORMED}
MORE = {
    ("mistral", "token"): PLAIN,
    ("mixtral", "mixed"): PLAIN,
    ("qwen2", "token"): PLAIN,
    ("qwen3_moe", "mixed"): NORMED,
    ("glm4_moe", "mixed"): NORMED,
    ("gemma3_text", "token"): NORMED,  # norms with 1 + weight
    ("minimax_m2", "mixed"): NORMED,  # norms over all heads
}


def calls(answer: dict, op) -> int:
    return sum(answer["stats"].get(op.name, {}).values())


ALSO_COMPILED = MODELS
"""Models that are compiled without the launch, too.

The others' tokens are compared with an eager run's, which takes a seventh of the time: no rounding changes a token of
engines.py's prompts.
"""


def job(engines, flavour: tuple[str, str], switch: str, compiled: bool) -> dict:
    """Return a job that forces the launch and the plugin's attention, or leaves both to vLLM."""
    given = {"VLLM_ROCM_OPS_ATTENTION": switch, "VLLM_ROCM_OPS_MEASURE": "0"}
    made = engines.job(flavour, compiled=compiled, environment=given)
    if ON_GPU:
        made["engine"]["attention_backend"] = "TRITON_ATTN"
    return made


RELEASES = {
    f"{name} {release}": (release, models)
    for release in test_selection.RELEASES
    for name, models in (("", MODELS), ("more", MORE))
    if not name or release in (test_selection.OLDEST, INSTALLED)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [name if name == f" {INSTALLED}" else pytest.param(name, marks=full) for name in RELEASES]
)
def test_tokens_equal_baseline_vllms(engines, tmp_path, of):
    """In vLLM's CPU engine, compiled, one launch per layer and step replaces two, or four with its norms."""
    release, models = RELEASES[of]
    left_out = (*NOT_ON_CPU.get(release, ()), *(["minimax_m2"] if release == "0.30" else []))  # its tokens vary there
    models = {flavour: op for flavour, op in models.items() if flavour[0] not in left_out}
    jobs = {}
    for flavour in models:
        for switch in "10":
            compiled = switch == "1" or ON_GPU or flavour in ALSO_COMPILED
            jobs[f"{'-'.join(flavour)} {switch}"] = job(engines, flavour, switch, compiled)
    package = None if release == INSTALLED else test_selection.runnable(release, tmp_path)
    answers = engines.run(jobs, vllm=package, cache=f"rope-{release}")
    for flavour, op in models.items():
        plugin, baseline = (answers[f"{'-'.join(flavour)} {switch}"] for switch in "10")
        assert plugin["tokens"] == baseline["tokens"], flavour
        for one in (PLAIN, NORMED):
            found = calls(plugin, one), calls(baseline, one)
            if ON_GPU:  # a replayed graph calls no op
                found = tuple(LAYERS * STEPS * (one.name in of["captured"][0]) for of in (plugin, baseline))
            assert found == (LAYERS * STEPS if one is op else 0, 0), flavour


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the other test's code is generated, too")
def test_tokens_of_generated_code(engines):
    """Inductor's code passes views of one projection to the op, which rotates them in place."""
    models = {"llama": PLAIN, "qwen3": NORMED}
    jobs = {name: job(engines, (name, "token"), "1", compiled=True) for name in models}
    first, later = (engines.run(jobs, generates=True, cache="kept") for _ in range(2))
    baseline = engines.run({name: job(engines, (name, "token"), "0", compiled=False) for name in models})
    assert LOADED not in first["output"] and LOADED in later["output"]
    for name, op in models.items():
        for answers in (first, later):
            assert answers[name]["tokens"] == baseline[name]["tokens"]
            assert calls(answers[name], op) == LAYERS * STEPS


MEASURED = """
import on_cpu
from vllm_rocm_ops.vllm.attention import backends
from vllm_rocm_ops.vllm.attention.rope_pre_attention import RopePreAttention
from vllm_rocm_ops.vllm.graph import compilation

def baseline_outputs(self, rotated, qkv, slots, cache):
    q, k = (x.unflatten(1, (-1, self.heads[2])) for x in rotated)
    keys, values = backends.of_cpu(self.decoder.impl, self.attn, cache)
    keys[slots // 16, slots % 16], values[slots // 16, slots % 16] = k, self.parts(qkv)[2]
    return q, k, cache

on_cpu.time_launches(qk_norm_rope_and_cache="query_out")
RopePreAttention.baseline_outputs = baseline_outputs
"""


@pytest.fixture(scope="module")
def measured(engines, tmp_path_factory) -> tuple[dict, dict]:
    return on_cpu.measured(engines, ("qwen3", "token"), tmp_path_factory.mktemp("measured"), MEASURED)


@full
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="replaces the write of CPU caches")
@pytest.mark.parametrize("what", on_cpu.WHAT)
def test_what_was_measured_to_be_faster_serves(measured, what):
    answers, records = measured
    shapes = {NORMED.name: "4:2x64/64 bfloat16 auto"}
    on_cpu.check_measured(what, answers[what], *records[what], LAYERS * STEPS, shapes)
