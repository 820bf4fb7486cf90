"""Test models in which W_UK's launch rotates the queries: their calls, explain and predicted steps."""

import torch
from marks import full
from test_cli import kernels, measured
from test_model_layers import fused
from test_step import DEEPSEEK, check_one_launch, steps_with

from vllm_rocm_ops import ops
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.config import read
from vllm_rocm_ops.vllm.selection import kernel_selection


def test_a_rotation_and_w_uk_in_one_launch():
    """It replaces two launches of each layer, with arguments that the op accepts."""
    [call] = fused(read("deepseek-v3"), ops.batched_gemm_rope, tp=8)
    assert (call.layer, call.count, call.parts) == (
        "rotation + W_UK",
        61,
        (model_layers.absorbed(read("deepseek-v3"), 8)[0],),
    )
    a = call.op.Arguments(*call.case(3).make("meta", torch.Generator(), torch.float8_e4m3fnuz))
    assert call.op.explain(*a, arch="gfx942").launches
    assert a.x.shape == (3, 16, 128) and a.q_pe.shape == (3, 16, 64) and a.x.stride() == a.q_pe.stride()
    assert a.weights.shape == (16, 128, 512) and a.cos_sin_cache.shape[1] == 64


def test_explain_of_a_model_says_what_is_asked_for(monkeypatch):
    measured(monkeypatch)
    monkeypatch.setenv("VLLM_ROCM_OPS_ATTENTION", "1")
    assert kernels("deepseek-v3", (1,), products=False)["W_UK"] == "in rotation + W_UK"


def test_explain_of_a_model_knows_the_launch_that_rotates_queries(monkeypatch):
    """It serves where it and W_UK's product were measured to be faster; the product is then part of it."""
    one, product = "rotation + W_UK", "batched_gemm 16x512x128 bfloat16 transposed bmm"

    def explained(shapes: dict) -> dict[str, str]:
        measured(monkeypatch, shapes)
        return kernels("deepseek-v3", (1,), products=False)

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
    joined = check_one_launch(steps_with(DEEPSEEK, op, mla_norm_rope_and_cache=1.0), layer, op, 61)
    assert [*joined].index(layer) == [*joined].index("attention") - 1
    assert layer not in steps_with(DEEPSEEK, op, mla_norm_rope_and_cache=None)(0.1)
