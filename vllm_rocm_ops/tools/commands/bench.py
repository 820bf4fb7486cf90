"""Benchmark test cases, a model's calls or a list of shapes on this GPU, and check the results."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import torch

from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import lists, report
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench.baselines import load_vllm


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_cases(parser)
    meaning = "also benchmark the installed kernels of PyTorch, vLLM, FlashAttention, FlashMLA, AITER and Triton"
    parser.add_argument("--baselines", action="store_true", help=meaning)
    meaning = (
        ".jsonl or .csv file to append results to, or a folder, in which the file is <gpu>/<date>-<commit>-<kind>.jsonl"
    )
    parser.add_argument("--output", type=Path, metavar="PATH", help=meaning)


def measure(
    sweep: bool,
    shapes: str | None,
    op: list[str] | None,
    case: list[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    baselines: bool,
    output: Path | None,
) -> int:
    """Print the times, of every configuration in a `sweep`. Returns 1 if a result is wrong. Raises RuntimeError without a GPU."""
    selected, clock = options.shapes_of(shapes, op, case, model, tp, ep, batch), clocks.GpuClock()
    vllm = load_vllm() if baselines else None
    keep = report.keeper(output, lists.kind_of(shapes, model), clock, vllm) if output else None
    with torch.inference_mode():
        return report.show(bench.run(selected, clock, sweep=sweep, baselines=baselines), keep)


run = functools.partial(measure, False)
