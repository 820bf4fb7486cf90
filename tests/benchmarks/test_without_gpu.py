"""Test serving_benchmarks/without_gpu.py: the plugin's seams and kernels, and predicted steps, without a GPU."""

import re

import latency
import pytest
import without_gpu
from timing_study import step


def report(**of_with) -> dict:
    """Return latency.py's report on a tiny run of both sides."""
    seams = [{"name": "norm", "on": True}, {"name": "rope_and_cache", "on": False}]
    run = {"model_id": "tiny-llama", "log": "logs/it.log"}
    with_ops = run | {"side": "with", "seams": seams, "op_stats": {"rms_norm": {"fallback: CPU": 7}}} | of_with
    return {"runs": [run | {"side": "without"}, with_ops], "versions": {"vllm": "0.32.0"}, "hardware": "2 cores"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Replace the run by one that takes no time, and predictions that are not frozen by an error."""
    monkeypatch.setattr(latency, "benchmark", lambda arguments: report())
    monkeypatch.setattr(step, "live_time", lambda machine, context: pytest.fail("the batch sizes are frozen"))


def test_a_machine_without_a_gpu_shows_kernels_and_predicted_steps(tmp_path, capsys):
    without_gpu.main(["--batch", "1", "8", "--output", str(tmp_path / "new")])
    out = capsys.readouterr().out
    assert "seams on:   norm\nseams off:  rope_and_cache\nops called: rms_norm (7)\nNo kernel ran" in out
    for model in without_gpu.MODELS:
        assert f"\n{model}, TP 8, on MI300X: kernels by tokens per step\n" in out
        said = out.partition(f"\n{model}, TP 8: `python -m serving_benchmarks.step --model ")[2].split("\n\n")[0]
        assert "MI300X: predicted times in us, not measured" in said and "\nlayer " not in said
        for tokens in (1, 8):
            assert said.count(f"\npredicted step, {tokens} tokens: ") == 2
            assert f"\npredicted speedup, {tokens} tokens: " in said
    assert "scaled_mm_wave_splitk_8" in out and "fused_experts_gate_up_block" in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_a_batch_size_that_is_not_frozen_is_predicted_now(monkeypatch):
    monkeypatch.setattr(step, "live_time", lambda machine, context: lambda call, tokens: (10.0, 1, None))
    [said] = (
        line
        for line in without_gpu.steps("DeepSeek-V3", "MI300X", [3])
        if line.startswith("predicted step, 3 tokens: plugin")
    )
    assert re.search(r" \d+\.\d\d ms \(.*\) in \d+ launches", said)


def test_missing_predictions_are_explained_at_the_end(monkeypatch, tmp_path, capsys):
    def missing(machine, context):
        raise ImportError("the emulator needs Python 3.11")

    monkeypatch.setattr(step, "live_time", missing)
    without_gpu.main(["--batch", "3", "--output", str(tmp_path)])
    out = capsys.readouterr().out
    assert "scaled_mm_wave_splitk_8" in out and out.endswith("\nNo predicted times: the emulator needs Python 3.11\n")


def test_a_side_that_fails_without_a_gpu_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(latency, "benchmark", lambda arguments: report(error="no memory"))
    with pytest.raises(RuntimeError, match="tiny-llama failed with the plugin: no memory; see logs/it.log"):
        without_gpu.main(["--output", str(tmp_path)])
