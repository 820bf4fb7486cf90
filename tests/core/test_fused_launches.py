"""Test launches that do the work of several in a model's layers: their calls, explain and predicted steps.

A router that chooses experts, W_UK's launch that rotates queries, and attention, or W_UV after it, that quantizes.
"""

import dataclasses

import pytest
import test_step
import torch
from marks import full
from test_cli import GFX942, kernels, measured
from test_model_layers import GLM, LLAMA, calls, fused, given, joins
from test_step import check_one_launch, steps_with

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.vllm.selection import kernel_selection

QWEN, DEEPSEEK = "qwen3-8b-fp8", "deepseek-v3"
ATTENTION, V_UP = "attention + o's input quantization", "W_UV + o's input quantization"


# A router and the choice of experts


def test_a_router_and_its_topk_in_one_launch():
    """One launch does the work of two neighboring calls of a layer, unless shared experts run beside a 16-bit gate."""
    sizes = 128, 2048, 8, True, 1, 1
    [call] = fused(read("qwen3-30b-a3b-fp8"), ops.router_gemm_topk, tp=2)
    by_layer = {each.layer: each for each in calls(read("qwen3-30b-a3b-fp8"), 2)}
    product, choice = by_layer["router"], by_layer["routing"]
    assert (call.layer, call.parts, call.count) == ("router + routing", (product, choice), product.count)
    a = given(call)
    assert (*a.weight.shape, *a[2:])[: len(sizes)] == sizes and a.x.shape == (3, sizes[1])
    assert a.e_score_correction_bias is None
    assert len(call.op.explain(*a, arch=archs.named("gfx942")).launches) == 1
    assert joins(call.fusion, product, choice) and not joins(call.fusion, choice, product)
    for model in (LLAMA, DEEPSEEK):
        assert fused(read(model), ops.router_gemm_topk) == []


def test_a_float_gate_and_its_topk_in_one_launch():
    """vLLM runs its GEMM otherwise: the plugin has none for a float32 weight."""
    [call] = fused(read(GLM), ops.router_gemm_topk, tp=2)
    a = given(call, 40)
    assert call.launches[0] == "router" and [part.layer for part in call.parts] == ["routing"]
    assert (*a.weight.shape, a.weight.dtype, a.x.dtype) == (128, 4096, torch.float32, torch.bfloat16)
    for arch in ("gfx942", "gfx950"):
        [launch] = call.op.explain(*a, arch=archs.named(arch)).launches
        assert launch.symbol.startswith("router_gemm_topk_fp32_x4_wave_splitk_")
    product = model_layers.Launch("router", (128, 4096), "GateLinear of float32 weights", torch.float32)
    [choice] = call.parts
    assert joins(call.fusion, product, choice) and not joins(call.fusion, choice, product)
    for other in ({"dtype": torch.bfloat16}, {"parameters": ()}, {"layer": "gate"}):
        assert not joins(call.fusion, dataclasses.replace(product, **other), choice)


def test_explain_of_a_model_knows_the_launch_that_multiplies_and_routes(monkeypatch):
    """It serves where it was measured to be faster than both pairs of launches, which are then parts of it."""

    def explained(model: str, shapes: dict) -> dict[str, str]:
        measured(monkeypatch, shapes)
        return kernels(model, (2,), tp=2)

    one, fast, slow = "router + routing", *({2: kernel_selection.Measured(us, 3.0, 0.0, 0.0)} for us in (2.0, 4.0))
    for model, shape in (
        ("qwen3-30b-a3b-fp8", "128x2048 bfloat16 top 8 normalized"),
        (GLM, "128x4096 float32 top 8 normalized sigmoid bias"),
    ):
        baselines = ("float32_gate",) if model == GLM else ("rocm_unquantized_gemm", "separate")
        keys = [f"router_gemm_topk {shape} {baseline}" for baseline in baselines]
        assert explained(model, {})[one].startswith("two launches (unmeasured")
        found = explained(model, dict.fromkeys(keys, fast))
        kernel = "router_gemm_topk_fp32_x4" if model == GLM else "router_gemm_topk_x4"
        assert found[one].startswith(f"{kernel}_wave_splitk_8")
        assert found["router"] == found["routing"] == f"in {one}"
        found = explained(model, dict(zip(keys, (fast, slow) if len(keys) > 1 else (slow,))))
        assert found[one].startswith("two launches (measured") and not found["router"].startswith("in ")


