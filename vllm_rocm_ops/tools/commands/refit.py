"""Benchmark calls on this AMD GPU and refit the timing model, in a file that `predict` then reads (needs the extra [emulator])."""

from __future__ import annotations

import argparse


def add(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run() -> int:
    """Print measured and predicted times. Raises ValueError without an AMD GPU, and ImportError without the extra."""
    from vllm_rocm_ops.timing import refit

    for line in refit.lines(*refit.machine_here()):
        print(line, flush=True)
    return 0
