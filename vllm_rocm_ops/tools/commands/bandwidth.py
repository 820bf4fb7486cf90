"""Measure HBM bandwidth by size, by direction and by number of blocks (workgroups)."""

from __future__ import annotations

import argparse
import itertools

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import clock as clocks
from vllm_rocm_ops.ops.stream_memory import DIRECTIONS
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench import stream


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options. Any of them skips the table by size."""
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="directions to measure (default: all)")
    meaning = f"memory per call, in MiB (default: {stream.SIZE})"
    parser.add_argument("--size", type=stream.parse_size, metavar="MIB", help=meaning)
    usual = f"{', '.join(map(str, stream.PER_UNIT))} per compute unit"
    meaning = f"blocks per launch (default: {usual}; with --sweep also 1, 2, 4, ... {stream.MAX_POWER})"
    parser.add_argument("--workgroups", type=stream.parse_workgroups, metavar="N,N,...", help=meaning)
    parser.add_argument("--sweep", action="store_true", help="also measure powers of two")


def run(direction: list[str] | None, size: int | None, workgroups: tuple[int, ...] | None, sweep: bool) -> int:
    """Print the tables. Raises RuntimeError without a GPU or if a result is wrong."""
    clock = clocks.GpuClock()
    blocks = workgroups or stream.usual_blocks(clock.arch.compute_units, sweep)
    asked = sweep or any(value is not None for value in (direction, size, workgroups))
    by_size = () if asked else bench.hbm(clock, ops.unquantized_gemm)
    by_blocks = stream.table(clock, direction or DIRECTIONS, (size or stream.SIZE) * stream.MIB, blocks)
    for line in itertools.chain(by_size, by_blocks):
        print(line, flush=True)
    return 0
