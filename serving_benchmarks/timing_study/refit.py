"""Benchmark calls on an AMD GPU and refit the machine's few constants to them, in a user file.

    python -m serving_benchmarks.timing_study.refit

`serving_benchmarks.step` then uses the file's constants and says so. The shipped model does not change.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, clock, envs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.timing import launch_time, machines, predict
from vllm_rocm_ops.timing.machines import Constant, Machine
from vllm_rocm_ops.timing.trace import Recording, region_of
from vllm_rocm_ops.tools import explain

from . import fitting

STEPS = {
    "start": (0.0, 5.0, 0.1),
    "wave_latency": (0, 1000, 50),
    "mall_bandwidth": (3000, 18000, 500),
    "hbm_bandwidth": (2000, 8000, 100),
}
CALLS = (  # op, shape of the first tensor, N of the weight
    ("rms_norm", (1, 16384), 0),
    ("rms_norm", (512, 8192), 0),
    ("silu_and_mul", (64, 16384), 0),
    ("silu_and_mul", (2048, 16384), 0),
    ("scaled_mm", (1, 8192), 8192),
    ("scaled_mm", (16, 16384), 16384),
)


class Measured(NamedTuple):
    """A call, its measured time, and its kernels' recordings."""

    name: str
    us: float
    recordings: list[Recording]

    def predicted(self, machine: Machine) -> float:
        return sum(launch_time.predict(machine, each).us for each in self.recordings)


def arguments_of(op: Op, arch: str, shape: tuple[int, ...], n: int) -> dict:
    """Return arguments on the meta device, with a weight of `n` rows unless 0."""
    given = explain.example(op, archs.named(arch), shape)
    if n:
        given["b"] = torch.empty(n, shape[-1], dtype=given["b"].dtype, device="meta").t()
        given |= {name: torch.empty(1, device="meta") for name in ("scale_a", "scale_b")} | {"bias": None}
    return given


def on_gpu(timer: clock.GpuClock, op: Op, given: dict) -> float:
    """Return the median time of a call with cold tensors, in microseconds."""

    def made(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=timer.device).zero_()

    sets = [tuple(map(made, given.values())) for _ in range(timer.calls(clock.tensor_bytes(*given.values())))]
    return statistics.median(timer.samples({"call": timer.prepare(op, sets)})["call"])


def measured(machine: Machine, time: Callable[[Op, dict], float], calls=CALLS) -> Iterator[Measured]:
    """Yield each call with its time by `time(op, arguments)`, all tensors cold."""
    for name, shape, n in calls:
        op = getattr(ops, name)
        given = arguments_of(op, str(machine.arch), shape, n)
        recordings = []
        for kernel in predict.predict_call(op, given, machine):
            lines = {line for block in kernel.recording.blocks for line in block.lines}
            recordings.append(dataclasses.replace(kernel.recording, cold=frozenset(map(region_of, lines))))
        case = "x".join(map(str, (*shape, *([n] if n else ()))))
        yield Measured(f"{name} {case}", time(op, given), recordings)


def refitted(machine: Machine, found: list[Measured]) -> Machine:
    """Return the machine whose constants in `STEPS` minimize the mean |log(predicted / measured)|."""

    def error(tried: Machine) -> float:
        return statistics.mean(abs(math.log(each.predicted(tried) / each.us)) for each in found)

    return fitting.least(machine, STEPS, error)


def file_of(machine: Machine) -> Path:
    """Return the user's file of constants for a machine."""
    return envs.tables() / f"timing-{machine.name}.json"


def of_user(machine: Machine) -> Machine:
    """Return the machine with the user's constants, if any. Raises ValueError for unknown names or non-numbers."""
    path = file_of(machine)
    if not path.is_file():
        return machine
    try:
        constants = {name: float(value) for name, value in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"refit: {path} must map constants to numbers, got {error}") from error
    if set(constants) - set(STEPS):
        raise ValueError(f"refit: {path} must have only {', '.join(STEPS)}, got {', '.join(constants)}")
    units = {name: machine.constants[name].unit for name in constants}
    return machine.but(**{name: Constant(value, units[name], "fitted", str(path)) for name, value in constants.items()})


def said(machine: Machine) -> Iterator[str]:
    """Yield a line that names the user's file, if it exists."""
    if file_of(machine).is_file():
        yield f"constants refitted by the user: {file_of(machine)}"


def machine_here() -> tuple[Machine, Callable[[Op, dict], float]]:
    """Return the machine of the first GPU and a function that times calls on it. Raises ValueError without an AMD GPU."""
    try:
        timer = clock.GpuClock()
    except RuntimeError as error:
        raise ValueError(f"refit needs an AMD GPU: {error}") from error
    product = archs.product_of(torch.cuda.current_device())
    alike = [each for each in machines.MACHINES.values() if str(each.arch) == str(timer.arch)]
    if not alike:
        raise ValueError(f"refit needs one of {', '.join(machines.MACHINES)}, got {product}")
    machine = next((each for each in alike if each.name == product), alike[0])
    return machine, lambda op, given: on_gpu(timer, op, given)


def lines(machine: Machine, time: Callable[[Op, dict], float], calls=CALLS) -> Iterator[str]:
    """Format measured and predicted times before and after the fit, and write the user's constants."""
    found = []
    yield f"{machine.name}: cold tensors; predictions with the shipped constants"
    for each in measured(machine, time, calls):
        found.append(each)
        us = each.predicted(machine)
        yield f"  {each.name}: measured {each.us:.1f} us, predicted {us:.1f} us, {us / each.us - 1:+.0%}"
    fitted = refitted(machine, found)
    for each in found:
        us = each.predicted(fitted)
        yield f"  {each.name}: refitted {us:.1f} us, {us / each.us - 1:+.0%}"
    path = file_of(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: fitted[name] for name in STEPS}, indent=1) + "\n")
    changes = ", ".join(f"{name} {machine[name]:g} to {fitted[name]:g}" for name in STEPS)
    yield f"{changes}; serving_benchmarks.step now uses {path}"


def main() -> int:
    """Refit the model on this GPU."""
    try:
        for line in lines(*machine_here()):
            print(line, flush=True)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
