"""Define the times of baseline kernels, all-reduces and gaps in a decode step, each with its source and kind.

Kinds are published, measured (by this project), fitted and assumed. Times are what a launch adds to a captured graph, including the gap
after it. Profilers report more: the machine's `profiled` is subtracted per kernel, down to `MIN_LAUNCH`.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import launches

from .machines import Constant, Machine

KINDS = ("published", "measured", "fitted", "assumed")
PRODUCTS = ("MI300X", "MI355X")  # with baseline times

_FACE = "Hugging Face, hf-rocm-kernels and its blog, MI300X"

MIN_LAUNCH = Constant(1.93, "us, shortest launch in a graph", "published", f"SwiGLU + FP8, one row: {_FACE}")
LAUNCH = Constant(3.84, "us per vLLM launch, without its bytes", "published", f"vLLM's SwiGLU + FP8, one row: {_FACE}")
GAP = Constant(
    0.0,
    "us after a launch; more if it is shorter than MIN_LAUNCH",
    "assumed",
    "a launch's time in a graph contains its gap",
)
MAX_GAP = Constant(
    4.5 - MIN_LAUNCH.value, "us, maximum gap", "published", "Kog, 2026-05: about 4.5 us a launch on MI300X"
)
REST = Constant(
    24, "launches per step outside the layers", "measured", "own H200 profiles: embedding, inputs, sampling"
)
PREFILL = Constant(
    649, "TFLOP/s per GPU in prefill", "published", "ROCm/aiter fbb52ddfad72: 256x13312x16384 in 172.3 us on MI300X"
)

ALL_REDUCE = Constant(
    5.2, "us per all-reduce of 10 KB", "published", "aiter#3549, fused with the norm, 8 MI300X; muiLLM: 5"
)
LARGER_PRODUCT, LARGER = "MI355X", {24: 6.3, 96: 6.8, 192: 7.0, 768: 9.6, 1536: 12.9}  # us by KB
LARGEST = Constant(LARGER[1536], "us per all-reduce of 1536 KB; more in LARGER", "published", "vllm#39080, MI355X, TP8")
LINKS = Constant(1.2, "x MI355X's increase, on other GEMMs", "assumed", "the ratio of link rates, 153.6 / 128 GB/s")

FUSED = {
    "MI300X": (Constant(5.2, "us for 1 x 5120 with a norm, one-shot", "published", "aiter#3549, 8 MI300X"), 1, 5120),
    "MI355X": (Constant(7.0, "us for 4 x 7168 with a norm, one-shot", "published", "aiter#3458, 8 MI355X"), 4, 7168),
}
LINK = Constant(
    48, "GB/s per link and direction on MI300X", "assumed", "3 / 4 of its 64 GB/s; MI355X by the ratio LINKS"
)
ADDEND = Constant(
    0.4,
    "us for an addend of a norm's input",
    "assumed",
    "kernel model, 1 x 7168: 3.69 -> 4.07 us on MI300X, 3.01 -> 3.28 on MI355X",
)

H200_GAP = Constant(0.45, "us after a launch under the profiler", "fitted", "two of sixteen H200 profiles, batch 1")
H200_HOST = Constant(320, "us per step outside its graph", "fitted", "two of sixteen H200 profiles, batch 1")


class Time(NamedTuple):
    """Hold the time in us of all launches of a call, their number, and their source."""

    us: float
    launches: int
    kind: str
    source: str


def rule(machine: Machine, launches: int, read: float) -> Time:
    """Return the time of launches without a published one, from the bytes that they read."""
    us = launches * LAUNCH.value + read / machine["hbm_bandwidth"] / 1e3
    return Time(
        us, launches, "assumed", f"rule: {LAUNCH.value} us a launch + bytes at {machine['hbm_bandwidth']:.0f} GB/s"
    )


def all_reduce(machine: Machine, kilobytes: float) -> Time:
    """Return the time of one all-reduce over 8 GPUs."""
    if machine.name != LARGER_PRODUCT:
        increase = LINKS.value * (_between(LARGER, kilobytes) - LARGER[24])
        return Time(ALL_REDUCE.value + max(increase, 0), 1, "assumed", f"{ALL_REDUCE.source}; {LARGEST.source}")
    return Time(_between(LARGER, kilobytes), 1, "published", LARGEST.source)


def fused_all_reduce(machine: Machine, ranks: int, rows: int, hidden: int) -> Time | None:
    """Return the time of an all-reduce fused with the following norm (csrc/collectives), or None if no kernel supports it.

    A published kernel of this kind gives the fixed part. The plugin's kernel adds its own bytes on links and per block.
    """
    if machine.name not in FUSED:
        return None
    published, *at = FUSED[machine.name]
    group = launches.Group(0, (0,) * ranks, 0, 0, machine.arch.compute_units, 1)
    a = ops.rms_norm.Arguments(torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta"), None, 0.0, False)
    if ranks not in launches.RANKS or not all(holds for _, holds in launches.rules(None, a, machine.arch, group)):
        return None
    link = LINK.value * 1e3 * (LINKS.value if machine.name == LARGER_PRODUCT else 1)
    values, unit = 2 * math.prod(at), machine.arch.costs.collective.unit_bytes_per_us
    fixed = published.value - values / link - 7 * 2 * at[1] / unit
    words = rows * hidden // launches.VALUES_IN_WORD * launches.WORD_BYTES
    ours = words / link + launches.cost(launches.default(a, machine.arch, group), a, machine.arch, group)
    source = f"{published.source}, without its bytes: {fixed:.1f}; words at {link / 1e3:.0f} GB/s, and collectives/launches.py"
    return Time(fixed + ours, 1, "predicted", source)


def _between(points: dict[int, float], at: float) -> float:
    """Interpolate linearly, constant before the first point and with the last slope beyond the last."""
    known = sorted(points.items())
    if at <= known[0][0] or len(known) == 1:
        return known[0][1]
    (x, y), (next_x, next_y) = next(
        (pair for pair in itertools.pairwise(known) if at <= pair[1][0]), (known[-2], known[-1])
    )
    return y + (next_y - y) * (at - x) / (next_x - x)


TABLE = json.loads(Path(__file__).with_name("baseline_times.json").read_text())
"""Times of baseline kernels: `us` by tokens, per product, op and sizes. Missing tokens are interpolated."""


def kind_of(op: str) -> str:
    """Return the op's name in `TABLE`."""
    return "norm" if "rms_norm" in op else "activation" if op.startswith("silu_and_mul") else op


def published(machine: Machine, op: str, parameters: tuple, tokens: int) -> Time | None:
    """Return a baseline's published time for a call in a graph, or None."""
    found: dict[int, Time] = {}
    for row in TABLE:
        sizes = tuple(row["sizes"])
        if row["product"] != machine.name or row["op"] != kind_of(op) or parameters[: len(sizes)] != sizes:
            continue
        beyond = machine["profiled"] * row["kernels"] if row["timer"] == "profiler" else 0
        for rows, us in row["us"].items():
            us = max(us - beyond, MIN_LAUNCH.value * row["kernels"])
            found[int(rows)] = Time(us, row["kernels"], row["kind"], row["source"])
    if not found:
        return None
    nearest = min(found, key=lambda rows: abs(math.log(rows / tokens)))
    us = found[tokens].us if tokens in found else _within({rows: time.us for rows, time in found.items()}, tokens)
    return found[nearest]._replace(us=us)


def _within(points: dict[int, float], at: int) -> float:
    """Interpolate, constant beyond the ends."""
    return _between(points, min(max(at, min(points)), max(points)))
