"""Test gates that a model's code calls before its MoE layer, with float32 and bf16 weights: which are found, their calls, and timing."""

import gc

import pytest
import torch
from fakes import Counting, Fake, plugin_wins_up_to, time_choices
from linears import one_rank  # noqa: F401
from test_experts import EXPERTS, HIDDEN, TOPK, inputs
from test_routing_gate import FASTER, FUSED, Moe, adopted, called, experts_that_do_not_route, planted
from torch._dynamo.testing import EagerAndRecordGraphs
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.models import glm4_moe, minimax_m2, qwen3_moe

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.vllm.graph import compiled_ops, moe_side_channel
from vllm_rocm_ops.vllm.moe import (
    expert_support,
    gate_calls,
    quantized_input,
    routing_experts,
    routing_gate,
    vllm_routing,
)
from vllm_rocm_ops.vllm.selection import kernel_selection

pytestmark = pytest.mark.usefixtures("configuration", "one_rank")
GROUPED, PLAIN = "DeepSeekV3", "RenormalizeNaive without groups"


class Gates(torch.nn.Module):
    """A model's MoE block with a float32 gate of its own, and vLLM's layer, which is called with logits."""

    def __init__(self, kind: type = GateLinear, router: str = GROUPED, dtype=torch.float32):
        super().__init__()
        self.experts = Moe(router)
        weight, self.experts.gate = self.experts.gate.weight.data, None
        if kind is torch.nn.Linear:
            self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=dtype)
        else:
            self.gate = kind(HIDDEN, EXPERTS, params_dtype=dtype, out_dtype=dtype)
            self.gate.cpu_linear = torch.nn.functional.linear
        self.gate.weight.data.copy_(weight + (torch.rand(weight.shape) - 0.5) * 2**-10)

    def forward(self, hidden):
        router_logits, _ = self.gate(hidden)
        return self.experts(hidden, router_logits=router_logits)


class Casts(Gates):
    """The same with tokens that the model's code converts."""

    def __init__(self, router: str = GROUPED):
        super().__init__(torch.nn.Linear, router)

    def forward(self, hidden):
        router_logits = self.gate(hidden.to(dtype=torch.float32))
        return self.experts(hidden, router_logits=router_logits)


@pytest.mark.parametrize("router", [GROUPED, PLAIN])
@pytest.mark.parametrize("kind", [Gates, Casts])
def test_one_launch_routes(kind, router):
    """The result is as by two launches, with one op fewer, for up to the timed number of tokens."""
    block = adopted(kind, router=router)
    plain = {"topk_softmax": 1} if router == PLAIN else {"grouped_topk": 1}
    for tokens in (1, 4, 5):
        result, counts = called(block, inputs(tokens))
        assert counts == (FUSED if tokens <= 4 else plain)
        found, block.gate.__class__ = type(block.gate), type(block.gate).__bases__[1]
        wanted, counts = called(block, inputs(tokens))
        assert counts == plain and torch.allclose(result, wanted, rtol=1e-2, atol=1e-2)
        block.gate.__class__ = found


def test_a_bf16_gate_in_the_model_is_timed_as_one_in_the_layer():
    block = adopted(Gates, dtype=torch.bfloat16)
    names = [choice.key.baseline.name for choice in block.gate.rocm_ops_router.choices]
    assert names == ["rocm_unquantized_gemm", "separate"] and called(block, inputs(2))[1] == FUSED


def test_a_float_gate_in_the_layer_is_served():
    """Its layer calls it, with tokens in bf16."""
    kernel_selection.begin_recording()
    layer = Moe(kind=lambda *sizes, **_: GateLinear(*sizes, params_dtype=torch.float32, out_dtype=torch.float32))
    routing_gate.adopt([layer])
    [choice] = layer.gate.rocm_ops_router.choices
    kernel_selection.apply_decisions(kernel_selection.Decided({}, {choice.key: FASTER}))
    assert not layer.gate.rocm_ops_in_model and called(layer, inputs(3))[1] == FUSED


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("tokens", "size"), [(3, 8), (12, 16)])
def test_one_kernel_serves_a_router(arch, tokens, size):
    emulator, block = Counting(arch), adopted(Gates, router=PLAIN, plugin=bytes([0] + [1] * 64))
    with launch.executor(emulator):
        called(block, inputs(tokens))
    routers = [name for name in emulator.symbols if name.startswith(("router", "moe_topk", "unquantized"))]
    assert [name.rpartition("_")[0] for name in routers] == ["router_gemm_topk_fp32_x4_wave_splitk"], routers


