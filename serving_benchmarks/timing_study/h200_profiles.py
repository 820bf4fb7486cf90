"""Predict profiled steps on H200 from their kernels: two streams, gaps between launches, and the time outside the graph."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import baseline

RESULTS = Path(__file__).resolve().parents[1] / "results" / "nvidia-h200"
PROFILES = {  # files of results/nvidia-h200: layers with shared experts, all layers
    "2026-11-22-215c3c3-llama-tp4": (0, 30),
    "2026-11-23-9afc31a-llama-rank-of-8": (0, 40),
    "2026-11-23-9afd86e-deepseek-rank-of-8": (17, 20),
    "2026-11-23-e10d0ef-deepseek-whole-rank-of-8": (58, 61),
}
FITTED = {("2026-11-23-9afc31a-llama-rank-of-8", "without"), ("2026-11-23-e10d0ef-deepseek-whole-rank-of-8", "without")}
ALONE = "2026-11-22-cf0696c-gemm.jsonl"  # times of block-scaled GEMMs alone
ONCE, DENSE = ((2112, 7168), (3072, 1536), (7168, 2048)), ((4608, 7168), (7168, 2304))
SHARED = ((512, 7168), (7168, 256))
LINEARS = {"without": "gemm_fp8_blockwise", "with": "block_scaled_mm"}
ACTIVATIONS = {"without": "mul_silu", "with": "silu_and_mul"}
QUANTIZED = {"without": 2, "with": 1}  # launches of a shared expert that quantize alone


class Profile(NamedTuple):
    """A recorded step in us: its kernels, the second stream's kernels, launches, and the spans measured and predicted."""

    name: str
    side: str
    batch: int
    kernels: float
    hidden: float
    launches: float
    span: float
    predicted: float
    engine: float | None

    @property
    def error(self) -> float:
        return self.predicted / self.span - 1

    @property
    def fitted(self) -> bool:
        return (self.name, self.side) in FITTED and self.batch == 1


@functools.cache
def _alone(side: str) -> dict[tuple[int, int, int], float]:
    return {
        tuple(line["shape"].values()): line["us"] if side == "with" else line["peers"]["vllm"]
        for line in map(json.loads, (RESULTS / ALONE).read_text().splitlines())
        if line["op"] == "block_scaled_mm"
    }


def second_stream(kernels: dict, side: str, batch: int, experts: int, layers: int) -> float:
    """Return the shared experts' time, us.

    The profile has one sum for all block-scaled linears: the main stream's take at most their time alone, the second stream's at
    least their share.
    """

    def sums(pattern: str) -> tuple[float, float]:
        named = [times for name, times in kernels.items() if pattern in name]
        return sum(calls for calls, _ in named), sum(us for _, us in named)

    if not experts:
        return 0.0
    alone = {shape: us for (m, *shape), us in _alone(side).items() if m == batch for shape in [tuple(shape)]}
    main = layers * sum(alone[shape] for shape in ONCE) + (layers - experts) * sum(alone[shape] for shape in DENSE)
    second = experts * sum(alone[shape] for shape in SHARED)
    _, us = sums(LINEARS[side])
    linears = max(us * second / (main + second), us - main)
    (calls, quantize), (acts, activate) = sums("per_token_group_quant"), sums(ACTIVATIONS[side])
    return linears + QUANTIZED[side] * experts * quantize / calls + experts * activate / acts


def profiles() -> Iterator[Profile]:
    """Yield every profile of the engine with its step: measured kernels, two streams, gaps and the time outside the graph."""
    for name, (experts, layers) in PROFILES.items():
        report = json.loads((RESULTS / f"{name}-latency.json").read_text())
        engine = {(line["side"], line["batch_size"]): line["decode_ms_per_token"] for line in report["results"]}
        for run in report["runs"]:
            for size, ranks in run["profile"].items():
                kernels, batch, side = ranks[0]["kernels"], int(size), run["side"]
                launches, us = (sum(times) for times in zip(*kernels.values()))
                hidden = second_stream(kernels, side, batch, experts, layers)
                predicted = us - hidden + launches * baseline.H200_GAP.value + baseline.H200_HOST.value
                ms = engine.get((side, batch))
                yield Profile(name, side, batch, us, hidden, launches, ranks[0]["span_us"], predicted, ms and ms * 1e3)
