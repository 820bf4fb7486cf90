"""Test that recorded results with old names are read by the present ones."""

import functools
import json

import pytest
from pages import measurements

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import op, renamed
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.vllm import seam


def test_present_names_exist_and_old_ones_do_not():
    """A seam or an op that is renamed again needs its entry."""
    known = {*seam.NAMES, *(one.name for one in op.registered())}
    assert set(renamed.NAMES.values()) <= known and not known & renamed.NAMES.keys()


@pytest.mark.parametrize(
    ("old", "present"),
    [
        ("scaled_mm_silu_narrow_8", "scaled_mm_silu_wave_splitk_8"),
        ("batched_gemm_bf16_narrow_16 + narrow_epoch", "batched_gemm_bf16_wave_splitk_16 + narrow_epoch"),
        ("latent_norm_rope_and_cache_bf16_fp8", "mla_norm_rope_and_cache_bf16_fp8"),
        ("-decode_attention,-latent_attention", "-decode_attention,-mla_attention"),
        ("SkinnyConfig(rows=64, parts=1)", "SkinnyConfig(rows=64, parts=1)"),
    ],
)
def test_texts(old, present):
    assert renamed.current(old) == renamed.current(present) == present


def test_results_are_read_by_present_names(tmp_path):
    """By the tables of pages; the files stay."""
    path = tmp_path / "2026-11-25-abc-cases.jsonl"
    old = {"op": "latent_norm_rope_and_cache", "kernel": "scaled_mm_narrow_8", "seam": "latent_attention", "gpu": "G"}
    path.write_text(json.dumps(old) + "\n")
    present = {
        "op": "mla_norm_rope_and_cache",
        "kernel": "scaled_mm_wave_splitk_8",
        "seam": "mla_attention",
        "gpu": "G",
    }
    assert measurements.lines_of(path) == [present]
    assert measurements.gpus(path, present["op"]) == {"G"} and not measurements.gpus(path, old["op"])
    assert measurements.seams_of({"environment": {"VLLM_ROCM_OPS_SEAMS": "-decode_attention,-latent_attention"}}) == (
        measurements.NO_ATTENTION
    )


def test_frozen_predictions_hold_for_code_whose_symbols_alone_changed(monkeypatch):
    call = next(
        call for call in model_layers.calls(model_config.read("llama-3.1-405b-fp8"), 8) if call.op is ops.scaled_mm
    )
    values = frozen.newest()["calls"][frozen.key("MI300X", call, 1)]
    [(symbol, digest)] = values["code"].items()
    assert symbol == "scaled_mm_narrow_8"
    find = functools.partial(frozen.find, "MI300X", call, 1, archs.ARCHS["gfx942"])
    for code, holds in (
        ({"scaled_mm_wave_splitk_8": renamed.OBJECTS[digest]}, True),
        ({"scaled_mm_wave_splitk_16": renamed.OBJECTS[digest]}, False),
        ({"scaled_mm_wave_splitk_8": "0" * 16}, False),
    ):
        monkeypatch.setattr(frozen, "code_of", lambda *_, code=code: code)
        assert find() == (values if holds else None)
