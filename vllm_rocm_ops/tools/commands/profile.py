"""Run test cases, a model's calls or a list of shapes a few times each under an external profiler, without checks or timing."""

from __future__ import annotations

import argparse

import torch

from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import report
from vllm_rocm_ops.tools.bench import run as bench


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_cases(parser)


def run(
    shapes: str | None,
    op: list[str] | None,
    case: list[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
) -> int:
    """Print the calls. Raises RuntimeError without a GPU."""
    selected = options.shapes_of(shapes, op, case, model, tp, ep, batch)
    clock = clocks.GpuClock()
    with torch.inference_mode():
        return report.show(bench.run(selected, clock, profile=True))
