"""Test INT4 linear layers in vLLM: the results, the calls left to the baseline, and when the plugin serves."""

import functools

import linears
import pytest
import torch
from fakes import Fake, decide, parameter
from linears import FEW, MANY, hold, one_rank, random, require_choice, require_products, require_sizes_won  # noqa: F401
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16 import TritonW4A16LinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
    CompressedTensorsWNA16,
)
from vllm.model_executor.layers.quantization.quark.schemes.quark_w4a16_int4 import QuarkW4A16Int4
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

import vllm_rocm_ops
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.quantization import packed_bits
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection

N, K = 48, 256
NAMES = "weight_packed", "weight_scale", "weight_zero_point"
GROUPS = {"32": 32, "128": 128, "channel": -1}

pytestmark = pytest.mark.usefixtures("configuration", "one_rank")


class Baseline:
    """The base of stand-ins for vLLM's kernels, which keeps the numbers of tokens in `calls`."""

    def apply_weights(self, layer, x, bias=None):
        self.calls.append(len(x))
        weight, scale, zero_points = self._get_weight_params(layer)
        assert zero_points is None
        return ops.w4a16_gemm.reference(x, weight, scale, bias)


class Packing(Baseline):
    """A kernel whose scales have another layout."""

    def process_weights_after_loading(self, layer):
        super().process_weights_after_loading(layer)
        layer.weight_scale = parameter(layer.weight_scale.data.t().contiguous())


def config(group: int = 128, **given) -> linear.MPLinearLayerConfig:
    """Return vLLM's configuration of a layer."""
    shape, of = (K, N), {"weight_type": scalar_types.uint4b8, "act_type": torch.bfloat16, "zero_points": False}
    return linear.MPLinearLayerConfig(shape, shape, group_size=group, **of | given)


