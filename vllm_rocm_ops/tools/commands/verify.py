"""Check the results of the ops' test cases, of a model's calls or of a list of shapes, each called once; times nothing.

Without a GPU the PyTorch reference runs, unless `--emulate` names an architecture whose kernels the emulator runs.
"""

from __future__ import annotations

import argparse
import os

import torch

from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.tools import options
from vllm_rocm_ops.tools.bench import report
from vllm_rocm_ops.tools.bench import run as bench


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    options.add_cases(parser)
    meaning = "check each case, and each kernel, in the emulator of this architecture; needs the extra [emulator]"
    parser.add_argument("--emulate", metavar="ARCH", help=meaning)
    jobs = min(2, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help=f"processes of --emulate; default: {jobs}")


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
    """Print what is right and what is wrong; 1 if something is."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {jobs}")
    if emulate and shapes:
        raise ValueError(f"--emulate checks test cases and a model's calls, not the list {shapes}")
    asked = shapes, op, case, model, tp, ep, batch
    if emulate:
        from vllm_rocm_ops.emulator import cases as emulated  # an extra

        wrong = False
        cases = [(shape.op, shape.case) for shape in options.shapes_of(*asked)]
        for line, is_wrong in emulated.verify(cases, emulate, jobs):
            wrong |= is_wrong
            print(line, flush=True)
        return int(wrong)
    found = options.shapes_of(*asked)
    try:
        clock = clocks.GpuClock()
    except RuntimeError as error:
        if shapes:
            raise
        clock = None
        print(f"The ops run their PyTorch reference here ({error}): no kernel is checked.")
    with torch.inference_mode():
        return report.show(bench.run(found, clock, once=True))
