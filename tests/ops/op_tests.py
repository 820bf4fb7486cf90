"""The test of every op's cases and configurations on every available executor, by default those that `chosen` selects.

Each test_<op>.py imports `test_case`, to which conftest.py gives the cases of the ops in vllm_rocm_ops/ops/<op>.py.

The executors are this machine's GPU if it is supported, else the emulator with the shipped gfx942 and gfx950 code, the
latter on a chip of three compute units. On that chip a block takes several tiles in turn, as with large weights, and
GEMMs have integer operands, whose results must be bit-equal to the reference; each kernel also runs on the case's
values. vllm_rocm_ops/core/correctness.py defines the allowed errors. Outputs start as NaN, so that unwritten elements
show.
"""

from __future__ import annotations

import fcntl
import functools
import os
import pickle
from pathlib import Path

import pytest
import torch
from kernel_features import runs_of
from marks import AMD, FULL, cover
from sources import ROOT, file_of_tests

from vllm_rocm_ops.core import archs, launch, op
from vllm_rocm_ops.core.correctness import check_case

FEW_UNITS = 3
OPS = list(op.registered())


def executors():
    if torch.cuda.is_available() and archs.of_device(0) is not None:
        yield pytest.param("cuda", id=archs.of_device(0).name)
    else:
        yield "gfx942"
        yield f"gfx950:{FEW_UNITS}"
        if FULL:
            yield f"gfx942:{FEW_UNITS}"
            yield "gfx950"


@pytest.fixture(scope="module", params=executors())
def executor(request):
    """Yield the device of the tensors and the arch."""
    if request.param == "cuda":
        yield "cuda", archs.of_device(0)
        return
    from vllm_rocm_ops.emulator import Emulator

    emulator = Emulator(request.param)
    with launch.executor(emulator):
        yield "cpu", emulator.arch


@functools.cache
def chosen() -> dict[tuple[str, str, str], list]:
    """Return what `choose` does. One of a run's workers computes it."""
    run, path = os.environ.get("PYTEST_XDIST_TESTRUNUID"), ROOT / "build/chosen.pickle"
    if not run:
        return choose()
    path.parent.mkdir(exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        of_run, found = pickle.load(file) if path.stat().st_size else (None, {})
        if of_run != run:
            found = choose()
            file.truncate(0)
            pickle.dump((run, found), file)
    return found


def choose() -> dict[tuple[str, str, str], list]:
    """Return the configurations that run by default, by chip, op and case.

    They cover each feature of kernel_features.py once, on one of the chips.
    """
    found = []
    for the_op in OPS:
        for place, case in enumerate(the_op.cases()):
            chips = [*executors()][:: -1 if place % 2 else 1]  # of two with equal features the first is chosen
            of_chips = runs_of(the_op, case, list(map(archs.named, chips)))
            found += [((chip, the_op.name, case.name), run) for chip, runs in zip(chips, of_chips) for run in runs]
    by_case = {}
    for place in sorted(cover([run.reached for _, run in found], [run.cost for _, run in found])):
        key, run = found[place]
        by_case.setdefault(key, []).append(run.config)
    return by_case


def runs(of_file: Path):
    """Yield the cases of a test file's ops: each on a GPU, or with --full on both archs; else those that `chosen` selects."""
    of_ops = [the_op for the_op in OPS if file_of_tests(the_op) == of_file]
    for number, executor in enumerate(executors()):
        value, name = (executor.values[0], executor.id) if hasattr(executor, "values") else (executor, executor)
        for the_op in of_ops:
            for place, case in enumerate(the_op.cases()):
                if value == "cuda":
                    configs = None
                elif FULL:  # of both archs, one with few units
                    configs = None if number // len(AMD) == place % 2 else ()
                else:
                    configs = chosen().get((value, the_op.name, case.name), ())
                if configs != ():
                    yield pytest.param(value, the_op, case, configs, id=f"{name}-{the_op.name}-{case.name}")


def test_case(the_op, case, configs, executor):
    device, arch = executor
    check_case(the_op, case, device, arch, configs, whole=arch.compute_units == FEW_UNITS)


def require_whole_numbers(name: str, case_name: str, executor) -> None:
    """Check a case of a GEMM's op on integers, of which its results are exact."""
    device, arch = executor
    the_op = next(the_op for the_op in OPS if the_op.name == name)
    check_case(the_op, next(case for case in the_op.cases() if case.name == case_name), device, arch, whole=True)
