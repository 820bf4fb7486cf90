"""Check the results of test cases, a model's calls or a list of shapes, with one untimed call each.

Without a GPU the PyTorch reference runs; `--emulate` runs the kernels of an architecture in the emulator.
"""

from __future__ import annotations

import argparse
import os

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import report
from vllm_rocm_ops.tools.bench import run as bench


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_cases(parser)
    meaning = "run each case and each kernel in the emulator of this architecture (needs the extra [emulator])"
    parser.add_argument("--emulate", metavar="ARCH", help=meaning)
    jobs = min(2, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs", type=int, default=jobs, metavar="N", help=f"processes for --emulate (default: {jobs})"
    )


def run(
    shapes: str | None,
    op: list[str] | None,
    case: list[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    emulate: str | None,
    jobs: int,
) -> int:
    """Print the result of each case. Returns 1 if one is wrong."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if emulate and shapes:
        raise ValueError(f"--emulate supports test cases and --model, not the list {shapes}")
    asked = shapes, op, case, model, tp, ep, batch
    if emulate:
        from vllm_rocm_ops.emulator import cases as emulated  # an extra

        wrong = False
        cases = [(shape.op, shape.case) for shape in options.shapes_of(*asked, archs.named(emulate))]
        for line, is_wrong in emulated.verify(cases, emulate, jobs):
            wrong |= is_wrong
            print(line, flush=True)
        return int(wrong)
    selected = options.shapes_of(*asked)
    try:
        clock = clocks.GpuClock()
    except RuntimeError as error:
        if shapes:
            raise
        clock = None
        print(f"No kernel is checked: the ops run their PyTorch reference ({error}).")
    with torch.inference_mode():
        return report.show(bench.run(selected, clock, once=True))
