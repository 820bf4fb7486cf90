"""Predict published times of ROCm/aiter's kernels: from a row of the file to its call and time.

Layouts and grids (published_gemm.py, published_attention.py) are facts of aiter's launch code at e4048607 and of the
objects' metadata. No object is here: a bare git directory has them by their blobs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops.emulator.objects import KernelObject
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.timing.trace import Recording, aligned

from . import external_kernel
from .external_kernel import Arguments, ObjectLaunch, Pointers, explicit_bytes

KEPT = 4  # recordings
SLOT = 16  # bytes of each argument


class Row(NamedTuple):
    """A row of the published times, without its time."""

    gpu: str
    op: str
    code_object: str
    blob: str
    m: int
    n: int
    k: str
    batch_or_experts: int
    extra: dict[str, str]
    commit: str = ""  # that published it

    @property
    def family(self) -> str:
        """The folder of its code object."""
        parts = self.code_object.split("/")
        return parts[2] if len(parts) > 3 and parts[0] == "hsa" else ""

    @property
    def units(self) -> int:
        """The compute units of its GPU."""
        return next((units for name, units in (("MI308", 80), ("MI35", 256)) if name in self.gpu), 304)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's tile, from the object's name."""
        found = re.findall(r"_(\d+)x(\d+)(?:_|\.)", self.code_object.rpartition("/")[2])
        if not found:
            raise ValueError(f"{self.code_object} must have a tile in its name")
        return int(found[-1][0]), int(found[-1][1])


class Call(NamedTuple):
    """The launch of a row, with fewer rows if the others do the same, and the whole `grid`.

    `inputs` are in HBM if `is_cold`. `cleared` are the sizes of buffers that other kernels zero before, in bytes.
    `whole_axis` is the axis of the grid whose blocks wait for each other. With a `second` launch, the time is
    extrapolated by `beyond` times the difference between both. `repeats` is how many blocks of the whole grid load the
    lines that each block of the launch has alone.
    """

    launch: ObjectLaunch
    grid: tuple[int, int, int]
    inputs: tuple[torch.Tensor, ...]
    is_cold: bool
    cleared: tuple[int, ...] = ()
    whole_axis: int | None = None
    second: ObjectLaunch | None = None
    beyond: float = 0.0
    repeats: float = 1.0


def row(fields: dict[str, str]) -> Row:
    """Return a row of the file, or raise ValueError."""
    try:
        extra = dict(each.split("=", 1) for each in fields["extra"].split() if "=" in each)
        words = [each for each in fields["extra"].split() if "=" not in each]
        blob = fields["blob_at_measurement"] or fields["blob_latest"]
        numbers = int(fields["M"]), int(fields["N"]), fields["K"], int(fields["batch_or_experts"] or 1)
        extra["words"] = " ".join(words)
        return Row(fields["gpu"], fields["op"], fields["code_object"], blob, *numbers, extra, fields["commit"])
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"the row must have the columns of validation_points_gfx942.csv: {error!r}") from None


class Recorder:
    """Recordings of launches, of which the last few are kept.

    Rows with more tokens do the same in more blocks.
    """

    def __init__(self):
        self.kept: OrderedDict[tuple, Recording] = OrderedDict()

    def record(self, arch: str, path: Path, what: Call, launch: ObjectLaunch) -> Recording:
        """Return a recording of a launch of the call, for its whole grid.

        Raises ValueError and the emulator's errors.
        """
        args = tuple((at, _what(value)) for at, value in launch.args.items())
        key = (path.name, launch.symbol, launch.grid, args)
        if key not in self.kept:
            while len(self.kept) >= KEPT:
                self.kept.popitem(last=False)
            self.kept[key] = external_kernel.record(arch, path, launch, what.inputs, what.whole_axis)
        self.kept.move_to_end(key)
        found = dataclasses.replace(self.kept[key], grid=math.prod(what.grid))
        return found if what.is_cold else dataclasses.replace(found, cold=frozenset())


def predict(machine: Machine, what: Call, path: Path, recorder: Recorder) -> float:
    """Return the predicted time of a row's call in us, as its profiler counts it.

    Raises ValueError and the emulator's errors.
    """
    ran = [what.launch] if what.second is None else [what.launch, what.second]
    times = [
        external_kernel.predict(
            machine, recorder.record(str(machine.arch), path, what, each), what.grid, what.repeats
        ).us
        for each in ran
    ]
    us = times[0] + what.beyond * (times[-1] - times[0]) + machine["profiled"]
    return us + sum(machine["profiled"] + size / machine["mall_bandwidth"] / 1e3 for size in what.cleared)


def _what(value):
    """Return the part of an argument that distinguishes launches."""
    if isinstance(value, Pointers):
        return tuple(tensor.numpy().tobytes() for tensor in value.tensors)
    return value if isinstance(value, bytes) else value.numel()


def numbers(values: Iterable[int]) -> torch.Tensor:
    """Return a buffer of unsigned 4-byte numbers, and 16 bytes more."""
    content = struct.pack(f"<{len(values := list(values))}I", *(value & 0xFFFFFFFF for value in values))
    return aligned(torch.frombuffer(bytearray(content + bytes(16)), dtype=torch.uint8))


def zeros(size: int) -> torch.Tensor:
    """Return a buffer of `size` bytes."""
    return aligned(torch.empty(max(16, size), dtype=torch.uint8, device="meta"))


def laid_out(kernel: KernelObject, names: str, values: dict) -> Arguments:
    """Return arguments of 16 bytes each, in the order of `names`, up to the end of the kernel's."""
    known, args = names.split(), {}
    assert values.keys() <= set(known), values.keys() - set(known)
    for name, value in values.items():
        is_number = isinstance(value, int | float)
        args[SLOT * known.index(name)] = (
            struct.pack("<f" if isinstance(value, float) else "<I", value) if is_number else value
        )
    end = explicit_bytes(kernel)
    return args | ({end - 1: b"\0"} if end - 1 not in args else {})