@pytest.mark.parametrize("kind", [Gates, Casts])
def test_a_compiled_graph_chooses_at_each_call(kind):
    """One graph serves all numbers of tokens. It has the gate's op, whose tokens are bf16, and none of its GEMM."""
    block, kept = adopted(kind), EagerAndRecordGraphs()
    gate = torch.compile(lambda x: block(x), backend=kept, dynamic=True, fullgraph=False)
    with torch.no_grad():
        for tokens in (2, 9):
            result, counts = called(gate, inputs(tokens))
            assert counts.pop("router_gemm_topk", 0) == (tokens <= 4)
            assert torch.allclose(result, called(block, inputs(tokens))[0], rtol=1e-2, atol=1e-2)
    calls = [node for module in kept.graphs for node in module.graph.nodes if "routed_gate" in str(node.target)]
    assert len(calls) == 1 and calls[0].args[0].meta["example_value"].dtype == torch.bfloat16


def test_the_key_of_a_compile_cache_knows_gates_in_graphs(monkeypatch):
    monkeypatch.setattr(compiled_ops.choices, "others", ("something",))
    for _ in range(2):
        adopted(Gates)
    assert compiled_ops.choices.others == ("something", routing_gate.IN_GRAPHS)


def test_the_op_of_graphs_finds_a_gate_by_its_weight():
    """A weight that vLLM has moved is multiplied as in its dtype, and a gate that is gone is forgotten."""
    block, hidden = adopted(Gates), inputs(3)
    weight = block.gate.weight.data
    found = torch.ops.vllm_rocm_ops.routed_gate(hidden, weight)
    assert moe_side_channel.current.routed[0] is not None
    moe_side_channel.current.routed = None
    moved = torch.ops.vllm_rocm_ops.routed_gate(hidden, weight.clone())
    assert moe_side_channel.current.routed is None and found.dtype == moved.dtype == torch.float32
    assert torch.allclose(found, hidden.float() @ weight.t(), atol=1e-4) and torch.allclose(found, moved, atol=1e-4)
    address = weight.data_ptr()
    assert address in routing_gate.in_models
    del block
    kernel_selection.invalidate()
    gc.collect()
    assert address not in routing_gate.in_models


@pytest.mark.parametrize("fault", ["", "logits", "weights", "ids", "order", "choice"])
@pytest.mark.parametrize("router", [GROUPED, PLAIN])
def test_it_is_checked_and_timed_beside_vllms_gate(monkeypatch, router, fault):
    """A wrong result turns the op off, a right one serves where it is faster. Its key has the weight's dtype."""
    if fault:
        monkeypatch.setattr(routing_gate.OP, "reference", planted(routing_gate.OP.reference, fault))
    kernel_selection.begin_recording()
    block = Gates(router=router)
    routing_gate.adopt([block])
    [choice] = time_choices((1, 2, 4, 8, 16, 32, 64), 64, plugin_wins_up_to(32))
    assert f"8x256 float32 top {TOPK}" in choice.key.shape and choice.key.baseline.name == "float32_gate"
    assert choice.state == ("off" if fault else "measured"), choice.why
    if not fault:
        assert choice.plugin_by_tokens[32] == 1 and sum(choice.plugin_by_tokens) == 32
        assert called(block, inputs(32))[1] == FUSED and called(block, inputs(33))[1] != FUSED


def test_padding_of_a_router_without_groups_goes_to_no_expert(monkeypatch):
    """So vLLM routes by sigmoid without groups, too."""
    mask = torch.tensor([False, True, False])
    monkeypatch.setattr(routing_experts, "is_padding", lambda tokens: mask[:tokens])
    for grouped in (False, True):
        block = adopted(Gates)
        routed = block.experts.routed_experts
        if not grouped:
            routed.num_expert_group = routed.topk_group = None
        block.gate.rocm_ops_router.of_layer.experts = Fake(baseline=object())
        with torch.no_grad():
            block.gate(inputs(3))
        *_, ids = moe_side_channel.current.routed
        assert (ids < 0).all(1).tolist() == ([False] * 3 if grouped else mask.tolist())
        moe_side_channel.current.routed = None


