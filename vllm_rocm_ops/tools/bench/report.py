"""What was measured: a line per case, as text, as JSON for the files under serving_benchmarks/results, and as CSV, and what lines sum
up to."""

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
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.clock import Clock

COPIED = 1 << 30  # float32 values
COPIES = 4
FEW_TOKENS = 64
SHOWN = 3  # of the configurations of a sweep; more where they are chosen or wrong


@dataclass(frozen=True)
class Origin:
    """Where results are from. A copy reads and writes `copy_gb_s`."""

    gpu: str
    copy_gb_s: float
    versions: dict[str, str | None]
    commit: str

    def file(self, results: Path, kind: str) -> Path:
        """Where results of a kind go."""
        name = f"{datetime.date.today()}-{self.commit}-{kind}.jsonl"
        return results / self.gpu.replace(" ", "-").lower() / name


def origin(clock: Clock, vllm: str | None, commit: str) -> Origin:
    """That of what is measured here, beside this version of vLLM."""
    versions = {"torch": torch.__version__, "vllm": vllm, "vllm_rocm_ops": vllm_rocm_ops.__version__}
    return Origin(gpu_name(clock), copy_bandwidth(clock), versions, commit)


def gpu_name(clock: Clock) -> str:
    return torch.cuda.get_device_name() if clock.device == "cuda" else clock.device


def copy_bandwidth(clock: Clock) -> float:
    """GB/s of reading and writing large tensors once, both counted."""
    source = torch.empty(COPIED, dtype=torch.float32, device=clock.device)
    target = torch.empty_like(source)
    prepared = clock.prepare(lambda: torch.neg(source, out=target), [()] * COPIES)
    return 2 * source.nbytes / statistics.median(clock.samples({"copy": prepared})["copy"]) / 1000


def commit() -> str:
    """Return the commit that VLLM_ROCM_OPS_COMMIT names, else the commit of the checkout in the working directory."""
    if named := envs.VLLM_ROCM_OPS_COMMIT:
        return named
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True)
class Line:
    """One case in one configuration: what ran it, what is wrong with the result (None if nothing is, "" if it was not checked),
    the samples in the clock's unit, and what a call moves and computes; the medians of peers, and why others are unavailable.
    `chosen` is the configuration that runs without a sweep; `found` is what else a list of shapes says of its results."""

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
    peers: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    found: dict[str, object] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer it is."""
        return min(self.peers.values()) / self.median if self.peers and self.samples else None

    @property
    def tokens(self) -> int:
        return next((size for size in self.sizes.values() if isinstance(size, int)), 0)

    def __str__(self) -> str:
        verdict = {None: "right", "": ""}.get(self.wrong, "WRONG")
        text = f"{self.op:36} {self.case:24} {verdict:6}"
        if self.samples:
            text += f" {min(self.samples):9.2f} {self.median:9.2f} {max(self.samples):9.2f}"
            text += f" {self.bytes_moved / self.median / 1e3:8.0f}"
            text += f" {self.flops / self.median / 1e6:8.1f}" if self.flops else " " * 9
        text += "".join(f"  {peer} {us:.2f}" for peer, us in self.peers.items())
        text += f"  {self.kernel}" + (f": {self.wrong}" if self.wrong else "")
        text += "" if self.chosen else f" {self.config}"
        return text + "".join(f"  {name} {_shown(value)}" for name, value in self.found.items())

    def json(self, origin: Origin) -> dict:
        """The line of a file of results."""
        us, floor = self.median if self.samples else None, self.bytes_moved / origin.copy_gb_s / 1000
        return {
            "op": self.op,
            "case": self.case,
            "shape": self.sizes,
            "gpu": origin.gpu,
            "us": us and round(us, 3),
            "peers": {name: round(peer, 3) for name, peer in self.peers.items()},
            "unavailable": self.unavailable,
            "floor_us": round(floor, 3),
            "share_of_floor": us and round(floor / us, 3),
            "bandwidth_gb_s": us and round(self.bytes_moved / us / 1000, 1),
            "copy_gb_s": round(origin.copy_gb_s, 1),
            "kernel": self.config,
            "chosen": self.chosen,
            **({} if self.wrong == "" else {"wrong": self.wrong}),
            **self.found,
            "versions": origin.versions,
            "commit": origin.commit,
        }


def append(lines: Iterable[Line], origin: Origin, path: Path) -> None:
    """Adds lines to a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line.json(origin)) + "\n" for line in lines)


