"""Test gates that route in the launch of their GEMM: a layer's calls, what is timed, which gates stay, and engines."""

import collections

import pytest
import torch
from engines import STEPS, counted, prompts_of
from fakes import Counting, Fake, plugin_wins_up_to, time_choices
from linears import one_rank  # noqa: F401
from marks import full
from test_experts import EXPERTS, HIDDEN, ROUTERS, TOPK, Layer, call_with_logits, config, inputs, kernel, method, random
from vllm import envs
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear

import vllm_rocm_ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.vllm.graph import moe_side_channel
from vllm_rocm_ops.vllm.moe import expert_support, gate_calls, routing_experts, routing_gate, unquantized_experts
from vllm_rocm_ops.vllm.selection import kernel_selection

pytestmark = pytest.mark.usefixtures("configuration", "one_rank")
FUSED, SEPARATE = {"router_gemm_topk": 1}, {"grouped_topk": 1}
FASTER = bytes([0, 1, 1, 1, 1])  # up to four tokens


class Moe(torch.nn.Module):
    """vLLM's MoE layer: the gate, then the experts with its logits."""

    def __init__(self, router: str = "DeepSeekV3", kind: type | None = None, **changed):
        super().__init__()
        name, grouped = router.split()[0], "groups" not in router
        self.bias = random(EXPERTS) * 0.1 if name == "DeepSeekV3" else None
        self.gate = (kind or GateLinear)(HIDDEN, EXPERTS, params_dtype=torch.bfloat16, **changed)
        self.gate.weight.data.copy_(random(EXPERTS, HIDDEN) * HIDDEN**-0.5)
        self.gate.cpu_linear = torch.nn.functional.linear
        self.layer, self.moe_config = Layer("bf16"), config(**method(name))
        self.made = kernel(self.layer, unquantized_experts.PLUGIN_EXPERTS[0], **method(name))
        self.routed_experts = torch.nn.Module()
        self.routed_experts.quant_method = Fake(moe_kernel=self.made)
        self.groups = dict(zip(("num_expert_group", "topk_group"), (4, 2) if grouped else (None, None)))
        for key, value in (self.groups | {"routed_scaling_factor": 1.5, "e_score_correction_bias": self.bias}).items():
            setattr(self.routed_experts, key, value)

    def _forward_impl(self, hidden, router_logits=None):
        logits = self.gate(hidden)[0] if router_logits is None else router_logits
        return call_with_logits(self.layer, self.made, logits, self.bias, hidden, **self.groups)

    forward = _forward_impl


def adopted(make: type = Moe, plugin: bytes = FASTER, **options) -> torch.nn.Module:
    """Return a layer, or a block around one, whose gate routes for few tokens."""
    kernel_selection.begin_recording()
    layer = make(**options)
    routing_gate.adopt([layer])
    keys = [one.key for one in kernel_selection.all_choices() if one.kernels.op is routing_gate.OP]
    kernel_selection.apply_decisions(kernel_selection.Decided({}, dict.fromkeys(keys, plugin)))
    return layer


def called(run, *arguments) -> tuple[object, dict[str, int]]:
    """Return a result, and the calls of each op except the experts'."""
    vllm_rocm_ops.reset_stats()
    with torch.no_grad():
        result = run(*arguments)
    counts = counted(vllm_rocm_ops.stats())
    assert counts.pop("fused_experts", 1) == 1
    return result, counts


@pytest.mark.parametrize("router", ROUTERS)
def test_one_launch_routes(router):
    """The layer's result is as by two launches, with one op fewer."""
    layer, hidden = adopted(router=router), inputs(4)
    plain = {"topk_softmax": 1} if "groups" in router else SEPARATE
    result, counts = called(layer, hidden)
    assert counts == FUSED and moe_side_channel.current.routed is None
    routing_gate.restore_baseline(layer.gate)
    wanted, counts = called(layer, hidden)
    assert counts == plain and torch.equal(result, wanted)


def test_more_tokens_take_two_launches():
    layer = adopted()
    assert [called(layer, inputs(tokens))[1] for tokens in (1, 4, 5, 17)] == [FUSED, FUSED, SEPARATE, SEPARATE]


def test_one_kernel_serves_a_router():
    """On gfx950 the op is one kernel, and the experts' routing none."""
    emulator, layer = Counting("gfx950"), adopted(router="RenormalizeNaive without groups")
    hidden = inputs(3)
    with launch.executor(emulator):
        result, _ = called(layer, hidden)
    routers = [name for name in emulator.symbols if name.startswith(("router", "moe_topk", "unquantized"))]
    assert routers == ["router_gemm_topk_x4_wave_splitk_8"], routers
    wanted, _ = called(layer, hidden)
    torch.testing.assert_close(result, wanted, rtol=0.05, atol=0.02)


