"""Kernels of ROCm/aiter whose times were published: what their code objects take as arguments, and how many blocks are launched.

Layouts and grids are facts of aiter's launch code at e4048607 and of the objects' metadata. No object is here: a bare git directory has
them by their blobs.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops.emulator.objects import KernelObject

from . import foreign
from .foreign import Arguments, ObjectLaunch, explicit_bytes
from .machines import Machine
from .trace import Recording, aligned

WARM_BYTES = 2_500_000  # of inputs, of which 101 copies fit Infinity Cache
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

    @property
    def family(self) -> str:
        """The folder of its code object."""
        parts = self.code_object.split("/")
        return parts[2] if len(parts) > 3 and parts[0] == "hsa" else ""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a block's tile, as the object's name has them."""
        found = re.findall(r"_(\d+)x(\d+)(?:_|\.)", self.code_object.rpartition("/")[2])
        if not found:
            raise ValueError(f"{self.code_object} must have a tile in its name")
        return int(found[-1][0]), int(found[-1][1])


class Call(NamedTuple):
    """The launch of a row, with fewer rows where more do the same, and the whole `grid`. `inputs` are in HBM if `is_cold`. `cleared` are
    bytes that another kernel sets to zero before. `whole_axis`: the axis of the grid whose blocks wait for each other."""

    launch: ObjectLaunch
    grid: tuple[int, int, int]
    inputs: tuple[torch.Tensor, ...]
    is_cold: bool
    cleared: int = 0
    whole_axis: int | None = None


def row(fields: dict[str, str]) -> Row:
    """A row of the file. Raises ValueError for one that is not as the file's."""
    try:
        extra = dict(each.split("=", 1) for each in fields["extra"].split() if "=" in each)
        words = [each for each in fields["extra"].split() if "=" not in each]
        blob = fields["blob_at_measurement"] or fields["blob_latest"]
        numbers = int(fields["M"]), int(fields["N"]), fields["K"], int(fields["batch_or_experts"] or 1)
        return Row(
            fields["gpu"], fields["op"], fields["code_object"], blob, *numbers, extra | {"words": " ".join(words)}
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"the row must have the columns of validation_points_gfx942.csv: {error!r}") from None


def call(of: Row, kernel: KernelObject) -> Call:
    """The launch of a row by a kernel of its object. Raises ValueError where the layout is not known."""
    if of.family not in FAMILIES:
        raise ValueError(f"the arguments of {of.family or of.code_object} are not known")
    return FAMILIES[of.family](of, kernel)


class Recorder:
    """Recordings of launches, the last few of which are kept: rows with more tokens do the same in more blocks."""

    def __init__(self):
        self.kept: OrderedDict[tuple, Recording] = OrderedDict()

    def record(self, arch: str, path: Path, what: Call) -> Recording:
        """A recording of the call's launch, for its whole grid. Raises ValueError and the emulator's errors."""
        launch = what.launch
        args = tuple((at, value if isinstance(value, bytes) else value.numel()) for at, value in launch.args.items())
        key = (path.name, launch.symbol, launch.grid, args)
        if key not in self.kept:
            while len(self.kept) >= KEPT:
                self.kept.popitem(last=False)
            self.kept[key] = foreign.record(arch, path, launch, what.inputs, what.whole_axis)
        self.kept.move_to_end(key)
        found = dataclasses.replace(self.kept[key], grid=math.prod(what.grid))
        return found if what.is_cold else dataclasses.replace(found, cold=frozenset())


def predict(machine: Machine, of: Row, path: Path, kernel: KernelObject, recorder: Recorder) -> float:
    """The predicted time of a row in us, as its profiler counts it. Raises ValueError and the emulator's errors."""
    what = call(of, kernel)
    found = foreign.predict(machine, recorder.record(str(machine.arch), path, what), what.grid)
    us = found.us + machine["profiled"]
    if what.cleared:
        us += machine["profiled"] + what.cleared / machine["mall_bandwidth"] / 1e3
    return us


def _zeros(size: int) -> torch.Tensor:
    return aligned(torch.empty(max(16, size), dtype=torch.uint8, device="meta"))


