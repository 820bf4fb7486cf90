"""Test models whose router multiplies and chooses experts in one launch: their calls, explain and predicted steps."""

import dataclasses

import torch
from marks import full
from test_cli import kernels, measured
from test_model_layers import GLM, LLAMA, calls, fused, joins
from test_step import QWEN, check_one_launch, steps_with

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.vllm.selection import kernel_selection


def test_a_router_and_its_topk_in_one_launch():
    """One launch does the work of two neighboring calls of a layer, unless shared experts run beside a 16-bit gate."""
    sizes = 128, 2048, 8, True, 1, 1
    [call] = fused(read("qwen3-30b-a3b-fp8"), ops.router_gemm_topk, tp=2)
    by_layer = {each.layer: each for each in calls(read("qwen3-30b-a3b-fp8"), 2)}
    product, choice = by_layer["router"], by_layer["routing"]
    assert (call.layer, call.parts, call.count) == ("router + routing", (product, choice), product.count)
    a = call.op.Arguments(*call.case(3).make("meta", torch.Generator(), torch.float8_e4m3fn))
    assert (*a.weight.shape, *a[2:])[: len(sizes)] == sizes and a.x.shape == (3, sizes[1])
    assert a.e_score_correction_bias is None
    assert len(call.op.explain(*a, arch=archs.named("gfx942")).launches) == 1
    assert joins(call.fusion, product, choice) and not joins(call.fusion, choice, product)
    for model in (LLAMA, "deepseek-v3"):
        assert fused(read(model), ops.router_gemm_topk) == []


def test_a_float_gate_and_its_topk_in_one_launch():
    """vLLM runs its GEMM otherwise: the plugin has none for a float32 weight."""
    [call] = fused(read(GLM), ops.router_gemm_topk, tp=2)
    a = call.op.Arguments(*call.case(40).make("meta", torch.Generator(), torch.float8_e4m3fn))
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
    found = steps_with(QWEN, "router_gemm_topk", 3.0, unquantized_gemm=4.2)
    check_one_launch(found, "router + routing", "router_gemm_topk", 48)
