"""Run the all-reduce on GPUs for a short time; tests/all_reduce_on_gpu.py by itself runs for long."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "all_reduce_on_gpu.py"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "8", "--launches", "6000"),
        ("--ranks", "3", "--launches", "6000"),
        ("--ranks", "2", "--launches", "300", "--processes"),
        ("--ranks", "4", "--launches", "3000", "--large"),
    ],
    ids=" ".join,
)
def test_on_gpus(options):
    """Ranks are streams of a process, or processes, which share a GPU if there are not enough."""
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all bits right" in done.stdout and "the rank that comes late fails too" in done.stdout, done.stdout