COLUMNS = (
    "op",
    "case",
    "shape",
    "by",
    "kernel",
    "us",
    "best_us",
    "slowest_us",
    "gb_s",
    "tflops",
    "result",
    "gpu",
    "commit",
)


def append_csv(lines: list[Line], gpu: str, commit: str, path: Path) -> None:
    """Adds lines to a table: a row of each configuration of ours, and one of each peer, of which only the median is known. A new
    file begins with the names of the columns."""

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
        writer.writerows(row(lines[0], peer, (us,)) for peer, us in lines[0].peers.items())


HEADER = (
    f"{'op':36} {'case':24} {'result':6} {'best us':>9} {'median':>9} {'slowest':>9} {'GB/s':>8} {'TFLOPS':>8}  kernel"
)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items()) or "-"
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def summary(lines: list[Line]) -> str:
    """How many are wrong, and geometric means: of the medians, of the peers' times and of a sweep's best times to them."""
    chosen = [line for line in lines if line.chosen]
    checked = [line for line in lines if line.wrong != ""]
    wrong = sum(line.wrong is not None for line in checked)
    text = f"{len(chosen)} cases"
    if checked:
        text += f", {wrong} wrong" if wrong else ", all right"
    timed = [line for line in chosen if line.samples]
    for op, of_op in _grouped(timed, lambda line: line.op).items():
        mean = statistics.geometric_mean(line.median for line in of_op)
        text += f"\n{op}: {mean:.2f} us as a geometric mean of {len(of_op)} cases"
    if len({line.op for line in timed}) > 1:
        text += f"\nall: {statistics.geometric_mean(line.median for line in timed):.2f} us as a geometric mean"
    compared = [line for line in timed if line.ratio]
    for (what, few), of_range in _grouped(compared, lambda line: (_what(line), line.tokens <= FEW_TOKENS)).items():
        ratios, tokens = [line.ratio for line in of_range], f"{'up to' if few else 'more than'} {FEW_TOKENS} tokens"
        mean = statistics.geometric_mean(ratios)
        text += f"\n{what}, {tokens}: {mean:.2f}x the best peer as a geometric mean, least {min(ratios):.2f}x"
    if len(lines) > len(chosen):
        best = {
            case: min(line.median for line in of_case)
            for case, of_case in _grouped(lines, lambda line: (line.op, line.case)).items()
        }
        for op, of_op in _grouped(timed, lambda line: line.op).items():
            mean = statistics.geometric_mean(line.median / best[line.op, line.case] for line in of_op)
            text += f"\n{op}: the chosen configurations take {mean:.3f}x the time of the best ones"
    return text


def show(results: Iterable[list[Line]], keep: Callable[[list[Line]], None] | None = None) -> int:
    """Print results as they come, and what they sum up to, and `keep` each. Return 1 if one is wrong."""
    lines = []
    print(HEADER)
    for of_shape in results:
        lines += of_shape
        for place, line in enumerate(of_shape):
            if place < SHOWN or line.chosen or line.wrong:
                print(line, flush=True)
        for peer, why in of_shape[0].unavailable.items():
            print(f"  no {peer}: {why}")
        if keep:
            keep(of_shape)
    print(summary(lines))
    return int(any(line.wrong for line in lines))


def keeper(output: Path, kind: str, clock: Clock, vllm: str | None) -> Callable[[list[Line]], None]:
    """Return what appends lines to a .jsonl or .csv file, or to a file of this kind in a folder. Raises ValueError for another file."""
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
