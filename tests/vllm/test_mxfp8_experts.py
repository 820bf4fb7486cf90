"""Test the plugin's experts of packed MX-FP8 weights around vLLM's emulation: results, calls left to it, and selection."""

import pytest
import torch
from fakes import Fake, by_reference, parameter, plugin_wins_up_to, time_choices
from linears import ask_for_aiter
from test_experts import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOKENS,
    Layer,
    call,
    close,
    config,
    inputs,
    keep,
    parallel,
    routed,
    supports,
)
from vllm.model_executor.layers.fused_moe.experts import aiter_mxfp8_moe, mxfp8_emulation_moe, mxfp8_native_moe
from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8FusedMoE

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import coverage, seam
from vllm_rocm_ops.vllm.linear import mx_weights
from vllm_rocm_ops.vllm.moe import mxfp8_experts

BACKENDS, EMULATION = fp8.Fp8MoeBackend, mxfp8_emulation_moe.Mxfp8EmulationTritonExperts
MANY = 65

pytestmark = pytest.mark.usefixtures("configuration")


def plugin() -> type:
    return mxfp8_experts.PLUGIN_EXPERTS[1]


class Held:
    """A layer, vLLM's emulation, which keeps the weights of its calls, and the plugin's experts around it."""

    def __init__(self, monkeypatch, rest: str = "", nan: bool = False, **options):
        self.layer = layer = Layer("mx alone", rest)
        if nan:
            layer.w2.view(torch.uint8)[EXPERTS - 1, HIDDEN - 1, INNER - 1] = 255
        self.calls = keep(monkeypatch, EMULATION, plugin(), layer)
        options = layer.rest | options
        self.activation = {"activation": options["activation"]} if "activation" in options else {}
        self.kernel = fp8.make_fp8_moe_kernel(layer.quant_config, config(**options), plugin(), BACKENDS.TRITON_MXFP8)
        self.experts = self.kernel.fused_experts

    def call(self, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of a call, and the plain computation's."""
        (weights, ids), hidden = routed(tokens=tokens), inputs(tokens)
        made = call(self.layer, self.kernel, weights, ids, hidden, **self.activation)
        return made, self.layer.plain(hidden, weights, ids)


@pytest.mark.parametrize("rest", ["", "oai"])
def test_kernels_read_packed_weights(rest, monkeypatch):
    """gfx942's, in the emulator; a call that they do not serve has a copy, by which vLLM's emulation multiplies. AITER has no part."""
    ask_for_aiter(monkeypatch)
    one = Held(monkeypatch, rest)
    with launch.executor(Emulator("gfx942", races=False)):
        close(*one.call())
        assert one.calls == [] and vllm_rocm_ops.stats().keys() == {"fused_experts"}
        assert all("mxfp8" in kernel for kernel in vllm_rocm_ops.stats()["fused_experts"])
        close(*one.call(MANY))
    assert vllm_rocm_ops.stats()["mx_dequantize"] == {"mx_dequantize_fp8": 2}
    [copies] = one.calls
    for copy, exact in zip(copies, (one.layer.exact1, one.layer.exact2)):
        assert copy.dtype == torch.bfloat16 and copy.float().equal(exact)


def test_a_release_whose_emulation_has_no_copies_makes_them_itself(monkeypatch):
    """One without the variable would scale a copy again."""
    monkeypatch.setattr(mx_weights, "emulation_reads_bf16", lambda quantization: False)
    by_reference(monkeypatch, ops.mx_dequantize)
    one = Held(monkeypatch)
    close(*one.call(MANY))
    assert [w1 is one.layer.w1 for w1, _ in one.calls] == [True]


def test_both_are_timed_as_they_run(monkeypatch):
    """vLLM's emulation with its copy; where a copy has no kernel, with the weights as they are."""
    by_reference(monkeypatch, ops.fused_experts)
    one = Held(monkeypatch)
    one.call()
    [choice] = time_choices(clock=plugin_wins_up_to(17, place=1))
    assert choice.plugin_serves(17) and not choice.plugin_serves(MANY)
    assert str(choice.key.baseline).startswith("Kept") and " scales mx alone" in choice.key.shape
    assert one.calls and all(w1 is one.layer.w1 for w1, _ in one.calls)
    close(*one.call())


def test_a_wrong_result_is_found(monkeypatch):
    """Then vLLM's emulation serves all calls, and still has the plugin's copies."""
    by_reference(monkeypatch, ops.mx_dequantize)
    one = Held(monkeypatch)
    one.call()
    monkeypatch.setattr(ops.fused_experts, "run_kernels", lambda *given: ops.fused_experts.reference(*given) * 1.1)
    [choice] = time_choices((1, 2), 64, plugin_wins_up_to(TOKENS, place=1))
    assert not choice.plugin_serves(1)
    one.calls.clear()
    for _ in range(2):
        close(*one.call())
    assert [w1.dtype for w1, _ in one.calls] == 2 * [torch.bfloat16]


def test_weights_with_nan_are_vllms(monkeypatch):
    """gfx942's kernels would read 480."""
    said = []
    monkeypatch.setattr(mxfp8_experts, "log_unsupported", said.append)
    one = Held(monkeypatch, nan=True)
    by_reference(monkeypatch, ops.fused_experts, ops.mx_dequantize)
    one.call()
    one.call(MANY)
    assert said == ["MX-FP8 weights with NaN"] and all(w1 is one.layer.w1 for w1, _ in one.calls)
    assert len(one.calls) == 2 and one.experts.refused


@pytest.fixture
def rocm(monkeypatch):
    """Have vLLM select as on gfx942 among its experts. Return a function that selects."""
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    for one in (aiter_mxfp8_moe.AiterMxfp8Experts, mxfp8_native_moe.Mxfp8NativeTritonExperts):
        supports(monkeypatch, one, False)
    supports(monkeypatch, EMULATION)
    monkeypatch.setattr(mxfp8, "_SUPPORTED_BACKENDS", (BACKENDS.TRITON_MXFP8, BACKENDS.EMULATION))
    monkeypatch.setattr(mxfp8, "prioritize_humming", lambda backends: backends, raising=False)
    return lambda **options: mxfp8.select_mxfp8_moe_backend(config(**options))


def test_layers_that_vllm_emulates_are_the_plugins(rocm):
    assert rocm() == (BACKENDS.TRITON_MXFP8, plugin())
    assert plugin().baseline_class() is EMULATION


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"in_dtype": torch.float16}, "MX-FP8 weights with torch.float16"),
        ({"is_lora_enabled": True}, None),
        (parallel(use_ep=True, ep_size=2, dp_size=2, all2all_backend="deepep_low_latency"), "the batched activation"),
    ],
)
def test_layers_stay_vllms(options, said, rocm, monkeypatch):
    reasons = []
    for module in (mxfp8_experts, mxfp8_experts.experts):
        monkeypatch.setattr(module, "log_unsupported", reasons.append)
    assert rocm(**options) == (BACKENDS.EMULATION, EMULATION)
    assert {reason.startswith(said) for reason in reasons} == ({True} if said else set())


