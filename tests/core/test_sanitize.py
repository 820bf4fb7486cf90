"""Test tests/sanitize.py on recorded output of the tools, and on a fake tool that prints it."""

import os
import re
import sys

import pytest
import sanitize

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import op as op_module

KERNELS = {"rms_norm_bf16_x1", "scaled_mm_skinny_16"}
PASSED = "271 passed in 95.31s (0:01:35)\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{PASSED}========= ERROR SUMMARY: 0 errors\n"
RACE_FREE = (
    f"========= COMPUTE-SANITIZER\n{PASSED}========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
BEYOND = f"""========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at rms_norm_bf16_x1+0x380
=========     by thread (65,0,0) in block (0,0,0)
=========     Access to 0x7bd889c03041 is out of bounds
=========     and is 66 bytes after the nearest allocation at 0x7bd889c03000 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernel [0x2c8] in libcuda.so.1
=========
========= Invalid __global__ write of size 4 bytes
=========     at rms_norm_bf16_x1+0x380
=========     by thread (66,0,0) in block (0,0,0)
{PASSED}========= ERROR SUMMARY: 2 errors
"""
RACE = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at scaled_mm_skinny_16+0x150
=========     and Read access at scaled_mm_skinny_16+0x160 [508 hazards]
========= and Write access at scaled_mm_skinny_16+0x150 [5 hazards]
=========
{PASSED}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
UNWRITTEN = f"""========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, float>(int, float)+0x70
=========     by thread (31,0,0) in block (1,0,0)
========= Uninitialized __global__ memory read of size 16 bytes
=========     at 0x88 in rms_norm_bf16_x1
{PASSED}========= ERROR SUMMARY: 2 errors
"""
BARRIER = """========= COMPUTE-SANITIZER
========= Barrier error detected. Divergent thread(s) in block.
=========     at scaled_mm_skinny_16+0x15520
=========     by thread (128,0,0) in block (0,0,0)
========= Target application returned an error
1 failed, 270 passed in 95.31s (0:01:35)
========= ERROR SUMMARY: 1 error
"""
NO_PLACE = f"========= COMPUTE-SANITIZER\n========= Program hit an error of a new kind\n{PASSED}========= ERROR SUMMARY: 1 error\n"
NOT_PRINTED = (
    CLEAN.replace("0 errors", "257 errors")
    + "========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit\n"
)


@pytest.mark.parametrize(
    ("output", "status", "ours", "others", "is_clean"),
    [
        (CLEAN, 0, {}, {}, True),
        (RACE_FREE, 0, {}, {}, True),
        (BEYOND, 86, {"Invalid __global__ write of size 4 bytes in rms_norm_bf16_x1": 2}, {}, False),
        (RACE, 86, {"Error: Race reported between Write access in scaled_mm_skinny_16": 1}, {}, False),
        (
            UNWRITTEN,
            86,
            {"Uninitialized __global__ memory read of size 16 bytes in rms_norm_bf16_x1": 1},
            {
                "Uninitialized __global__ memory read of size 4 bytes in "
                "void at::native::vectorized_elementwise_kernel<(int)4, float>(int, float)": 1
            },
            False,
        ),
        (BARRIER, 1, {"Barrier error detected. Divergent thread(s) in block. in scaled_mm_skinny_16": 1}, {}, False),
        (NO_PLACE, 86, {"Program hit an error of a new kind": 1}, {}, False),
    ],
    ids=["clean", "no race", "beyond", "race", "unwritten", "barrier", "no place"],
)
def test_findings_in_a_tools_output_are_counted(output, status, ours, others, is_clean):
    result = sanitize.parse(output, status, KERNELS)
    assert (result.ours, result.others, result.is_clean, result.why) == (ours, others, is_clean, "")
    assert result.failed == (output is BARRIER) and result.passed >= 270


def test_a_report_behind_the_words_of_a_test():
    behind = BEYOND.replace("========= Invalid", "test_softmax.py::test_case[one] ========= Invalid", 1)
    assert sanitize.parse(behind, 86, KERNELS) == sanitize.parse(BEYOND, 86, KERNELS)


def test_errors_of_others_alone_are_clean():
    text = UNWRITTEN.partition("========= Uninitialized __global__ memory read of size 16")[0]
    assert sanitize.parse(text + PASSED + "========= ERROR SUMMARY: 1 error\n", 86, KERNELS).is_clean


def test_a_test_that_fails_is_not_clean():
    result = sanitize.parse(CLEAN.replace("271 passed", "1 failed, 270 passed"), 1, KERNELS)
    assert (result.ours, result.why, result.failed) == ({}, "", 1) and not result.is_clean


@pytest.mark.parametrize(
    ("output", "status", "why"),
    [
        ("", 0, "there is no summary"),
        (PASSED, 0, "there is no summary"),
        (CLEAN.replace(PASSED, "no tests ran in 0.01s\n"), 5, "no test ran"),
        (CLEAN.replace("271 passed", "270 passed, 1 skipped"), 0, "1 tests were skipped"),
        (NOT_PRINTED, 86, "257 errors were not printed"),
        (CLEAN, 139, "exit status 139"),
        ("========= Internal Sanitizer Error: out of memory\n" + CLEAN, 0, "Internal Sanitizer Error: out of memory"),
    ],
)
def test_incomplete_output_of_a_tool_is_not_clean(output, status, why):
    result = sanitize.parse(output, status, KERNELS)
    assert result.why == why and not result.is_clean


RACING = "router_z_loss_bf16_256"
FAKE = """#!{python}
import os, sys
options = dict(zip(sys.argv, sys.argv[1:]))
tests = sys.argv[sys.argv.index("--tb=short") + 1:]
open({seen!r}, "a").write(" ".join([os.environ["CUDA_VISIBLE_DEVICES"], *tests]) + "\\n")
print(open({outputs!r} + "/" + options["--tool"]).read())
sys.exit(86 if options["--tool"] == "racecheck" else 0)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a compute-sanitizer that finds a race on PATH of a machine with two GPUs.

    Return the file that lists the GPUs and tests it was given.
    """
    seen, tool = tmp_path / "seen", tmp_path / "compute-sanitizer"
    tool.write_text(FAKE.format(python=sys.executable, seen=str(seen), outputs=str(tmp_path)))
    tool.chmod(0o755)
    for name in sanitize.TOOLS:
        (tmp_path / name).write_text(RACE.replace("scaled_mm_skinny_16", RACING) if name == "racecheck" else CLEAN)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(sanitize, "gpu", lambda: archs.ARCHS["sm_90"])
    monkeypatch.setattr(sanitize.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    some = {op.name: op for op in op_module.registered() if op.name in ("router_z_loss", "rms_norm_static_fp8_quant")}
    monkeypatch.setattr(sanitize.op, "registered", some.values)
    return seen


def test_a_line_for_each_tool(fake, capsys):
    assert sanitize.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" in our")[0] for line in lines if not line.startswith("  ")] == [
        "memcheck: clean: 0 errors",
        "racecheck: WRONG: 1 errors",
        "initcheck: clean: 0 errors",
        "synccheck: clean: 0 errors",
    ]
    assert f"  1 x Error: Race reported between Write access in {RACING}" in lines
    assert sanitize.main(["--tool", "synccheck", "-k", "rope", "--workers", "3"]) == 0
    *given, own = fake.read_text().splitlines()
    assert own.endswith("tests/ops -k rope") and len({line[2:] for line in given}) == 1
    ids = given[0].split()[1:]
    assert all(re.search(r"/ops/\S*test_\w+\.py::test_case\[sm_90-", test) for test in ids)
    assert sum("/ops/standalone/test_router_loss.py::test_case[sm_90-router_z_loss-" in test for test in ids) >= 3


