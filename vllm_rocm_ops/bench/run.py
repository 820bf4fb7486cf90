"""Runs the ops' cases, or a model's calls, on this machine: are the results right, and how long do they take?

A case is checked as the tests check it (correctness.py) and timed as the tuner times (clock.py). Bytes are those of all
tensors, those updated in place twice; operations are counted for products.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from vllm_rocm_ops import correctness
from vllm_rocm_ops.bench.clock import Clock, tensor_bytes
from vllm_rocm_ops.op import Case, Op

PROFILED_CALLS = 10
HBM_BYTES = tuple(2**i for i in range(20, 33, 2))
READ_COLUMNS = 8192


@dataclass(frozen=True)
class Line:
    """One case: what ran it, what is wrong with the result (None if nothing is, "" if it was not checked), the samples in the
    clock's unit, and what a call moves and computes."""

    op: str
    case: str
    kernel: str
    wrong: str | None
    samples: tuple[float, ...] = ()
    bytes_moved: int = 0
    flops: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def __str__(self) -> str:
        verdict = {None: "right", "": ""}.get(self.wrong, "WRONG")
        text = f"{self.op:36} {self.case:24} {verdict:6}"
        if self.samples:
            text += f" {min(self.samples):9.2f} {self.median:9.2f} {max(self.samples):9.2f}"
            text += f" {self.bytes_moved / self.median / 1e3:8.0f}"
            text += f" {self.flops / self.median / 1e6:8.1f}" if self.flops else " " * 9
        return f"{text}  {self.kernel}" + (f": {self.wrong}" if self.wrong else "")


HEADER = (
    f"{'op':36} {'case':24} {'result':6} {'best us':>9} {'median':>9} {'slowest':>9} {'GB/s':>8} {'TFLOPS':>8}  kernel"
)


def select(cases: Iterable[tuple[Op, Case]], op: str, case: str) -> list[tuple[Op, Case]]:
    """Those whose names match the patterns. Raises ValueError where none do."""
    found = [(o, c) for o, c in cases if fnmatch.fnmatchcase(o.name, op) and fnmatch.fnmatchcase(c.name, case)]
    if not found:
        raise ValueError(f"no case matches --op {op} --case {case}")
    return found


def run(
    cases: Iterable[tuple[Op, Case]], clock: Clock | None, once: bool = False, profile: bool = False
) -> Iterator[Line]:
    """Each case, checked and timed; called once and checked, if `once`; only called, a few times, if `profile`. Without a clock
    the reference runs, on CPU: there is nothing to check and to time. Kernels alone are timed."""
    device = clock.device if clock else "cpu"
    fp8_dtype = clock.arch.fp8_dtype if clock else torch.float8_e4m3fn
    for op, case in cases:
        generator = correctness.generator_of(case.name)
        arguments = case.make("cpu", generator, fp8_dtype)
        on_device = tuple(correctness.clone(value, device) for value in arguments)
        explained = op.explain(*on_device, arch=clock and clock.arch, require_code=True)
        kernel = " + ".join(launch.symbol for launch in explained.launches) or explained.source
        if profile:
            for _ in range(PROFILED_CALLS):
                op(*on_device)
            yield Line(op.name, case.name, kernel, "")
            continue
        wrong = _check(op, arguments, device) if clock else _call(op, on_device)
        if clock is None or once or not explained.launches:
            yield Line(op.name, case.name, kernel, wrong)
            continue
        result = op(*on_device)
        moved = tensor_bytes(*on_device, *correctness.as_tuple(result))
        moved += tensor_bytes(*(getattr(op.Arguments(*on_device), name) for name in op.mutates))
        copies = range(clock.calls(moved))
        sets = [tuple(correctness.clone(value, device) for value in on_device) for _ in copies]
        samples = clock.samples({"op": clock.prepare(op, sets)})["op"]
        sizes = op.problem(op.Arguments(*on_device))
        flops = 2 * sizes["m"] * sizes["n"] * sizes["k"] if {"m", "n", "k"} <= set(sizes) else 0
        yield Line(op.name, case.name, kernel, wrong, tuple(samples), moved, flops)


def _call(op: Op, arguments: tuple) -> str:
    op(*arguments)
    return ""


def _check(op: Op, arguments: tuple, device: str) -> str | None:
    try:
        with correctness.unwritten_is_nan():
            correctness.run_and_check(op, arguments, device)
    except correctness.Wrong as error:
        return str(error)
    return None


def summary(lines: list[Line]) -> str:
    """How many are wrong, and the geometric means of the medians."""
    checked = [line for line in lines if line.wrong != ""]
    wrong = sum(line.wrong is not None for line in checked)
    parts = [f"{len(lines)} cases"]
    if checked:
        parts.append(f"{wrong} wrong" if wrong else "all right")
    timed: dict[str, list[float]] = {}
    for line in lines:
        if line.samples:
            timed.setdefault(line.op, []).append(line.median)
    text = ", ".join(parts)
    for op, medians in timed.items():
        text += f"\n{op}: {statistics.geometric_mean(medians):.2f} us as a geometric mean of {len(medians)} cases"
    if len(timed) > 1:
        every = [median for medians in timed.values() for median in medians]
        text += f"\nall: {statistics.geometric_mean(every):.2f} us as a geometric mean"
    return text


# Memory bandwidth


def bandwidths(clock: Clock, op: Op, size: int) -> dict[str, float]:
    """GB/s of moving `size` bytes of HBM: a copy (read and written), PyTorch's sum of them, and `op`, our `unquantized_gemm`,
    which multiplies one token with them as a weight."""
    count = clock.calls(size)
    sources = [torch.ones(size // 2, dtype=torch.bfloat16, device=clock.device) for _ in range(count)]
    total = torch.zeros((), dtype=torch.bfloat16, device=clock.device)
    token = torch.ones(1, READ_COLUMNS, dtype=torch.bfloat16, device=clock.device)
    weights = [(token, source.view(-1, READ_COLUMNS)) for source in sources]
    prepared = {
        "copy": clock.prepare(
            lambda source: source[: size // 4].copy_(source[size // 4 :]), [(source,) for source in sources]
        ),
        "sum": clock.prepare(lambda source: torch.sum(source, dim=0, out=total), [(source,) for source in sources]),
        op.name: clock.prepare(op, weights),
    }
    return {name: size / statistics.median(us) / 1e3 for name, us in clock.samples(prepared).items()}


def hbm(clock: Clock, op: Op) -> Iterator[str]:
    """A table of bandwidths by size, line by line."""
    yield f"{'MB':>8} {'copy':>8} {'sum':>8} {op.name:>18}  GB/s"
    for size in HBM_BYTES:
        found = bandwidths(clock, op, size)
        yield f"{size / 1e6:8.0f} {found['copy']:8.0f} {found['sum']:8.0f} {found[op.name]:18.0f}"
    usual = clock.arch.bandwidth_gb_s
    yield f"costs are fitted to {usual:.0f} GB/s of reading on {clock.arch.name}"
