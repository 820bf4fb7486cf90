"""Judge the plugin or a submission as the contests do: results first, then times, then the score.

A time is the host's, from a call to the end of its work on the GPU. A problem is called 3 to 100 times, until the standard error of the
mean is small enough, or for 10 s (30 s in a ranked run). The score is the geometric mean of the means. The output follows RadeonFlow's
checker: best and slowest time, TFLOPS, and a geometric mean of the best.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from contests import contest as contests
from contests.contest import Contest, Sizes
from vllm_rocm_ops.core.clock import GpuClock
from vllm_rocm_ops.core.stats import reset_stats, stats

MIN_CALLS, MAX_CALLS = 3, 100
SECONDS, RANKED_SECONDS, WALL_SECONDS = 10.0, 30.0, 120.0
STAGED_CALLS = 5
NEXT_SEED = 13  # seed increment per call of a ranked run
Kernel = Callable[..., object]  # called with data and a Stage


@dataclass
class Machine:
    """A kernel's device with its e4m3 dtype. FP8 instructions are off by up to `rounding` of a sum's terms."""

    device: str
    fp8_dtype: torch.dtype
    rounding: float = 0.0

    def seconds(self) -> float:
        """Return the time after all work so far, or nothing on CPU tensors, which an emulator runs."""
        if self.device == "cpu":
            return 0.0
        torch.cuda.synchronize()
        return time.perf_counter()


def gpu() -> Machine:
    """Return the first GPU. Raises RuntimeError without one."""
    arch = GpuClock().arch
    return Machine("cuda", arch.fp8_dtype, arch.sum_rounding)


class Raised(RuntimeError):
    """Signal a kernel's error, in one line."""


@dataclass(frozen=True)
class Verdict:
    """The result of a problem.

    `wrong` is the fault, "" if it is correct, None if it was not checked. `times` and `stages` are seconds of the calls and of the
    plugin's stages. `ran` lists the kernels of the plugin's ops.
    """

    number: int
    sizes: Sizes
    wrong: str | None
    times: tuple[float, ...] = ()
    flops: float = 0.0
    floor_us: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    ran: tuple[str, ...] = ()

    def lines(self, kind: str) -> Iterator[str]:
        """Yield the report's lines."""
        sizes = " ".join(f"{name} {size}" for name, size in self.sizes.items())
        said = {None: "", "": "ok"}.get(self.wrong, "FAILED")
        text = f"{kind} {self.number:2}: {sizes:48} {said:6}"
        if self.times:
            for name, seconds in (("best", min(self.times)), ("slowest", max(self.times))):
                text += f" {name} {seconds * 1e6:.2f} us {self.flops / seconds / 1e12:.2f} TFLOPS "
            text += f" mean of {len(self.times)} {statistics.mean(self.times) * 1e6:.2f} us"
        if self.floor_us:
            text += f"  the task's floor {self.floor_us:.2f} us"
        yield text.rstrip()
        if self.wrong:
            yield f"    {self.wrong}"
        for name, seconds in self.stages.items():
            yield f"    {name} {seconds * 1e6:.2f} us"
        if self.ran:
            yield f"    ran {'; '.join(self.ran)}"


