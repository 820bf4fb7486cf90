"""Test models whose router multiplies and chooses experts in one launch: their calls, explain and predicted steps."""

import torch
from marks import full
from test_cli import kernels, measured
from test_model_layers import GLM, LLAMA, calls, fused, joins
from test_step import DEEPSEEK, check_one_launch, steps_with

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.vllm.selection import kernel_selection


def test_a_router_and_its_topk_in_one_launch():
    """One launch does the work of two neighboring calls of a layer."""
    wanted = {
        "deepseek-v3": (256, 7168, 8, True, 8, 4, "sigmoid", 1.0),
        "qwen3-30b-a3b-fp8": (128, 2048, 8, True, 1, 1),
    }
    for model, sizes in wanted.items():
        [call] = fused(read(model), ops.router_gemm_topk, tp=2)
        by_layer = {each.layer: each for each in calls(read(model), 2)}
        product, choice = by_layer["router"], by_layer["routing"]
        assert (call.layer, call.parts, call.count) == ("router + routing", (product, choice), product.count)
        a = call.op.Arguments(*call.case(3).make("meta", torch.Generator(), torch.float8_e4m3fn))
        assert (*a.weight.shape, *a[2:])[: len(sizes)] == sizes and a.x.shape == (3, sizes[1])
        assert (a.e_score_correction_bias is None) == (model != "deepseek-v3")
        assert len(call.op.explain(*a, arch=archs.named("gfx942")).launches) == 1
        assert joins(call.fusion, product, choice) and not joins(call.fusion, choice, product)
    for model in (GLM, LLAMA):
        assert fused(read(model), ops.router_gemm_topk) == []


def test_explain_of_a_model_knows_the_launch_that_multiplies_and_routes(monkeypatch):
    """It serves where it was measured to be faster than both pairs of launches, which are then parts of it."""

    def explained(model: str, shapes: dict) -> dict[str, str]:
        measured(monkeypatch, shapes)
        return kernels(model, (2,), tp=2)

    one, fast, slow = "router + routing", *({2: kernel_selection.Measured(us, 3.0, 0.0, 0.0)} for us in (2.0, 4.0))
    for model, shape in (
        ("deepseek-v3", "256x7168 bfloat16 top 8 normalized sigmoid 4 of 8 groups bias"),
        ("qwen3-30b-a3b-fp8", "128x2048 bfloat16 top 8 normalized"),
    ):
        keys = [f"router_gemm_topk {shape} {baseline}" for baseline in ("rocm_unquantized_gemm", "separate")]
        assert explained(model, {})[one].startswith("two launches (unmeasured")
        found = explained(model, dict.fromkeys(keys, fast))
        assert found[one].startswith("router_gemm_topk_x4_wave_splitk_8")
        assert found["router"] == found["routing"] == f"in {one}"
        found = explained(model, dict(zip(keys, (fast, slow))))
        assert found[one].startswith("two launches (measured") and not found["router"].startswith("in ")


@full
def test_a_router_and_its_topk_are_one_launch_where_that_is_faster():
    found = steps_with(DEEPSEEK, "router_gemm_topk", 3.0, unquantized_gemm=4.2)
    check_one_launch(found, "router + routing", "router_gemm_topk", 58, saves=False)  # a second stream runs beside it
