"""Test `refit` with the model itself as the GPU, and on other GEMMs."""

from __future__ import annotations

import json

import pytest
import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.timing import machines, predict, refit
from vllm_rocm_ops.tools import cli

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
    assert cli.main(["predict", "rms_norm", "--shape", "1x4096"]) == 0
    assert "constants refitted by the user: " in capsys.readouterr().out
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
    assert cli.main(["refit"]) == 2
    assert "refit needs an AMD GPU: no GPU found" in capsys.readouterr().err


@pytest.mark.parametrize("product", ["mi325x", "MI355X"])
def test_other_products_have_no_error_band(capsys, product):
    assert cli.main(["predict", "rms_norm", "--shape", "1x4096", "--arch", product]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert (
        f"on {product.upper()}: predicted " in head
        and f"no published decode times of {product.upper()} to compare" in head
    )


def test_what_nobody_measured_on_a_product_is_called_a_guess():
    for machine in (machines.MI325X, machines.MI355X):
        assert all(constant.kind != "fitted" for constant in machine.constants.values())
    gfx942 = [
        each for each in machines.MI355X.constants.values() if each.kind == "measured" and "MI300X" in each.source
    ]
    assert not gfx942 and machines.MI325X["hbm_bandwidth"] > MACHINE["hbm_bandwidth"]
    assert predict.band(ops.scaled_mm, "MI355X").ratio is None
