"""Compare published decode steps of vLLM with the predicted baseline step.

The comparison yields the gaps and all-reduce times consistent with each published step, the error band of a step, and errors beyond the
band: of slopes over batch, and of other engines. Nothing is fitted to them. The baseline's GEMM times are from torch._scaled_mm, which
these releases call; that was chosen before.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.timing.machines import Constant

from . import baseline, step

MODEL, RANKS, PARAMETERS, PROMPT, OUTPUT = "llama-3.1-405b-fp8", 8, 405e9, 128, 2048
RELEASES = {
    "0.8.3": {1: 22.1, 2: 22.5, 4: 23.4, 8: 24.9, 16: 26.5, 32: 30.8, 64: 40.0},
    "0.11.1": {1: 23.5, 16: 27.2, 64: 42.3},
}  # ms per token, 8 MI300X
FIRST = Constant(
    RELEASES["0.8.3"][1],
    "ms per token at batch 1; more in RELEASES",
    "published",
    "ROCm/vllm 402118091, its image of 2025-04 (0.8.3); image of 2025-11 (0.11.1)",
)
SKINNY = Constant(
    1,
    "most rows of wvSplitKQ in these releases",
    "published",
    "ROCm/vllm c43debd43 (0.8.3), tuned_gemm.py; vLLM 0.11, w8a8_utils.py",
)
SLOWEST = Constant(20, "us per small all-reduce", "published", "mscclpp#646: RCCL, 15 to 20")
FASTEST = Constant(5, "us per small all-reduce", "published", "muiLLM PR 6, 8 MI300X")


class Admitted(NamedTuple):
    """A published point in ms and the constants consistent with it.

    `gap` is the interval of us after a launch, for all-reduces between the fastest and the slowest published one. `reduce`
    is the us per all-reduce without any gap.
    """

    release: str
    batch: int
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
def predicted(batch: int) -> tuple[float, float, int, float, int]:
    """Return us of the step with AITER off: with the prefill's part, us without all-reduces and gaps, launches, us per all-reduce, and their number."""
    machine = machines.MI300X
    nodes = step.nodes(
        model_config.read(MODEL), RANKS, None, batch, machine, "baseline", lambda *_: None, PROMPT + OUTPUT // 2,
        skinny=int(SKINNY.value), aiter=False,
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
            us, kernels, launches, reduce, count = predicted(batch)
            left, larger = ms * 1e3 - kernels, reduce - predicted(1)[3]
            gaps = sorted((left - count * (small.value + larger)) / launches for small in (FASTEST, SLOWEST))
            rows.append(Admitted(release, batch, ms, us / 1e3, (gaps[0], gaps[1]), left / count))
    return rows


def spread() -> tuple[float, float]:
    """Return the minimum and maximum of published / predicted, the error band of a step."""
    ratios = [each.ratio for each in admitted()]
    return min(*ratios, 1.0), max(*ratios, 1.0)


# Slopes over batch, and other engines

KEPT = 0.15  # relative error of a slope


def slopes() -> list[tuple[str, int, float, float]]:
    """Return release, batch, and the ms added since batch 1, published and predicted."""
    return [
        (release, batch, points[batch] - points[1], (predicted(batch)[0] - predicted(1)[0]) / 1e3)
        for release, points in RELEASES.items()
        for batch in points
        if batch > 1
    ]


def explained() -> bool:
    """True if the constants of baseline.py explain all slopes within `KEPT`."""
    return all(abs(found / published - 1) <= KEPT for *_, published, found in slopes())


class Other(NamedTuple):
    """Published ms per token by concurrent requests, of another engine or an older vLLM.

    `context` is the average number of keys of a request, `skinny` the most rows of wvSplitKQ, and `ranks` the GPUs.
    """

    name: str
    model: str
    product: str
    context: int
    ms: dict[int, float]
    source: str
    skinny: int = int(baseline.SKINNY.value)
    ranks: int = RANKS


OTHERS = (
    Other(
        "ATOM in vLLM, DeepSeek-R1 FP8, TP 8",
        "deepseek-v3",
        "MI355X",
        1536,
        {4: 11.2, 8: 12.0, 16: 13.5, 32: 17.8, 64: 21.3},
        "2026-03, 1k in, 1k out; the GPU is presumed",
    ),
    Other(
        "SGLang, DeepSeek-R1 FP8, TP 8",
        "deepseek-v3",
        "MI355X",
        1536,
        {4: 9.6, 8: 10.7, 16: 13.6, 32: 18.4, 64: 23.0},
        "2026-05, 1k in, 1k out",
    ),
    Other(
        "an older vLLM, Llama-3.1-405B FP8, TP 8",
        MODEL,
        "MI300X",
        192,
        {1: 27.6, 8: 31.0, 16: 34.2, 32: 40.1, 64: 54.1},
        "Oracle, 128 in, 128 out: requests over tokens a second, with the prefill",
        skinny=0,
    ),
    Other(
        "vLLM 0.11.2, DeepSeek-V2-Lite BF16, TP 1",
        str(Path(__file__).with_name("deepseek-v2-lite.json")),
        "MI300X",
        1024,
        {1: 4.52},
        "cklxx/fleet-mi300x, 2026-09: wall, full graphs; 1024 keys are assumed",
        skinny=1,
        ranks=1,
    ),
)
"""Held-out checks of the baseline's step: nothing is fitted to them, and they do not define the band."""


def other_ms(other: Other, batch: int) -> float:
    """Return the predicted ms of the baseline's step for a point of `OTHERS`."""
    machine = machines.named(other.product)
    given = (
        model_config.read(other.model),
        other.ranks,
        None,
        batch,
        machine,
        "baseline",
        lambda *_: None,
        other.context,
    )
    return step.total(step.nodes(*given, skinny=other.skinny)).us / 1e3
