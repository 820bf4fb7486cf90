"""The ops in the emulator: are the results of their cases right, and what do a call's kernels have and do? Needs the extra
[emulator]."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch

from vllm_rocm_ops.core import launch
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.correctness import Wrong, check_case, generator_of
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import extent
from vllm_rocm_ops.emulator import Emulator, EmulatorError
from vllm_rocm_ops.emulator.counters import Counters
from vllm_rocm_ops.emulator.objects import KernelObject

NEIGHBOURS = 16  # blocks that run side by side: of four waves, as many as the emulator runs in lockstep
EXPLAINED_BLOCKS = 64  # of a launch
HEADER = f"{'op':36} {'cases':>6} {'PyTorch':>8} {'kernels':>8} {'seconds':>8}  result"


# The cases


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
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(check_numbered, range(len(found)))


def verify(cases: Iterable[tuple[Op, Case]], arch_name: str, jobs: int) -> Iterator[tuple[str, bool]]:
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


# What a call's kernels have and do


class Ran(NamedTuple):
    """A launch that ran, whole or some of its blocks: what its code object says, and what was counted of those blocks."""

    kernel: KernelObject
    counters: Counters
    grid: int  # blocks of the launch
    blocks: list[int]  # those that ran
    waves: int  # of a block
    lds: int  # bytes of a block
    held: int  # blocks that a compute unit can hold, as registers and LDS allow


def executable(planned: Sequence[Launch]) -> list[Launch]:
    """Launches with tensors in place of their workspaces and counters, in all of them the same for one workspace."""
    tensors: dict[int, torch.Tensor] = {}

    def tensor(arg):
        if isinstance(arg, launch.Workspace):
            return tensors.setdefault(id(arg), torch.empty(arg, dtype=torch.uint8))
        return torch.zeros(arg, dtype=torch.int32) if isinstance(arg, launch.Counters) else arg

    return [one.with_each(tensor) for one in planned]


def sample(grid: int, most: int) -> list[int]:
    """About so many blocks of a grid: runs of neighbours, which share tiles, spread evenly."""
    if grid <= most:
        return list(range(grid))
    runs = max(most // NEIGHBOURS, 1)
    starts = ((2 * run + 1) * grid // (2 * runs) - NEIGHBOURS // 2 for run in range(runs))
    return [start + i for start in starts for i in range(NEIGHBOURS)]


def run(emulator: Emulator, one: Launch, most: int) -> Ran:
    """Runs about so many blocks of a launch."""
    code = launch.code_object(one.module, emulator.arch.name)
    kernel = emulator.program(code, one.symbol).object
    grid = math.prod(one.grid)
    blocks = sample(grid, most)
    counters = emulator.run(code, one, (), blocks)
    waves = -(-math.prod(one.block) // emulator.arch.wave_lanes)
    lds = kernel.lds + one.lds
    one_unit = dataclasses.replace(emulator.options, compute_units=1)
    return Ran(kernel, counters, grid, blocks, waves, lds, one_unit.resident_blocks(kernel, waves, lds))


def zeros_like(value):
    """A tensor of zeros with the shape and strides of one on the meta device; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(extent(value), dtype=value.dtype).as_strided(value.shape, value.stride())


def describe(op: Op, arguments: Sequence, case: Case | None, arch_name: str) -> Iterator[str]:
    """What the kernels of a call have and do, line by line. The call is that of the case, or, without one, on zeros in place of these
    arguments. Of a launch with many blocks some run, if no other launch needs what it writes."""
    emulator = Emulator(arch_name, races=False)
    if case:
        values = f"the values of the case {case.name}"
        arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
    else:
        values, arguments = "zeros", tuple(map(zeros_like, arguments))
    planned = executable(op.explain(*arguments, arch=emulator.arch).launches)
    if not planned:
        yield "  no kernel runs that could be emulated"
    for one in planned:
        ran = run(emulator, one, EXPLAINED_BLOCKS if one is planned[-1] else math.prod(one.grid))
        yield from _lines(ran, values)


def _lines(ran: Ran, values: str) -> Iterator[str]:
    has, counted, scale = ran.kernel.statistics, ran.counters, ran.grid / len(ran.blocks)

    def whole(count: float) -> int:
        return round(count * scale)

    yield (
        f"  {ran.kernel.name}: {has['vgprs']} VGPRs, {has['agprs']} AGPRs, {has['sgprs']} SGPRs, {ran.lds} bytes of LDS, "
        f"{has['scratch']} of scratch; blocks of {ran.waves} waves; a compute unit holds {ran.held} blocks"
    )
    part = f"; {len(ran.blocks)} of {ran.grid} blocks ran; sums are scaled up" if scale > 1 else ""
    yield f"    emulated on {values}{part}"
    yield "    instructions: " + ", ".join(f"{whole(n)} {kind}" for kind, n in counted.instructions.most_common())
    yield (
        f"    loads {whole(counted.bytes_loaded)} bytes, stores {whole(counted.bytes_stored)}; "
        f"{whole(counted.mnemonics['s_waitcnt'])} s_waitcnt, at most {counted.loads_in_flight} loads of a wave in flight; "
        f"{whole(counted.barriers)} barriers"
    )
    yield (
        f"    {whole(counted.issue_cycles)} issue cycles, {whole(counted.matrix_cycles)} of matrix cores, {whole(counted.lds_cycles)} "
        f"of LDS, {whole(counted.lds_conflict_cycles)} of these lost to bank conflicts"
    )
