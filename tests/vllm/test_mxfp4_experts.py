"""Test the plugin's MXFP4 experts around vLLM's that hold weights in a form of their own, and which of them are kept."""

import pytest
import torch
from fakes import Fake, by_reference, plugin_wins_up_to, time_choices
from linears import random
from test_experts import EXPERTS, INNER, TOKENS, Layer, close, config, inputs, keep, parallel, routed, scheme, supports
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as triton_kernels
from vllm.model_executor.layers.fused_moe.experts import marlin_moe, ocp_mx_emulation_moe
from vllm.model_executor.layers.fused_moe.experts.aiter_mxfp4_w4a16_moe import AiterW4A16ExpertsMonolithic
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.v1.worker import worker_base

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import compat, coverage, seam
from vllm_rocm_ops.vllm.moe import expert_support, mxfp4_experts
from vllm_rocm_ops.vllm.moe.expert_support import log_unsupported

BACKENDS = mxfp4.Mxfp4MoeBackend
GPT_OSS = {
    "activation": MoEActivation.SWIGLUOAI,
    "has_bias": True,
    "routing_method": RoutingMethodType.RenormalizeNaive,
    "router_logits_dtype": torch.bfloat16,
}

pytestmark = pytest.mark.usefixtures("configuration")


class StridedLayout:
    """triton_kernels' layout without an order of its own."""


class CDNA4MXScaleLayout:
    """Its layout of scales for gfx950."""


class HopperMXValueLayout:
    """One of its others."""


def held(values: torch.Tensor, layout: object = StridedLayout) -> Fake:
    """Return weights or scales [E, N, K] as triton_kernels' tensor has them."""
    experts, n, k = values.shape
    return Fake(storage=Fake(data=values.transpose(1, 2), layout=layout), shape=[experts, 2 * k, n])


