"""Test that `python -m serving_benchmarks.step` predicts a step."""

import re
import subprocess
import sys

import pytest
from marks import full
from sources import ROOT

from serving_benchmarks import step
from vllm_rocm_ops.timing import predict

TINY = "--model", "tiny-llama-fp8", "--batch", "2"


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return a function that returns the output of a command that succeeds."""
    monkeypatch.setattr(predict, "BLOCKS", 16)

    def run(*arguments: str) -> str:
        assert step.main([*TINY, *arguments]) == 0
        return capsys.readouterr().out

    return run


@full
def test_a_model_is_predicted_launch_by_launch(printed):
    head, *rows, baseline, plugin, speedup, most, last = printed().splitlines()
    assert "predicted times in us, not measured" in head and "with 4096 keys per request" in head
    layers = [re.split(r"  +", row)[0] for row in rows[1:]]
    assert (
        layers.index("qkv")
        < layers.index("rotation + cache write")
        < next(i for i, one in enumerate(layers) if one.startswith("attention"))
        < layers.index("o")
    )
    cells = [re.split(r"  +", row) for row in rows[1:]]
    counts = [int(row[4]) for row in cells]
    us = [float(row[7].partition(",")[0]) for row in cells]
    of_each = sum(int(row[3]) * time for row, time in zip(cells, us))
    found = re.fullmatch(r"predicted step, 2 tokens: plugin (\S+) ms \(.*\) in (\d+) launches.*", plugin)
    assert int(found[2]) == sum(counts) and float(found[1]) * 1e3 == pytest.approx(of_each, abs=30)
    assert speedup.startswith("predicted speedup, 2 tokens: ")
    assert baseline.startswith("predicted step, 2 tokens: baseline ") and "published steps" in last
    assert most.startswith("most time above the HBM roofline: ") and most.count(" ms, ") == 3
    assert any("predicted +-25%" in row for row in rows) and any("assumed" in row for row in rows)


@full
def test_a_baseline_is_of_the_product_that_was_measured(printed):
    predicted = printed("--arch", "MI308X")
    assert "predicted step, 2 tokens: plugin " in predicted and "tokens: baseline " not in predicted


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((*TINY, "--arch", "gfx942"), "arch must be a product with a timing model (MI300X, MI308X, MI325X, MI350X, "),
        ((*TINY, "--tp", "7"), "--model tiny-llama-fp8: "),
        ((*TINY, "--context", "0"), "--context: must be 1 to 1048576 keys, got 0"),
    ],
)
def test_what_cannot_be_predicted_says_why(asked, message, capsys):
    try:
        status = step.main(asked)
    except SystemExit as exit:  # of argparse
        status = exit.code
    out, error = capsys.readouterr()
    assert (status, out) == (2, "") and message in error


def test_without_the_emulators_package_it_says_why():
    lacking = "import runpy, sys; sys.modules['tinygrad.renderer.amd'] = None"
    code = f"{lacking}; runpy.run_module('serving_benchmarks.step', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code, *TINY], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (result.returncode, result.stdout) == (2, "") and "the emulator needs " in result.stderr
