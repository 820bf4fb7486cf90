"""Test the guards of ROCm/aiter's pull request 3783 for MX-FP8 kernels, under its names.

These are its tests other than results: refusals, fallbacks, the table of tuned shapes, and tensors of more than 2 GB.
"""

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs

FP8, U8 = torch.float8_e4m3fn, torch.uint8
GFX950 = archs.named("gfx950")


def dense(m: int, n: int, k: int, **changes):
    sizes = {"a": (m, k), "b": (n, k)}
    rows = {name: torch.empty(size, dtype=FP8, device="meta") for name, size in sizes.items()}
    rows |= {f"scale_{x}": torch.empty(size[0], k // 32, dtype=U8, device="meta") for x, size in sizes.items()}
    return ops.mxfp8_scaled_mm.Arguments(**{**rows, "out_dtype": torch.bfloat16, **changes})


def experts(m: int, topk: int, count: int, hidden: int, inner: int, **changes):
    def meta(*size: int, dtype=FP8):
        return torch.empty(size, dtype=dtype, device="meta")

    given = {
        "hidden": meta(m, hidden, dtype=torch.bfloat16),
        "w1": meta(count, 2 * inner, hidden),
        "w2": meta(count, hidden, inner),
        "topk_weights": meta(m, topk, dtype=torch.float32),
        "topk_ids": meta(m, topk, dtype=torch.int32),
        "out_dtype": torch.bfloat16,
        "w1_scale": meta(count, 2 * inner, hidden // 32, dtype=U8),
        "w2_scale": meta(count, hidden, inner // 32, dtype=U8),
    }
    return ops.fused_experts.Arguments(**{**given, **changes})


def said(op, a) -> str:
    return op.explain(*a, arch="gfx950").source


# Refused


@pytest.mark.parametrize("k", [31, 48, 100])
def test_dense_k_not_a_multiple_of_32(k):
    with pytest.raises(ValueError, match="mxfp8_scaled_mm: a must be .*K a multiple of 32"):
        said(ops.mxfp8_scaled_mm, dense(4, 64, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_moe_mul_weight_by_not_float32(dtype):
    weights = torch.empty(4, 2, dtype=dtype, device="meta")
    with pytest.raises(ValueError, match="fused_experts: topk_weights must be float32"):
        said(ops.fused_experts, experts(4, 2, 8, 256, 128, topk_weights=weights))


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"a": torch.empty(4, 256, dtype=torch.float8_e4m3fnuz, device="meta")}, "a"),
        ({"scale_a": torch.empty(4, 8, device="meta")}, "scale_a"),
        ({"scale_b": torch.empty(64, 4, dtype=U8, device="meta")}, "scale_b"),
        ({"out_dtype": torch.int32}, "out_dtype"),
    ],
)
def test_dtype_and_size(changes, name):
    with pytest.raises(ValueError, match=f"mxfp8_scaled_mm: {name} must be"):
        said(ops.mxfp8_scaled_mm, dense(4, 64, 256, **changes))


# Beyond the request's limits, the plugin's kernels go on, or fall back with a reason


@pytest.mark.parametrize("m", [17, 33, 65, 1024])
def test_gemv_m_above_16_and_out_of_can_implement_m(m):
    assert not ops.mxfp8_scaled_mm.explain(*dense(m, 2560, 6144), arch="gfx950").is_fallback


def test_other_arch():
    assert (
        "gfx942 has block-scaled matrix instructions"
        in ops.mxfp8_scaled_mm.explain(*dense(4, 64, 256), arch="gfx942").source
    )


def test_not_contiguous():
    rows = torch.empty(256, 4, dtype=FP8, device="meta").t()
    assert said(ops.mxfp8_scaled_mm, dense(4, 64, 256, a=rows)).startswith(
        "fallback: the kernels require that a has K innermost"
    )


def test_moe_m_routed_above_can_implement():
    assert "M is at most 64" in said(ops.fused_experts, experts(65, 4, 128, 6144, 768))


# The table of tuned shapes


def test_tuned_csv_by_k_n_m(tmp_path, monkeypatch):
    """A row decides for its shape, other shapes use the model of the GPU, and a row that fits nothing is ignored."""
    a = dense(8, 2560, 6144)
    usual = ops.mxfp8_scaled_mm.explain(*a, arch="gfx950").config
    other = next(c for c in ops.mxfp8_scaled_mm.configs(a, GFX950) if c != usual)
    rows = [f"256,8,2560,6144,{other.tokens},{other.streams},{other.blocks},here", "256,16,2560,6144,16,1,999999,here"]
    (tmp_path / "gfx950").mkdir()
    text = "\n".join(["compute_units,m,n,k,config.tokens,config.streams,config.blocks,source", *rows, ""])
    (tmp_path / "gfx950" / "mxfp8_scaled_mm.csv").write_text(text)
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path))
    ops.mxfp8_scaled_mm.invalidate()
    assert ops.mxfp8_scaled_mm.explain(*a, arch="gfx950").config == other
    assert ops.mxfp8_scaled_mm.explain(*dense(9, 2560, 6144), arch="gfx950").config != other
    wrong = ops.mxfp8_scaled_mm.explain(*dense(16, 2560, 6144), arch="gfx950").config
    assert wrong is not None and wrong.blocks != 999999


# More than 2 GB


def test_more_than_2gb_of_weights_is_no_fallback():
    """256 experts, 2.4 GB, go to Triton in the request; here offsets are within one expert."""
    a = experts(8, 4, 256, 6144, 768)
    assert a.w1.numel() > 2**31 and not ops.fused_experts.explain(*a, arch="gfx950").is_fallback
    assert not ops.mxfp8_scaled_mm.explain(*dense(8, 2**19, 6144), arch="gfx950").is_fallback


def test_an_expert_of_more_than_2gb_falls_back():
    why = said(ops.fused_experts, experts(1, 1, 1, 2**16, 2**14))
    assert why.startswith("fallback") and "an expert's w1 spans less than 2 GB" in why
    far = torch.empty_strided((64, 256), (2**24, 1), dtype=FP8, device="meta")
    assert "b's row stride is below 16 MB" in said(ops.mxfp8_scaled_mm, dense(4, 64, 256, b=far))
