"""Autotune the ops for a model's shapes, and save the configurations that beat the default ones.

Rows go to <folder>/<arch>/<op>.csv, which an op reads before its default; the folder is `VLLM_ROCM_OPS_TABLES`. All
configurations of a problem are timed in one run, in turn. The fastest gets a row if it is more than 3 % faster than the one that runs
without the user's tables, and again when only these two are timed. Otherwise the row has no configuration: it marks the problem as
measured, so the next run skips it.
"""

from __future__ import annotations

import csv
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

import vllm_rocm_ops
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.clock import Clock, tensor_bytes
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.tools.bench.baselines import prepare

MARGIN = 0.03
DECODE = (1, 2, 4, *range(8, 257, 8))  # as vLLM captures graphs
PREFILL = (512, 1024, 2048, 4096, 8192)


class Problem(NamedTuple):
    """The subject of one tuned row: a call of an op, and the row's key."""

    op: Op
    layer: str
    case: Case
    key: dict[str, str]

    def __str__(self) -> str:
        sizes = " ".join(f"{name} {value}" for name, value in self.key.items() if name != "compute_units")
        return f"{self.op.name} {sizes} ({self.layer})"


@dataclass
class Result:
    """The medians of a problem, in the clock's unit: the current configuration, the best one, and the baselines.

    `best` equals `now` if no configuration earned a row. `unavailable` tells why a baseline is missing.
    """

    problem: Problem
    now: float
    best: float
    config: object | None
    baselines: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)


class Tuned(NamedTuple):
    """The results of a run, the number of problems that already had rows, and the tables' folder."""

    results: list[Result]
    known: int
    folder: Path


def problems(
    calls: Iterable[model_layers.LayerCall], batches: Iterable[int], arch: Arch
) -> tuple[list[Problem], dict[str, str]]:
    """Return the distinct problems of a model's calls at these batch sizes, and why no kernel supports the others.

    A problem is named after the call with the highest count per step.
    """
    distinct: dict[tuple, Problem] = {}
    refused = {}
    for call in sorted(calls, key=lambda call: -call.count):
        for batch in batches:
            case = call.case(batch)
            arguments = case.make("meta", torch.Generator(), arch.fp8_dtype)
            a = call.op.Arguments(*arguments)
            key = {"compute_units": arch.compute_units, **call.op.problem(a)}
            problem = Problem(call.op, call.layer, case, {name: str(value) for name, value in key.items()})
            explained = call.op.explain(*arguments, arch=arch, require_code=True)
            if explained.launches:
                distinct.setdefault((call.op.name, *problem.key.items()), problem)
            else:
                refused[str(problem)] = explained.source
    return list(distinct.values()), refused


def inputs(case: Case, clock: Clock) -> list[tuple]:
    """Create the clock's number of argument sets for one sample."""
    on_meta = case.make("meta", torch.Generator(), clock.arch.fp8_dtype)
    generator = torch.Generator(clock.device).manual_seed(0)
    count = clock.calls(tensor_bytes(*on_meta))
    return [case.make(clock.device, generator, clock.arch.fp8_dtype) for _ in range(count)]


def measure(problem: Problem, clock: Clock, baselines: Mapping[str, object]) -> Result:
    """Time all configurations of a problem and its baselines."""
    op, arch = problem.op, clock.arch
    sets = inputs(problem.case, clock)
    a = op.Arguments(*sets[0])
    now = op.default(a, arch)
    prepared: dict[object, object] = {}
    for config in dict.fromkeys((now, *op.configs(a, arch))):
        with op.running(config):
            prepared[config] = clock.prepare(op, sets)
    of_baselines, unavailable = prepare(baselines, clock, sets)
    prepared |= of_baselines
    medians = _medians(clock, prepared)
    result = Result(problem, medians[now], medians[now], None, unavailable=unavailable)
    result.baselines = {name: medians[name] for name in of_baselines}
    fastest = min((config for config in prepared if config not in baselines), key=medians.get)
    if _wins(medians[fastest], medians[now]):
        again = _medians(clock, {config: prepared[config] for config in (now, fastest)})
        if _wins(again[fastest], again[now]):
            result.now, result.best, result.config = again[now], again[fastest], fastest
    return result


def _medians(clock: Clock, prepared: dict[object, object]) -> dict[object, float]:
    return {name: statistics.median(samples) for name, samples in clock.samples(prepared).items()}


def _wins(ours: float, other: float) -> bool:
    return ours * (1 + MARGIN) < other


