"""Measure HBM bandwidth by direction and number of blocks (workgroups)."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.ops.stream_memory import MAX_BLOCKS, WORDS

MIB = 1 << 20
SIZE = 1024  # MiB
PER_UNIT = (1, 2, 4, 8)  # blocks per compute unit
MAX_POWER = 2048  # maximum number of blocks in a sweep's powers of two


def parse_size(text: str) -> int:
    """Parse '256' to 256 MiB."""
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be 1 to {1 << 20} MiB, got {text}")
    return int(text)


def parse_workgroups(text: str) -> tuple[int, ...]:
    """Parse '304,608' to (304, 608)."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MAX_BLOCKS for number in numbers):
        wanted = f"comma-separated integers from 1 to {MAX_BLOCKS}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
    return tuple(map(int, numbers))


def usual_blocks(compute_units: int, sweep: bool) -> list[int]:
    """Return the numbers of blocks to measure, with powers of two in a `sweep`."""
    powers = [1 << i for i in range(MAX_POWER.bit_length())] if sweep else []
    return sorted({*powers, *(times * compute_units for times in PER_UNIT)})


def table(clock: Clock, directions: Iterable[str], size: int, blocks: Iterable[int]) -> Iterator[str]:
    """Yield a table of GB/s for `size` bytes at each number of blocks, line by line; a copy moves them twice.

    Raises RuntimeError if a result is wrong.
    """
    directions = list(directions)
    yield f"{'blocks':>8} " + " ".join(f"{direction:>8}" for direction in directions) + f"  GB/s, {size >> 20} MiB"
    words = size // 4 // WORDS * WORDS
    sources = [torch.arange(words, dtype=torch.int32, device=clock.device) for _ in range(clock.calls(size))]
    for count in blocks:
        for direction in directions:
            given = sources[0], direction, count
            if not torch.equal(ops.stream_memory(*given), ops.stream_memory.reference(*given)):
                raise RuntimeError(f"stream_memory is wrong: {direction} with {count} blocks")
        prepared = {
            direction: clock.prepare(ops.stream_memory, [(source, direction, count) for source in sources])
            for direction in directions
        }
        medians = {direction: statistics.median(us) for direction, us in clock.samples(prepared).items()}
        rates = (size * (2 if name == "copy" else 1) / medians[name] / 1e3 for name in directions)
        yield f"{count:8} " + " ".join(f"{rate:8.0f}" for rate in rates)
