"""Test the refit with the model itself as the GPU."""

from __future__ import annotations

import json
import re

import pytest
import torch
from marks import full
from timing_study import refit

from serving_benchmarks import step as door
from vllm_rocm_ops.timing import machines, predict

pytestmark = full
MACHINE = machines.MI300X
TRUTH = MACHINE.but(start=1.5, wave_latency=800)
CALLS = (("rms_norm", (1, 4096), 0), ("scaled_mm", (1, 1024), 512))
STEPS = {"start": (0.0, 3.0, 0.5), "wave_latency": (0, 1000, 100)}


@pytest.fixture(autouse=True)
def user(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_OPS_TABLES", str(tmp_path / "tables"))
    monkeypatch.setattr(predict, "BLOCKS", 4)
    monkeypatch.setattr(refit, "STEPS", STEPS)


def truth():
    """Return a timer of calls by TRUTH, with all tensors cold."""
    expected = {
        each.name.partition(" ")[0]: each.predicted(TRUTH) for each in refit.measured(MACHINE, lambda *_: 1.0, CALLS)
    }
    return lambda op, given: expected[op.name]


def step_lines(capsys) -> list[str]:
    """Return the lines of a predicted step."""
    assert door.main(["--model", "tiny-llama-fp8"]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_step_is_predicted_with_the_users_constants(capsys):
    def launches() -> list[float]:
        """Return the times of the plugin's launches."""
        cells = (line.rpartition("  ")[2] for line in step_lines(capsys))
        return [float(cell.partition(",")[0]) for cell in cells if re.match(r"[0-9.]+, predicted", cell)]

    before = launches()
    refit.file_of(MACHINE).parent.mkdir(parents=True)
    refit.file_of(MACHINE).write_text(json.dumps({"start": 3.0}))
    assert before and all(after > us + 2 for us, after in zip(before, launches(), strict=True))


def test_a_refit_finds_the_machine_that_was_measured(capsys):
    lines = list(refit.lines(MACHINE, truth(), CALLS))
    assert len(lines) == 2 + 2 * len(CALLS) and "measured " in lines[1] and "predicted " in lines[1]
    after = [abs(int(line.rpartition(" ")[2].rstrip("%"))) for line in lines if "refitted" in line]
    before = [abs(int(line.rpartition(" ")[2].rstrip("%"))) for line in lines if "measured" in line]
    assert max(after) <= 3 < min(before)
    written = json.loads(refit.file_of(MACHINE).read_text())
    assert set(written) == set(refit.STEPS) and written["start"] + written["wave_latency"] / 500 > 2
    mine = refit.of_user(MACHINE)
    assert {name: mine[name] for name in written} == written and mine.constants["start"].source.endswith(".json")
    assert f"constants refitted by the user: {refit.file_of(MACHINE)}" in step_lines(capsys)
    assert refit.of_user(machines.MI355X) is machines.MI355X


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "must map constants to numbers"), ('{"valu": 3}', "must have only start")]
)
def test_a_file_of_something_else_is_refused(text, message):
    refit.file_of(MACHINE).parent.mkdir(parents=True)
    refit.file_of(MACHINE).write_text(text)
    with pytest.raises(ValueError, match=message):
        refit.of_user(MACHINE)


def test_without_an_amd_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refit.main() == 2
    assert "refit needs an AMD GPU: no GPU found" in capsys.readouterr().err
