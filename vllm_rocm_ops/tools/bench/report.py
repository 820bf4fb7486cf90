"""Report benchmark results: text lines and summaries, JSON lines for serving_benchmarks/results, and CSV."""

from __future__ import annotations

import csv
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core.clock import Clock

COPIED = 1 << 30  # float32 values
COPIES = 4
FEW_TOKENS = 64
SHOWN = 3  # configurations to print per shape in a sweep, besides chosen and wrong ones


@dataclass(frozen=True)
class Origin:
    """Describe where results are from. `copy_gb_s` is the bandwidth of a copy, reads and writes counted."""

    gpu: str
    copy_gb_s: float
    versions: dict[str, str | None]
    commit: str

    def file(self, results: Path, kind: str) -> Path:
        name = f"{datetime.date.today()}-{self.commit}-{kind}.jsonl"
        return results / self.gpu.replace(" ", "-").lower() / name


def origin(clock: Clock, vllm: str | None, commit: str) -> Origin:
    """Return the origin of results measured on this machine, with this version of vLLM."""
    versions = {"torch": torch.__version__, "vllm": vllm, "vllm_rocm_ops": vllm_rocm_ops.__version__}
    return Origin(gpu_name(clock), copy_bandwidth(clock), versions, commit)


def gpu_name(clock: Clock) -> str:
    """Return the GPU's product, or the device without one."""
    return archs.product_of(torch.cuda.current_device()) if clock.device == "cuda" else clock.device