def in_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Return scales [E, N, K / 32] as triton_kernels has them for gfx950, [E, N / 32, K]: padded to tiles of 32 rows and 8 columns."""
    scale = torch.nn.functional.pad(scale, (0, -scale.shape[2] % 8), value=200)
    tiles = scale.unflatten(2, (-1, 2, 4)).unflatten(1, (-1, 2, 16))  # E, N / 32, 2, 16, K / 256, 2, 4
    return tiles.permute(0, 1, 4, 6, 3, 5, 2).flatten(2)


def plugin_of(backend: str, routes: bool = False) -> type:
    """Return the plugin's class around vLLM's experts of a backend."""
    chosen = [one for one in mxfp4_experts.PLUGIN_EXPERTS if one.backend is BACKENDS[backend]]
    return next(one for one in chosen if one.is_monolithic() == routes)


class Held:
    """A layer like gpt-oss's whose weights vLLM's Triton experts hold, these, and the plugin's around them."""

    def __init__(
        self,
        monkeypatch,
        routes: bool,
        layout: object = StridedLayout,
        padded: bool = False,
        by_references: bool = True,
        tiles: bool = False,
    ):
        monkeypatch.setattr(compat, "mx_scale", lambda precision: precision.weight_scale)
        if by_references:
            by_reference(monkeypatch, ops.fused_experts, ops.topk_softmax)
        self.layer = Layer("mxfp4", "interleaved")
        self.weights = [held(weight, layout) for weight in (self.layer.w1, self.layer.w2)]
        quant = self.layer.quant_config
        for of in (quant._w1, quant._w2):
            of.bias = of.bias.float()
            scale = torch.nn.functional.pad(of.scale, (0, 2), value=200) if padded else of.scale
            of.scale = Fake(weight_scale=held(in_tiles(scale), CDNA4MXScaleLayout()) if tiles else held(scale))
        plugin, theirs = plugin_of("TRITON", routes), mxfp4.backend_to_kernel_cls(BACKENDS.TRITON)[not routes]
        self.calls = keep(monkeypatch, theirs, plugin, self.layer)
        self.kernel = mxfp4.make_mxfp4_moe_kernel(quant, config(**GPT_OSS), plugin, BACKENDS.TRITON)
        self.experts, self.routes = self.kernel.fused_experts, routes

    def is_covered(self) -> bool:
        """True if the plugin counts the layer as its own, of which it knows the first weight."""
        module = torch.nn.Module()
        module.quant_method, module.w13_weight = Fake(moe_kernel=self.kernel), self.weights[0]
        assert expert_support.first_weight(module).shape == self.layer.w1.shape
        [(kind, taken, what)] = coverage.layers(module)
        assert kind == "layers of experts" and taken == (expert_support.serving_experts(module) is not None)
        assert what == ("Fake" if taken else f"Fake, {self.experts.refused}")  # which `doctor` prints
        return taken

    def all_held(self, calls: int) -> bool:
        """True if vLLM's experts got this number of calls, with the weights that they hold."""
        return len(self.calls) == calls and all(
            given is held for call in self.calls for given, held in zip(call, self.weights)
        )

    def call(self, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of a call, and the plain computation's."""
        hidden = inputs(tokens)
        given = {"activation": GPT_OSS["activation"], "global_num_experts": EXPERTS, "expert_map": None}
        given["apply_router_weight_on_input"] = False
        if self.routes:
            logits = random(tokens, EXPERTS).bfloat16()
            weights, ids = self.layer.in_softmax(logits)
            groups = dict.fromkeys(("num_expert_group", "topk_group", "e_score_correction_bias"))
            more = {"routed_scaling_factor": 1.0, "routing_sink": None}
            result = self.kernel.apply_monolithic(hidden, *self.weights, logits, **given, **groups, **more)
        else:
            weights, ids = routed(tokens=tokens)
            result = self.kernel.apply(hidden, *self.weights, topk_weights=weights, topk_ids=ids, **given)
        return result, self.layer.plain(hidden, weights, ids)


@pytest.mark.parametrize("routes", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_weights_are_read_where_vllms_experts_hold_them(routes, padded, monkeypatch):
    """Few tokens are the plugin's: no weight is copied, scales only if padded. vLLM's experts get more, as they hold them."""
    one = Held(monkeypatch, routes, padded=padded)
    close(*one.call())
    assert one.calls == []
    w1, w2 = one.experts.op_weights(*one.weights)
    assert (w1.data_ptr(), w2.data_ptr()) == (one.layer.w1.data_ptr(), one.layer.w2.data_ptr())
    assert w1.shape == one.layer.w1.shape and one.experts.w1_scale.shape == (EXPERTS, 2 * INNER, w1.shape[2] // 16)
    kept = one.layer.quant_config._w1.scale.weight_scale.storage.data
    assert (one.experts.w1_scale.data_ptr() == kept.data_ptr()) is not padded
    assert one.experts.w1_bias.dtype == one.experts.w2_bias.dtype == torch.bfloat16
    close(*one.call(65))
    assert one.all_held(1) and one.is_covered()


def test_scales_in_tiles_are_read(monkeypatch):
    """gfx950's: the op has a copy of them. Both sides are timed, and calls of many tokens are vLLM's, as they are held."""
    one = Held(monkeypatch, routes=True, tiles=True)
    close(*one.call())
    assert one.calls == [] and one.experts.w1_scale.shape == (EXPERTS, 2 * INNER, one.layer.w1.shape[2] // 16)
    before = one.experts.w1_scale.clone()
    one.experts.w1_scale.zero_()
    one.experts.refresh()
    assert one.experts.w1_scale.equal(before)
    close(*one.call(65))
    assert one.all_held(1) and one.is_covered()


@pytest.mark.parametrize("routes", [False, True])
def test_copies_follow_weights_that_are_updated_in_place(routes, monkeypatch):
    """Padded scales and biases of float32 have copies, which keep their addresses: captured graphs read them."""
    one = Held(monkeypatch, routes, padded=True)
    close(*one.call())
    quant = one.layer.quant_config
    before = [getattr(one.experts, f"w{which}_{what}").data_ptr() for which in "12" for what in ("scale", "bias")]
    for of, exact in ((quant._w1, one.layer.exact1), (quant._w2, one.layer.exact2)):
        of.scale.weight_scale.storage.data.sub_(1)
        of.bias.mul_(-2)
        exact.mul_(0.5)
    module, holder = torch.nn.Module(), torch.nn.Module()
    module.quant_method, module.w13_weight, holder.experts = Fake(moe_kernel=one.kernel), one.weights[0], module
    runner = Fake(get_model=lambda: holder)
    worker = object.__new__(worker_base.WorkerWrapperBase)
    worker.worker = Fake(finish_weight_update=lambda: None, model_runner=runner)
    worker.finish_weight_update()
    close(*one.call())
    assert before == [
        getattr(one.experts, f"w{which}_{what}").data_ptr() for which in "12" for what in ("scale", "bias")
    ]


def test_kernels_take_what_vllms_experts_hold(monkeypatch):
    """The op's own kernels run, in the emulator, with biases that vLLM's experts have in float32."""
    one = Held(monkeypatch, routes=True, by_references=False)
    with launch.executor(Emulator("gfx942", races=False)):
        close(*one.call())
    assert one.calls == [] and vllm_rocm_ops.stats().keys() == {"topk_softmax", "fused_experts"}


@pytest.mark.parametrize("routes", [False, True])
def test_weights_in_another_order_stay_vllms(routes, monkeypatch):
    said = []
    monkeypatch.setattr(mxfp4_experts, "log_unsupported", said.append)
    one = Held(monkeypatch, routes, layout=HopperMXValueLayout())
    for _ in range(2):
        close(*one.call())
    assert one.all_held(2) and said == ["MXFP4 weights in HopperMXValueLayout"]
    assert not one.is_covered()


@pytest.mark.parametrize("routes", [False, True])
def test_both_are_timed_as_they_run(routes, monkeypatch):
    """Experts that route get logits on both sides, vLLM's the weights that they hold. Their results must agree."""
    one = Held(monkeypatch, routes)
    one.call()
    clock = plugin_wins_up_to(17, place=1)
    [choice] = time_choices(clock=clock)
    assert choice.plugin_serves(17) and not choice.plugin_serves(65)
    assert str(choice.key.baseline).startswith("Kept")
    assert one.calls and one.all_held(len(one.calls))
    assert all(len(sets[0]) == (3 if routes else 4) for sets in clock.asked)
    close(*one.call())


@pytest.mark.parametrize("routes", [False, True])
def test_a_wrong_result_is_found(routes, monkeypatch):
    one = Held(monkeypatch, routes)
    one.call()
    monkeypatch.setattr(ops.fused_experts, "run_kernels", lambda *given: ops.fused_experts.reference(*given) * 1.1)
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(TOKENS, place=1))
    assert not choice.plugin_serves(1)


OTHERS = [
    *(triton_kernels.OAITritonMxfp4ExpertsMonolithic, triton_kernels.OAITritonExperts),
    *(triton_kernels.UnfusedOAITritonExperts, AiterW4A16ExpertsMonolithic, marlin_moe.MarlinExperts),
    ocp_mx_emulation_moe.OCP_MXQuantizationEmulationTritonExperts,
]


@pytest.fixture
def rocm(monkeypatch):
    """Have vLLM select as on ROCm among experts that support a layer. Return a function that selects, given these."""
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    monkeypatch.setattr(mxfp4, "_user_moe_activation_override", lambda: None)
    monkeypatch.setattr(seam, "arch_here", lambda platform: None)
    order = ("AITER_TRITON_MXFP4_BF16", "TRITON", "TRITON_UNFUSED", "MARLIN", "EMULATION")
    priority = [BACKENDS[name] for name in order]
    for name in ("_get_priority_backends_for_gpt_oss", "_get_priority_backends"):
        monkeypatch.setattr(mxfp4, name, lambda: priority)

    def select(*supported: type, general: bool = False, asked=None, **options) -> tuple:
        for one in OTHERS:
            supports(monkeypatch, one, one in supported)
        made = config(**{**GPT_OSS, **options})
        if general:
            return mxfp4.select_deepseek_v4_mxfp4_moe_backend(made)
        return mxfp4.select_mxfp4_moe_backend(made, **({"activation_key": asked} if asked else {}))

    return select


def test_vllms_choice_is_kept(rocm):
    """The plugin's experts are around those that vLLM selects, and route if these do."""
    fused, modular, unfused, aiter, marlin, emulation = OTHERS
    for supported, backend, routes in (
        ((fused, modular, emulation), "TRITON", True),
        ((modular, emulation), "TRITON", False),
        ((unfused, emulation), "TRITON_UNFUSED", False),
        ((aiter, fused), "AITER_TRITON_MXFP4_BF16", True),
        ((emulation,), "EMULATION", False),
    ):
        for general in (False, True):
            assert rocm(*supported, general=general) == (BACKENDS[backend], plugin_of(backend, routes))
            assert plugin_of(backend, routes).baseline_class() is supported[0]
    assert rocm(marlin, emulation) == (BACKENDS.MARLIN, marlin)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_dtype": torch.float16}, "MXFP4 weights with torch.float16"),
        ({"activation": MoEActivation.SILU, "swiglu_limit": -1.0}, None),
        ({"activation": MoEActivation.GELU}, None),
        ({"routing_method": RoutingMethodType.Default}, None),
        ({"is_lora_enabled": True}, None),
        (parallel(use_ep=True, ep_size=2, dp_size=2, all2all_backend="deepep_low_latency"), "the batched activation"),
    ],
)
def test_layers_stay_vllms(options, said, rocm, monkeypatch):
    fused, *_ = OTHERS
    reasons = []
    for module in (mxfp4_experts, mxfp4_experts.experts):
        monkeypatch.setattr(module, "log_unsupported", reasons.append)
    assert rocm(fused, **options) == (BACKENDS.TRITON, fused)
    assert [reason.startswith(said) for reason in reasons] == ([True] if said else [])


def test_load_balancing_is_served_beside_emulation_only(rocm):
    """It moves parameters, which triton_kernels' tensors are not, and the plugin has copies of their biases."""
    options = parallel(use_ep=True, ep_size=2, dp_size=2, all2all_backend="allgather_reducescatter")
    for experts, backend in ((OTHERS[1], "TRITON"), (OTHERS[-1], "EMULATION")):
        assert rocm(experts, **options)[1] is plugin_of(backend)
    balanced = parallel(use_ep=True, ep_size=2, dp_size=2, all2all_backend="allgather_reducescatter", enable_eplb=True)
    assert rocm(OTHERS[1], **balanced)[1] is OTHERS[1]
    assert rocm(OTHERS[-1], **balanced)[1] is plugin_of("EMULATION")


def test_a_named_backend_is_kept(rocm, monkeypatch):
    fused, *_ = OTHERS
    assert rocm(fused, moe_backend="triton")[1] is plugin_of("TRITON", routes=True)
    monkeypatch.setenv("VLLM_ROCM_OPS_NAMED_BACKEND", "keep")
    assert rocm(fused, moe_backend="triton")[1] is fused


def test_bf16_tokens_beside_emulation_are_said(rocm, caplog):
    """A checkpoint that asks for 4-bit tokens gets bf16 ones, which generates other text than vLLM's emulation."""
    *_, emulation = OTHERS
    mxfp4_experts.warn_bf16_tokens.cache_clear()
    log_unsupported.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            key = mxfp4.kMxfp4Dynamic
            assert rocm(emulation, asked=key)[1] is plugin_of("EMULATION")
    assert caplog.text.count("MXFP4 experts multiply bf16 tokens") == 1
    made = mxfp4.make_mxfp4_moe_quant_config(BACKENDS.EMULATION, *2 * (torch.ones(1),), a1_scale=torch.ones(1))
    assert plugin_of("EMULATION").a1_scale is None and made is not None


def test_scheme_is_vllms():
    assert scheme("mxfp4") == (mxfp4.kMxfp4Static, None)