class Table:
    """Manage a user's table for one op, with rows as tables.py reads them; the file is replaced atomically."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, key: Mapping[str, str]) -> bool:
        return any(self._is_for(row, key) for row in self.rows)

    def put(self, key: Mapping[str, str], config: object | None, source: str) -> None:
        """Replace the row for these sizes, or add one, and write the file."""
        fields = {} if config is None else tables.config_fields(config)
        row = {**key, **{f"config.{name}": value for name, value in fields.items()}, "source": source}
        self.rows = [old for old in self.rows if not self._is_for(old, key)] + [row]
        names = dict.fromkeys(name for row in (dict(key), *self.rows) for name in row if name and name != "source")
        columns = [name for name in names if not name.startswith("config.")]
        columns += [name for name in names if name.startswith("config.")]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written = self.path.with_suffix(f".{os.getpid()}")
        with written.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*columns, "source"], extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        written.replace(self.path)

    @staticmethod
    def _is_for(row: Mapping[str, str], key: Mapping[str, str]) -> bool:
        return all(row.get(name) == value for name, value in key.items())


def tune(
    wanted: Iterable[Problem],
    clock: Clock,
    folder: Path,
    baselines: Callable[[Op], Mapping[str, object]] = lambda op: {},
    force: bool = False,
    on: str = "",
    log: TextIO | None = None,
) -> Tuned:
    """Measure the problems without a row, or all with `force`, and write each row at once. `on` names the GPU."""
    tables: dict[str, Table] = {}

    def table(op: Op) -> Table:
        path = folder / clock.arch.name / f"{op.name}.csv"
        return tables.setdefault(op.name, Table(path))

    wanted = list(wanted)
    left = [problem for problem in wanted if force or not table(problem.op).has(problem.key)]
    results, start = [], time.monotonic()
    for place, problem in enumerate(left):
        result = measure(problem, clock, baselines(problem.op))
        results.append(result)
        table(problem.op).put(problem.key, result.config, source(result, clock, on))
        if log:
            seconds = (time.monotonic() - start) / (place + 1) * (len(left) - place - 1)
            print(f"[{place + 1}/{len(left)}, {duration(seconds)} left] {line(result, clock)}", file=log, flush=True)
    op_module.invalidate_tables()
    return Tuned(results, len(wanted) - len(left), folder)


def source(result: Result, clock: Clock, on: str) -> str:
    """Return the provenance of a row."""
    times = f"{result.best:.2f} {clock.unit} versus {result.now:.2f} without this row"
    if result.config is None:
        times = f"{result.now:.2f} {clock.unit}, no configuration more than {MARGIN:.0%} faster"
    who = f"vllm-rocm-ops {vllm_rocm_ops.__version__} tune on {on or clock.arch}, {datetime.date.today()}"
    return f"{who}: {times}"


def line(result: Result, clock: Clock) -> str:
    """Return the progress line of a result."""
    text = f"{result.problem}: {result.now:.2f} {clock.unit}"
    if result.config is not None:
        text += f" -> {result.best:.2f} with {result.config}"
    if result.baselines:
        best = min(result.baselines, key=result.baselines.get)
        text += f"; best baseline {best} {result.baselines[best]:.2f}"
    return text


def duration(seconds: float) -> str:
    """Format a duration in minutes or seconds."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def summary(done: Tuned, refused: Mapping[str, str], clock: Clock) -> str:
    """Summarize a run."""
    results = done.results
    won = [result for result in results if result.config is not None]
    lines = [f"{len(results)} shapes measured, {done.known} already in the tables, {len(refused)} unsupported"]
    if won:
        gain = statistics.geometric_mean([result.now / result.best for result in won])
        lines.append(f"{len(won)} new rows, each more than {MARGIN:.0%} faster: {gain:.2f}x (geometric mean)")
    elif results:
        lines.append(f"no configuration is more than {MARGIN:.0%} faster: the default ones stay")
    for op in dict.fromkeys(result.problem.op.name for result in results):
        of_op = [result for result in results if result.problem.op.name == op]
        ratios = [min(result.baselines.values()) / result.best for result in of_op if result.baselines]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            lines.append(f"  {op}: {mean:.2f}x speedup over the best baseline (geometric mean), min {min(ratios):.2f}x")
    unavailable = {(r.problem.op.name, name): why for r in results for name, why in r.unavailable.items()}
    lines += [f"  {op}: {name} unavailable for some shapes: {why}" for (op, name), why in unavailable.items()]
    for why in dict.fromkeys(refused.values()):
        shapes = [shape for shape in refused if refused[shape] == why]
        lines.append(f"  no kernel for {shapes[0]}{f' and {len(shapes) - 1} others' if shapes[1:] else ''}: {why}")
    lines.append(f"tables: {done.folder / clock.arch.name}")
    return "\n".join(lines)