def copy_bandwidth(clock: Clock) -> float:
    """Return the GB/s of copying large tensors, reads and writes counted."""
    source = torch.empty(COPIED, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    prepared = clock.prepare(lambda: torch.neg(source, out=target), [()] * COPIES)
    return 2 * source.nbytes / statistics.median(clock.samples({"copy": prepared})["copy"]) / 1000


def commit() -> str:
    """Return VLLM_ROCM_OPS_COMMIT if set, else the commit of the checkout in the working directory."""
    if named := envs.VLLM_ROCM_OPS_COMMIT:
        return named
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Line:
    """One case in one configuration.

    `wrong` is the fault of the result: None if it is correct, "" if it was not checked. `samples` and the baselines' medians are in the
    clock's unit. `chosen` marks the configuration that runs without a sweep. `details` has further fields from a list's check.
    """

    op: str
    case: str
    kernel: str
    wrong: str | None
    samples: tuple[float, ...] = ()
    bytes_moved: float = 0
    flops: int = 0
    group: str = ""
    sizes: dict[str, object] = field(default_factory=dict)
    config: str = ""
    chosen: bool = True
    baselines: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        """Return the speedup over the fastest baseline."""
        return min(self.baselines.values()) / self.median if self.baselines and self.samples else None

    @property
    def tokens(self) -> int:
        return next((size for size in self.sizes.values() if isinstance(size, int)), 0)

    def __str__(self) -> str:
        verdict = {None: "ok", "": ""}.get(self.wrong, "FAILED")
        text = f"{self.op:36} {self.case:24} {verdict:6}"
        if self.samples:
            text += f" {min(self.samples):9.2f} {self.median:9.2f} {max(self.samples):9.2f}"
            text += f" {self.bytes_moved / self.median / 1e3:8.0f}"
            text += f" {self.flops / self.median / 1e6:8.1f}" if self.flops else " " * 9
        text += "".join(f"  {baseline} {us:.2f}" for baseline, us in self.baselines.items())
        text += f"  {self.kernel}" + (f": {self.wrong}" if self.wrong else "")
        text += "" if self.chosen else f" {self.config}"
        return text + "".join(f"  {name} {_shown(value)}" for name, value in self.details.items())

    def json(self, origin: Origin) -> dict:
        us, floor = self.median if self.samples else None, self.bytes_moved / origin.copy_gb_s / 1000
        return {
            "op": self.op,
            "case": self.case,
            "shape": self.sizes,
            "gpu": origin.gpu,
            "us": us and round(us, 3),
            "peers": {name: round(baseline, 3) for name, baseline in self.baselines.items()},
            "unavailable": self.unavailable,
            "floor_us": round(floor, 3),
            "share_of_floor": us and round(floor / us, 3),
            "bandwidth_gb_s": us and round(self.bytes_moved / us / 1000, 1),
            "copy_gb_s": round(origin.copy_gb_s, 1),
            "kernel": self.config,
            "chosen": self.chosen,
            **({} if self.wrong == "" else {"wrong": self.wrong}),
            **self.details,
            "versions": origin.versions,
            "commit": origin.commit,
        }


def append(lines: Iterable[Line], origin: Origin, path: Path) -> None:
    """Append lines to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line.json(origin)) + "\n" for line in lines)


COLUMNS = (
    *("op", "case", "shape", "by", "kernel", "us", "best_us", "slowest_us", "gb_s", "tflops"),
    *("result", "gpu", "commit"),
)


def append_csv(lines: list[Line], gpu: str, commit: str, path: Path) -> None:
    """Append rows to a table, with column names if it is new: one per configuration of the plugin and per baseline.

    Peers have their median only.
    """

    def row(line: Line, by: str, samples: tuple[float, ...], kernel: str = "", result: str = "") -> dict:
        us = statistics.median(samples) if samples else None
        spread = len(samples) > 1
        return {
            "op": line.op,
            "case": line.case,
            "shape": " ".join(f"{name}={size}" for name, size in line.sizes.items()),
            "by": by,
            "kernel": kernel,
            "us": us and round(us, 3),
            "best_us": round(min(samples), 3) if spread else None,
            "slowest_us": round(max(samples), 3) if spread else None,
            "gb_s": us and round(line.bytes_moved / us / 1e3, 1),
            "tflops": round(line.flops / us / 1e6, 2) if us and line.flops else None,
            "result": result,
            "gpu": gpu,
            "commit": commit,
        }

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if file.tell() == 0:
            writer.writeheader()
        for line in lines:
            result = {None: "right", "": ""}.get(line.wrong, line.wrong)
            writer.writerow(row(line, "vllm_rocm_ops", line.samples, line.config or line.kernel, result))
        writer.writerows(row(lines[0], baseline, (us,)) for baseline, us in lines[0].baselines.items())


HEADER = (
    f"{'op':36} {'case':24} {'result':6} {'best us':>9} {'median':>9} {'slowest':>9} {'GB/s':>8} {'TFLOPS':>8}  kernel"
)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items()) or "-"
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def summary(lines: list[Line]) -> str:
    """Summarize results: the number of failures, and geometric means of medians, speedups and a sweep's regret."""
    chosen = [line for line in lines if line.chosen]
    checked = [line for line in lines if line.wrong != ""]
    wrong = sum(line.wrong is not None for line in checked)
    text = f"{len(chosen)} cases"
    if checked:
        text += f", {wrong} failed" if wrong else ", all passed"
    timed = [line for line in chosen if line.samples]
    for op, of_op in _grouped(timed, lambda line: line.op).items():
        mean = statistics.geometric_mean(line.median for line in of_op)
        text += f"\n{op}: {mean:.2f} us geometric mean, {len(of_op)} cases"
    if len({line.op for line in timed}) > 1:
        text += f"\nall: {statistics.geometric_mean(line.median for line in timed):.2f} us geometric mean"
    compared = [line for line in timed if line.ratio]
    for (what, few), of_range in _grouped(compared, lambda line: (_what(line), line.tokens <= FEW_TOKENS)).items():
        ratios, tokens = [line.ratio for line in of_range], f"{'up to' if few else 'more than'} {FEW_TOKENS} tokens"
        mean = statistics.geometric_mean(ratios)
        text += (
            f"\n{what}, {tokens}: {mean:.2f}x speedup over the best baseline (geometric mean), min {min(ratios):.2f}x"
        )
    if len(lines) > len(chosen):
        of_cases = _grouped((line for line in lines if line.samples), lambda line: (line.op, line.case))
        best = {case: min(line.median for line in of_case) for case, of_case in of_cases.items()}
        for op, of_op in _grouped(timed, lambda line: line.op).items():
            mean = statistics.geometric_mean(line.median / best[line.op, line.case] for line in of_op)
            text += f"\n{op}: chosen configurations take {mean:.3f}x the time of the best (geometric mean)"
    return text


def show(results: Iterable[list[Line]], keep: Callable[[list[Line]], None] | None = None) -> int:
    """Print results as they arrive, with a summary, and pass each to `keep`. Returns 1 if a result is wrong."""
    lines = []
    print(HEADER)
    for of_shape in results:
        lines += of_shape
        for place, line in enumerate(of_shape):
            if place < SHOWN or line.chosen or line.wrong:
                print(line, flush=True)
        for baseline, why in of_shape[0].unavailable.items():
            print(f"  {baseline} unavailable: {why}")
        if keep:
            keep(of_shape)
    print(summary(lines))
    return int(any(line.wrong for line in lines))


def keeper(output: Path, kind: str, clock: Clock, vllm: str | None) -> Callable[[list[Line]], None]:
    """Return a function that appends lines to a .jsonl or .csv file, or to this kind's file in a folder.

    Raises ValueError for another file.
    """
    measured = commit()
    if output.suffix == ".csv":
        return lambda lines: append_csv(lines, gpu_name(clock), measured, output)
    if output.suffix not in (".jsonl", "") and not output.is_dir():
        raise ValueError(f"--output must be a .jsonl file, a .csv file or a folder, got {output}")
    here = origin(clock, vllm, measured)
    path = output if output.suffix == ".jsonl" else here.file(output, kind)
    return lambda lines: append(lines, here, path)


def _what(line: Line) -> str:
    return f"{line.op} {line.group}".strip()


def _grouped(lines: Iterable[Line], key) -> dict[object, list[Line]]:
    groups: dict[object, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups
