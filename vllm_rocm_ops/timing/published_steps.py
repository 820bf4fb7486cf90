"""Compare published decode steps of vLLM with the predicted baseline step.

The comparison yields the gaps and all-reduce times consistent with each published step, and the error band of a step. Nothing is fitted
to them. The baseline's GEMM times are from torch._scaled_mm, which these releases call; that was chosen before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from vllm_rocm_ops.models import config as model_config

from . import baseline, machines, step
from .machines import Constant

MODEL, RANKS, PARAMETERS, PROMPT, OUTPUT = "llama-3.1-405b-fp8", 8, 405e9, 128, 2048
RELEASES = {"0.8.3": {1: 22.1, 16: 26.5, 64: 40.0}, "0.11.1": {1: 23.5, 16: 27.2, 64: 42.3}}  # ms per token, 8 MI300X
FIRST = Constant(
    RELEASES["0.8.3"][1],
    "ms per token at batch 1; more in RELEASES",
    "published",
    "ROCm's vLLM images, 2025-04 and 2025-11",
)
SKINNY = {"0.8.3": (0, 1), "0.11.1": (1, 1)}  # most rows of wvSplitKQ; 0.8.3's image was not read
SLOWEST = Constant(20, "us per small all-reduce", "published", "mscclpp#646: RCCL, 15 to 20")
FASTEST = Constant(5, "us per small all-reduce", "published", "muiLLM PR 6, 8 MI300X")


class Admitted(NamedTuple):
    """Hold a published point in ms and the constants consistent with it.

    `skinny` is the most rows of vLLM's wvSplitKQ. `gap` is the interval of us after a launch, for all-reduces between the
    fastest and the slowest published one. `reduce` is the us per all-reduce without any gap.
    """

    release: str
    batch: int
    skinny: int
    published: float
    predicted: float
    gap: tuple[float, float]
    reduce: float

    @property
    def ratio(self) -> float:
        return self.published / self.predicted


def prefill_us(batch: int) -> float:
    """Return the prefill's part of a published time per token: latency divided by output tokens contains it."""
    return 2 * PARAMETERS * PROMPT * batch / RANKS / baseline.PREFILL.value / 1e6 / OUTPUT


@functools.cache
def predicted(batch: int, skinny: int) -> tuple[float, float, int, float, int]:
    """Return us of the step with AITER off and up to `skinny` rows in wvSplitKQ: with the prefill's part, us without all-reduces and gaps, launches, us per all-reduce, and their number."""
    machine = machines.MI300X
    nodes = step.nodes(
        model_config.read(MODEL), RANKS, None, batch, machine, "baseline", lambda *_: None, PROMPT + OUTPUT // 2,
        skinny=skinny, aiter=False,
    )  # fmt: skip
    found = step.total(nodes)
    [reduce] = (node for node in nodes if node.layer == "all-reduce")
    us = found.us + prefill_us(batch)
    return us, us - reduce.count * reduce.us - found.gap_us, found.launches, reduce.us, reduce.count


def admitted() -> list[Admitted]:
    """Return every published point with its consistent constants."""
    rows = []
    for release, points in RELEASES.items():
        for batch, ms in points.items():
            for skinny in sorted({rows if batch <= rows else 0 for rows in SKINNY[release]}):
                us, kernels, launches, reduce, count = predicted(batch, skinny)
                left, larger = ms * 1e3 - kernels, reduce - predicted(1, skinny)[3]
                gaps = sorted((left - count * (small.value + larger)) / launches for small in (FASTEST, SLOWEST))
                rows.append(Admitted(release, batch, skinny, ms, us / 1e3, (gaps[0], gaps[1]), left / count))
    return rows


def spread() -> tuple[float, float]:
    """Return the minimum and maximum of published / predicted, the error band of a step."""
    ratios = [each.ratio for each in admitted()]
    return min(*ratios, 1.0), max(*ratios, 1.0)