def test_workers_share_the_cases_and_the_gpus(fake, capsys):
    assert sanitize.main(["--tool", "memcheck", "initcheck"]) == 0
    whole = [line.split()[1:] for line in fake.read_text().splitlines()]
    fake.unlink()
    assert sanitize.main(["--tool", "memcheck", "initcheck", "--workers", "3"]) == 0
    *_, memcheck, initcheck = capsys.readouterr().out.splitlines()
    assert f" {3 * 271} tests passed" in memcheck and f" {3 * 271} tests passed" in initcheck
    given = [line.split() for line in fake.read_text().splitlines()]
    assert sorted(gpu for gpu, *_ in given) == ["0"] * 3 + ["1"] * 3
    assert sorted(test for _, *tests in given for test in tests) == sorted(whole[0] * 2)
    assert max(len(tests) for tests in given) - min(len(tests) for tests in given) <= 1
    assert sanitize.main(["--tool", "racecheck", "--workers", "3"]) == 1
    assert f"3 x Error: Race reported between Write access in {RACING}" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["0", "-1", "x"])
def test_a_number_of_workers_that_there_is_not(workers):
    with pytest.raises(SystemExit):
        sanitize.main(["--workers", workers])


def test_a_tool_that_takes_too_long(fake, tmp_path, capsys):
    """It reports the cases that did not end, and keeps the output of each process."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "a case PASSED"\nsleep 60\n')
    logs = tmp_path / "logs"
    assert sanitize.main(["--tool", "memcheck", "--timeout", "2", "--workers", "2", "--logs", str(logs)]) == 1
    found = capsys.readouterr().out
    assert "it took longer than --timeout" in found
    tests = [line for line in found.splitlines() if line.startswith("  did not end: test_case[sm_90-")]
    assert len(tests) == len(sanitize.chosen(archs.ARCHS["sm_90"], 3)) - 2
    assert [path.read_text() for path in logs.iterdir()] == ["a case PASSED\n"] * 2


def test_every_kernel_has_a_case_of_few_elements():
    arch, found = archs.ARCHS["sm_90"], {}
    some = [op for op in op_module.registered() if op.name in ("rms_norm", "unquantized_gemm", "topk_softmax")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanitize.op, "registered", lambda: some)
        for the_op, case in sanitize.chosen(arch, 1):
            found.setdefault(the_op, []).append(case)
    for the_op in some:
        every = {name for case in the_op.cases() for name in sanitize.kernels_of(the_op, case, arch)}
        assert every and {name for case in found[the_op] for name in sanitize.kernels_of(the_op, case, arch)} == every
        assert len(found[the_op]) <= len(every) < len(list(the_op.cases()))


def test_a_machine_without_a_gpu_or_the_tool(monkeypatch, tmp_path):
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU that the kernels are compiled for, and finds none"):
        sanitize.main([])
    monkeypatch.setattr(sanitize, "gpu", lambda: archs.ARCHS["sm_90"])
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sanitize.pathlib.Path, "glob", lambda *_: iter(()))
    with pytest.raises(SystemExit, match="compute-sanitizer is not on PATH and in no CUDA toolkit"):
        sanitize.main([])
