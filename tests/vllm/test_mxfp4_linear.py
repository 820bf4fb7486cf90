"""Test linear layers of MX weights that vLLM emulates: the results, the calls left to the baseline, and when the plugin serves."""

import functools
import importlib

import linears
import pytest
import torch
from fakes import decide, parameter
from linears import FEW, MANY, hold, one_rank, random, require_products, require_sizes_won  # noqa: F401
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mxfp4 import emulation as mxfp4
from vllm.model_executor.kernels.linear.mxfp8 import emulation as mxfp8

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.quantization import packed_bits
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import mx_weights
from vllm_rocm_ops.vllm.selection import kernel_selection

N, K = 48, 256
KINDS = "mxfp8", "mxfp4"
EMULATIONS = {"mxfp8": mxfp8.EmulationMxfp8LinearKernel, "mxfp4": mxfp4.EmulationMxfp4LinearKernel}
MX8, MX4 = "RocmOpsMxfp8WeightLinear", "RocmOpsMxfp4Linear"
CHOOSE = linear_base.vllm_kernel_for

pytestmark = pytest.mark.usefixtures("configuration")


class Baseline:
    """vLLM's emulation, which keeps the numbers of tokens in `calls`."""

    def apply_weights(self, layer, x, bias=None):
        self.calls.append(len(x))
        return super().apply_weights(layer, x, bias)


def plugin_for(kind: str) -> type:
    """Return the plugin's kernel for weights of a format."""
    table = getattr(linear, f"_POSSIBLE_{kind.upper()}_KERNELS")[linear.current_platform._enum]
    return next(kernel for kernel in table if kernel.__name__ in (MX8, MX4))


def config(kind: str) -> object:
    return linear.Mxfp8LinearLayerConfig((N, K)) if kind == "mxfp8" else linear.MxFp4LinearLayerConfig()


