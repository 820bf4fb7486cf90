"""Compare the baseline's step with published steps beyond its band: their slope over batch, and other engines."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import machines

from . import baseline, published_steps, step

KEPT = 0.15  # relative error of a slope


def slopes() -> list[tuple[str, int, float, float]]:
    """Return release, batch, and the ms added since batch 1, published and predicted."""
    us = published_steps.predicted
    return [
        (release, batch, points[batch] - points[1], (us(batch)[0] - us(1)[0]) / 1e3)
        for release, points in published_steps.RELEASES.items()
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
    ranks: int = published_steps.RANKS


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
        published_steps.MODEL,
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
