"""Test models in which attention, or W_UV after it, quantizes its result: their calls, explain and predicted steps."""

import pytest
import test_step
import torch
from marks import full
from test_cli import GFX942, kernels, measured

from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.vllm.selection import kernel_selection

LLAMA, QWEN, DEEPSEEK = "llama-3.1-405b-fp8", "qwen3-8b-fp8", "deepseek-v3"
ATTENTION, V_UP = "attention + o's input quantization", "W_UV + o's input quantization"


def quantizing(config: dict, tp: int) -> list[fused_calls.FusedCall]:
    """Return a model's fused calls whose result is quantized."""
    return [call for call in fused_calls.calls(config, tp) if fused_calls.QUANTIZATION in call.launches]


def test_attention_or_w_uv_quantizes_in_its_launch():
    """The launch replaces two of each layer, with arguments that the ops accept, static or by groups of 128."""

    def made(model: str, tp: int) -> tuple:
        [call] = quantizing(read(model), tp)
        a = call.op.Arguments(*call.case(3).make("meta", torch.Generator(), torch.float8_e4m3fnuz))
        assert call.op.explain(*a, arch="gfx942").launches
        return a, call.layer, call.op.name, call.count, call.traits

    a, *found = made(LLAMA, 8)
    assert found == [ATTENTION, "paged_attention_decode", 126, " to e4m3"]
    assert a.out.dtype == torch.float8_e4m3fnuz and a.out.shape == a.query.shape == (3, 16, 128)
    assert a.out_scale.numel() == 1 and a.out_scales is None
    a, *found = made(QWEN, 2)
    assert found == [ATTENTION, "paged_attention_decode", 36, " to e4m3 by 128"]
    assert a.out_scale is None and a.out_scales.shape == (3, 16)
    a, *found = made(DEEPSEEK, 8)
    assert found == [V_UP, "batched_gemm", 61, " to e4m3 by 128"]
    assert a.out.shape == (3, 16, 128) and a.out_scales.shape == (3, 16)
    [call] = quantizing(read(DEEPSEEK), 8)
    assert call.parts == (model_layers.absorbed(read(DEEPSEEK), 8)[1],)


def test_other_quantizations_are_launches_of_their_own():
    """They are per token or by groups that are no heads, or there are none."""
    static, groups = (read(model) | {"head_dim": 64} for model in (LLAMA, QWEN))
    assert (len(quantizing(static, 8)), len(quantizing(groups, 2))) == (1, 0)
    some = read(LLAMA)["quantization_config"] | {"ignored_layers": ["model.layers.0.self_attn.o_proj"]}
    assert [call.count for call in quantizing(read(LLAMA) | {"quantization_config": some}, 8)] == [125]
    assert quantizing(read("glm-4.5-air-fp8"), 4) == quantizing(read("tiny-llama"), 1) == []


def test_explain_of_a_model_says_where_attention_quantizes(capsys, monkeypatch):
    """Only kinds that win over vLLM's kernels, and somewhere over two launches, are shown; plain attention is not."""
    joined, parts = ATTENTION, {"static": "", "groups": " by 128"}

    def explained(found: dict[str, tuple[float, float]], model: str = "llama-3.1-405b-fp8") -> dict[str, str]:
        shape = "16:1x128 auto" if "llama" in model else "32:8x128 auto"
        shapes = {
            f"paged_attention_decode {shape}{kind} page 16 128 of 8192 keys {baseline}": {
                n: kernel_selection.Measured(*us, 0.0, 0.0) for n in (1, 64)
            }
            for (kind, baseline), us in ((name.split("|"), us) for name, us in found.items())
        }
        measured(monkeypatch, shapes)
        config, tp = read(model), 8 if "llama" in model else 1
        calls = [*model_layers.calls(config, tp), *explain.around(config, tp, None, GFX942)]
        rows = explain.table(calls, GFX942, (1,))[1:]
        return {layer: f"{kernel}: {why}" for layer, _, _, _, kernel, _, why in rows}

    wins, loses = (2.0, 3.0), (3.0, 2.0)
    for model, (kind, by) in zip(("llama-3.1-405b-fp8", "qwen3-8b-fp8"), parts.items()):
        plugin, apart = f" to e4m3{by}|RocmAttentionBackend", f" to e4m3{by}|separate"
        other = f" to e4m3{parts['static' if by else 'groups']}|RocmAttentionBackend"
        found = explained({"|RocmAttentionBackend": wins, plugin: wins, apart: wins, other: loses}, model)
        assert found[joined].startswith("paged_attention_decode_bf16_128_native"), kind
        assert found["attention"] == f"in {joined}: "
        found = explained({"|RocmAttentionBackend": wins, plugin: wins, apart: loses}, model)
        assert found[joined] == "two launches: measured: not faster than attention plus o's input quantization"
        assert found["attention"].startswith("paged_attention_decode_bf16_128_native")
        found = explained({"|RocmAttentionBackend": loses, plugin: loses, apart: wins}, model)
        assert found[joined] == "two launches: measured: 1 (context length, backend) pairs"
        assert found["attention"] == "vLLM's kernel: measured: 1 (context length, backend) pairs"
        found = explained({"|RocmAttentionBackend": wins}, model)
        assert found[joined].startswith("two launches: unmeasured") and found["attention"].startswith("paged_")
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert explained({}, "qwen3-8b-fp8")["attention"] == f"in {joined}: "


def test_explain_of_a_model_says_where_w_uv_quantizes(monkeypatch):
    """It was timed against torch.bmm and vLLM's quantization, or the user asks for it."""
    wins = {1: kernel_selection.Measured(2.0, 3.0, 0.0, 0.0)}
    for by, layer in (("", "W_UV"), (" to e4m3 by 128", V_UP)):
        measured(monkeypatch, {f"batched_gemm 16x128x512 bfloat16{by} bmm": wins})
        found = kernels(DEEPSEEK, (1,), products=False)
        assert found[layer].startswith("batched_gemm_") and "(measured: plugin 2.0 us" in found[layer]
        assert (found["W_UV"] == f"in {V_UP}") is bool(by)
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert kernels(DEEPSEEK, (1,), products=False)["W_UV"] == f"in {V_UP}"


@full
@pytest.mark.parametrize(("config", "layers"), [(test_step.LLAMA, 126), (test_step.QWEN, 48)], ids=["llama", "qwen"])
def test_attention_quantizes_its_result_where_that_is_faster(config, layers):
    layer = "attention + o's input quantization"
    joined = test_step.check_one_launch(test_step.steps_with(config, layer), layer, "paged_attention_decode", layers)
    assert joined["o"].count == layers and layer not in test_step.steps_with(test_step.DEEPSEEK, layer, 3.0)(3.0)


@full
def test_w_uv_quantizes_its_result_where_that_is_faster():
    """The plain product and the quantization stay apart otherwise, and on the baseline's side."""
    layer = "W_UV + o's input quantization"
    test_step.check_one_launch(
        test_step.steps_with(test_step.DEEPSEEK, layer, None, batched_gemm=3.0), layer, "batched_gemm", 61
    )
    assert test_step.steps_with(test_step.DEEPSEEK, "", 1.0)(1.0)[layer].count == 61, "all fusions at once"
