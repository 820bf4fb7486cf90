"""Test predicted decode steps in which attention, or W_UV after it, quantizes o's input."""

import pytest
from marks import full
from test_step import DEEPSEEK, LLAMA, QWEN, check_one_launch, steps_with

pytestmark = full


@pytest.mark.parametrize(("config", "layers"), [(LLAMA, 126), (QWEN, 48)], ids=["llama", "qwen"])
def test_attention_quantizes_its_result_where_that_is_faster(config, layers):
    layer = "attention + o's input quantization"
    joined = check_one_launch(steps_with(config, layer), layer, "paged_attention_decode", layers)
    assert joined["o"].count == layers and layer not in steps_with(DEEPSEEK, layer, 3.0)(3.0)


def test_w_uv_quantizes_its_result_where_that_is_faster():
    """The plain product and the quantization stay apart otherwise, and on the baseline's side. It needs no other fusion."""
    layer = "W_UV + o's input quantization"
    check_one_launch(steps_with(DEEPSEEK, layer, None, batched_gemm=3.0), layer, "batched_gemm", 61)
    rotates = steps_with(DEEPSEEK, "batched_gemm_rope", mla_norm_rope_and_cache=1.0)
    assert rotates(1.0)[layer].count == 61
