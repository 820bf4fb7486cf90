"""Fit the constants that no microbenchmark gives, and report the errors against published times.

    python -m serving_benchmarks.timing_study.calibrate MEASUREMENTS OBJECTS

MEASUREMENTS is a folder with peer_measurements.csv, gfx942_issue_microbench.csv and gfx942_traced_asm.csv; no other
file in it is read. OBJECTS has the measured kernels, compiled for gfx942: residual_rms.co, swiglu.co and skinny_gemm.co
from huggingface/hf-rocm-kernels, wvsplitk.co from vLLM's csrc/rocm/skinny_gemms.cu, and the kernels that traced.py
reads. The barrier is fitted first, on one traced kernel, then the others on decode kernels. The constants that the
package needs go to its calibration.json, the evidence to calibration.json in this folder; `--check` only prints. Held-out points are predicted with the constants fitted to the others.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.timing import launch_time, machines
from vllm_rocm_ops.timing.launch_time import Prediction
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.timing.trace import Recording, RecordingEmulator, aligned, record

from . import fitting, microbenchmarks, points, report, traced
from .points import Point
from .report import HALVES, Case

CALIBRATION = Path(machines.__file__).with_name("calibration.json")
EVIDENCE = Path(__file__).with_name("calibration.json")
SHIPPED = ("fitted", "classes")  # predictions and their error bands need these
BLOCKS = 64  # recorded blocks per launch
STEPS = {"start": (0.0, 3.0, 0.1), "wave_latency": (0, 1000, 50), "mall_bandwidth": (4000, 12000, 500)}
FITTED = {"barrier": traced.BARRIERS, **STEPS}
"""By fitted constant: its minimum, its maximum, and the step between the values tried."""


def _zeros(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return aligned(torch.empty(shape, dtype=dtype, device="meta"))


def _one() -> torch.Tensor:
    return aligned(torch.ones(1))


def _symbol(path: Path, part: str) -> str:
    """Return the kernel of a code object whose name contains a part, or raise ValueError."""
    found = [name for name in CodeObject(path).kernels if part in name]
    if not found:
        raise ValueError(f"{path} must hold a kernel with {part} in its name")
    return found[0]


Prepared = tuple[Path, Launch, list[torch.Tensor]]  # code object, launch, cold tensors


def _residual_rms(folder: Path, point: Point) -> Prepared:
    """Prepare a launch with a block per row, with the source's number of threads."""
    path, (m, n) = folder / "residual_rms.co", (point.m, point.n)
    threads = 1024 if m <= 32 else 768 if m <= 128 else 384
    args = (_zeros(m, n), _zeros(m, n), _zeros(n), _one(), _zeros(m, n, dtype=torch.uint8), None, 1e-6, n, 0)
    return path, Launch("", _symbol(path, "residual_rms_vectorized"), (m, 1, 1), (threads, 1, 1), args), []


_SWIGLU_THREADS = ((32, 256), (64, 448), (128, 64), (256, 192), (1024, 512), (2048, 128))


