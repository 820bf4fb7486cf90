"""Judge ours, or a user's own file, as the contests do: results first, then times, then the score.

A time is the host's, from a call to the end of its work on the GPU. A problem is called 3 to 100 times, until the standard error of
the mean is small enough, or 10 s (in a ranked run 30 s) are over. The score is the geometric mean of the means. RadeonFlow's
checker prints the best and the slowest time, TFLOPS, and a geometric mean of the best; so do the lines here.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from contests import contest as contests
from contests.contest import Contest, Sizes
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core.stats import reset_stats, stats

LEAST_CALLS, MOST_CALLS = 3, 100
SECONDS, RANKED_SECONDS, WALL_SECONDS = 10.0, 30.0, 120.0
STAGED_CALLS = 5
NEXT_SEED = 13  # from one call of a ranked run to the next
Kernel = Callable[..., object]  # of data and a Stage


class Machine(Protocol):
    """What a kernel runs on: tensors of `device`, with this e4m3. Its FP8 instructions are off by `rounding` of a sum's terms.
    `seconds()` is the time when all work so far is done."""

    device: str
    fp8_dtype: torch.dtype
    rounding: float

    def seconds(self) -> float: ...


class Gpu:
    """The first GPU."""

    device = "cuda"

    def __init__(self, fp8_dtype: torch.dtype):
        self.fp8_dtype, self.rounding = fp8_dtype, archs.of_device(0).sum_rounding

    def seconds(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


class Emulated:
    """CPU tensors, on which an emulator runs the ops. Nothing is timed."""

    device = "cpu"
    rounding = 0.0

    def __init__(self, fp8_dtype: torch.dtype):
        self.fp8_dtype = fp8_dtype

    def seconds(self) -> float:
        return 0.0


class Raised(RuntimeError):
    """A kernel's error, in one line."""


@dataclass(frozen=True)
class Verdict:
    """What was found of a problem: what is wrong (None if it was not checked), the seconds of its calls and of ours' stages, and
    what our ops ran."""

    number: int
    sizes: Sizes
    wrong: str | None
    times: tuple[float, ...] = ()
    flops: float = 0.0
    floor_us: float | None = None
    stages: dict[str, float] = field(default_factory=dict)
    ran: tuple[str, ...] = ()

    def lines(self, kind: str) -> Iterator[str]:
        sizes = " ".join(f"{name} {size}" for name, size in self.sizes.items())
        said = {None: "", "": "right"}.get(self.wrong, "WRONG")
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
    """A contest's judge. `kernel` is called with data and a `Stage`."""

    contest: Contest
    kernel: Kernel
    machine: Machine

    def call(self, data: object, stage: contests.Stage = contests.unstaged) -> object:
        """Return a result; raise `Raised` where the kernel fails."""
        try:
            with torch.no_grad():
                return self.kernel(data, stage)
        except Exception as error:
            raise Raised(f"the kernel raises {type(error).__name__}: {error}".splitlines()[0]) from error

    def check(self, data: object) -> str:
        """Say what is wrong with the result for these data, which the call may change."""
        own = contests.copy(data)
        try:
            result = self.call(data)
        except Raised as error:
            return str(error)
        return self.compare(result, own)

    def compare(self, result: object, own: object) -> str:
        """Say what is wrong with the result for data that no call has changed."""
        with torch.no_grad():
            slack = self.machine.rounding and self.machine.rounding * self.contest.terms(own)
            return contests.compare(self.contest, result, self.contest.reference(own), slack)

    def time(self, sizes: Sizes, once: bool, ranked: bool) -> tuple[str, tuple[float, ...]]:
        """Say what is wrong, and how long calls take. The first call is checked; in a ranked run each is, on new data."""
        data = self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype)
        wrong = self.check(data)
        if wrong:
            return wrong, ()
        times: list[float] = []
        begun = time.perf_counter()
        for calls in range(1, 2 if once else MOST_CALLS + 1):
            if ranked:
                data = self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype, calls * NEXT_SEED)
                own = contests.copy(data)
            else:
                self.contest.again(data)
            start = self.machine.seconds()
            result = self.call(data)
            times.append(self.machine.seconds() - start)
            if ranked:
                wrong = self.compare(result, own)
                if wrong:
                    return wrong, ()
            if calls >= LEAST_CALLS and self.enough(times, RANKED_SECONDS if ranked else SECONDS, begun):
                break
        return "", tuple(times)

    def enough(self, times: list[float], seconds: float, begun: float) -> bool:
        error = statistics.stdev(times) / len(times) ** 0.5
        certain = error < self.contest.error * statistics.mean(times)
        return certain or sum(times) > seconds or time.perf_counter() - begun > WALL_SECONDS

    def stages(self, sizes: Sizes) -> dict[str, float]:
        """Return the best seconds of each stage of a kernel. A stage ends on the GPU before the next begins."""
        data = self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype)
        found: dict[str, list[float]] = {}

        @contextlib.contextmanager
        def stage(name: str) -> Iterator[None]:
            start = self.machine.seconds()
            yield
            found.setdefault(name, []).append(self.machine.seconds() - start)

        for _ in range(STAGED_CALLS):
            self.contest.again(data)
            self.call(data, stage)
        return {name: min(times) for name, times in found.items()}

    def checked(self, number: int, sizes: Sizes) -> Verdict:
        """Check a problem; time nothing."""
        reset_stats()
        wrong = self.check(self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype))
        return Verdict(number, sizes, wrong, ran=_ran())

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
        """Only call a benchmark, for a profiler."""
        sizes = self.contest.benchmarks[number]
        data = self.contest.data(sizes, self.machine.device, self.machine.fp8_dtype)
        reset_stats()
        for _ in range(STAGED_CALLS):
            self.contest.again(data)
            self.call(data)
        self.machine.seconds()
        return Verdict(number, sizes, None, ran=_ran())


def _ran() -> tuple[str, ...]:
    """Return what each op ran."""
    return tuple(f"{op}: {kernel}" for op, kernels in stats().items() for kernel in kernels)


def score(verdicts: list[Verdict]) -> str:
    """Return the geometric means of what was timed. The contests' score is the one of the mean times."""
    timed = [verdict for verdict in verdicts if verdict.times]
    if not timed:
        return "nothing is timed"
    best = statistics.geometric_mean(min(verdict.times) for verdict in timed) * 1e6
    rate = statistics.geometric_mean(verdict.flops / min(verdict.times) for verdict in timed) / 1e12
    mean = statistics.geometric_mean(statistics.mean(verdict.times) for verdict in timed) * 1e6
    return (
        f"geometric means of {len(timed)}: best {best:.2f} us {rate:.2f} TFLOPS, mean {mean:.2f} us, which is the score"
    )
