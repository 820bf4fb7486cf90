"""Test that a run of tests ends: when a worker dies, and when a test hangs."""

import re
import shlex
import subprocess
import sys

import pytest
from sources import ROOT

from vllm_rocm_ops.core import envs

RUN = ROOT / "tests" / "run.sh"
OPTIONS = shlex.split(
    re.search(r"-m pytest -q -n .*?\)\) (.*?) \"\$@\"", RUN.read_text(), re.DOTALL)[1].replace("\\\n", "")
)
"""pytest's options in run.sh, after the number of workers."""


@pytest.mark.parametrize(
    ("act", "options", "said"),
    [
        ("os.abort()", (), "crashed while running 'test_first.py::test_it'"),
        ("time.sleep(60)", ("-o", "timeout=1"), "Timeout (>1.0s)"),
    ],
    ids=["dies", "hangs"],
)
def test_a_run_ends_with_the_name_of_the_test(act, options, said, tmp_path):
    """Without --max-worker-restart=0 the first run waits forever for the dead worker's other file."""
    (tmp_path / "test_first.py").write_text(
        f"import os, time\n\n\ndef test_it():\n    {act}\n\n\ndef test_next():\n    pass\n"
    )
    (tmp_path / "test_second.py").write_text("def test_other():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", *OPTIONS, *options, "-p", "no:cacheprovider", tmp_path]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert found.returncode == 1 and said in found.stdout and "FAILED test_first.py::test_it" in found.stdout


def test_each_test_and_the_whole_run_have_a_limit(pytestconfig):
    assert float(pytestconfig.getini("timeout")) > 0
    assert "timeout --foreground --kill-after=60" in RUN.read_text()


def test_the_guard_of_the_shared_state_sees_a_variable_that_hides_one(monkeypatch, request):
    state = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "process_is_left_as_it_was")).state
    before = state()
    monkeypatch.setitem(vars(envs), "VLLM_ROCM_OPS_DISABLE", "norm")
    assert state() != before