def _swiglu(folder: Path, point: Point) -> Prepared:
    """Prepare a launch on 16384 columns, as the blog says: two halves of 8192."""
    path, (m, n) = folder / "swiglu.co", (point.m, point.n // 2)
    threads = next((each for rows, each in _SWIGLU_THREADS if m * n <= rows * 16384), 1024)
    args = (_zeros(m, 2 * n), _one(), _zeros(m, n, dtype=torch.uint8), _zeros(8), m, n, 0)
    grid = -(-n * m // 8 // threads)
    return path, Launch("", _symbol(path, "swiglu_vectorized"), (grid, 1, 1), (threads, 1, 1), args), []


_SKINNY = {  # by n, k, maximum rows: producers of A, of B, consumers, splits; lanes of A, B, queue, rows, instructions
    (2304, 16384, 8): (3, 6, 2, 16, 1, 4, 3, 8, 4),
    (2304, 16384, 16): (3, 4, 2, 8, 1, 4, 3, 16, 8),
    (2304, 16384, 32): (2, 4, 2, 8, 2, 4, 2, 16, 8),
    (13312, 16384, 8): (3, 6, 2, 3, 1, 3, 4, 8, 4),
    (13312, 16384, 16): (2, 5, 3, 3, 1, 3, 3, 16, 8),
    (13312, 16384, 32): (3, 6, 3, 1, 2, 3, 3, 16, 8),
    (16384, 6656, 8): (2, 7, 2, 1, 1, 4, 2, 8, 4),
    (16384, 6656, 16): (2, 5, 3, 1, 1, 4, 3, 16, 8),
    (16384, 6656, 32): (2, 4, 2, 1, 2, 4, 2, 16, 8),
}


def _skinny_gemm(folder: Path, point: Point) -> Prepared:
    """Prepare a launch with the source's configuration for the shape, and a cold weight, which the benchmark rotated."""
    path, (m, n, k) = folder / "skinny_gemm.co", (point.m, point.n, point.k)
    *workers, split = (config := _SKINNY[n, k, next(rows for rows in (8, 16, 32) if m <= rows)])[:4]
    instance = "".join(f"Li{number}E" for number in config[4:])
    weight = _zeros(n, k, dtype=torch.uint8)
    args = (_zeros(m, k, dtype=torch.uint8), weight, _zeros(m, n), _one(), m, n, k, k, split, *workers)
    symbol = _symbol(path, f"skinny_gemm_kernelI{instance}")
    return path, Launch("", symbol, (304, 1, 1), (64 * sum(workers), 1, 1), args), [weight]


def _rounds_of(rows: int, at_once: int, waves: int) -> int:
    """Return the fewest waves of a block, at most `waves`, with the minimum rounds of `at_once` rows per wave."""
    rounds = -(-rows // (at_once * waves))
    return next(fewer for fewer in range(max(1, waves - 12), waves + 1) if -(-rows // (at_once * fewer)) == rounds)


def _gemv(folder: Path, point: Point) -> Prepared:
    """Prepare vLLM's wvSplitK for one token, two weight rows at a time.

    A block has 16 waves, of which some exit at once. The weight is cold.
    """
    path, (n, k) = folder / "wvsplitk.co", (point.n, point.k)
    weight, units, rows = _zeros(n, k), machines.MI300X.arch.compute_units, 2
    working = _rounds_of(n, units * rows, 16)
    args = (k, k, k, n, 1, 1, weight, _zeros(1, k), None, _zeros(1, n), working, units)
    return path, Launch("", _symbol(path, "wvSplitK_hf_sml_"), (units, 1, 1), (64, 16, 1), args), [weight]


KERNELS: dict[str, Callable[[Path, Point], Prepared]] = {
    "hfrk_skinny_gemm": _skinny_gemm,
    "hfrk_residual_rms": _residual_rms,
    "hfrk_swiglu": _swiglu,
    "wvSpltK (hipBLASLt)": _gemv,
}


def recordings(folder: Path, chosen: Iterable[Point]) -> dict[Point, Recording]:
    """Return the recordings of these points' kernels, or raise ValueError if a code object is missing."""
    emulator, found = RecordingEmulator(str(machines.MI300X.arch), races=False), {}
    for point in chosen:
        path, launch, cold = KERNELS[point.kernel](folder, point)
        blocks = emulated.sample(math.prod(launch.grid), BLOCKS)
        found[point] = record(emulator, path, launch, blocks, cold=cold)
    return found


def errors(machine: Machine, recorded: dict[Point, Recording]) -> dict[Point, float]:
    """Return log(predicted / measured) by point."""
    return {point: math.log(launch_time.predict(machine, each).us / point.us) for point, each in recorded.items()}


def fit(machine: Machine, recorded: dict[Point, Recording]) -> Machine:
    """Return the machine with the constants of `STEPS` that minimize the mean |log ratio|.

    They are found one at a time until none changes.
    """
    assert not any(point.held_out for point in recorded)
    return fitting.least(machine, STEPS, lambda tried: statistics.mean(map(abs, errors(tried, recorded).values())))


def calibrate(measurements: Path, objects: Path, machine: Machine, fitting: bool) -> dict:
    """Fit the constants if asked to, print each point, and return the report on both halves."""
    chosen = [point for point in points.read(measurements, held_out=True) if point.kernel in KERNELS]
    kernels = [(kernel, traced.recording(objects, kernel)) for kernel in traced.read(measurements)]
    if fitting:
        machine = machine.but(barrier=traced.fit_barrier(_traced_machine(machine), *kernels[0]))
    recorded = recordings(objects, chosen)
    if fitting:
        machine = fit(machine, {point: each for point, each in recorded.items() if not point.held_out})
    cases = [_case(point, launch_time.predict(machine, recorded[point])) for point in sorted(chosen)]
    for case in cases:
        shape = "x".join(str(size) for size in (case.m, case.n, case.k) if size)
        print(
            f"{case.kernel:18} {shape:16} {case.half:8} measured {case.us:7.2f} us, predicted {case.predicted:7.2f} us, "
            f"{case.predicted / case.us - 1:+.0%}"
        )
    by_test: dict[str, dict] = {}
    for result in microbenchmarks.run(machines.MI308X, measurements):
        entry = by_test.setdefault(result.test, {"tests": 0, "within": 0})
        entry["tests"] += 1
        entry["within"] += result.passes
    return {
        "fitted": {name: machine[name] for name in FITTED},
        "traced": traced.predicted(_traced_machine(machine), kernels),
        "sensitivity": report.sensitivity(
            machine,
            FITTED,
            lambda tried: [launch_time.predict(tried, of).us for point, of in recorded.items() if not point.held_out],
        ),
        "classes": report.classes(cases),
        "same_shape": report.ranks(cases, same_shape=True),
        "microbenchmarks": by_test,
        "points": [list(case) for case in cases],
    }


def _traced_machine(machine: Machine) -> Machine:
    """Return the machine of the traces, with the fitted constants of this one."""
    return machines.MI308X.but(**{name: machine[name] for name in FITTED})


def _case(point: Point, found: Prediction) -> Case:
    half = HALVES[point.held_out]
    predicted, megabytes = round(found.us, 2), round(found.megabytes, 3)
    return Case(*point[:5], half, point.us, predicted, megabytes, found.blocks)


def read() -> dict:
    """Return the committed calibration of both files."""
    return machines.CALIBRATION | json.loads(EVIDENCE.read_text())


def written(found: dict) -> dict[Path, str]:
    """Return the text of a calibration file, with a line for each point."""
    shipped = {name: found[name] for name in SHIPPED}
    found = {name: value for name, value in found.items() if name not in SHIPPED}
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["points"])
    text = json.dumps(found | {"points": []}, indent=1)
    text = text.replace('"points": []', f'"points": [\n{rows}\n ]')
    return {CALIBRATION: json.dumps(shipped, indent=1) + "\n", EVIDENCE: text + "\n"}


def main(argv: list[str] | None = None) -> int:
    """Fit or check the constants, and print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.timing_study.calibrate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("measurements", type=Path)
    parser.add_argument("objects", type=Path)
    parser.add_argument("--check", action="store_true", help="fit nothing and write nothing")
    arguments = parser.parse_args(argv)
    try:
        found = calibrate(arguments.measurements, arguments.objects, machines.MI300X, not arguments.check)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    for path, text in written(found).items():
        print(text, end="")
        if not arguments.check:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
