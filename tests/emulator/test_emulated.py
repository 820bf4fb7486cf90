"""Test the ops in the emulator, as `verify --emulate` and `emulate` run them.

Every kernel runs in some case, wrong ones are named, and the counted traffic is the call's.
"""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from marks import AMD, full

from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.core import archs, op
from vllm_rocm_ops.core.launch import CODE, code_object
from vllm_rocm_ops.emulator import CodeObject, Emulator, errors
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.tools import cli, explain


def all_cases() -> list[tuple]:
    return [(the_op, case) for the_op in op.registered() for case in the_op.cases()]


@pytest.mark.parametrize("arch", AMD)
def test_every_case_is_checked_and_every_kernel_runs_in_one(arch):
    tasks = emulated.tasks(all_cases(), archs.named(arch))
    assert [(task.op.name, task.case.name) for task in tasks] == [(o.name, c.name) for o, c in all_cases()]
    shipped = {name for path in (CODE / arch).glob("*.co") for name in CodeObject(path).kernels}
    of_ranks = set().union(*collectives.kernels().values())  # test_all_reduce.py and test_flagged.py run them
    assert set().union(*(task.kernels for task in tasks)) == shipped - of_ranks
    left = {task.op.name for task in tasks if task.configs == (None,)}  # some cases are for PyTorch alone
    assert ("mxfp8_scaled_mm" in left) == (arch == "gfx942")
    assert sum(len(task.configs) for task in tasks) < 1.2 * len(tasks)


def test_the_default_configuration_runs_first():
    arch = archs.named("gfx950")
    for task in emulated.tasks(all_cases()[::7], arch):
        a = task.op.Arguments(*task.case.make("meta", torch.Generator(), arch.fp8_dtype))
        assert task.configs[0] == task.op.explain(*a, arch=arch).config


def test_verify_says_what_is_right_and_how_long_it_took(capsys):
    assert cli.main(["verify", "--emulate", "MI300X", "--op", "silu_and_mul*", "--case", "bf16", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [o.name for o in op.registered() if o.name.startswith("silu")]
    assert [line.split()[0] for line in lines] == ["op", *names, str(len(names))]
    seconds = [float(line.split()[4]) for line in lines[1:-1]]
    assert all(line.split()[1:3] == ["1", "0"] and line.endswith("ok") for line in lines[1:-1]), lines
    assert all(int(line.split()[3]) >= 1 for line in lines[1:-1]), lines
    total = re.fullmatch(rf"{len(names)} cases on gfx942: all passed, ([\d.]+) s CPU time", lines[-1])
    assert math.isclose(sum(seconds), float(total[1]), abs_tol=0.05 * (len(names) + 1) + 0.01)  # rounding to tenths


@full
def test_verify_divides_the_cases_over_processes():
    command = [
        sys.executable,
        "-m",
        "vllm_rocm_ops",
        "verify",
        "--emulate",
        "gfx950",
        "--op",
        "top*",
        "--case",
        "*-experts512",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("6 cases on gfx950: all passed")


def test_a_case_that_no_kernel_takes_is_not_called_right(capsys):
    command = ["verify", "--emulate", "gfx942", "--op", "mxfp8*", "--case", "m1", "--jobs", "1"]
    assert cli.main(command) == 0
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
    broken(monkeypatch, lambda self, launch, uninitialized: None)  # leaves the outputs as they are
    assert cli.main(["verify", "--emulate", "gfx942", "--op", "rms_norm", "--case", "bf16", "--jobs", jobs]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and re.search(
        r"^  bf16 in RowConfig\(.*\): Wrong: rms_norm output 0: NaNs differ$", out, re.MULTILINE
    )
    assert "1 cases on gfx942: 1 failed" in out


def test_a_kernels_fault_is_told_as_the_emulator_tells_it(monkeypatch, capsys):
    def launch(self, launch, uninitialized):
        raise errors.OutOfBounds("rms_norm+0x40: 16 bytes at byte 64")

    broken(monkeypatch, launch)
    assert cli.main(["verify", "--emulate", "gfx942", "--op", "rms_norm", "--case", "fp16", "--jobs", "1"]) == 1
    assert "OutOfBounds: rms_norm+0x40: 16 bytes at byte 64" in capsys.readouterr().out


def test_no_code_object_is_no_right_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("vllm_rocm_ops.core.launch.CODE", tmp_path)
    assert cli.main(["verify", "--emulate", "gfx942", "--op", "rms_norm", "--case", "bf16", "--jobs", "1"]) == 1
    assert "no code object of rms_norm for gfx942" in capsys.readouterr().out


def test_an_arch_of_another_vendor_is_refused(capsys):
    assert cli.main(["verify", "--emulate", "sm_90", "--op", "rms_norm"]) == 2
    assert capsys.readouterr().err == "the emulator runs gfx942 and gfx950, got sm_90\n"


# emulate


def emulate(capsys, *arguments: str) -> str:
    assert cli.main(["emulate", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("name", ["scaled_mm", "fused_experts"])
def test_emulate_shows_what_the_code_objects_hold(name, arch, capsys):
    text, planned = emulate(capsys, name, "--arch", arch), explain.explain(getattr(ops, name), arch).launches
    found = re.findall(
        r"^  (\w+: .*) bytes LDS, .* (\d+) waves per block; (\d+) resident blocks per compute unit$", text, re.MULTILINE
    )
    assert len(found) == len(planned) >= 1
    for (line, waves, held), one in zip(found, planned, strict=True):
        kernel = CodeObject(code_object(one.module, arch)).kernels[one.symbol]
        has, lds = kernel.statistics, kernel.lds + one.lds
        assert line == f"{one.symbol}: {has['vgprs']} VGPRs, {has['agprs']} AGPRs, {has['sgprs']} SGPRs, {lds}"
        assert int(waves) == math.prod(one.block) // 64
        fitting = archs.named(arch).lds_bytes // lds if lds else 99
        assert int(held) == min(4 * kernel.waves_per_simd // int(waves), fitting) and has["vgprs"] > 0
    assert any(one.lds for one in planned) or name != "fused_experts"


def test_emulate_counts_the_bytes_of_the_whole_call(capsys):
    """All blocks are counted if there are few; of many, some are scaled up."""
    case = next(case for case in ops.silu_and_mul.cases())
    (x,) = case.make("meta", torch.Generator(), torch.float8_e4m3fn)
    text = emulate(capsys, "silu_and_mul", "--arch", "gfx950")
    assert (
        f"{x.nbytes} bytes loaded, {x.nbytes // 2} bytes stored" in text
        and f"on the values of the case {case.name}" in text
    )
    text = emulate(capsys, "silu_and_mul", "--arch", "gfx950", "--shape", "4096x2048")
    assert f"{4096 * 4096} bytes loaded, {4096 * 2048} bytes stored" in text and "on zeros" in text
    assert re.search(r"\b64 of \d+ blocks ran, sums are extrapolated", text)
    waits = int(re.search(r"(\d+) s_waitcnt", text)[1])
    assert waits >= 4096 and waits % 64 == 0


def test_emulate_runs_launches_that_need_each_other(capsys):
    text = emulate(capsys, "fused_experts", "--arch", "gfx942")
    planned = explain.explain(ops.fused_experts, "gfx942").launches
    assert len(re.findall(r"^  \w+: \d+ VGPRs", text, re.MULTILINE)) == len(planned) > 1


def test_emulate_of_what_no_kernel_takes(capsys):
    text = emulate(capsys, "mxfp8_scaled_mm", "--arch", "gfx942")
    assert text.splitlines()[-1] == "  no kernel to emulate: PyTorch runs this call"
