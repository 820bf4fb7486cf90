"""The ops in the emulator: are the results of their cases right? Needs the extra [emulator]."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from vllm_rocm_ops import launch
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.correctness import Wrong, check_case
from vllm_rocm_ops.emulator import Emulator, EmulatorError
from vllm_rocm_ops.op import Case, Op

HEADER = f"{'op':36} {'cases':>6} {'PyTorch':>8} {'kernels':>8} {'seconds':>8}  result"


class Task(NamedTuple):
    """A case, the configurations to check it in, (None,) where no kernel takes it, and the kernels that they run."""

    op: Op
    case: Case
    configs: tuple
    kernels: frozenset[str]


class Checked(NamedTuple):
    """A task that is done: the kernels that ran, or that PyTorch did, seconds of processor time, and what is wrong, if anything is."""

    op: str
    kernels: frozenset[str]
    falls_back: bool
    seconds: float
    wrong: str


def tasks(cases: Iterable[tuple[Op, Case]], arch: Arch) -> list[Task]:
    """Each case in the configuration that it runs by default, and in those that bring a kernel which no case before ran."""
    found: list[Task] = []
    known: set[str] = set()
    for the_op, case in cases:
        a = the_op.Arguments(*case.make("meta", torch.Generator(), arch.fp8_dtype))
        explained, outputs = the_op.explain(*a, arch=arch), the_op.allocate(a)
        chosen, kernels = [explained.config], {planned.symbol for planned in explained.launches}
        for config in the_op.configs(a, arch):
            symbols = {planned.symbol for planned in the_op.plan(config, outputs, a, arch)}
            if not symbols <= known | kernels:
                chosen.append(config)
                kernels |= symbols
        known |= kernels
        found.append(Task(the_op, case, tuple(chosen), frozenset(kernels)))
    return found


@functools.cache
def emulator_of(arch_name: str) -> Emulator:
    """This process's emulator of an architecture, which keeps the kernels that it has decoded."""
    return Emulator(arch_name)


def check(task: Task, arch_name: str) -> Checked:
    """Runs a task."""
    start, wrong = time.process_time(), ""
    emulator = emulator_of(arch_name)
    with launch.executor(emulator):
        for config in task.configs:
            try:
                check_case(task.op, task.case, "cpu", emulator.arch, [config])
            except (Wrong, EmulatorError) as error:
                wrong = f"{task.case.name} in {config}: {type(error).__name__}: {error}"
                break
    return Checked(task.op.name, task.kernels, task.configs == (None,), time.process_time() - start, wrong)


_of_this_process: list[tuple[Task, str]] = []  # what check_numbered finds after a fork


def check_numbered(number: int) -> Checked:
    """The check of a task that this process inherited."""
    return check(*_of_this_process[number])


def check_all(found: list[Task], arch_name: str, jobs: int) -> Iterator[Checked]:
    """Runs tasks in so many processes; what they say comes in the order of the tasks."""
    torch.set_num_threads(1)  # the tensors are small, and threads do not survive a fork
    if jobs == 1:
        yield from (check(task, arch_name) for task in found)
        return
    _of_this_process[:] = [(task, arch_name) for task in found]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap(check_numbered, range(len(found)))


def bench(cases: Iterable[tuple[Op, Case]], arch_name: str, jobs: int) -> Iterator[tuple[str, bool]]:
    """Checks the cases; lines for people, and whether each tells of a failure."""
    arch = emulator_of(arch_name).arch
    found = tasks(cases, arch)
    yield HEADER, False
    done: list[Checked] = []
    for op_name, group in itertools.groupby(check_all(found, arch_name, jobs), lambda checked: checked.op):
        of_op = list(group)
        kernels, wrong = frozenset().union(*(one.kernels for one in of_op)), [one.wrong for one in of_op if one.wrong]
        left = sum(one.falls_back for one in of_op)
        verdict = "WRONG" if wrong else "right" if kernels else ""
        seconds = sum(one.seconds for one in of_op)
        line = f"{op_name:36} {len(of_op):6} {left:8} {len(kernels):8} {seconds:8.1f}  {verdict}"
        yield line.rstrip(), bool(wrong)
        yield from (("  " + text, True) for text in wrong)
        done += of_op
    failed = sum(bool(one.wrong) for one in done)
    said = f"{failed} wrong" if failed else "all right" if any(one.kernels for one in done) else "no kernel ran"
    total = sum(one.seconds for one in done)
    yield f"{len(done)} cases on {arch}: {said}, {total:.1f} s of processor time", bool(failed)
