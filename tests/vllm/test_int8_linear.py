"""Test INT8 linear layers in vLLM: the results, the calls left to the baseline, and when the plugin serves."""

import functools

import linears
import pytest
import torch
from fakes import decide, parameter
from linears import FEW, MANY, hold, random, require_choice, require_products, require_sizes_won
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import int8_linear
from vllm_rocm_ops.vllm.selection import kernel_selection

N, K = 48, 160

pytestmark = pytest.mark.usefixtures("configuration")


class Baseline:
    """The base of stand-ins for vLLM's kernels, which computes in float32 and keeps the numbers of tokens in `calls`."""

    def apply_weights(self, layer, x, bias=None):
        self.calls.append(len(x))
        weight, scale, input_scale, zero_point, adjustment = self._get_layer_params(layer)
        assert zero_point is None and adjustment is None
        a, scale_a = int8_linear.quantized(x, input_scale)
        return ops.gemm.reference(a, weight, x.dtype, scale_a, scale, bias)


class Packing(Baseline):
    """A kernel that leaves the weight in an unknown order."""

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        layer.weight = parameter(layer.weight.data.flip(0))


KINDS = {"tensors": (False, True), "fused": (False, False), "channels": (True, False), "channels static": (True, True)}
"""Kind -> whether weights have a scale per channel, and whether activations have a static one."""


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a layer with its kernel, which may keep a baseline, and the exact weight."""
    monkeypatch.setattr(linear_base, "_kernels", {})

    def make(kind: str, baseline: type | None = None):
        hold(monkeypatch, baseline, CutlassInt8ScaledMMLinearKernel)
        per_channel, static = KINDS[kind]
        layer, weight = torch.nn.Module(), (40 * random(N, K)).round().clamp(-127, 127).to(torch.int8)
        layer.logical_widths = [N // 3, N - N // 3] if kind == "fused" else [N]
        count = N if per_channel else len(layer.logical_widths)
        scale = random(count).abs() / 100 + 0.001
        layer.weight = parameter(weight)
        layer.weight_scale = parameter(scale.view(-1, 1) if per_channel else scale)
        layer.input_scale = parameter(torch.tensor([0.03])) if static else None
        layer.input_zero_point = layer.azp_adj = None
        of_rows = scale if per_channel else scale.repeat_interleave(torch.tensor(layer.logical_widths))
        kernel = linear.init_int8_linear_kernel(per_channel, static, True, "test")
        assert type(kernel).__name__ == "RocmOpsInt8Linear"
        kernel.process_weights_after_loading(layer)
        return layer, kernel, weight.float() * of_rows.view(-1, 1)

    return make


close = functools.partial(linears.close, most=0.02)  # the rounding to int8


@pytest.mark.parametrize("kind", KINDS)
def test_products(make, kind):
    require_products(*make(kind), "gemm", close)


def test_unmeasured_sizes_are_vllms(make):
    layer, kernel, exact = make("channels", Baseline)
    with launch.executor(Emulator("gfx950")):
        for tokens in (1, MANY):
            x = random(tokens, K).bfloat16()
            close(kernel.apply_weights(layer, x), x, exact)
    assert kernel.baseline.calls == [1, MANY] and vllm_rocm_ops.stats() == {}


@pytest.mark.parametrize("fault", [None, "scale_b", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_serve_the_sizes_they_won(make, kind, fault, monkeypatch):
    kernel_selection.begin_recording()
    layer, kernel, exact = make(kind, Baseline)
    require_sizes_won(layer, kernel, exact, ops.gemm, fault, monkeypatch)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_kernels_serve_where_ours_won(make, arch):
    """Emulated kernels equal the baseline, except for roundings of the last bit; a bias of another type is vLLM's."""
    kernel_selection.begin_recording()
    layer, kernel, _ = make("channels", Baseline)
    x, bias = random(MANY, K).bfloat16(), random(N).bfloat16()
    wanted = kernel.apply_weights(layer, x, bias)
    decide(bytes([0]) + bytes([1]) * MANY)
    with launch.executor(Emulator(arch)):
        output = kernel.apply_weights(layer, x, bias)
        [symbol] = vllm_rocm_ops.stats()["gemm"]
        assert symbol.startswith("gemm_int8_") and len(kernel.baseline.calls) == 1
        torch.testing.assert_close(output, wanted, rtol=2**-7, atol=1e-3)
        kernel.apply_weights(layer, x, bias.float())
    assert len(kernel.baseline.calls) == 2


def test_weights_of_unknown_order_are_vllms(make):
    layer, kernel, _ = make("channels", Packing)
    kernel.apply_weights(layer, random(FEW, K).bfloat16())
    assert kernel.order is None and kernel.baseline.calls == [FEW]


def test_activations_with_a_zero_point_are_vllms():
    plugin = linear._POSSIBLE_INT8_KERNELS[linear.current_platform._enum][0]
    given = {"is_static_input_scheme": False, "is_channelwise": True, "input_symmetric": False}
    config = linear.Int8ScaledMMLinearLayerConfig(**given)
    assert plugin.can_implement(config) == (False, "supports symmetric activations only")
    assert type(linear.init_int8_linear_kernel(True, False, False, "test")) is not plugin


def test_vllm_chooses_the_baseline(make, monkeypatch):
    require_choice(make("channels", Baseline)[1], linear._POSSIBLE_INT8_KERNELS, monkeypatch)


def test_fake_results_are_like_real_ones(make):
    layer, kernel, _ = make("channels static", Baseline)
    x = random(FEW, K).bfloat16()
    arguments = x, layer.weight, layer.weight_scale, layer.input_scale, None, kernel.baseline_name
    torch.library.opcheck(torch.ops.vllm_rocm_ops.int8_linear.default, arguments, test_utils="test_faketensor")
