"""Define the times of baseline kernels, all-reduces and gaps in a decode step, each with its source and kind.

Kinds are published, measured (by this project), fitted and assumed. Times are what a launch adds to a captured graph, including the gap
after it. Profilers report more: the machine's `profiled` is subtracted per kernel, down to `MIN_LAUNCH`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.collectives import flagged, launches
from vllm_rocm_ops.collectives.all_reduce import choose_protocol
from vllm_rocm_ops.timing.machines import Constant, Machine

KINDS = ("published", "measured", "fitted", "assumed", "predicted")
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
EMPTY = {
    "MI300X": Constant(1.381, "us of an empty node of a graph", "published", "AMD, rocm-systems#11282, MI300X"),
    "MI355X": Constant(1.461, "us of an empty node of a graph", "published", "AMD, rocm-systems#11282, MI355X"),
}
"""The least cost of a vLLM launch; LAUNCH is the most. Both sides of a comparison take the same."""
SKINNY = Constant(
    4, "most rows of vLLM's wvSplitKQ, static per-tensor FP8", "published", "vLLM 0.32, scaled_mm/rocm.py; 1 in 0.11"
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
LARGER_PRODUCT, LARGER = "MI355X", {24: 6.3, 96: 6.8, 192: 7.0, 384: 7.5, 768: 9.6, 1536: 12.9}  # AITER's us by KB
LARGEST = Constant(LARGER[1536], "us per all-reduce of 1536 KB; more in LARGER", "published", "vllm#39080, MI355X, TP8")
LINKS = Constant(1.2, "x MI355X's increase, on other GEMMs", "assumed", "the ratio of link rates, 153.6 / 128 GB/s")
OWN = {
    "MI300X": {2: 7.2, 256: 14.4, 512: 14.7, 1024: 22.9, 2048: 36.6, 4096: 63.9},
    "MI355X": {96: 7.6, 192: 10.0, 384: 13.1, 768: 16.0, 1536: 24.2},
}  # vLLM's us by KB, with AITER off
OWN_SOURCE = {
    "MI300X": Constant(36.6, "us per all-reduce of 2 MB; more in OWN", "published", "vllm#19744, MI300X, TP4"),
    "MI355X": Constant(24.2, "us per all-reduce of 1536 KB; more in OWN", "published", "vllm#39080, MI355X, TP8"),
}

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
    """The time in us of all launches of a call, their number, and their source."""

    us: float
    launches: int
    kind: str
    source: str


def launch_costs(machine: Machine) -> tuple[float, float]:
    """Return the least and the most us of a vLLM launch without its bytes."""
    return EMPTY.get(machine.name, EMPTY["MI300X"]).value, LAUNCH.value


def rule(machine: Machine, launches: int, read: float, launch: float = LAUNCH.value) -> Time:
    """Return the time of launches without a published one, from the bytes that they read."""
    us = launches * launch + read / machine["hbm_bandwidth"] / 1e3
    return Time(us, launches, "assumed", f"rule: {launch} us a launch + bytes at {machine['hbm_bandwidth']:.0f} GB/s")


def all_reduce(machine: Machine, kilobytes: float, aiter: bool) -> Time:
    """Return the time of one all-reduce, vLLM's own kernel unless AITER is on."""
    if not aiter:
        name = machine.name if machine.name in OWN else "MI300X"
        kind = "published" if name == machine.name else "assumed"
        return Time(_between(OWN[name], kilobytes), 1, kind, OWN_SOURCE[name].source)
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
    link = LINK.value * 1e3 * (LINKS.value if machine.name == LARGER_PRODUCT else 1)
    costs = dataclasses.replace(machine.arch.costs.collective, link_bytes_per_us=link, all_links_bytes_per_us=7 * link)
    arch = dataclasses.replace(machine.arch, costs=dataclasses.replace(machine.arch.costs, collective=costs))
    group = launches.Group(0, (0,) * ranks, 0, 0, arch.compute_units, 1, payload=flagged.PAYLOAD)
    a = ops.rms_norm.Arguments(torch.empty(rows, hidden, dtype=torch.bfloat16, device="meta"), None, 0.0, False)
    if ranks not in launches.RANKS:
        return None
    values = 2 * math.prod(at)
    fixed = published.value - values / link - 7 * 2 * at[1] / costs.unit_bytes_per_us
    source = f"{published.source}, without its bytes: {fixed:.1f}; "
    planner, _ = choose_protocol(None, a, arch, group)
    if planner is None:
        return None
    config = planner.default(a, arch, group)
    ours = planner.cost(config, a, arch, group)
    if planner is flagged:
        ours -= costs.hop_us  # the published time has one trip
        source += f"bytes of {config.stages} stages at {link / 1e3:.0f} GB/s, and collectives/flagged.py"
    else:
        source += f"words at {link / 1e3:.0f} GB/s, and collectives/launches.py"
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
"""Times of baseline kernels: `us` by tokens, per product, op and sizes. Missing tokens are interpolated.

`skinny` marks the wvSplitKQ of releases that call it for at most this number of rows.
"""


def kind_of(op: str) -> str:
    """Return the op's name in `TABLE`."""
    return "norm" if "rms_norm" in op else "activation" if op.startswith("silu_and_mul") else op


def published(
    machine: Machine, op: str, parameters: tuple, tokens: int, skinny: int = int(SKINNY.value)
) -> Time | None:
    """Return a baseline's time for a call in a graph, or None.

    Static per-tensor FP8 with up to `skinny` rows has the kernel model's time of wvSplitKQ.
    """
    found: dict[int, Time] = {}
    by = skinny if op == ops.scaled_mm.name and not parameters[2] and tokens <= skinny else 0
    for row in TABLE:
        sizes = tuple(row["sizes"])
        if (
            row.get("skinny", 0) != by
            or row["product"] != machine.name
            or row["op"] != kind_of(op)
            or parameters[: len(sizes)] != sizes
        ):
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
