"""Test the GEMMs of MLA weight absorption: the calls of torch.bmm in vLLM that the plugin serves, and their results."""

import pytest
import torch
from fakes import Counting, Fake, RowClock, decide
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.utils import replace_parameter

import vllm_rocm_ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import mla_absorb
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing, watchdog

HEADS, NOPE, V, LATENT = 2, 128, 64, 256


class Layer(torch.nn.Module):
    """The two weights of one projection as vLLM makes them."""

    num_heads, v_head_dim, kv_lora_rank = HEADS, V, LATENT
    is_aiter_triton_fp4_bmm_enabled = is_aiter_triton_fp8_bmm_enabled = is_amx_bmm_enabled = False

    def __init__(self, seed: int = 0):
        super().__init__()
        self.load(seed)

    def load(self, seed: int) -> None:
        generator, v = torch.Generator().manual_seed(seed), self.v_head_dim
        weight = torch.randn(HEADS * (NOPE + v), LATENT, generator=generator).bfloat16()
        w_uk, w_uv = weight.t().view(LATENT, HEADS, NOPE + v).split([NOPE, v], -1)
        replace_parameter(self, "W_UV", w_uv.transpose(0, 1), prefer_copy=True)
        replace_parameter(self, "W_UK_T", w_uk.permute(1, 2, 0), prefer_copy=True)


