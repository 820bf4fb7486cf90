"""The ops in the emulator, as `bench --emulate` has them: every kernel in some case, and what it says of wrong ones."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import cli, emulated, op
from vllm_rocm_ops.emulator import CodeObject, Emulator, errors
from vllm_rocm_ops.launch import CODE

AMD = ("gfx942", "gfx950")


def all_cases() -> list[tuple]:
    return [(the_op, case) for the_op in op.registered() for case in the_op.cases()]


@pytest.mark.parametrize("arch", AMD)
def test_every_case_is_checked_and_every_kernel_runs_in_one(arch):
    tasks = emulated.tasks(all_cases(), archs.named(arch))
    assert [(task.op.name, task.case.name) for task in tasks] == [(o.name, c.name) for o, c in all_cases()]
    shipped = {name for path in (CODE / arch).glob("*.co") for name in CodeObject(path).kernels}
    assert set().union(*(task.kernels for task in tasks)) == shipped
    left = {task.op.name for task in tasks if task.configs == (None,)}  # some cases are for PyTorch alone
    assert ("mxfp8_scaled_mm" in left) == (arch == "gfx942")
    assert sum(len(task.configs) for task in tasks) < 1.2 * len(tasks)


def test_what_runs_by_default_comes_first():
    arch = archs.named("gfx950")
    for task in emulated.tasks(all_cases()[::7], arch):
        a = task.op.Arguments(*task.case.make("meta", torch.Generator(), arch.fp8_dtype))
        assert task.configs[0] == task.op.explain(*a, arch=arch).config


def test_bench_says_what_is_right_and_how_long_it_took(capsys):
    assert cli.main(["bench", "--emulate", "MI300X", "--op", "silu_and_mul*", "--case", "bf16", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["op", *(o.name for o in op.registered() if "silu" in o.name), "4"]
    seconds = [float(line.split()[4]) for line in lines[1:-1]]
    assert all(line.split()[1:3] == ["1", "0"] and line.endswith("right") for line in lines[1:-1]), lines
    assert all(int(line.split()[3]) >= 1 for line in lines[1:-1]), lines
    total = re.fullmatch(r"4 cases on gfx942: all right, ([\d.]+) s of processor time", lines[-1])
    assert math.isclose(sum(seconds), float(total[1]), abs_tol=0.25)


def test_bench_divides_the_cases_over_processes():
    command = [
        sys.executable,
        "-m",
        "vllm_rocm_ops",
        "bench",
        "--emulate",
        "gfx950",
        "--op",
        "top*",
        "--case",
        "*-experts512",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("6 cases on gfx950: all right")


def test_a_case_that_no_kernel_takes_is_not_called_right(capsys):
    assert cli.main(["bench", "--emulate", "gfx942", "--op", "mxfp8*", "--case", "m1", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["mxfp8_scaled_mm", "1", "1", "0", out.splitlines()[1].split()[4]]
    assert "1 cases on gfx942: no kernel ran" in out


def broken(monkeypatch, launch) -> None:
    class Broken(Emulator):
        pass

    Broken.launch = launch
    monkeypatch.setattr(emulated, "Emulator", Broken)
    emulated.emulator_of.cache_clear()


@pytest.fixture(autouse=True)
def emulators():
    yield
    emulated.emulator_of.cache_clear()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_wrong_result_fails_and_names_the_case(jobs, monkeypatch, capsys):
    broken(monkeypatch, lambda self, launch, uninitialised: None)  # leaves the outputs as they are
    assert cli.main(["bench", "--emulate", "gfx942", "--op", "rms_norm", "--case", "bf16", "--jobs", jobs]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out and re.search(
        r"^  bf16 in RowConfig\(.*\): Wrong: rms_norm output 0: NaNs differ$", out, re.MULTILINE
    )
    assert "1 cases on gfx942: 1 wrong" in out


def test_a_kernels_fault_is_told_as_the_emulator_tells_it(monkeypatch, capsys):
    def launch(self, launch, uninitialised):
        raise errors.OutOfBounds("rms_norm+0x40: 16 bytes at byte 64")

    broken(monkeypatch, launch)
    assert cli.main(["bench", "--emulate", "gfx942", "--op", "rms_norm", "--case", "fp16", "--jobs", "1"]) == 1
    assert "OutOfBounds: rms_norm+0x40: 16 bytes at byte 64" in capsys.readouterr().out


def test_no_code_object_is_no_right_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("vllm_rocm_ops.launch.CODE", tmp_path)
    assert cli.main(["bench", "--emulate", "gfx942", "--op", "rms_norm", "--case", "bf16", "--jobs", "1"]) == 1
    assert "no code object of rms_norm for gfx942" in capsys.readouterr().out


def test_an_arch_of_another_vendor_is_refused(capsys):
    assert cli.main(["bench", "--emulate", "sm_90", "--op", "rms_norm"]) == 2
    assert capsys.readouterr().err == "the emulator runs gfx942 and gfx950, got sm_90\n"
