"""Check ops' cases in the emulator, and describe the kernels of a call. Needs the extra [emulator]."""

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

from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.correctness import Wrong, check_case, generator_of
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import extent
from vllm_rocm_ops.emulator import Emulator, EmulatorError
from vllm_rocm_ops.emulator.counters import Counters
from vllm_rocm_ops.emulator.objects import KernelObject

NEIGHBORS = 16  # adjacent blocks to run together: the largest number of four waves each in lockstep
EXPLAINED_BLOCKS = 64  # per launch
HEADER = f"{'op':36} {'cases':>6} {'PyTorch':>8} {'kernels':>8} {'seconds':>8}  result"


# The cases


class Task(NamedTuple):
    """A case, the configurations to check ((None,) if no kernel supports it), and their kernels."""

    op: Op
    case: Case
    configs: tuple
    kernels: frozenset[str]


class Checked(NamedTuple):
    """A finished task: its kernels, whether PyTorch ran instead, CPU seconds, and the fault, if any."""

    op: str
    kernels: frozenset[str]
    falls_back: bool
    seconds: float
    wrong: str


def tasks(cases: Iterable[tuple[Op, Case]], arch: Arch) -> list[Task]:
    """Return each case with its default configuration, and with those that add a kernel that no earlier case runs."""
    queued: list[Task] = []
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
        queued.append(Task(the_op, case, tuple(chosen), frozenset(kernels)))
    return queued


@functools.cache
def emulator_of(arch_name: str) -> Emulator:
    """Return this process's emulator of an architecture, which caches decoded kernels."""
    return Emulator(arch_name)


def check(task: Task, arch_name: str) -> Checked:
    """Check one task."""
    start, wrong = time.process_time(), ""
    emulator = emulator_of(arch_name)
    with launches.executor(emulator):
        for config in task.configs:
            try:
                check_case(task.op, task.case, "cpu", emulator.arch, [config])
            except (Wrong, EmulatorError) as error:
                wrong = f"{task.case.name} in {config}: {type(error).__name__}: {error}"
                break
    return Checked(task.op.name, task.kernels, task.configs == (None,), time.process_time() - start, wrong)


_of_this_process: list[tuple[Task, str]] = []  # inherited by forked workers


def check_numbered(number: int) -> Checked:
    """Check an inherited task."""
    return check(*_of_this_process[number])


def check_all(queued: list[Task], arch_name: str, jobs: int) -> Iterator[Checked]:
    """Check tasks in `jobs` processes; results arrive in order."""
    torch.set_num_threads(1)  # tensors are small, and threads do not survive a fork
    if jobs == 1:
        yield from (check(task, arch_name) for task in queued)
        return
    _of_this_process[:] = [(task, arch_name) for task in queued]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(check_numbered, range(len(queued)))


def verify(cases: Iterable[tuple[Op, Case]], arch_name: str, jobs: int) -> Iterator[tuple[str, bool]]:
    """Check the cases, and yield report lines, each with whether it reports a failure."""
    arch = emulator_of(arch_name).arch
    queued = tasks(cases, arch)
    yield HEADER, False
    done: list[Checked] = []
    for op_name, group in itertools.groupby(check_all(queued, arch_name, jobs), lambda checked: checked.op):
        of_op = list(group)
        kernels = frozenset().union(*(result.kernels for result in of_op))
        wrong = [result.wrong for result in of_op if result.wrong]
        left = sum(result.falls_back for result in of_op)
        verdict = "FAILED" if wrong else "ok" if kernels else ""
        seconds = sum(result.seconds for result in of_op)
        line = f"{op_name:36} {len(of_op):6} {left:8} {len(kernels):8} {seconds:8.1f}  {verdict}"
        yield line.rstrip(), bool(wrong)
        yield from (("  " + text, True) for text in wrong)
        done += of_op
    failed = sum(bool(result.wrong) for result in done)
    said = f"{failed} failed" if failed else "all passed" if any(result.kernels for result in done) else "no kernel ran"
    total = sum(result.seconds for result in done)
    yield f"{len(done)} cases on {arch}: {said}, {total:.1f} s CPU time", bool(failed)


# The kernels of a call


class Ran(NamedTuple):
    """The statistics of a kernel and the counters of the blocks that ran."""

    kernel: KernelObject
    counters: Counters
    grid: int  # blocks in the launch
    blocks: list[int]  # blocks that ran
    waves: int  # per block
    lds: int  # bytes per block
    held: int  # resident blocks per compute unit, limited by registers and LDS


def executable(planned: Sequence[Launch]) -> list[Launch]:
    """Return launches with tensors for their workspaces and counters; equal workspaces share a tensor."""
    tensors: dict[int, torch.Tensor] = {}

    def tensor(arg):
        if isinstance(arg, launches.Workspace):
            return tensors.setdefault(id(arg), torch.empty(arg, dtype=torch.uint8))
        return torch.zeros(arg, dtype=torch.int32) if isinstance(arg, launches.Counters) else arg

    return [launch.with_each(tensor) for launch in planned]


def sample(grid: int, most: int) -> list[int]:
    """Return about `most` blocks of a grid, in evenly spread runs of neighbors, which share tiles."""
    if grid <= most:
        return list(range(grid))
    runs = max(most // NEIGHBORS, 1)
    starts = ((2 * run + 1) * grid // (2 * runs) - NEIGHBORS // 2 for run in range(runs))
    return [start + i for start in starts for i in range(NEIGHBORS)]


def run(emulator: Emulator, launch: Launch, most: int) -> Ran:
    """Run about `most` blocks of a launch."""
    code = launches.code_object(launch.module, emulator.arch.name)
    kernel = emulator.program(code, launch.symbol).object
    grid = math.prod(launch.grid)
    blocks = sample(grid, most)
    counters = emulator.run(code, launch, (), blocks)
    waves = -(-math.prod(launch.block) // emulator.arch.wave_lanes)
    lds = kernel.lds + launch.lds
    one_unit = dataclasses.replace(emulator.options, compute_units=1)
    return Ran(kernel, counters, grid, blocks, waves, lds, one_unit.resident_blocks(kernel, waves, lds))


def zeros_like(value):
    """Return a zero tensor with the shape and strides of a meta tensor; other values unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(extent(value), dtype=value.dtype).as_strided(value.shape, value.stride())


def describe(op: Op, arguments: Sequence, case: Case | None, arch_name: str) -> Iterator[str]:
    """Describe the kernels of a call, line by line.

    The call has the case's arguments, or without a case zeros like `arguments`. Of the last launch, a sample of blocks runs.
    """
    emulator = Emulator(arch_name, races=False)
    if case:
        values = f"the values of the case {case.name}"
        arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
    else:
        values, arguments = "zeros", tuple(map(zeros_like, arguments))
    planned = executable(op.explain(*arguments, arch=emulator.arch).launches)
    if not planned:
        yield "  no kernel to emulate: PyTorch runs this call"
    for launch in planned:
        ran = run(emulator, launch, EXPLAINED_BLOCKS if launch is planned[-1] else math.prod(launch.grid))
        yield from _lines(ran, values)


def _lines(ran: Ran, values: str) -> Iterator[str]:
    has, counted, scale = ran.kernel.statistics, ran.counters, ran.grid / len(ran.blocks)

    def whole(count: float) -> int:
        return round(count * scale)

    yield (
        f"  {ran.kernel.name}: {has['vgprs']} VGPRs, {has['agprs']} AGPRs, {has['sgprs']} SGPRs, {ran.lds} bytes LDS, "
        f"{has['scratch']} bytes scratch; {ran.waves} waves per block; {ran.held} resident blocks per compute unit"
    )
    part = f"; {len(ran.blocks)} of {ran.grid} blocks ran, sums are extrapolated" if scale > 1 else ""
    yield f"    emulated on {values}{part}"
    yield "    instructions: " + ", ".join(f"{whole(n)} {kind}" for kind, n in counted.instructions.most_common())
    yield (
        f"    {whole(counted.bytes_loaded)} bytes loaded, {whole(counted.bytes_stored)} bytes stored; "
        f"{whole(counted.mnemonics['s_waitcnt'])} s_waitcnt, at most {counted.loads_in_flight} loads in flight per wave; "
        f"{whole(counted.barriers)} barriers"
    )
    yield (
        f"    {whole(counted.issue_cycles)} issue cycles, {whole(counted.matrix_cycles)} matrix core cycles, {whole(counted.lds_cycles)} "
        f"LDS cycles, of which {whole(counted.lds_conflict_cycles)} are bank conflicts"
    )
