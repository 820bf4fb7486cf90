"""Predict the times of any code object's kernels, whose arguments the caller gives.

The emulator runs some blocks, and the model times them.

    launch = external_kernel.ObjectLaunch("name", (80, 1, 1), (256, 1, 1), {0: torch.zeros(4096), 8: struct.pack("<I", 512)})
    external_kernel.predict(machines.named("MI300X"), external_kernel.record("gfx942", path, launch), launch.grid)

As a command: python -m serving_benchmarks.timing_study.external_kernel --help
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import re
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops.core import kernel_arguments
from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.emulator import cases as emulated
from vllm_rocm_ops.emulator.objects import KernelObject
from vllm_rocm_ops.timing import launch_time, machines, trace
from vllm_rocm_ops.timing.hierarchy import Sharing
from vllm_rocm_ops.timing.launch_time import Prediction
from vllm_rocm_ops.timing.machines import Machine

from . import refit

BLOCKS = 16  # recorded blocks of a one-dimensional grid
MAX_BYTES = 1 << 33  # of a launch's buffers
PREFIX = "external_kernel"


class Pointers(NamedTuple):
    """A pointer to `table`, which starts with pointers to `tensors`."""

    table: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


Arguments = dict[int, torch.Tensor | bytes | Pointers]


class ObjectLaunch(NamedTuple):
    """A launch of a kernel that has no stamp.

    `args` maps offsets in the argument buffer to tensors or `Pointers` for pointers, and to bytes for all else. Other
    bytes are zero.
    """

    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: Arguments
    lds: int = 0

    @property
    def named(self) -> dict[str, object]:
        """The arguments by their names in errors."""
        found: dict[str, object] = {}
        for offset, value in self.args.items():
            is_nested = isinstance(value, Pointers)
            found[f"at byte {offset}"] = value.table if is_nested else value
            for place, tensor in enumerate(value.tensors if is_nested else ()):
                found[f"{place} of that at byte {offset}"] = tensor
        return found


def packed(args: Arguments, address: Callable[[torch.Tensor], int]) -> bytes:
    """Return the argument buffer, up to the last argument."""
    content = bytearray()
    for offset, value in args.items():
        if isinstance(value, Pointers):
            inner = struct.pack(f"<{len(value.tensors)}Q", *map(address, value.tensors))
            value.table[: len(inner)] = torch.frombuffer(bytearray(inner), dtype=torch.uint8)
            value = value.table
        raw = struct.pack("<Q", address(value)) if isinstance(value, torch.Tensor) else value
        content.extend(bytes(max(0, offset + len(raw) - len(content))))
        content[offset : offset + len(raw)] = raw
    return bytes(content)


class _AllRegisters(KernelObject):
    """A kernel whose waves may name all registers.

    In hardware, registers beyond the VGPRs of its descriptor are AGPRs by other names.
    """

    vgprs = agprs = 256


class ObjectProgram(trace.RecordingEmulator.program_type):
    """A program of a published code object, which runs on hardware as it is."""

    trusted = True

    def __init__(self, code: CodeObject, name: str, arch: str):
        super().__init__(code, name, arch)
        fields = dataclasses.fields(KernelObject)
        self.object = _AllRegisters(**{field.name: getattr(self.object, field.name) for field in fields})


class _TimedProgram(ObjectProgram):
    computes_matrices = False


class ObjectEmulator(trace.RecordingEmulator):
    """An emulator that accepts `ObjectLaunch`, and computes the hardware's results."""

    program_type = ObjectProgram

    def packed(self, path: Path, launch: ObjectLaunch, space) -> bytes:
        """Return the bytes of a launch's arguments."""
        return packed(launch.args, space.address)


class TimedEmulator(ObjectEmulator):
    """An emulator that leaves results of matrix instructions unset, as most addresses and branches need none."""

    program_type = _TimedProgram


# Time


class _ByRegion(Mapping):
    """The number of blocks that load a line, by its region.

    All blocks load the same lines of the regions in `everywhere`.
    """

    def __init__(self, factors: dict[int, float], everywhere: Collection[int]):
        self.factors, self.everywhere = factors, everywhere

    def __contains__(self, line: object) -> bool:
        return trace.region_of(line) in self.everywhere

    def __getitem__(self, line: int) -> float:
        return self.factors[trace.region_of(line)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.factors)

    def __len__(self) -> int:
        return len(self.factors)