def test_logits_of_another_call_are_not_mistaken():
    """Experts find weights and ids by their logits and arguments, once."""
    layer, hidden = adopted(), inputs(4)
    with torch.no_grad():
        logits = layer.gate(hidden)[0]
        assert called(layer, hidden, logits.clone())[1] == SEPARATE
        assert called(layer, hidden, logits)[1] == SEPARATE  # forgotten by then
        logits = layer.gate(hidden)[0]
        assert called(layer, hidden, logits.view(4, EXPERTS))[1] == {}
        assert called(layer, hidden, logits)[1] == SEPARATE
        logits = layer.gate(hidden)[0]
        assert called(layer, hidden[:3], logits[:3])[1] == SEPARATE
        for changed in ({"topk_group": 3}, {"num_expert_group": 2}):
            logits, plain = layer.gate(hidden)[0], layer.groups
            layer.groups = layer.groups | changed
            assert called(layer, hidden, logits)[1] == SEPARATE
            layer.groups = plain
        logits, bias = layer.gate(hidden)[0], layer.bias
        layer.bias = bias + 1.0  # equal choices, but another tensor
        assert called(layer, hidden, logits)[1] == SEPARATE
        layer.bias = bias


def test_an_unread_gate_result_does_not_reach_the_next_layer():
    layers, hidden = [adopted(), adopted(router="Default")], inputs(2)
    alone = [called(layer, hidden)[0] for layer in layers]
    for order in ((0, 1), (1, 0), (0, 0)):
        with torch.no_grad():
            layers[order[0]].gate(hidden)
        result, counts = called(layers[order[1]], hidden)
        assert torch.equal(result, alone[order[1]]) and counts == FUSED


def test_threads_do_not_share():
    """Two micro-batches run in two threads."""
    import threading

    moe_side_channel.publish(torch.ones(1), (1,), torch.ones(1), torch.ones(1))
    found = []
    thread = threading.Thread(target=lambda: found.append(moe_side_channel.current.routed))
    thread.start()
    thread.join()
    assert found == [None]
    moe_side_channel.current.routed = None


def test_padding_goes_to_no_expert(monkeypatch):
    """vLLM masks tokens only where it routes without groups, and so does the gate."""
    mask = torch.tensor([False, True, False])
    monkeypatch.setattr(routing_experts, "is_padding", lambda tokens: mask[:tokens])
    for router, baseline, masks in (
        ("Default without groups", object(), True),
        ("Default without groups", None, False),
        ("DeepSeekV3", object(), False),
    ):
        layer = adopted(router=router)
        method_of = layer.made.fused_experts.method
        layer.gate.rocm_ops_router.of_layer.experts = Fake(method=method_of, topk=TOPK, baseline=baseline)
        with torch.no_grad():
            layer.gate(inputs(3))
        *_, ids = moe_side_channel.current.routed
        assert (ids < 0).all(1).tolist() == (mask.tolist() if masks else [False] * 3)


def test_a_gate_that_never_wins_is_vllms():
    """Its class is vLLM's after its next call, and one that may win later stays."""
    for plugin, stays in ((bytes(5), False), (FASTER, True)):
        layer = adopted(plugin=plugin)
        plain = type(layer.gate).__bases__[1]
        called(layer, inputs(9))
        assert (type(layer.gate) is plain) is not stays
        assert called(layer, inputs(2))[1] == (FUSED if stays else SEPARATE)


def test_both_baselines_must_lose():
    layer = adopted()
    one, other = layer.gate.rocm_ops_router.choices
    assert {one.key.baseline.name, other.key.baseline.name} == {"rocm_unquantized_gemm", "separate"}
    other.plugin_by_tokens = bytes([0, 1, 0, 0, 0])
    assert [called(layer, inputs(tokens))[1] for tokens in (1, 2)] == [FUSED, SEPARATE]


def test_unsupported_calls_are_vllms(monkeypatch):
    """So is a call whose op no kernel takes, and one with inputs of another type."""
    layer = adopted()
    monkeypatch.setattr(routing_gate.Router, "run", lambda *_: None)
    assert called(layer, inputs(2))[1] == SEPARATE


def test_returns_what_vllms_gate_does():
    """Both kinds of gates return a pair or the logits, of the weight's dtype."""
    for return_bias in (True, False):
        for kind in (None, ReplicatedLinear):
            options = {"bias": False} if kind else {}
            layer = adopted(kind=kind, return_bias=return_bias, **options)
            with torch.no_grad():
                found = layer.gate(inputs(2))
                moe_side_channel.current.routed = None
                routing_gate.restore_baseline(layer.gate)
                wanted = layer.gate(inputs(2))
            assert isinstance(found, tuple) is isinstance(wanted, tuple) is return_bias
            if return_bias:
                assert found[1] is wanted[1] is None
                found, wanted = found[0], wanted[0]
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def experts_that_do_not_route(layer: Moe) -> None:
    experts = unquantized_experts.PLUGIN_EXPERTS[-1](layer.moe_config, layer.layer.quant_config)
    layer.routed_experts.quant_method.moe_kernel = Fake(fused_experts=experts)


STAY = {
    "bias": ({"bias": True}, None),
    "fp32 logits": ({"out_dtype": torch.float32}, None),
    "fp16 weight": ({}, lambda layer: layer.gate.half()),
    "other experts": ({}, lambda layer: setattr(layer.gate, "weight", torch.nn.Parameter(layer.gate.weight[:4]))),
    "a class of its own": ({}, lambda layer: setattr(layer.gate, "__class__", type("Other", (type(layer.gate),), {}))),
    "no gate in the layer": ({}, lambda layer: setattr(layer, "gate", None)),
    "a gate with the shared experts'": ({}, lambda layer: setattr(layer, "_fse_fuse_gate", True)),
    "data parallel": ({}, lambda layer: vary(layer, dp_size=2)),
    "sequence parallel": ({}, lambda layer: vary(layer, is_sequence_parallel=True)),
    "prefill context parallel": ({}, lambda layer: vary(layer, pcp_size=2)),
    "fp16 tokens": ({}, lambda layer: vary(layer, in_dtype=torch.float16)),
    "shared experts": ({}, lambda layer: setattr(layer, "shared_experts", Fake(_stream=object()))),
    "vLLM's experts": ({}, lambda layer: setattr(layer.routed_experts.quant_method, "moe_kernel", None)),
    "experts that do not route": ({}, experts_that_do_not_route),
}


def vary(layer: Moe, **changed) -> None:
    wanted = {"dp_size": 1, "pcp_size": 1, "is_sequence_parallel": False, "in_dtype": torch.bfloat16}
    layer.moe_config = Fake(**wanted | {"num_experts": EXPERTS} | changed)


@pytest.mark.parametrize("why", STAY)
def test_gates_that_stay(why):
    options, change = STAY[why]
    kernel_selection.begin_recording()
    layer, other = Moe(**options), Moe()
    assert not routing_gate.unsupported_reason(other, gate_calls.Gate(other.gate))
    if change:
        change(layer)
    plain = type(layer.gate)
    routing_gate.adopt([layer])
    assert type(layer.gate) is plain and not kernel_selection.all_choices()


@pytest.mark.parametrize(
    ("why", "said"),
    {
        "bias": "gates with a bias",
        "fp32 logits": "gates of torch.bfloat16 with torch.bfloat16 tokens and logits of torch.float32",
        "fp16 weight": "gates of torch.float16 with torch.bfloat16 tokens and logits of torch.float16",
        "other experts": "gates of 4 experts in layers of 8",
        "a class of its own": "gates of other classes",
        "a gate with the shared experts'": "with the shared experts'",
        "shared experts": "16-bit gates with shared experts beside them on another stream",
        "data parallel": "gates whose tokens move between ranks",
    }.items(),
)
def test_gates_that_stay_are_said_with_the_reason_once(why, said, caplog):
    options, change = STAY[why]
    expert_support.log_unsupported.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            layer = Moe(**options)
            if change:
                change(layer)
            routing_gate.adopt([layer])
    assert caplog.text.count("gates of MoE layers stay on vLLM's kernels") == caplog.text.count(said) == 1


@pytest.mark.parametrize("how", ["VLLM_ROCM_OPS_MEASURE", "VLLM_BATCH_INVARIANT", "seam"])
def test_settings_that_exclude_the_gate(monkeypatch, how):
    if how == "seam":
        monkeypatch.setattr(routing_gate.seam, "active", lambda: ["fp8_experts"])
    elif how == "VLLM_BATCH_INVARIANT":
        monkeypatch.setattr(envs, how, True, raising=False)
    else:
        monkeypatch.setenv(how, "0")
    layer = Moe()
    routing_gate.adopt([layer])
    assert not isinstance(layer.gate, routing_gate.RoutingGate)


# Timing


def planted(reference, fault: str):
    """Return the op with wrong logits; weights; ids; or experts in another order. Or with the worst experts, and their weights."""

    def wrong(x, weight, *rest):
        given = x, weight, *rest, *routing_gate.OP._defaults[2 + len(rest) :]
        logits, weights, ids = reference(*given)
        if fault == "choice":
            _, weights, ids = reference(-x, *given[1:])
            scores = logits.float().sigmoid() if given[6] == "sigmoid" else logits.float().softmax(1)
            of = scores.gather(1, ids.long())
            return logits, given[7] * (of / of.sum(1, keepdim=True) if given[3] else of), ids
        wrongs = {"logits": (logits * 1.05, weights, ids), "weights": (logits, weights * 1.05, ids)}
        wrongs |= {"ids": (logits, weights, (ids + 1) % EXPERTS), "order": (logits, weights, ids.roll(1, 1))}
        return wrongs[fault]

    return wrong


@pytest.mark.parametrize("fault", ["", "logits", "weights", "ids", "order", "choice"])
@pytest.mark.parametrize("router", ["DeepSeekV3", "RenormalizeNaive without groups", "Default"])
def test_it_is_checked_and_timed_beside_both_pairs_of_launches(monkeypatch, router, fault):
    """Each result is checked; a wrong one turns the op off, a right one serves where it is faster."""
    if fault:
        monkeypatch.setattr(routing_gate.OP, "reference", planted(routing_gate.OP.reference, fault))
    kernel_selection.begin_recording()
    layer = Moe(router=router)
    routing_gate.adopt([layer])
    first, second = time_choices((1, 2, 4, 8, 16, 32), 64, plugin_wins_up_to(2))
    assert first.key.shape == second.key.shape and f"8x256 bfloat16 top {TOPK}" in first.key.shape
    assert first.state == second.state == ("off" if fault else "measured"), (first.why, first.plugin_by_tokens)
    if not fault:
        assert first.plugin_by_tokens == second.plugin_by_tokens == bytes([0, 1, 1]) + bytes(62), first.why
        assert called(layer, inputs(2))[1] == FUSED


def test_shapes_tell_routers_apart():
    kernel_selection.begin_recording()
    layers = [Moe(router=router) for router in ROUTERS]
    routing_gate.adopt(layers)
    shapes = collections.Counter(one.key.shape for one in kernel_selection.all_choices())
    assert len(shapes) == len(ROUTERS) and set(shapes.values()) == {2}
    assert "8x256 bfloat16 top 3 normalized sigmoid 2 of 4 groups bias" in shapes
    assert "8x256 bfloat16 top 3" in shapes


# Engines

SEEDS = {
    "deepseek": (22, 104, 175),
    "qwen3_moe": (43, 49, 66),
    "glm4_moe": (170, 265, 299),
    "minimax_m2": (249, 750, 1255),
}
"""engines.py's, for bf16, and for models whose code calls a gate with a float32 weight."""
PLANTED = "lambda exact: lambda *given: (lambda logits, weights, ids: (logits, weights, (ids + 1) % 8))(*exact(*given))"
MEASURED = """
import on_cpu
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
on_cpu.measure()
GateLinear._cpu_skip_gemm_dispatch = True  # else the CPU packs the weight
"""


APART = "from vllm_rocm_ops.vllm.moe import routing_gate; routing_gate.adopt = lambda models: None"


@full
@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek", "glm4_moe", "qwen3_moe", "minimax_m2"])
def test_in_an_engine(engines, tmp_path, model):
    """Decode steps have the tokens of two launches, also compiled and reloaded; a wrong choice changes them."""

    def job(compiled: bool = False, **options):
        given = {"prompts": prompts_of(SEEDS[model]), "logprobs": None} | options
        return engines.job((model, "bf16"), compiled, **given)

    then = [] if model == "minimax_m2" else ["reload"]  # whose weights vLLM cannot load again
    jobs = {"eager": job(then=then), "compiled": job(compiled=True)}
    planted = {"planted": job(fault={"op": "router_gemm_topk", "make": PLANTED})}
    found = engines.run(jobs | planted, before=MEASURED, VLLM_ROCM_OPS_TABLES=str(tmp_path / "with"))
    apart = engines.run_one(job(), before=MEASURED + APART, VLLM_ROCM_OPS_TABLES=str(tmp_path / "apart"))
    layers = {"deepseek": 2, "minimax_m2": 2}.get(model, 1)
    routing = "topk_softmax" if model in ("qwen3_moe", "minimax_m2") else "grouped_topk"

    def counts(answer) -> list[int]:
        return [counted(answer["stats"]).get(op, 0) for op in ("router_gemm_topk", routing)]

    assert counts(apart) == [0, layers * STEPS]
    for mode in jobs:
        assert counts(found[mode]) == [layers * (STEPS - 1), layers]
        assert found[mode]["tokens"] == apart["tokens"]
    tokens = {mode: answer["tokens"] for mode, answer in found.items() if mode != "output"}
    assert found["eager"]["then"] == [tokens["eager"]] * len(then) and tokens["planted"] != tokens["eager"]
