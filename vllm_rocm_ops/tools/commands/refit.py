"""Measure calls on this machine's AMD GPU, and refit the timing model to them in a file that `predict` reads from then on."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Add no option: all is found on the machine."""


def run() -> int:
    """Print times, measured and predicted. Raises ValueError without an AMD GPU, and ImportError without the extra."""
    from vllm_rocm_ops.timing import refit

    for line in refit.lines(*refit.machine_here()):
        print(line, flush=True)
    return 0