@dataclass(frozen=True)
class Judge:
    """Judge a contest. `kernel` is called with data and a `Stage`."""

    contest: Contest
    kernel: Kernel
    machine: Machine

    def data(self, sizes: Sizes, later: int = 0) -> object:
        """Return the inputs of a problem; a ranked run adds `later` to the seed."""
        return self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype, later)

    def call(self, data: object, stage: contests.Stage = contests.unstaged) -> object:
        """Return a result. Raises `Raised` if the kernel fails."""
        try:
            with torch.no_grad():
                return self.kernel(data, stage)
        except Exception as error:
            raise Raised(f"the kernel raises {type(error).__name__}: {error}".splitlines()[0]) from error

    def check(self, data: object) -> str:
        """Return what is wrong with the result for these data, which the call may change, or ""."""
        own = contests.copy(data)
        try:
            return self.compare(self.call(data), own)
        except Raised as error:
            return str(error)

    def compare(self, result: object, own: object) -> str:
        """Return what is wrong with the result for unchanged data, or ""."""
        with torch.no_grad():
            slack = self.machine.rounding and self.machine.rounding * self.contest.terms(own)
            return contests.compare(self.contest, result, self.contest.reference(own), slack)

    def time(self, sizes: Sizes, once: bool, ranked: bool) -> tuple[str, tuple[float, ...]]:
        """Return what is wrong, or "", and the times of calls. The first call is checked; in a ranked run each is, on new data."""
        data = self.data(sizes)
        if wrong := self.check(data):
            return wrong, ()
        times: list[float] = []
        begun = time.perf_counter()
        for calls in range(1, 2 if once else MAX_CALLS + 1):
            if ranked:
                data = self.data(sizes, calls * NEXT_SEED)
                own = contests.copy(data)
            else:
                self.contest.again(data)
            start = self.machine.seconds()
            result = self.call(data)
            times.append(self.machine.seconds() - start)
            if ranked and (wrong := self.compare(result, own)):
                return wrong, ()
            if calls >= MIN_CALLS and self.enough(times, RANKED_SECONDS if ranked else SECONDS, begun):
                break
        return "", tuple(times)

    def enough(self, times: list[float], seconds: float, begun: float) -> bool:
        """True if the times suffice."""
        error = statistics.stdev(times) / len(times) ** 0.5
        certain = error < self.contest.error * statistics.mean(times)
        return certain or sum(times) > seconds or time.perf_counter() - begun > WALL_SECONDS

    def stages(self, sizes: Sizes) -> dict[str, float]:
        """Return the best seconds of each stage of a kernel. A stage ends on the GPU before the next begins."""
        data, times_of = self.data(sizes), {}

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            start = self.machine.seconds()
            yield
            times_of.setdefault(name, []).append(self.machine.seconds() - start)

        for _ in range(STAGED_CALLS):
            self.contest.again(data)
            self.call(data, stage)
        return {name: min(times) for name, times in times_of.items()}

    def checked(self, number: int, sizes: Sizes) -> Verdict:
        """Check a problem, untimed."""
        reset_stats()
        return Verdict(number, sizes, self.check(self.data(sizes)), ran=_ran())

    def timed(self, number: int, once: bool, ranked: bool) -> Verdict:
        """Check and time a benchmark."""
        sizes = self.contest.benchmarks[number]
        reset_stats()
        wrong, times = self.time(sizes, once, ranked)
        ran = _ran()
        stages = {} if wrong or once else self.stages(sizes)
        flops, floor = self.contest.flops(sizes), self.contest.floors.get(number)
        return Verdict(number, sizes, wrong, times, flops, floor, stages, ran)

    def profiled(self, number: int) -> Verdict:
        """Call a benchmark for a profiler."""
        sizes = self.contest.benchmarks[number]
        data = self.data(sizes)
        reset_stats()
        for _ in range(STAGED_CALLS):
            self.contest.again(data)
            self.call(data)
        self.machine.seconds()
        return Verdict(number, sizes, None, ran=_ran())


def _ran() -> tuple[str, ...]:
    """Return the kernels of each op."""
    return tuple(f"{op}: {kernel}" for op, kernels in stats().items() for kernel in kernels)


def score(verdicts: list[Verdict]) -> str:
    """Format the geometric means. The contests' score is the mean's."""
    timed = [verdict for verdict in verdicts if verdict.times]
    if not timed:
        return "nothing was timed"
    best = statistics.geometric_mean(min(verdict.times) for verdict in timed) * 1e6
    rate = statistics.geometric_mean(verdict.flops / min(verdict.times) for verdict in timed) / 1e12
    mean = statistics.geometric_mean(statistics.mean(verdict.times) for verdict in timed) * 1e6
    return f"geometric means over {len(timed)}: best {best:.2f} us {rate:.2f} TFLOPS, mean {mean:.2f} us, which is the score"