# Code of models


class Twice(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden)
        self.last = router_logits
        return self.experts(hidden, router_logits=router_logits)


class Changed(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden)
        router_logits = router_logits * 2
        return self.experts(hidden, router_logits=router_logits)


class InPlace(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden)
        return self.experts(hidden, router_logits=router_logits.mul_(2))


class Others(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden * 2)
        return self.experts(hidden, router_logits=router_logits)


class Positional(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden)
        return self.experts(hidden, router_logits)


class Second(Gates):
    def forward(self, hidden):
        _, router_logits = self.gate(hidden)[::-1]
        return self.experts(hidden, router_logits=router_logits)


class Halves(Gates):
    def forward(self, hidden):
        router_logits, _ = self.gate(hidden.to(torch.float16))
        return self.experts(hidden, router_logits=router_logits)


class OtherTokens(Gates):
    def forward(self, hidden):
        exact = hidden.float() / 3
        router_logits, _ = self.gate(exact.to(torch.float32))
        return self.experts(hidden, router_logits=router_logits)


@pytest.mark.parametrize("kind", [Twice, Changed, InPlace, Others, Positional, Second, Halves, OtherTokens])
def test_gates_whose_logits_other_code_reads_stay(kind):
    """So do gates with other tokens than the layer's, and calls of another form."""
    assert gate_calls.called_before(kind, "experts") is None
    block = adopted(kind)
    assert type(block.gate) is GateLinear and called(block, inputs(2))[1] == {"grouped_topk": 1}


def test_code_that_cannot_be_read_has_no_gate():
    assert gate_calls.called_before(type("Made", (), {"forward": len}), "experts") is None
    assert gate_calls.gate_before(None, Moe()).module is None


def test_a_float_call_is_a_conversion():
    class Floats(Gates):
        def forward(self, hidden):
            logits = self.gate(hidden.float())
            return self.experts(hidden_states=hidden, router_logits=logits)

    assert gate_calls.called_before(Floats, "experts") == ("gate", True)


def test_the_code_of_vllms_models_is_known():
    """GLM-4.x converts tokens up to vLLM 0.30. Models that give the gate to the layer call none."""
    found = gate_calls.called_before(glm4_moe.Glm4MoE, "experts")
    assert found in (("gate", False), ("gate", True))
    assert gate_calls.called_before(minimax_m2.MiniMaxM2MoE, "experts") == ("gate", False)
    assert gate_calls.called_before(qwen3_moe.Qwen3MoeSparseMoeBlock, "experts") is None


class Exact(Gates):
    """Its gate gets tokens in float32, which its code has not converted from 16 bits."""

    def forward(self, hidden):
        exact = hidden.float() / 3
        router_logits, _ = self.gate(exact)
        return self.experts(hidden, router_logits=router_logits)


@pytest.mark.parametrize("compiles", [False, True])
def test_float32_tokens_of_their_own_are_vllms(compiles):
    block, hidden = adopted(Exact), inputs(2)
    run = torch.compile(lambda x: block.gate(x)[0], backend="eager") if compiles else lambda x: block.gate(x)[0]
    logits, exact = run(hidden.float() / 3), (hidden.float() / 3) @ block.gate.weight.t()
    assert torch.allclose(logits, exact, rtol=1e-5, atol=1e-5) and moe_side_channel.current.routed is None


def test_each_layer_has_its_own_gate():
    model = torch.nn.ModuleList([Gates(), Gates()])
    layers = [*quantized_input.layers_of(model)]
    found = dict(gate_calls.gates_of([model], layers))
    assert [found[block.experts].module for block in model] == [block.gate for block in model]


# Layers in which vLLM routes


class ByRouter(Moe):
    """A layer whose experts do not route: vLLM's router does."""

    def __init__(self, router=None, **options):
        super().__init__(**options)
        experts_that_do_not_route(self)
        self.router = router or grouped(self.bias)

    def _forward_impl(self, hidden, router_logits=None):
        logits = self.gate(hidden)[0] if router_logits is None else router_logits
        return self.router._compute_routing(hidden, logits, None)

    forward = _forward_impl


def grouped(bias, **changed):
    """Return a router of grouped top-k."""
    given = {"num_expert_group": 4, "topk_group": 2, "scoring_func": "sigmoid", "routed_scaling_factor": 1.5} | changed
    return GroupedTopKRouter(TOPK, EXPERTS, renormalize=True, e_score_correction_bias=bias, **given)


def with_bias(bias, **changed):
    """Return a router of top-k with a bias, as MiniMax-M2's."""
    return FusedTopKBiasRouter(TOPK, EXPERTS, bias, **changed)


def plain(bias, **changed):
    """Return a router of plain top-k."""
    return FusedTopKRouter(TOPK, EXPERTS, **changed)


@pytest.fixture
def in_python(monkeypatch):
    """Route by the plugin's reference in place of vLLM's kernels, which CPUs lack."""
    counts = {}

    def compute(self, hidden, logits, indices_type, **_):
        counts[type(self).__name__] = counts.get(type(self).__name__, 0) + 1
        made = vllm_routing.VllmRouting(self)
        return routing_experts.route(made.method, made.topk, logits, *made.groups)

    for kind in vllm_routing.classes():
        monkeypatch.setattr(kind, "_compute_routing", compute)
    return counts


@pytest.mark.parametrize("make", [grouped, with_bias, plain])
@pytest.mark.parametrize("in_model", [False, True])
def test_vllms_router_gets_what_the_gate_chose(in_python, make, in_model):
    """It routes itself for other token counts, and for logits of another call."""
    bias = torch.rand(EXPERTS)
    kernel_selection.begin_recording()
    if in_model:
        block = Gates()
        block.experts = ByRouter(make(bias))
        gate, block.experts.gate = block.gate, None
    else:
        block = ByRouter(make(bias))
        gate = block.gate
    wanted = block(inputs(2))
    name = type(make(bias)).__name__
    assert in_python == {name: 1}
    routing_gate.adopt([block])
    choices = gate.rocm_ops_router.choices
    assert len(choices) == (1 if in_model else 2) and all(name in one.key.baseline.name for one in choices)
    kernel_selection.apply_decisions(kernel_selection.Decided({}, dict.fromkeys((one.key for one in choices), FASTER)))
    for tokens, by_gate in ((2, True), (5, False)):
        in_python.clear()
        weights, ids = block(inputs(tokens))
        assert in_python == ({} if by_gate else {name: 1})
        if by_gate:
            assert torch.equal(ids, wanted[1]) and torch.allclose(weights, wanted[0], rtol=1e-3)
    gate(inputs(2))
    layer = block.experts if in_model else block
    in_python.clear()
    layer(inputs(2), torch.randn(2, EXPERTS))
    assert in_python == {name: 1}


def test_its_launch_is_timed_beside_vllms_router(in_python):
    kernel_selection.begin_recording()
    block = Gates()
    block.experts = ByRouter(with_bias(torch.rand(EXPERTS)))
    block.experts.gate = None
    routing_gate.adopt([block])
    [choice] = time_choices((1, 2, 4, 8), 8, plugin_wins_up_to(2))
    assert choice.key.baseline.name == "float32_gate_FusedTopKBiasRouter" and choice.state == "measured", choice.why
    assert choice.plugin_by_tokens[:4] == bytes([0, 1, 1, 0]) and in_python


@pytest.mark.parametrize(
    "router",
    {
        "shared experts": lambda: grouped(None, num_fused_shared_experts=1),
        "a table": lambda: with_bias(torch.rand(EXPERTS), hash_indices_table=torch.zeros(2)),
        "other scores": lambda: with_bias(torch.rand(EXPERTS), scoring_func="sqrtsoftplus"),
        "sigmoid without a bias": lambda: plain(None, scoring_func="sigmoid"),
        "another class": lambda: type("OtherRouter", (GroupedTopKRouter,), {})(TOPK, EXPERTS, 4, 2),
        "none": object,
    }.items(),
    ids=lambda given: given[0],
)
def test_other_routers_stay(router, caplog):
    expert_support.log_unsupported.cache_clear()
    with caplog.at_level("INFO"):
        layer = ByRouter(router[1]())
        routing_gate.adopt([layer])
    assert type(layer.gate) is GateLinear and "router is another than vLLM's top-k" in caplog.text
