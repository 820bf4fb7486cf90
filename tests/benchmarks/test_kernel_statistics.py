"""Test serving_benchmarks/kernel_statistics.py: its report on a small layer matches the code object and the whole grid."""

import json
import pathlib
import subprocess
import sys

import pytest
from marks import AMD, full

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import CodeObject

ROOT = pathlib.Path(__file__).resolve().parents[2]
FORMS = {"plain": "", "shuffled": ", shuffled", "mxfp8": ", mxfp8"}  # of weights, and the names of their lines
COUNTED = (
    "hbm_bytes_over_minimum",
    "issue_cycles_per_byte",
    "matrix_cycles_per_byte",
    "bytes_in_flight_per_compute_unit",
)


def lines(folder: pathlib.Path, arch: str, blocks: int) -> list[dict]:
    command = [
        sys.executable,
        str(ROOT / "serving_benchmarks" / "kernel_statistics.py"),
        "--arch",
        arch,
        "--m",
        "1",
        "64",
    ]
    command += ["--layers", "shared gate_up", "--weights", *FORMS, "--blocks", str(blocks), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    [path] = (folder / arch).glob("*-static.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@full
@pytest.mark.parametrize("arch", AMD)
def test_some_blocks_stand_for_all(arch, tmp_path):
    of_all, of_some = lines(tmp_path / "whole", arch, 10**6), lines(tmp_path / "sampled", arch, 32)
    forms = [name for form, name in FORMS.items() if form != "mxfp8" or arch == "gfx950"]
    cases = [f"dsv3_tp8 shared gate_up{form} {m}x512x7168" for form in forms for m in (1, 64)]
    assert [line["case"] for line in of_all] == cases
    for whole, sampled in zip(of_all, of_some, strict=True):
        assert whole["blocks_emulated"] == whole["blocks"] > sampled["blocks_emulated"] == 32
        for name in COUNTED:
            assert sampled[name] == pytest.approx(whole[name], rel=0.15), name
        assert whole["hbm_bytes_over_minimum"] >= 1 and whole["bytes_in_flight_per_compute_unit"] > 0
        kernel = CodeObject(launch.code_object(whole["op"], arch)).kernels[whole["kernel"]]
        assert (
            kernel.statistics.items() >= {name: whole[name] for name in ("vgprs", "agprs", "sgprs", "scratch")}.items()
        )
        assert whole["waves_per_compute_unit"] <= whole["occupancy"] <= 32
