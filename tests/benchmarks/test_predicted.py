"""Test serving_benchmarks/predicted.py and without_gpu.py: predicted kernels versus published times, tables, figure."""

import csv
import importlib
import json
import pathlib
import sys
from concurrent.futures import Future
from xml.etree import ElementTree

import pytest
from pages import predicted_table
from timing_study import step

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "serving_benchmarks"
PATH = SCRIPTS / "predicted.py"
sys.path.append(str(SCRIPTS))
figures, latency, predicted, without_gpu = map(
    importlib.import_module, ("figures", "latency", "predicted", "without_gpu")
)
sys.path.remove(str(SCRIPTS))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with published times of one product on two GPUs."""
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

    def known(call, tokens):
        asked.append((call.layer, tokens))
        return None if call.layer == "lm_head" else (10.0, 2, 0.25 if call.op.name == "scaled_mm" else None)

    monkeypatch.setattr(step, "live_time", lambda machine, context: known)
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
    products = predicted_table.products().splitlines()
    assert "predicted plugin / published" in products[0] and "Kernels of abc" in products[0]
    assert "| one | aiter's tuner | 1.9 / 2.5 |  |" in products
    assert "| one | Hugging Face | 1.3 / 1.4 |  |" in products


# On a machine without a GPU


def made_up(device: str, batches: list[int], beside: dict, commit: str, names: list[str]):
    """Return two kernels of 1 and 2 ms for each model and batch size, one with an error band."""
    for batch in batches:
        for name in names:
            line = {"model": name, "device": device, "batch": batch, "context": 4096, "commit": commit}
            yield line | {
                "layer": "o",
                "op": "scaled_mm",
                "count": 10,
                "kernels": 1,
                "predicted_us": 100.0,
                "band": 0.25,
            }
            yield line | {
                "layer": "experts",
                "op": "fused_experts",
                "count": 4,
                "kernels": 5,
                "predicted_us": 500.0,
                "band": None,
            }


class InlinePool:
    """A pool that runs submitted calls at once, in this process."""

    def __init__(self, *how):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def shutdown(self, cancel_futures: bool) -> None:
        pass

    def submit(self, call, *given) -> Future:
        future = Future()
        future.set_result(call(*given))
        return future


def report(**of_with) -> dict:
    """Return latency.py's report on a tiny run of both sides."""
    seams = [{"name": "norm", "on": True}, {"name": "rope_and_cache", "on": False}]
    run = {"model_id": "tiny-llama", "log": "logs/it.log"}
    runs = [
        run | {"side": "without"},
        run | {"side": "with", "seams": seams, "op_stats": {"rms_norm": {"fallback: CPU": 7}}},
    ]
    runs[1] |= of_with
    return {"runs": runs, "versions": {"vllm": "0.32.0"}, "hardware": "2 cores"}


@pytest.fixture
def quick(monkeypatch):
    """Replace the run and the predictions by ones that take no time."""
    monkeypatch.setattr(latency, "benchmark", lambda arguments: report())
    monkeypatch.setattr(predicted, "lines", made_up)
    monkeypatch.setattr(without_gpu, "ProcessPoolExecutor", InlinePool)


@pytest.mark.usefixtures("quick")
def test_a_machine_without_a_gpu_shows_kernels_and_predicted_times(tmp_path, capsys):
    without_gpu.main(["--batch", "1", "8", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert "seams on:   norm\nseams off:  rope_and_cache\nops called: rms_norm (7)\nNo kernel ran" in out
    for model in without_gpu.MODELS:
        assert f"\n{model} on MI300X: kernels by tokens per step\n" in out
        table = out.partition(f"\n{model} on MI300X: predicted us per call, not measured; ")[2].splitlines()[1:]
        rows = [row.split() for row in table[:5]]
        assert rows[1] == ["o", "scaled_mm", "10", "100.0", "100.0", "+-25%"]
        assert rows[2] == ["experts", "fused_experts", "4", "500.0", "500.0", "unknown"]
        assert rows[3] == ["sum", "of", "these", "kernels,", "ms", "3.0", "+-0.2", "3.0", "+-0.2"] and rows[4] == [
            "launches",
            "30",
            "30",
        ]
    assert "scaled_mm_wave_splitk_8" in out and "fused_experts_gate_up_block" in out
    assert "A sum is not a decode step" in out
    assert all(len(line) <= 120 or line.startswith(str(tmp_path)) for line in out.splitlines())
    path = tmp_path / "predicted-MI300X.svg"
    assert out.splitlines()[-1] == str(path)
    lines = [json.loads(line) for line in (tmp_path / "predicted-MI300X.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and figures.predicted(lines) == path.read_text()
    figure = ElementTree.fromstring(path.read_text())
    texts = [element.text for element in figure.iterfind(".//{*}text")]
    assert (
        texts[0] == "Predicted for MI300X, never measured: kernels of a decode step by kind"
        and "not a step" in texts[1]
    )
    assert [texts.count(text) for text in ("3.0 ms", "30 launches", "batch 1", "batch 8", "linear", "moe")] == [
        4,
        4,
        2,
        2,
        1,
        1,
    ]
    bars = {
        kind: [float(r.get("height")) for r in figure.iterfind(".//{*}rect") if r.get("fill") == f"url(#{kind})"]
        for kind in ("linear", "moe")
    }
    assert (
        bars["moe"][0] == pytest.approx(2 * bars["linear"][0], rel=1e-3) and len(bars["moe"]) == 4 + 1
    )  # and the legend


@pytest.mark.parametrize(("largest", "step"), [(26.3, 5), (41.7, 5), (1.9, 0.2), (10.0, 1), (0.11, 0.02)])
def test_an_axis_has_at_most_ten_ticks(largest, step):
    assert figures.svg.tick_step(largest) == pytest.approx(step)


def test_each_kind_of_work_has_a_fill_of_its_own():
    calls = [call for model in predicted.MODELS.values() for call in predicted.calls(*model)]
    assert {figures.kind_of(call.layer, call.op.name) for call in calls} == set(figures.FILLS)
    assert len(set(figures.FILLS.values())) == len(figures.FILLS)


def test_a_file_without_predicted_times_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SystemExit, match="no predicted times in"):
        figures.main([str(tmp_path / "empty.jsonl")])


@pytest.mark.usefixtures("quick")
def test_missing_predictions_are_explained_at_the_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(without_gpu.doctor, "find_emulator", lambda: {"why_off": "the emulator needs Python 3.11"})
    without_gpu.main(["--batch", "1", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert "scaled_mm_wave_splitk_8" in out and out.endswith("\nNo predicted times: the emulator needs Python 3.11\n")


@pytest.mark.usefixtures("quick")
def test_a_side_that_fails_without_a_gpu_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(latency, "benchmark", lambda arguments: report(error="no memory"))
    with pytest.raises(RuntimeError, match="tiny-llama failed with the plugin: no memory; see logs/it.log"):
        without_gpu.main(["--output", str(tmp_path)])