def probes(grid: tuple[int, int, int], whole_axis: int | None = None) -> list[int]:
    """Return the numbers of a block in the middle of a grid, its neighbor along each axis, and one beyond all three.

    Along `whole_axis`, all blocks are included.
    """
    steps = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
    found: dict[int, None] = {}
    for step in steps:
        at = [min((size // 2 if size > 2 else 0) + more, size - 1) for size, more in zip(grid, step, strict=True)]
        for place in range(grid[whole_axis]) if whole_axis is not None else (None,):
            if place is not None:
                at[whole_axis] = place
            found[at[0] + grid[0] * (at[1] + grid[1] * at[2])] = None
    return list(found)


def sharing(machine: Machine, recording: trace.Recording, grid: tuple[int, int, int], running: int) -> Sharing:
    """Return how many blocks load the lines of each region: of the whole grid, and of a die's concurrent blocks.

    It follows from the axes of the grid along which the lines of a block change.
    """
    of = {block.number: _by_region(block.lines) for block in recording.blocks}
    first, dies = recording.blocks[0].number, int(machine["xcds"])
    strides = (1, grid[0], grid[0] * grid[1])
    at_once = min(running, recording.grid)
    chip, die, everywhere = {}, {}, set()
    for region in set().union(*of.values()):
        axes = [
            axis
            for axis, stride in enumerate(strides)
            if grid[axis] > 1 and of.get(first + stride, {}).get(region) != of[first].get(region)
        ]
        if not axes:
            everywhere.add(region)
        chip[region] = recording.grid / math.prod(grid[axis] for axis in axes)
        keys = {
            (tuple(number // strides[axis] % grid[axis] for axis in axes), number % dies) for number in range(at_once)
        }
        die[region] = max(1.0, at_once / len(keys))
    return Sharing(_ByRegion(die, everywhere), _ByRegion(chip, everywhere))


def _by_region(lines: Collection[int]) -> dict[int, frozenset[int]]:
    ordered = sorted(lines, key=trace.region_of)
    return {region: frozenset(of) for region, of in itertools.groupby(ordered, trace.region_of)}


def record(
    arch: str,
    path: Path,
    launch: ObjectLaunch,
    cold: Collection[torch.Tensor] | None = None,
    whole_axis: int | None = None,
) -> trace.Recording:
    """Run some blocks of a launch, and return their recording.

    `cold` are the tensors that no cache has, by default all; `whole_axis` is the axis of the grid whose blocks wait for
    each other. Raises ValueError and the emulator's errors, which name the symbol, the instruction and its offset.
    """
    has_axes = launch.grid[1:] != (1, 1)
    blocks = probes(launch.grid, whole_axis) if has_axes else emulated.sample(launch.grid[0], BLOCKS)
    return trace.record(TimedEmulator(arch, races=False), path, launch, blocks, cold=cold)


def predict(
    machine: Machine, recording: trace.Recording, grid: tuple[int, int, int], repeats: float = 1.0
) -> Prediction:
    """Return the predicted time of a recorded launch.

    Only a grid with several axes shows what blocks share. `repeats` is the number of blocks that load the lines that no
    axis shows as shared.
    """
    if grid[1:] == (1, 1):
        return launch_time.loaded(machine, recording)
    shared = sharing(machine, recording, grid, recording.held * machine.arch.compute_units)
    for of, least in ((shared.chip, repeats), (shared.die, repeats / machine["xcds"])):
        of.factors = {region: max(factor, least) for region, factor in of.factors.items()}
    return launch_time.loaded(machine, recording, shared)


# Command line


def kernel_of(path: Path, symbol: str | None, arch: str) -> KernelObject:
    """Return the kernel of a code object, the only one if no symbol is given, or raise ValueError."""
    try:
        code = CodeObject(path)
        kernels = code.kernels
    except (OSError, KeyError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{PREFIX}: {path} must be a code object, got {type(error).__name__}: {error}") from None
    if code.arch != arch:
        raise ValueError(f"{PREFIX}: {symbol or 'the kernel'} of {path} must be compiled for {arch}, got {code.arch}")
    if symbol is None and len(kernels) == 1:
        return next(iter(kernels.values()))
    if symbol not in kernels:
        raise ValueError(f"{PREFIX}: --symbol must be one of {', '.join(sorted(kernels))}, got {symbol}")
    return kernels[symbol]


def dimensions(name: str, text: str) -> tuple[int, int, int]:
    """Return '80x4' as (80, 4, 1), or raise ValueError."""
    sizes = text.split("x")
    if not 1 <= len(sizes) <= 3 or not all(re.fullmatch("[1-9][0-9]{0,9}", size) for size in sizes):
        raise ValueError(f"{PREFIX}: {name} must be one to three positive numbers with x between them, got {text}")
    return tuple(map(int, sizes + ["1", "1"]))[:3]


def arguments(kernel: KernelObject, text: str) -> Arguments:
    """Return the arguments that a user gives, see docs/timing.md, or raise ValueError."""
    where = f"{PREFIX}: {kernel.name}: --args"
    try:
        found = _from_json(where, json.loads(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} must be JSON, got {text[:60]}: {error}") from None
    total = sum(value.numel() for value in found.values() if isinstance(value, torch.Tensor))
    if total > MAX_BYTES:
        raise ValueError(f"{where} must have at most {MAX_BYTES} bytes of buffers, got {total}")
    end = max(
        (offset + (8 if isinstance(value, torch.Tensor) else len(value)) for offset, value in found.items()), default=0
    )
    wanted = explicit_bytes(kernel)
    if end != wanted:
        raise ValueError(f"{where} must be {wanted} bytes, got {end}")
    return found


def explicit_bytes(kernel: KernelObject) -> int:
    """Return the bytes of the arguments that a caller gives."""
    named = [arg for arg in kernel.metadata.get(".args", ()) if not arg[".value_kind"].startswith("hidden_")]
    return max((arg[".offset"] + arg[".size"] for arg in named), default=kernel.kernarg_size)


def _buffer(where: str, size: int, content: bytes = b"") -> torch.Tensor:
    if not 0 < size <= MAX_BYTES or len(content) > size:
        raise ValueError(f"{where} must have buffers of 1 to {MAX_BYTES} bytes that hold what is in them, got {size}")
    made = trace.aligned(torch.empty(size, dtype=torch.uint8, device="meta"))
    if content:
        made[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return made


def _from_json(where: str, given) -> Arguments:
    """Return the arguments of a list in order, or of an object that has them by their offsets."""
    if type(given) not in (list, dict):
        raise ValueError(f"{where} must be a list or an object, got {given!r}")
    found, end = {}, 0
    items = given.items() if isinstance(given, dict) else ((None, each) for each in given)
    for place, (offset, text) in enumerate(items):
        here = f"{where} {place if offset is None else f'at byte {offset}'}"
        if offset is not None and not re.fullmatch("[0-9]{1,5}", offset):
            raise ValueError(f"{where} must be by their offsets, got {offset!r}")
        value, size = _value(here, text)
        start = -(-end // size) * size if offset is None else int(offset)
        found[start], end = value, start + size
    return found


def _value(here: str, text) -> tuple[torch.Tensor | bytes, int]:
    """Return an argument of JSON, and its size in bytes."""
    kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    if text == "null":
        return bytes(8), 8
    if match := re.fullmatch("([0-9]{1,12})(?::((?:[0-9a-fA-F]{2})*))?", rest if kind == "buffer" else ""):
        return _buffer(here, int(match[1]), bytes.fromhex(match[2] or "")), 8
    code = kernel_arguments.FORMATS.get(kind)
    try:
        if code is None or kind == "pointer":
            raise ValueError(kind)
        raw = struct.pack("<" + code, float(rest) if kind.startswith("f") else int(rest))
    except (ValueError, struct.error, OverflowError):
        kinds = ", ".join(sorted(kernel_arguments.FORMATS.keys() - {"pointer"}))
        wanted = f"like buffer:4096, buffer:4:00000001, null, u32:7 or f32:0.5, of {kinds}"
        raise ValueError(f"{here} must be {wanted}, got {text!r}") from None
    return raw, len(raw)


def lines(
    machine: Machine, path: Path, symbol: str | None, grid: str, block: str, args: str, lds: int
) -> Iterator[str]:
    """Yield lines of text about a launch of a code object.

    Raises ValueError and the emulator's errors.
    """
    kernel = kernel_of(path, symbol, machine.arch.name)
    if lds < 0:
        raise ValueError(f"{PREFIX}: --lds must not be negative, got {lds}")
    launch = ObjectLaunch(
        kernel.name, dimensions("--grid", grid), dimensions("--block", block), arguments(kernel, args), lds
    )
    found = predict(machine, record(str(machine.arch), path, launch), launch.grid)
    yield f"{kernel.name} on {machine.name}: predicted {found.us:.1f} us, not measured; error unknown"
    yield f"  {found.details}"


def main(argv: list[str] | None = None) -> int:
    """Print the prediction of a launch."""
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.timing_study.external_kernel",
        description="Predict a launch of a code object.",
    )
    parser.add_argument("object", type=Path, help="a code object of whoever")
    parser.add_argument("--arch", default=machines.COMPARED, metavar="PRODUCT")
    parser.add_argument("--symbol", help="the kernel, where the object holds several")
    parser.add_argument("--grid", default="1", metavar="X[xY[xZ]]", help="blocks")
    parser.add_argument("--block", default="256", metavar="X[xY[xZ]]", help="threads of a block")
    parser.add_argument("--lds", type=int, default=0, metavar="BYTES", help="of LDS beyond the kernel's own")
    parser.add_argument("--args", default="[]", metavar="JSON", help="the argument buffer; see docs/timing.md")
    given = parser.parse_args(argv)
    try:
        machine = refit.of_user(machines.named(given.arch))
        found = lines(machine, given.object, given.symbol, given.grid, given.block, given.args, given.lds)
        for line in itertools.chain(refit.said(machine), found):
            print(line)
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # torch's errors go on with a stack
        print(f"{PREFIX}: {why}" if isinstance(error, RuntimeError) else why, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