@full
def test_a_router_and_its_topk_are_one_launch_where_that_is_faster():
    found = steps_with(test_step.QWEN, "router_gemm_topk", 3.0, unquantized_gemm=4.2)
    check_one_launch(found, "router + routing", "router_gemm_topk", 48)


# A rotation and W_UK


def test_a_rotation_and_w_uk_in_one_launch():
    """It replaces two launches of each layer, with arguments that the op accepts."""
    [call] = fused(read(DEEPSEEK), ops.batched_gemm_rope, tp=8)
    assert (call.layer, call.count, call.parts) == (
        "rotation + W_UK",
        61,
        (model_layers.absorbed(read(DEEPSEEK), 8)[0],),
    )
    a = given(call, fp8=torch.float8_e4m3fnuz)
    assert call.op.explain(*a, arch="gfx942").launches
    assert a.x.shape == (3, 16, 128) and a.q_pe.shape == (3, 16, 64) and a.x.stride() == a.q_pe.stride()
    assert a.weights.shape == (16, 128, 512) and a.cos_sin_cache.shape[1] == 64


def test_explain_of_a_model_says_what_is_asked_for(monkeypatch):
    measured(monkeypatch)
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert kernels(DEEPSEEK, (1,), products=False)["W_UK"] == "in rotation + W_UK"


def test_explain_of_a_model_knows_the_launch_that_rotates_queries(monkeypatch):
    """It serves where it and W_UK's product were measured to be faster; the product is then part of it."""
    one, product = "rotation + W_UK", "batched_gemm 16x512x128 bfloat16 transposed bmm"

    def explained(shapes: dict) -> dict[str, str]:
        measured(monkeypatch, shapes)
        return kernels(DEEPSEEK, (1,), products=False)

    fast, slow = ({1: kernel_selection.Measured(us, 3.0, 0.0, 0.0)} for us in (2.0, 4.0))
    key = "batched_gemm_rope 16x512x128+64 bfloat16 compiled"
    found = explained({key: fast, product: fast})
    assert found[one].startswith("batched_gemm_rope_bf16_transposed_16") and found["W_UK"] == f"in {one}"
    for others, why in (({key: slow, product: fast}, "(measured"), ({key: fast}, "(W_UK: unmeasured")):
        found = explained(others)
        assert found[one].startswith(f"two launches {why}") and not found["W_UK"].startswith("in ")


@full
def test_queries_are_rotated_by_the_launch_of_w_uk_where_that_is_faster():
    """It requires the launch in front, which rotates keys."""
    op, layer = "batched_gemm_rope", "rotation + W_UK"
    joined = check_one_launch(steps_with(test_step.DEEPSEEK, op, mla_norm_rope_and_cache=1.0), layer, op, 61)
    assert [*joined].index(layer) == [*joined].index("attention") - 1
    assert layer not in steps_with(test_step.DEEPSEEK, op, mla_norm_rope_and_cache=None)(0.1)


# Quantized results


def quantizing(config: dict, tp: int) -> list[fused_calls.FusedCall]:
    """Return a model's fused calls whose result is quantized."""
    return [call for call in fused_calls.calls(config, tp) if fused_calls.QUANTIZATION in call.launches]


def test_attention_or_w_uv_quantizes_in_its_launch():
    """The launch replaces two of each layer, with arguments that the ops accept, static or by groups of 128."""

    def made(model: str, tp: int) -> tuple:
        [call] = quantizing(read(model), tp)
        a = given(call, fp8=torch.float8_e4m3fnuz)
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
    joined = check_one_launch(steps_with(config, layer), layer, "paged_attention_decode", layers)
    assert joined["o"].count == layers and layer not in steps_with(test_step.DEEPSEEK, layer, 3.0)(3.0)


@full
def test_w_uv_quantizes_its_result_where_that_is_faster():
    """The plain product and the quantization stay apart otherwise, and on the baseline's side."""
    layer = "W_UV + o's input quantization"
    check_one_launch(steps_with(test_step.DEEPSEEK, layer, None, batched_gemm=3.0), layer, "batched_gemm", 61)
    assert steps_with(test_step.DEEPSEEK, "", 1.0)(1.0)[layer].count == 61, "all fusions at once"
