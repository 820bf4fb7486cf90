"""Make vLLM's CPU engine measure kernels: with fake clocks, references as the plugin's kernels, and gloo's all-reduce.

A test calls one of `measure`, `time_launches`, `reduce` and `try_kernels` in the engine's process, before a model loads.
"""

import functools
import os
import time
from pathlib import Path

import torch
from fakes import Fake, FakeClock
from keys import key
from marks import FULL

from vllm_rocm_ops import collectives, ops
from vllm_rocm_ops.collectives import qk_norm, wire
from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.core.stats import counter
from vllm_rocm_ops.tools import first_start, smoke
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.graph import all_reduce_timing, compiled_ops
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing, kernel_trial

# Linear layers, norms and activations


class LayerClock(FakeClock):
    """A clock by which the plugin wins for few tokens, and for rows if `rows_win`. A pair takes `seconds`."""

    def __init__(self, rows_win: bool, seconds: float):
        self.rows_win, self.seconds = rows_win, seconds

    def times(self, calls, sets, replays):
        time.sleep(self.seconds)
        [kernels] = calls["plugin"].args
        wins = self.rows_win if isinstance(kernels, compiled_ops.QuantComparison) else len(sets[0][0]) <= 8
        return {"plugin": [1.0 if wins else 3.0], "baseline": [2.0]}


def profile_first() -> None:
    """Make the engine run a profile run, as on a GPU, before it determines its memory."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    available = CPUWorker.determine_available_memory

    def after_a_profile_run(self):
        self.model_runner.profile_run()
        return available(self)

    CPUWorker.determine_available_memory = after_a_profile_run


def measure(factor: float = 1.0, rows_win: bool = True, seconds: float = 0.0) -> None:
    """Measure by a `LayerClock`. scaled_mm is wrong by a factor of a scale."""
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel as Native

    multiply = Native.apply_scaled_mm

    def counted(self, **arguments):
        counter("vllm", "its kernel").calls += 1
        return multiply(self, **arguments)

    def plugin(a, b, scale_a, scale_b, *others):
        counter("scaled_mm", "plugin").calls += 1
        return ops.scaled_mm.reference(a, b, scale_a, scale_b * factor, *others)

    def rows(op):
        return lambda *arguments: op.reference(*arguments, *op._defaults[len(arguments) :])

    for op in (ops.rms_norm_dynamic_per_token_quant, ops.silu_and_mul_per_token_quant):
        op.run_kernels = rows(op)
    linear_base.vllm_kernel_for = lambda *_: Native
    Native.apply_scaled_mm, ops.scaled_mm.run_kernels = counted, plugin
    worker_startup.clock = lambda: LayerClock(rows_win, seconds)
    kernel_timing.limit_s = lambda: 1000.0  # references and compilers of a CPU take their time
    profile_first()


# Launches that are timed before compilation

WHAT = {"faster": ("1", "1"), "wrong": ("1", "1.05")} | ({"slower": ("3", "1")} if FULL else {})
"""Environments of an engine: US, the plugin's microseconds beside vLLM's 2, and FACTOR, of a result."""


def time_launches(**results: str) -> None:
    """Time ops whose kernels are references, each with the name of the result that FACTOR multiplies."""
    samples = lambda side, tokens: [float(os.environ["US"]) if side == "plugin" else 2.0]
    worker_startup.clock, kernel_timing.limit_s = lambda: FakeClock(samples), lambda: 1000.0
    for name, result in results.items():
        op = getattr(ops, name)

        def run_kernels(*arguments, op=op, result=result):
            op.reference(*arguments)
            getattr(op.Arguments(*arguments), result).mul_(float(os.environ["FACTOR"]))
            return True

        op.run_kernels = run_kernels


def measured(engines, flavour: tuple[str, str], folder: Path, before: str, **options) -> tuple[dict, dict]:
    """Return a compiled model's answers and timing records by `WHAT`."""
    jobs = {}
    for name, (us, factor) in WHAT.items():
        environment = {"VLLM_ROCM_OPS_TABLES": str(folder / name), "US": us, "FACTOR": factor}
        jobs[name] = engines.job(flavour, compiled=True, environment=environment, **options)
    answers = engines.run(jobs, before=before)
    return answers, {name: records(folder / name) for name in WHAT}


def check_measured(what: str, answer: dict, record: kernel_selection.Record, calls: int, shapes: dict) -> None:
    """Check that the launches of these shapes, by op, were timed beside vLLM's compiled graph, once for all token counts.

    They served where they were faster. A wrong one is off.
    """
    for op, shape in shapes.items():
        assert sum(answer["stats"].get(op, {}).values()) == (calls if what == "faster" else 0)
        if what == "wrong":
            assert shape in record.off[op]
            continue
        timed = record.shapes[key(f"{op} {shape} compiled")]
        assert all(pair.plugin_us is not None and 0 < pair.error < 0.1 for pair in timed.values())
        assert {*compiled_ops.TOKENS} <= {*timed}


def records(folder: Path) -> list[kernel_selection.Record]:
    """Return the timing records in a folder of tables."""
    return [kernel_selection.read(path) for path in folder.glob("*/measured-*.json")]


# All-reduces with norms


class OverGloo:
    """An all-reduce of processes, which may flip a bit, or miss the other rank after some launches, if not 0.

    It may send FP8 from some rows on.
    """

    arch = archs.named("gfx950")

    def __init__(
        self, cpu_group, device, *, all_reduce, seconds=None, blocks=4, flips=False, missing_after=0, fp8_from=0
    ):
        self.seconds, self.fp8_from, self.flips, self.missing = seconds, fp8_from, flips, ""
        self.group = Fake(blocks=blocks, payload=0, wires=(wire.FP8, wire.BF16) if fp8_from else (wire.BF16,))
        self.missing_after, self.launched, self.is_closed = missing_after, 0, False

    def wire(self, op, x, *args):
        return self.group.wires[0] if len(x) >= self.fp8_from else wire.BF16

    def sum(self, x):
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        self.launched += 1
        sends_fp8 = self.wire(None, x) == wire.FP8
        total = (
            wire.fp8_sum(parts, self.arch.fp8_dtype) if sends_fp8 else sum(part.float() for part in parts).to(x.dtype)
        )
        if self.flips:
            total.view(torch.int16)[0, 0] ^= 1
        return total

    def __call__(self, op, x, *args):
        counter(f"all_reduce_{op.name}", "one launch").calls += 1
        if op is qk_norm.OP:
            return qk_norm.run_fallback(self.of_norms, torch.distributed.get_world_size(), (x, *args))
        return op.reference(self.sum(x), *args)

    def of_norms(self, squares):
        total = squares.clone()
        torch.distributed.all_reduce(total)
        return total * (2 if self.flips else 1)

    def unsupported(self, op, x, *args):
        return "too many tokens" * (len(x) > self.group.blocks)

    def check(self):
        if self.missing_after and self.launched > self.missing_after:
            self.missing = f"all_reduce: rank 1 of 2 did not come in epoch {self.missing_after + 1}"
        if self.missing:
            raise collectives.RankMissing(self.missing)

    def limit(self, seconds=None):
        self.seconds = seconds

    def close(self):
        self.is_closed = True


class GroupClock(FakeClock):
    """A clock by which the plugin wins with fewer tokens than `slow`; if it `fails`, it raises there."""

    def __init__(self, slow: int, fails: bool = False):
        self.slow, self.fails, self.pairs = slow, fails, []

    def times(self, group, agree, calls, sets, replays):
        tokens = len(sets[0][0])
        self.pairs.append(tokens)
        for name, call in calls.items():
            failing = self.fails and tokens >= self.slow and name == "baseline"
            agree(lambda call=call, failing=failing: call(*sets[0]) and (1 / 0 if failing else None))
        return {"plugin": [3.0 if tokens >= self.slow else 1.0], "baseline": [2.0]}


def reduce(slow: int, **how) -> None:
    """Name all-reduces as a GPU's engine does, and measure them by a `GroupClock`."""
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.use_custom_op_collectives = classmethod(lambda cls: True)
    worker_startup.group_clock = lambda: GroupClock(slow)
    create = functools.partial(OverGloo, **how)
    all_reduce_timing.before_compiling = functools.partial(all_reduce_timing.before_compiling, create=create)


# The trial of kernels at a first start, in a child

ARCH = archs.ARCHS["gfx942"]


class Graph:
    """A graph that repeats the captured calls."""

    def __init__(self, call, sets):
        self.replay = lambda: [call(*arguments) for arguments in sets]
        self.replay()


class Faulting:
    """An executor that aborts or sleeps in the kernels of one op's smallest case, and launches no other."""

    arch = ARCH

    def __init__(self, name: str, fault: str):
        op, self.fault = getattr(ops, name), fault
        arguments = smoke.smallest(op, ARCH).make("meta", torch.Generator(), ARCH.fp8_dtype)
        self.symbols = {planned.symbol for planned in op.explain(*arguments, arch=ARCH, require_code=True).launches}

    def launch(self, kernel, uninitialized):
        if kernel.symbol not in self.symbols:
            raise launch.NotLaunched("there is no GPU")
        if self.fault == "aborts":
            os.write(2, b"Memory access fault by GPU node-1\n")
            os.abort()
        time.sleep(600)


def child(name: str, fault: str) -> None:
    """Run the child, whose driver loads everything."""
    here, cuda = kernel_selection.machine(), torch.cuda
    driver = Fake(status="stands in".strip, versions=dict, load=lambda *_: 1)
    kernel_selection.machine = lambda: here
    cuda.device_count, archs.product_of = lambda: 1, lambda index: "a GPU"
    archs.of_device, launch.runtime, smoke.clock.capture = lambda index: ARCH, lambda: (driver, ""), Graph
    first_start.names = lambda: ["rms_norm", "scaled_mm", "silu_and_mul"]
    launch._executor = Faulting(name, fault)
    if fault == "sleeps":
        first_start.SECONDS = 3.0
    first_start.main()


def try_kernels(name: str, fault: str) -> None:
    """Let workers of this process try the kernels."""
    kernel_trial.applies, kernel_trial.device_of = lambda: True, lambda worker: {}
    kernel_trial.SECONDS = 300.0  # a busy machine may take 30 s to import what a child needs
    kernel_trial.CODE = f"import on_cpu; on_cpu.child({name!r}, {fault!r})"
