"""Test predictions frozen before anybody measures them, and how `check` compares them with measurements."""

import functools
import json
import re

import pytest
import torch

from timing import freeze
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import frozen
from vllm_rocm_ops.tools import check_parts

TINY = {"tiny-llama-fp8": 1}
SINCE = {"glm-4.5-air-fp8": "2026-11-25-6d0f875"}
"""The first file that has a model, among those frozen later."""


def calls() -> list[model_layers.LayerCall]:
    config = model_config.read("tiny-llama-fp8")
    return [call for call in (*model_layers.calls(config), *fused_calls.gated(config)) if call.count]


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


def test_what_is_frozen_is_what_predict_says(monkeypatch):
    """Each call occurs once for each product, with the code it holds for."""
    pytest.importorskip("tinygrad")
    from vllm_rocm_ops.timing import machines, predict

    monkeypatch.setattr(freeze, "MODELS", TINY)
    found = list(freeze.predictions(("MI300X", "MI325X"), (1, 8)))
    made = dict(found)
    assert len(made) == len(found)
    for product in ("MI300X", "MI325X"):
        machine = machines.named(product)
        for call in calls():
            [said] = predict.step([call], 8, machine)
            values = made[frozen.key(product, call, 8)]
            assert values["us"] == round(said.us, 2) and values["band"] == said.band.ratio
            assert values["launches"] == said.kernels
            assert values["code"] == frozen.code_of(call, 8, machine.arch)
            assert all(re.fullmatch("[0-9a-f]{16}", code) for code in values["code"].values())


def test_calls_with_the_same_code_are_kept(monkeypatch):
    """Calls with other code, and calls that one product lacks, are predicted again."""
    pytest.importorskip("tinygrad")
    monkeypatch.setattr(freeze, "MODELS", TINY)
    products, call = ("MI300X", "MI325X"), calls()[1]
    made = dict(freeze.predictions(products, (1,)))
    name = frozen.key("MI300X", call, 1)
    marked = {key: values | {"us": 0.5} for key, values in made.items()}
    assert dict(freeze.predictions(products, (1,), marked)) == marked
    for changed in ({name: marked[name] | {"code": {"other": "0" * 16}}}, {name: None}):
        again = dict(freeze.predictions(products, (1,), marked | changed))
        assert again == marked | {key: made[key] for key in (name, frozen.key("MI325X", call, 1))}


def test_attention_and_what_it_absorbs_are_frozen(monkeypatch):
    pytest.importorskip("tinygrad")
    monkeypatch.setattr(freeze, "MODELS", {"tiny-deepseek-v3-fp8": 1})
    names = {name.split()[1] for name, _ in freeze.predictions(("MI300X",), (1,))}
    assert {"mla_decode", "batched_gemm", "grouped_topk", "fused_experts"} <= names


def test_steps_are_frozen_with_their_calls():
    """The steps of the newest file, on both sides if a product has both, match the current ones."""
    known = frozen.newest()
    made = dict(freeze.steps(known["calls"], frozen.PRODUCTS, freeze.TOKENS))
    assert known["steps"].keys() == made.keys() and len(made) == 4 * 4 * (2 + 1 + 2)
    for name, values in made.items():
        assert values["launches"] > 400 and values["band"][0] < values["us"] < values["band"][1], name


def test_the_newest_file_counts_and_only_for_its_code(file):
    call, arch = calls()[1], archs.ARCHS["gfx942"]
    assert frozen.find("MI300X", call, 8, arch) is None  # no file
    values = {"us": 5.0, "band": 0.2, "launches": 1, "code": frozen.code_of(call, 8, arch)}
    file("2026-11-24-aaa.json", {frozen.key("MI300X", call, 8): values})
    assert frozen.find("MI300X", call, 8, arch) == values
    assert frozen.find("MI300X", call, 1, arch) is frozen.find("MI325X", call, 8, arch) is None
    assert frozen.find(None, call, 8, arch) is None
    other = values | {"code": dict.fromkeys(values["code"], "0")}
    file("2026-11-25-bbb.json", {frozen.key("MI300X", call, 8): other})
    assert frozen.find("MI300X", call, 8, arch) is None


def piece(layer: str, us: float | None, predicted: float | None, band: float | None = 0.25, **more) -> dict:
    of = None if predicted is None else {"us": predicted, "band": band}
    return {"layer": layer, "op": "scaled_mm", "kernel": "one", "tokens": 1, "us": us, "frozen": of, **more}


def test_what_was_measured_is_set_beside_what_was_predicted(file):
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


@pytest.mark.parametrize(
    "path", sorted((*freeze.OLDER.glob("*.json"), *frozen.FOLDER.glob("*.json"))), ids=lambda path: path.stem
)
def test_committed_files_have_every_product_and_model(path):
    """This also holds after the kernels have changed: such files stay as they are."""
    of = json.loads(path.read_text())
    assert path.stem == f"{of['date']}-{of['commit']}"
    assert {name.split()[0] for name in of["calls"]} == set(frozen.PRODUCTS)
    assert all(values["us"] > 0 and values["code"] for values in of["calls"].values())
    for model, tp in freeze.MODELS.items():
        if path.stem < SINCE.get(model, ""):
            continue
        attention = model_layers.attention(model_config.read(model), tp)
        for product in frozen.PRODUCTS:
            assert {frozen.key(product, attention, tokens) for tokens in freeze.TOKENS} <= of["calls"].keys()


def test_the_newest_file_alone_ships():
    [shipped] = frozen.FOLDER.glob("*.json")
    dates = [path.stem[: len("2026-11-26")] for path in (shipped, *freeze.OLDER.glob("*.json"))]
    assert dates[0] == max(dates)


def test_frozen_predictions_hold_for_code_whose_symbols_alone_changed(monkeypatch):
    call = next(
        call for call in model_layers.calls(model_config.read("llama-3.1-405b-fp8"), 8) if call.op is ops.scaled_mm
    )
    values = frozen.newest()["calls"][frozen.key("MI300X", call, 1)]
    [(symbol, digest)] = values["code"].items()
    assert symbol == "scaled_mm_narrow_8"
    find = functools.partial(frozen.find, "MI300X", call, 1, archs.ARCHS["gfx942"])
    for code, holds in (
        ({"scaled_mm_wave_splitk_8": frozen.RENAMED[digest]}, True),
        ({"scaled_mm_wave_splitk_16": frozen.RENAMED[digest]}, False),
        ({"scaled_mm_wave_splitk_8": "0" * 16}, False),
    ):
        monkeypatch.setattr(frozen, "code_of", lambda *_, code=code: code)
        assert find() == (values if holds else None)
