"""The bandwidth of a GPU's memory by direction and number of blocks (workgroups)."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.ops.stream_memory import MOST_BLOCKS, WORDS

MIB = 1 << 20
SIZE = 1024  # MiB
PER_UNIT = (1, 2, 4, 8)  # blocks for each compute unit
MOST_POWER = 2048  # of the numbers of blocks in a sweep


def parse_size(text: str) -> int:
    """'256' -> 256: MiB."""
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be MiB, 1 to {1 << 20}, got {text}")
    return int(text)


def parse_workgroups(text: str) -> tuple[int, ...]:
    """'304,608' -> (304, 608)."""
    numbers = text.split(",")
    if not all(number.isdecimal() and 1 <= int(number) <= MOST_BLOCKS for number in numbers):
        wanted = f"numbers from 1 to {MOST_BLOCKS} with commas between them"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
    return tuple(map(int, numbers))


def usual_blocks(compute_units: int, sweep: bool) -> list[int]:
    """The numbers of blocks that are tried, and in a `sweep` powers of two."""
    powers = [1 << i for i in range(MOST_POWER.bit_length())] if sweep else []
    return sorted({*powers, *(times * compute_units for times in PER_UNIT)})


def table(clock: Clock, directions: Iterable[str], size: int, blocks: Iterable[int]) -> Iterator[str]:
    """GB/s of `size` bytes for each number of blocks, line by line; a copy moves them twice. Raises RuntimeError where a result
    is wrong."""
    directions = list(directions)
    yield f"{'blocks':>8} " + " ".join(f"{direction:>8}" for direction in directions) + f"  GB/s of {size >> 20} MiB"
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
        found = {direction: statistics.median(us) for direction, us in clock.samples(prepared).items()}
        rates = (size * (2 if name == "copy" else 1) / found[name] / 1e3 for name in directions)
        yield f"{count:8} " + " ".join(f"{rate:8.0f}" for rate in rates)
