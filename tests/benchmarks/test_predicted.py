"""serving_benchmarks/predicted.py: lines of predicted steps beside published times, and the tables of them."""

import csv
import importlib.util
import pathlib

import predicted_table
import pytest

from vllm_rocm_ops.timing import predict

PATH = pathlib.Path(__file__).resolve().parents[2] / "serving_benchmarks" / "predicted.py"
spec = importlib.util.spec_from_file_location("predicted", PATH)
predicted = importlib.util.module_from_spec(spec)
spec.loader.exec_module(predicted)


@pytest.fixture
def folder(tmp_path):
    """Published times of one product on two GPUs."""
    of = {
        "gpu": "MI300X",
        "op": "a8w8_rowwise",
        "kernel": "a",
        "M": "1",
        "N": "2304",
        "K": "16384",
        "B": "",
        "us": "30",
    }
    rows = [of, of | {"us": "20"}, of | {"gpu": "MI325X", "us": "5"}, of | {"op": "bf16", "us": "5"}, of | {"us": "0"}]
    peer = of | {"op": "fp8_gemm_per_tensor", "kernel": "hfrk_skinny_gemm", "us": "11"}
    for name, given in ((predicted.AITER, rows), (predicted.PEERS, [peer, peer | {"kernel": "torch", "us": "4"}])):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(of))
            writer.writeheader()
            writer.writerows(given)
    return tmp_path


def test_steps_are_listed_beside_published_times(folder, monkeypatch):
    asked = []

    def step(calls, tokens, machine):
        (call,) = calls
        asked.append((call.layer, tokens))
        if call.layer == "lm_head":
            yield predict.Predicted(call, None, 0, predict.Band(None, ""))
        else:
            band = predict.Band(0.25, "") if call.op.name == "scaled_mm" else predict.Band(None, "")
            yield predict.Predicted(call, 10.0, 2, band)

    monkeypatch.setattr(predict, "step", step)
    model = ("llama-3.1-405b-fp8", 8, None)
    monkeypatch.setattr(predicted, "MODELS", {"one": model, "other": model})
    beside = predicted.published(folder, "MI300X")
    assert beside == {("scaled_mm", 1, 2304, 16384): {"aiter_us": 20.0, "hugging_face_us": 11.0}}
    assert predicted.published(None, "MI300X") == {}
    found = list(predicted.lines("MI300X", [1, 4], beside, "abc"))
    assert len(asked) == len(set(asked)) == 20, "each call once, whatever the model; two norms are the same"
    assert {line["model"] for line in found} == {"one", "other"} and "lm_head" not in {line["layer"] for line in found}
    (qkv,) = (line for line in found if line["case"] == "one, qkv, 126 of 1")
    assert (qkv["predicted_us"], qkv["profiled_us"], qkv["aiter_us"], qkv["hugging_face_us"]) == (10, 15, 20, 11)
    assert all("never measured" in line["evidence"] for line in found)
    assert len({(line["op"], line["case"]) for line in found}) == len(found)

    newest = {(line["op"], line["case"]): (line, PATH) for line in found}
    monkeypatch.setattr(predicted_table, "measured", lambda kind: [newest])
    monkeypatch.setattr(predicted_table, "links", lambda paths: "links")
    steps = predicted_table.steps().splitlines()
    total, known = (sum(line["count"] for line in found if line["model"] == "one" and line["batch"] == 1 and line["op"] in of)
                    for of in ({line["op"] for line in found}, {"scaled_mm"}))  # fmt: skip
    assert "predicted, never measured" in steps[0] and "Kernels of abc" in steps[0]
    assert f"| one | the step | {total / 100:.1f}, +-{known / 400:.1f} for {known / 100:.1f} of it |" in steps[4]
    assert "| one | products, ours predicted / aiter's tuner published | 1.9 / 2.5 |  |" in steps
    assert "| one | products, ours predicted / Hugging Face published | 1.3 / 1.4 |  |" in steps
    assert "| one | qkv | `scaled_mm` | 126 | 10.0 (15.0), A 20.0, H 11.0 | 10.0 (15.0) |" in predicted_table.calls()