def layer_of(group: int, gptq: bool = False) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a layer as loaded from compressed-tensors, or with GPTQ's layout, and the exact weight."""
    values = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(group + 1))
    scale = (random(N, K // (K if group == -1 else group)).abs() / 100 + 0.001).bfloat16()
    words = packed_bits(values).view(torch.int32)
    layer, output = torch.nn.Module(), int(gptq)
    turned = (lambda rows: rows.t().contiguous()) if gptq else (lambda rows: rows)
    given = {"weight_loader": lambda *_: None, "input_dim": 1 - output, "output_dim": output}
    layer.weight_packed = PackedvLLMParameter(data=turned(words), packed_dim=1 - output, packed_factor=8, **given)
    layer.weight_scale = GroupQuantScaleParameter(data=turned(scale), **given)
    exact = (values.float() - 8) * scale.float().repeat_interleave(K // scale.shape[1], 1)
    return layer, exact


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a layer with its kernel, which may keep a baseline, and the exact weight."""
    monkeypatch.setattr(linear_base, "_kernels", {})

    def make(kind: str, baseline: type | None = None, gptq: bool = False):
        hold(monkeypatch, baseline, TritonW4A16LinearKernel)
        layer, exact = layer_of(GROUPS[kind], gptq)
        kind = linear.choose_mp_linear_kernel(config(GROUPS[kind]))
        assert kind.__name__ == "RocmOpsInt4Linear"
        kernel = kind(config(exact.shape[1] // layer.weight_scale.shape[int(not gptq)]), *NAMES)
        kernel.process_weights_after_loading(layer)
        return layer, kernel, exact

    return make


close = functools.partial(linears.close, most=0.01)  # the rounding to bf16


@pytest.mark.parametrize("gptq", [False, True], ids=["compressed-tensors", "gptq"])
@pytest.mark.parametrize("kind", GROUPS)
def test_products(make, kind, gptq):
    require_products(*make(kind, gptq=gptq), "w4a16_gemm", close)


@pytest.mark.parametrize("fault", [None, "scale", "bias"])
@pytest.mark.parametrize("kind", GROUPS)
def test_kernels_serve_the_sizes_they_won(make, kind, fault, monkeypatch):
    kernel_selection.begin_recording()
    layer, kernel, exact = make(kind, Baseline)
    require_sizes_won(layer, kernel, exact, ops.w4a16_gemm, fault, monkeypatch)


def test_kernels_serve_where_ours_won(make):
    """Emulated kernels equal the baseline, except for roundings of the last bit; too many tokens are vLLM's."""
    kernel_selection.begin_recording()
    layer, kernel, _ = make("128", Baseline)
    x, bias = random(MANY, K).bfloat16(), random(N).bfloat16()
    wanted = kernel.apply_weights(layer, x, bias)
    decide(bytes([0]) + bytes([1]) * MANY)
    with launch.executor(Emulator("gfx942")):
        output = kernel.apply_weights(layer, x[:FEW], bias)
        assert vllm_rocm_ops.stats()["w4a16_gemm"] == {"w4a16_gemm_32_wave_splitk_16": 1}
        torch.testing.assert_close(output, wanted[:FEW], rtol=2**-7, atol=1e-3)
        kernel.apply_weights(layer, x, bias)
    assert kernel.baseline.calls == [MANY, MANY]


def test_weights_of_another_layout_are_vllms(make):
    layer, kernel, _ = make("32", Packing)
    assert kernel.order is None and layer.weight_scale.shape == (N, K // 32)


REFUSED = {
    "symmetric INT4": {"weight_type": scalar_types.uint4, "zero_points": True},
    "INT4 weights": {"weight_type": scalar_types.uint8b128},
    "bfloat16": {"act_type": torch.float16},
    "groups": {"group": 96},
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused_layers_are_vllms(why):
    """AWQ has zero points, and marlin-like kernels take 8 bits."""
    plugin = linear._POSSIBLE_KERNELS[linear.current_platform._enum][0]
    holds, said = plugin.can_implement(config(**REFUSED[why]))
    assert not holds and why in said


def test_columns_in_another_order_are_vllms():
    """Up to vLLM 0.29 a configuration tells of act-order."""
    plugin = linear._POSSIBLE_KERNELS[linear.current_platform._enum][0]
    holds, said = plugin.can_implement(Fake(**vars(config()), has_g_idx=True))
    assert not holds and "act-order" in said


def test_layers_of_another_kernel_are_vllms(monkeypatch):
    """Only the Triton kernel prepares weights in the op's layout."""
    plugin = linear._POSSIBLE_KERNELS[linear.current_platform._enum][0]
    monkeypatch.setattr(linear_base, "vllm_kernel_for", lambda *_: linear.ExllamaLinearKernel)
    assert plugin.can_implement(config()) == (
        False,
        "leaves the layer to ExllamaLinearKernel, whose weights have another layout",
    )
    monkeypatch.setattr(linear_base, "vllm_kernel_for", lambda *_: None)
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    assert not plugin.can_implement(config())[0]
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    assert plugin.can_implement(config()) == (False, "is not batch invariant")


def test_vllm_chooses_the_baseline(make, monkeypatch):
    require_choice(make("128", Baseline)[1], linear._POSSIBLE_KERNELS, monkeypatch)


def test_a_scheme_of_vllms_makes_the_kernel(monkeypatch):
    """compressed-tensors passes the names of its parameters, which older releases extend."""
    hold(monkeypatch, Baseline, TritonW4A16LinearKernel)
    scheme, layer = CompressedTensorsWNA16("group", 4, group_size=32), torch.nn.Module()
    scheme.create_weights(layer, K, K, [N], K, torch.bfloat16, weight_loader=lambda *_: None)
    assert type(scheme.kernel).__name__ == "RocmOpsInt4Linear"
    assert scheme.kernel.baseline.w_q_name == "weight_packed"


@pytest.mark.parametrize("pack_method", ["order", "reorder"])
def test_quarks_layers_are_served(pack_method, monkeypatch):
    """Its bytes are signed, in one of two orders, from which vLLM makes the layout that the op reads."""
    hold(monkeypatch, None, TritonW4A16LinearKernel)
    written = {"dtype": "int4", "group_size": 32, "symmetric": True}
    scheme, layer = QuarkW4A16Int4(quant_utils.kInt4Static32, None, pack_method, written), torch.nn.Module()
    sizes = {"input_size": K, "output_size": N}
    scheme.create_weights(layer, [N], K, torch.bfloat16, lambda *_: None, **sizes)
    assert type(scheme.kernel).__name__ == "RocmOpsInt4Linear"
    values = torch.randint(-8, 8, (K, N), generator=torch.Generator().manual_seed(1))
    order = [0, 2, 4, 6, 1, 3, 5, 7] if pack_method == "reorder" else range(8)
    shifts = 4 * torch.tensor(order).argsort()
    layer.weight.data.copy_(((values & 15).unflatten(1, (-1, 8)) << shifts).sum(2).to(torch.uint32).view(torch.int32))
    layer.weight_scale.data.copy_((random(K // 32, N).abs() / 100 + 0.001).bfloat16())
    exact = (values.float() * layer.weight_scale.float().repeat_interleave(32, 0)).t()
    scheme.process_weights_after_loading(layer)
    x = random(FEW, K).bfloat16()
    close(scheme.apply_weights(layer, x), x, exact)
    assert "w4a16_gemm" in vllm_rocm_ops.stats()


def test_fake_results_are_like_real_ones(make):
    layer, kernel, _ = make("32", Baseline)
    arguments = random(FEW, K).bfloat16(), layer.weight_packed, layer.weight_scale, None, kernel.baseline_name
    torch.library.opcheck(torch.ops.vllm_rocm_ops.int4_linear.default, arguments, test_utils="test_faketensor")