def layer_of(kind: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a layer as loaded, with more scales than it needs, and the exact weight."""
    bits = torch.randint(0, 256, (N, K), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    scale = torch.randint(118, 124, (N, K // 32 + 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    if kind == "mxfp8":
        bits[bits & 127 == 127] = 128  # -0 in place of NaN
        weight = bits.view(torch.float8_e4m3fn)
        values = weight.float()
    else:
        weight = packed_bits(bits & 15)
        values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[(bits & 7).long()]
        values = torch.where(bits & 8 > 0, -values, values)
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = parameter(weight), parameter(scale)
    return layer, values * torch.exp2(scale[:, : K // 32].float() - 127).repeat_interleave(32, 1)


@pytest.fixture(autouse=True)
def quark(monkeypatch):
    """Stand for Quark, by which vLLM dequantizes MXFP4 weights; and round inputs to whole numbers in its place."""
    monkeypatch.setattr(mxfp4, "has_quark", lambda: True, raising=False)

    def dequantized(weight, scale, dtype):
        return mx_weights.dequantize_rows(weight, scale, torch.arange(len(weight))).to(dtype)

    monkeypatch.setattr(mxfp4, "dequant_mxfp4", dequantized)
    monkeypatch.setitem(mxfp4._ACTIVATION_QUANT_DEQUANT_FUNCS, mxfp4.kMxfp4Dynamic, torch.round)


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a layer with its kernel, which may keep a baseline, and the exact weight."""
    monkeypatch.setattr(linear_base, "_kernels", {})

    def make(kind: str, baseline: type | None = None, given: object = None, nan: bool = False):
        hold(monkeypatch, baseline, EMULATIONS[kind])
        layer, exact = layer_of(kind)
        if nan:
            layer.weight.data.view(torch.uint8)[N - 1, K - 1] = 255
        kernel = plugin_for(kind)(given or config(kind))
        kernel.process_weights_after_loading(layer)
        return layer, kernel, exact

    return make


close = functools.partial(linears.close, most=0.01)  # the rounding to bf16


@pytest.mark.parametrize("kind", KINDS)
def test_products(make, kind):
    require_products(*make(kind), "mx_gemm", close)


@pytest.mark.parametrize("fault", [None, "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_serve_the_sizes_they_won(make, kind, fault, monkeypatch):
    kernel_selection.begin_recording()
    layer, kernel, exact = make(kind, Baseline)
    require_sizes_won(layer, kernel, exact, ops.mx_gemm, fault, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_packed(make, kind):
    """A call that emulated kernels do not serve has a copy of its own, by which vLLM's emulation multiplies."""
    kernel_selection.begin_recording()
    layer, kernel, exact = make(kind, Baseline)
    before, _ = layer_of(kind)
    assert layer.weight.view(torch.uint8).equal(before.weight.view(torch.uint8))
    assert layer.weight_scale.shape == (N, K // 32)
    x, bias = random(MANY, K).bfloat16(), random(N).bfloat16()
    close(kernel.apply_weights(layer, x, bias) - bias, x, exact)
    decide(bytes([0]) + bytes([1]) * MANY)
    with launch.executor(Emulator("gfx942")):
        close(kernel.apply_weights(layer, x[:FEW], bias) - bias, x[:FEW], exact)
        assert vllm_rocm_ops.stats()["mx_gemm"] == {f"mx_gemm_{kernel.traits[0]}_wave_splitk_16": 1}
        assert "mx_dequantize" not in vllm_rocm_ops.stats()
        close(kernel.apply_weights(layer, x, bias) - bias, x, exact)
        assert vllm_rocm_ops.stats()["mx_dequantize"] == {f"mx_dequantize_{kernel.traits[0]}": 1}
    assert kernel.baseline.calls == [MANY, MANY]


@pytest.mark.parametrize("kind", KINDS)
def test_a_scheme_of_vllms_loads_the_layer(kind, one_rank, monkeypatch):  # noqa: F811
    """compressed-tensors names its parameters, and the kernel of another format on this CPU is switched off."""
    schemes = importlib.import_module("vllm.model_executor.layers.quantization.compressed_tensors.schemes")

    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "RocmOpsMxfp8Linear")
    scheme = schemes.CompressedTensorsW8A8Mxfp8() if kind == "mxfp8" else schemes.CompressedTensorsW4A4Mxfp4()
    layer, (loaded, exact) = torch.nn.Module(), layer_of(kind)
    given = {"layer": layer, "params_dtype": torch.bfloat16, "weight_loader": lambda *_: None}
    sizes = {"output_partition_sizes": [N], "input_size_per_partition": K, "input_size": K, "output_size": N}
    scheme.create_weights(**given, **sizes)
    assert type(scheme.kernel).__name__ == (MX8 if kind == "mxfp8" else MX4)
    weight = layer.weight if kind == "mxfp8" else layer.weight_packed
    weight.data.view(torch.uint8).copy_(loaded.weight.view(torch.uint8))
    layer.weight_scale.data.copy_(loaded.weight_scale[:, : K // 32])
    scheme.process_weights_after_loading(layer)
    x = random(FEW, K).bfloat16()
    with launch.executor(Emulator("gfx942")):
        close(scheme.apply_weights(layer, x), x, exact)
    assert list(vllm_rocm_ops.stats()["mx_gemm"]) == [f"mx_gemm_{scheme.kernel.traits[0]}_wave_splitk_16"]


def test_weights_with_nan_are_vllms(make):
    """It makes its copy in bf16."""
    layer, kernel, _ = make("mxfp8", Baseline, nan=True)
    assert kernel.order is None and layer.weight.dtype == torch.bfloat16
    output = kernel.apply_weights(layer, random(FEW, K).bfloat16())
    assert output[:, -1].isnan().all() and not output[:, :-1].isnan().any()


def test_inputs_of_w4a4_are_rounded(make, monkeypatch):
    """By vLLM's function, for both sides, once."""
    kernel_selection.begin_recording()
    layer, kernel, exact = make("mxfp4", Baseline, linear.MxFp4LinearLayerConfig(mxfp4.kMxfp4Dynamic))
    monkeypatch.setattr(ops.mx_gemm, "run_kernels", ops.mx_gemm.reference)
    x = 3 * random(FEW, K).bfloat16()
    given = x, layer.weight, layer.weight_scale, None, kernel.baseline_name
    for output in (mx_weights.COMPARISON.plugin(*given), mx_weights.COMPARISON.baseline(*given)):
        close(output, x.round(), exact)
    everything = torch.arange(FEW), torch.arange(N)
    close(mx_weights.COMPARISON.exact(given, x, *everything).bfloat16(), x.round(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_the_user_asks_for_is_vllms(kind, monkeypatch):
    """By default vLLM copies MXFP8 weights, and the plugin does not."""
    plugin = plugin_for(kind)
    assert plugin.is_supported()[0]
    monkeypatch.setenv(mx_weights.DEQUANT_AT_LOAD[kind], "1")
    supported, why = plugin.is_supported()
    assert not supported and mx_weights.DEQUANT_AT_LOAD[kind] in why
    monkeypatch.setenv(mx_weights.DEQUANT_AT_LOAD[kind], "0")
    assert plugin.is_supported()[0]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_another_kernel_are_vllms(kind, monkeypatch):
    """Only vLLM's emulation reads packed weights as loaded; where vLLM has no kernel, none serves many tokens."""
    plugin = plugin_for(kind)
    monkeypatch.setattr(linear_base, "vllm_kernel_for", lambda *_: linear.AiterMxfp4LinearKernel)
    assert plugin.can_implement(config(kind)) == (False, "leaves the layer to AiterMxfp4LinearKernel")
    monkeypatch.setattr(linear_base, "vllm_kernel_for", lambda *_: None)
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    assert not plugin.can_implement(config(kind))[0]
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert plugin.is_supported() == (False, "is not batch invariant")


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_chooses_the_baseline(kind, monkeypatch):
    """It is the first of vLLM's own kernels that supports the layer."""
    plugin, table = plugin_for(kind), getattr(linear, f"_POSSIBLE_{kind.upper()}_KERNELS")
    monkeypatch.setitem(table, linear.current_platform._enum, [plugin, EMULATIONS[kind]])
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    assert CHOOSE(plugin, config(kind)) is EMULATIONS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_the_op(make, kind):
    """It is traced whole, with a choice or without."""
    layer, kernel, exact = make(kind, Baseline)
    x = random(2, FEW, K).bfloat16()
    close(kernel.apply_weights(layer, x), x, exact)
    run = torch.compile(lambda x: kernel.apply_weights(layer, x), backend="eager", fullgraph=True)
    close(run(x), x, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_fake_results_are_like_real_ones(make, kind):
    layer, kernel, _ = make(kind, Baseline)
    arguments = random(FEW, K).bfloat16(), layer.weight, layer.weight_scale, None, kernel.baseline_name
    torch.library.opcheck(torch.ops.vllm_rocm_ops.mx_weight_linear.default, arguments, test_utils="test_faketensor")