def _laid_out(kernel: KernelObject, names: str, values: dict) -> Arguments:
    """Arguments of 16 bytes each, in the order of `names`."""
    known, args = names.split(), {}
    assert values.keys() <= set(known), values.keys() - set(known)
    for name, value in values.items():
        is_number = isinstance(value, int | float)
        args[SLOT * known.index(name)] = (
            struct.pack("<f" if isinstance(value, float) else "<I", value) if is_number else value
        )
    end = explicit_bytes(kernel)
    return args | ({end - 1: b"\0"} if end - 1 not in args else {})


def _gemm_8bit(of: Row, kernel: KernelObject) -> Call:
    """fp8gemm_blockscale and i8gemm: a tile for each block, K split along the first axis of the grid."""
    (rows, columns), m, n, k = of.tile, of.m, of.n, int(of.k)
    split, ran = int(of.extra.get("splitK", 1)), _fewer(m, rows)
    is_scaled_by_block = of.family == "fp8gemm_blockscale"
    names = "C A B SA SB BIAS M N K PA PB PC KS" + " SM SN SK" * is_scaled_by_block
    scales = (4 * ran * (k // 128), 4 * (n // 128) * (k // 128)) if is_scaled_by_block else (4 * ran, 4 * n)
    inputs = {"A": _zeros(ran * k), "B": _zeros(n * k), "SA": _zeros(scales[0]), "SB": _zeros(scales[1])}
    values = {"C": _zeros(2 * ran * n), **inputs, "BIAS": _zeros(4 * n), "M": ran, "N": n, "K": k, "PA": k, "PB": k}
    values |= {"PC": 2 * n, "KS": split}
    if is_scaled_by_block:
        values |= {"SM": ran, "SN": n // 128, "SK": k // 128}
    grid = n // columns * split, -(-m // rows), 1
    return _call(kernel, names, values, inputs, grid, -(-ran // rows), (m + n) * k, 2 * m * n if split > 1 else 0)


def _gemm_bf16(of: Row, kernel: KernelObject) -> Call:
    """bf16gemm: a tile for each block, K split along the third axis of the grid, whose blocks wait for the one that clears."""
    (rows, columns), m, n, k = of.tile, of.m, of.n, int(of.k)
    split, ran = int(of.extra.get("splitK", 1)), _fewer(m, rows)
    names = "D C A B alpha beta SD0 SD1 SC0 SC1 SA0 SA1 SB0 SB1 M N K splitk is_out_b16 Bias add_bias semaphore"
    inputs = {"A": _zeros(2 * ran * k), "B": _zeros(2 * n * k)}
    values = {"D": _zeros(2 * ran * n), **inputs, "alpha": 1.0, "beta": 0.0, "SD0": 2 * n, "SC0": 2 * n, "SA0": 2 * k}
    values |= {"SB0": 2 * k, "M": ran, "N": n, "K": k, "splitk": split, "is_out_b16": 1}
    if explicit_bytes(kernel) > SLOT * names.split().index("semaphore"):
        values["semaphore"] = _zeros(4 * 1024)
    grid = -(-n // columns), -(-m // rows), split
    made = _call(kernel, names, values, inputs, grid, -(-ran // rows), 2 * (m + n) * k)
    return made._replace(whole_axis=2)


def _fewer(m: int, rows: int) -> int:
    """Rows of which blocks do the same as of all: three tiles, where there are more."""
    return min(m, 3 * rows)


def _call(
    kernel: KernelObject, names: str, values: dict, inputs: dict, grid: tuple, tiles: int, bytes: int, cleared: int = 0
) -> Call:
    """A GEMM whose second axis of the grid has `tiles` of rows in the launch; its inputs have so many bytes."""
    launch = ObjectLaunch(kernel.name, (grid[0], tiles, grid[2]), (256, 1, 1), _laid_out(kernel, names, values))
    return Call(launch, grid, tuple(inputs.values()), bytes >= WARM_BYTES, cleared)


FAMILIES: dict[str, Callable[[Row, KernelObject], Call]] = {
    "fp8gemm_blockscale": _gemm_8bit,
    "i8gemm": _gemm_8bit,
    "bf16gemm": _gemm_bf16,
}
