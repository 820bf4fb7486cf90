"""Test that a broken installation ends no engine: the plugin's kernels are off, and a log line says so."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

MODEL = ("llama", "token")

NO_LAUNCH = """
from vllm_rocm_ops.core import archs, launch

class Broken:
    arch = archs.named("gfx950")

    def launch(self, kernel, uninitialized):
        raise launch.NotLaunched("no kernel image is available for execution on the device")

launch._executor = Broken()
"""


def test_no_kernel_launches(engines, expected, tmp_path):
    """The driver loads the code objects and does not run them. The user's tuned tables are broken as well."""
    (tmp_path / "gfx950").mkdir()
    for name, text in (("scaled_mm", b"a,b\n1,2\n"), ("fused_add_rms_norm", b"\x00\xff" * 99)):
        (tmp_path / "gfx950" / f"{name}.csv").write_bytes(text)
    answer = engines.run_one(engines.job(MODEL), before=NO_LAUNCH, VLLM_ROCM_OPS_TABLES=str(tmp_path))
    why = "no kernel image is available for execution on the device"
    assert answer["tokens"] == [wanted.argmax(-1).tolist() for wanted in expected(MODEL, answer["tokens"])]
    assert len(answer["stats"]) == 4
    assert all(list(kernels) == [f"fallback: {why}"] for kernels in answer["stats"].values())
    line = rf"UserWarning: (\w+) runs without its kernels: {why}. To run without its kernels, set VLLM_ROCM_OPS_DISABLE=\1$"
    assert sorted(re.findall(line, answer["output"], re.MULTILINE)) == sorted(answer["stats"])
    assert len(re.findall(r"UserWarning: .*\.csv is not used: ", answer["output"])) == 2


def test_a_package_that_does_not_import_ends_no_vllm():
    """vLLM's plugin loader names the plugin."""
    code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm_rocm_ops.ops.scaled_mm":
            raise ImportError("libfoo.so.1: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from vllm.plugins import load_general_plugins
load_general_plugins()
print("goes on")
"""
    root = pathlib.Path(__file__).parents[2]
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    output = done.stdout + done.stderr  # of a new process: a fork may have the package already
    assert "Failed to load plugin rocm_ops" in output and "libfoo.so.1" in output and "goes on" in output
