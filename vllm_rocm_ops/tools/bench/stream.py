"""The bandwidth of a GPU's memory by direction and number of blocks (workgroups): `bench --hbm` with its flags."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.ops.stream_memory import DIRECTIONS, MOST_BLOCKS, WORDS

MIB = 1 << 20
SIZE = 1024  # MiB
PER_UNIT = (1, 2, 4, 8)  # blocks for each compute unit
MOST_POWER = 2048  # of the numbers of blocks in a sweep
OPTIONS = ("direction", "size", "workgroups")  # of bench, with --hbm only


def parse_size(text: str) -> int:
    """'256' -> 256: MiB."""
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"must be MiB, 1 to {1 << 20}, got {text}")
    return int(text)


def add_options(command: argparse.ArgumentParser) -> None:
    """Adds the flags of --hbm to those of bench."""
    add = command.add_argument_group("the bandwidth of memory").add_argument
    add("--direction", nargs="+", choices=DIRECTIONS, help="with --hbm: of our kernels; default: all")
    add("--size", type=parse_size, metavar="MIB", help=f"with --hbm: of the memory that a call has; default: {SIZE}")
    meaning = (
        f"with --hbm: blocks of a launch; default: {', '.join(map(str, PER_UNIT))} for each compute unit; with --sweep "
    )
    add("--workgroups", metavar="N,N,...", help=f"{meaning}also 1, 2, 4, ... {MOST_POWER}")


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with an error where options do not fit."""
    given = [f"--{name}" for name in OPTIONS if getattr(arguments, name) is not None]
    if given and not arguments.hbm:
        parser.error(f"{' '.join(given)} needs --hbm")
    if arguments.workgroups is not None:
        numbers = arguments.workgroups.split(",")
        if not all(number.isdecimal() and 1 <= int(number) <= MOST_BLOCKS for number in numbers):
            wanted = f"numbers from 1 to {MOST_BLOCKS} with commas between them"
            parser.error(f"--workgroups must be {wanted}, got {arguments.workgroups}")


def blocks_of(arguments: argparse.Namespace, compute_units: int) -> list[int]:
    """The numbers of blocks that were asked for."""
    if arguments.workgroups is not None:
        return [int(number) for number in arguments.workgroups.split(",")]
    powers = [1 << i for i in range(MOST_POWER.bit_length())] if arguments.sweep else []
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


def run(arguments: argparse.Namespace, clock: Clock) -> Iterator[str]:
    """The table that was asked for."""
    directions, size = arguments.direction or DIRECTIONS, (arguments.size or SIZE) * MIB
    yield from table(clock, directions, size, blocks_of(arguments, clock.arch.compute_units))
