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


def run(**cases) -> int:
    """Print the calls. Raises RuntimeError without a GPU."""
    selected = options.shapes_of(**cases)
    clock = clocks.GpuClock()
    with torch.inference_mode():
        return report.show(bench.run(selected, clock, profile=True))