def calls(layer: Layer, rows: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return vLLM's results with both weights, and the expected ones in float64."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, HEADS, NOPE + 64, generator=generator).bfloat16()[..., :NOPE]
    latent = torch.randn(rows, HEADS, LATENT, generator=generator).bfloat16()
    absorbed, out = q.new_empty(rows, HEADS, LATENT), q.new_empty(rows, HEADS * V)
    with torch.no_grad():
        torch.bmm(q.transpose(0, 1), layer.W_UK_T, out=absorbed.transpose(0, 1))
        MLAAttention._v_up_proj(layer, latent, out)
        plain = [torch.Tensor(weights.detach().float()).double() for weights in (layer.W_UK_T, layer.W_UV)]
        wanted = [torch.einsum("mhk,hkn->mhn", x.double(), w) for x, w in zip((q, latent), plain)]
    return [absorbed, out.view(rows, HEADS, V)], wanted


def served(layer: Layer, rows: int = 3) -> int:
    """Return how many of both GEMMs the plugin served, and check both."""
    vllm_rocm_ops.reset_stats()
    found, wanted = calls(layer, rows)
    for got, exact in zip(found, wanted):
        assert (got.double() - exact).abs().max() <= 2**-7 * exact.abs().max()
    return sum(vllm_rocm_ops.stats().get("batched_gemm", {}).values())


def test_both_products_are_served_where_asked_for(configuration):
    """Each takes one launch, and writes vLLM's output."""
    layer, emulator = Layer(), Counting("gfx942")
    assert served(layer) == 0
    mla_absorb.adopt(layer, True, 64)
    assert isinstance(layer.W_UV, torch.nn.Parameter) and layer.state_dict().keys() == {"W_UK_T", "W_UV"}
    with launch.executor(emulator):
        assert served(layer) == 2
    assert emulator.symbols == ["batched_gemm_bf16_transposed_16", "batched_gemm_bf16_wave_splitk_16"]


def test_a_noted_weight_keeps_its_address_and_class(configuration):
    """Its address when it is loaded again, the results of other calls, and their classes stay."""
    layer = Layer()
    before = [layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr(), layer.W_UV.stride()]
    mla_absorb.adopt(layer, True, 64)
    layer.load(1)
    assert before == [layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr(), layer.W_UV.stride()]
    assert served(layer) == 2
    other, found = Layer(1), layer.W_UV.contiguous()
    assert type(found) is torch.Tensor and torch.equal(found, other.W_UV)
    vllm_rocm_ops.reset_stats()
    left = torch.ones(HEADS, V, LATENT, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(torch.bmm(layer.W_UV, left), torch.bmm(other.W_UV, left))
        assert torch.bmm(torch.ones(HEADS, 3, LATENT, dtype=torch.bfloat16), layer.W_UV).shape == (HEADS, 3, V)
    assert sum(vllm_rocm_ops.stats()["batched_gemm"].values()) == 1  # the last: without an out


def test_a_weight_that_is_no_parameter(configuration):
    plain = Layer()
    layer = Fake(W_UV=plain.W_UV.detach(), other=1)
    mla_absorb.adopt(layer, True, 64)
    assert type(layer.W_UV) is seam.mixed(mla_absorb.Absorbed, torch.Tensor)
    mla_absorb.restore_baseline(layer.W_UV)
    assert type(layer.W_UV) is torch.Tensor


@pytest.fixture
def noted(configuration):
    """Yield a layer whose weights are noted to be measured."""
    kernel_selection.begin_recording()
    layer = Layer()
    mla_absorb.adopt(layer, False, 200)
    yield layer
    kernel_selection.invalidate()


def keys() -> dict[str, kernel_selection.Choice]:
    return {str(one.key): one for one in kernel_selection.all_choices() if one.kernels is mla_absorb.COMPARISON}


def require_measured(choice, monkeypatch, spoiled, is_right: bool, folder, most: float = 0.01) -> None:
    """Raise unless results of `mla_absorb.run` that were `spoiled` are noticed, and right ones have at `most` an error."""
    right = mla_absorb.run

    def run(x, weights, out, *scales):
        result = right(x, weights, out, *scales)
        spoiled(out, *scales)
        return result

    monkeypatch.setattr(mla_absorb, "run", run)
    given = choice.kernels, list(choice.layers.values()), 5, RowClock(), watchdog.marker(folder / "mark", "")
    with torch.inference_mode():
        if is_right:
            timed = kernel_timing.check_and_time(*given)
            assert timed.plugin_us == timed.baseline_us == 5 and 0 < timed.error < most
        else:
            with pytest.raises(kernel_timing.Mismatch):
                kernel_timing.check_and_time(*given)


def test_the_plugin_serves_where_it_was_measured_to_be_faster(noted):
    """It serves nothing before. A weight for which it never wins gets its class back."""
    uk, uv = "batched_gemm 2x256x128 bfloat16 transposed bmm", "batched_gemm 2x64x256 bfloat16 bmm"
    assert list(keys()) == [uk, uv]
    assert all(one.max_tokens == 64 and len(one.layers) == 1 for one in keys().values())
    assert served(noted) == 0
    decide(bytes([0, 0, 0]), bytes([0, 1, 1]))
    assert served(noted, 2) == 1 and served(noted, 3) == 0
    assert type(noted.W_UK_T) is torch.nn.Parameter
    assert type(noted.W_UV) is seam.mixed(mla_absorb.Absorbed, torch.nn.Parameter)


def test_nothing_is_noted_without_measurements(configuration, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_MEASURE", "0")
    layer = Layer()
    mla_absorb.adopt(layer, False, 64)
    assert type(layer.W_UV) is torch.nn.Parameter


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_wrong_result_is_noticed_when_it_is_measured(noted, monkeypatch, factor, tmp_path):
    """The check measures the very call that vLLM makes."""
    for choice in keys().values():
        require_measured(choice, monkeypatch, lambda out: out.mul_(factor), factor == 1.0, tmp_path)


def test_more_tokens_than_kernels_take_are_torchs(configuration):
    layer = Layer()
    mla_absorb.adopt(layer, True, 100)
    with launch.executor(Emulator("gfx942")):
        assert served(layer, mla_absorb.MAX_TOKENS) == 2
        assert all(kernel.startswith("batched_gemm_") for kernel in vllm_rocm_ops.stats()["batched_gemm"])
        assert served(layer, mla_absorb.MAX_TOKENS + 1) == 0
