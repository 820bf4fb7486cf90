"""Test predictions frozen before anybody measures them: calls and steps, and the committed file."""

import re

import pytest
from marks import full
from timing_study import freeze, step

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import CONTEXT, frozen, machines

pytestmark = full
TINY = {"tiny-llama-fp8": 1}


def calls() -> list[model_layers.LayerCall]:
    config = model_config.read("tiny-llama-fp8")
    return [call for call in (*model_layers.calls(config), *fused_calls.calls(config)) if call.count]


def test_what_is_frozen_is_what_predict_says(monkeypatch):
    """Each call occurs once for each product, with the code it holds for."""
    pytest.importorskip("tinygrad")
    monkeypatch.setattr(freeze, "MODELS", TINY)
    found = list(freeze.predictions(("MI300X", "MI325X"), (1, 8)))
    made = dict(found)
    assert len(made) == len(found)
    for product in ("MI300X", "MI325X"):
        machine = machines.named(product)
        for call in calls():
            us, launches, band = step.live_time(machine, CONTEXT)(call, 8)
            values = made[frozen.key(product, call, 8)]
            assert (values["us"], values["launches"], values["band"]) == (round(us, 2), launches, band)
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
    made = dict(freeze.steps(known["calls"], freeze.PRODUCTS, freeze.TOKENS))
    assert known["steps"].keys() == made.keys() and len(made) == 4 * 4 * (2 + 1 + 2)
    for name, values in made.items():
        assert values["launches"] > 400 and values["band"][0] < values["us"] < values["band"][1], name


def test_the_committed_file_has_every_product_and_model():
    """This also holds after the kernels have changed: the file stays as it is."""
    [path] = frozen.FOLDER.glob("*.json")
    of = frozen.newest()
    assert path.stem == f"{of['date']}-{of['commit']}"
    assert {name.split()[0] for name in of["calls"]} == set(freeze.PRODUCTS)
    assert all(values["us"] > 0 and values["code"] for values in of["calls"].values())
    for model, tp in freeze.MODELS.items():
        [attention] = model_layers.attention(model_config.read(model), tp)
        for product in freeze.PRODUCTS:
            assert {frozen.key(product, attention, tokens) for tokens in freeze.TOKENS} <= of["calls"].keys()