@pytest.mark.parametrize("balanced", [False, True])
def test_experts_of_other_ranks_are_served(rocm, balanced):
    """The op reads the parameters that load balancing moves."""
    more = {"enable_eplb": balanced, "all2all_backend": "allgather_reducescatter"}
    assert rocm(**parallel(use_ep=True, ep_size=2, dp_size=2, **more))[1] is plugin()


def test_copies_that_the_user_asks_for_are_vllms(rocm, monkeypatch):
    for asked in ("1", "0"):
        monkeypatch.setenv(mx_weights.DEQUANT_AT_LOAD["mxfp8"], asked)
        assert (rocm()[1] is plugin()) is (asked == "0")


def test_vllms_method_leaves_weights_packed(rocm, monkeypatch):
    """ModelOpt copies weights to bf16 for the backend that vLLM itself would use."""
    monkeypatch.setattr(plugin(), "baseline_class", staticmethod(lambda: None))
    layer, method = Layer("mx alone"), object.__new__(ModelOptMxFp8FusedMoE)
    monkeypatch.setattr(modelopt, "replace_parameter", setattr)
    held = Fake(w13_weight=layer.w1, w2_weight=layer.w2, _expert_routing_tables=lambda: None)
    held.w13_weight_scale, held.w2_weight_scale = layer.quant_config.w1_scale, layer.quant_config.w2_scale
    method.moe, method.weight_block_size, method.moe_kernel = config(), [1, 32], None
    method.mxfp8_backend, method.experts_cls = BACKENDS.TRITON_MXFP8, plugin()
    method.process_weights_after_loading(held)
    assert held.w13_weight is layer.w1 and isinstance(method.moe_kernel.fused_experts, plugin())


def test_packed_bytes_are_logged(monkeypatch, caplog):
    """By layers of experts and linear layers that keep them; none if vLLM has the layer."""
    one, module, linear = Held(monkeypatch), torch.nn.Module(), torch.nn.Module()
    module.quant_method = Fake(moe_kernel=one.kernel)
    quant = one.layer.quant_config
    module.w13_weight, module.w13_weight_scale = parameter(one.layer.w1), parameter(quant.w1_scale)
    module.w2_weight, module.w2_weight_scale = parameter(one.layer.w2), parameter(quant.w2_scale)
    of_linear = type("RocmOpsLinear", (), {"comparison": mx_weights.COMPARISON, "order": "plain"})
    linear.weight = parameter(torch.zeros(64, 64, dtype=torch.uint8))
    linear.weight_scale = parameter(torch.zeros(64, 4))
    linear.quant_method = Fake(kernel=of_linear())
    values = EXPERTS * 3 * HIDDEN * INNER
    found = [*coverage.packed([torch.nn.ModuleList([module, linear, torch.nn.Linear(4, 4)])])]
    assert found == [(values * 33 // 32, 2 * values), (64 * 64 + 64 * 16, 2 * 64 * 128)]
    with caplog.at_level("INFO"):
        coverage.log_packed(found)
        coverage.log_packed([*coverage.packed([torch.nn.Linear(4, 4)])])
    [said] = caplog.messages
    assert "2 layers keep MX weights packed: 0.0 GiB; copies in bf16 would take 0.0 GiB" in said
    of_linear.order = None
    one.experts.refused = "MX-FP8 weights with NaN"
    assert not [*coverage.packed([module, linear])]
