"""Test how `check` compares measurements with predictions that were frozen before."""

import json

import pytest
import torch

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import check_parts


def calls() -> list[model_layers.LayerCall]:
    config = model_config.read("tiny-llama-fp8")
    return [call for call in (*model_layers.calls(config), *fused_calls.calls(config)) if call.count]


@pytest.fixture
def file(monkeypatch, tmp_path):
    """Return a function that puts a file of these calls in the folder."""
    monkeypatch.setattr(frozen, "FOLDER", tmp_path)

    def write(name: str, of: dict) -> None:
        (tmp_path / name).write_text(json.dumps({"date": "2026-11-24", "commit": name[:3], "calls": of}))
        frozen.newest.cache_clear()

    frozen.newest.cache_clear()
    yield write
    frozen.newest.cache_clear()


def test_the_newest_file_counts_and_only_for_its_code(file):
    call, arch = calls()[1], archs.ARCHS["gfx942"]
    assert frozen.find("MI300X", call, 8, arch) is None  # no file
    values = {"us": 5.0, "band": 0.2, "launches": 1, "code": frozen.code_of(call, 8, arch)}
    file("2026-11-24-aaa.json", {frozen.key("MI300X", call, 8): values})
    assert frozen.find("MI300X", call, 8, arch) == values
    assert frozen.code_of(call, 7, arch) == values["code"] and frozen.find("MI300X", call, 7, arch) is None
    assert frozen.find("MI300X", call, 1, arch) is frozen.find("MI325X", call, 8, arch) is None
    assert frozen.find(None, call, 8, arch) is None
    other = values | {"code": dict.fromkeys(values["code"], "0")}
    file("2026-11-25-bbb.json", {frozen.key("MI300X", call, 8): other})
    assert frozen.find("MI300X", call, 8, arch) is None


def piece(layer: str, us: float | None, predicted: float | None, band: float | None = 0.25, **more) -> dict:
    of = None if predicted is None else {"us": predicted, "band": band}
    return {"layer": layer, "op": "scaled_mm", "kernel": "one", "tokens": 1, "us": us, "frozen": of, **more}


def test_measured_times_are_compared_with_frozen_predictions(file):
    """Each call occurs once. 12.4 us are within 25 % of 10, 7.9 are not: 10 are more than 25 % above them."""
    file("2026-11-24-aaa.json", {})
    first = [piece("qkv", 12.4, 10.0), piece("o", 7.9, 10.0), piece("down", 20.0, 10.0, None)]
    found = [*first, piece("qkv", 99.0, 10.0, beside="another"), piece("x", 1.0, None), piece("y", None, 3.0)]
    when, median, band, *worst = frozen.beside([*found, {"case": "a"}])
    assert when == "frozen predictions of 2026-11-24 at 202, before any run on such a GPU: 3 calls"
    assert median == "  measured / predicted: median 1.24"
    assert band == "  within the error band: 1 of 2; without a band: 1"
    assert worst[0] == "  down, 1 tokens: 20.0 us measured, 10.0 us predicted (scaled_mm)" and len(worst) == 3
    assert frozen.beside([piece("x", 1.0, None)]) == []


def test_calls_of_models_are_set_beside_the_file(file, monkeypatch):
    """`check` measures them so."""
    pytest.importorskip("tinygrad")
    from vllm_rocm_ops.emulator import cases as emulated

    call, arch = next(call for call in calls() if call.op.name == "scaled_mm"), archs.ARCHS["gfx942"]
    values = {"us": 5.0, "band": 0.2, "launches": 1, "code": frozen.code_of(call, 1, arch)}
    file("2026-11-24-aaa.json", {frozen.key("MI300X", call, 1): values})
    measured = check_parts.kernel_selection.Measured(4.0, 5.0, 0.0, 0.0)
    monkeypatch.setattr(check_parts.kernel_timing, "check_and_time", lambda *_: measured)
    given = call, "PyTorch", check_parts.Baseline(call.op.reference), arch, None, (1, 17)
    with torch.inference_mode(), launch.executor(emulated.emulator_of("gfx942")):
        of = [one["frozen"] for one in check_parts.beside(*given, "MI300X")]
    assert of == [values, None]
