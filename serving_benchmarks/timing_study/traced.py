"""Attention kernels with published thread traces, in cycles: one gives the cost of a barrier, the others check it.

A row of the file has the cycles of a tile of 32 keys, over all blocks of a compute unit: two at once, four waves each.
`OBJECTS` has each row's assembly by its name, assembled for gfx942, with the bound of its loop cut from 0xa00000 to
`BOUND`.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import CodeObject
from vllm_rocm_ops.timing import launch_time
from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import Memory
from vllm_rocm_ops.timing.machines import MI308X, Machine
from vllm_rocm_ops.timing.trace import Block, Recording, RecordingEmulator, aligned, record

FILE = f"{MI308X.arch.name}_traced_asm.csv"
BOUND = 0x200000  # bytes of K that the loop covers, of 0xa00000
ROWS, HEAD = 40960, 128  # of Q, K and V
TILES = 2  # per iteration of the loop
WARM = 6  # iterations before and after the timed ones
UNTRACED = 1.01  # wall time of a kernel over its trace's, from the other kernels, for one without a trace
BARRIERS = (35, 65, 5)  # cycles of a barrier: the range measured in GEMMs, and the step between the values tried


class Traced(NamedTuple):
    """A kernel and the cycles of a tile in its trace, or its wall cycles less 1 % without a trace."""

    name: str
    cycles: float


def read(folder: Path) -> list[Traced]:
    """Return the kernels in `folder` with published assembly, the first for fitting.

    Raises ValueError without the file.
    """
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} must hold {FILE}")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["assembly"]]
    wall, att = "wall_cycles_per_tile_at_1800MHz", "att_critical_cycles_per_tile"
    return [Traced(Path(row["assembly"]).stem, float(row[att] or float(row[wall]) / UNTRACED)) for row in rows]


def recording(folder: Path, kernel: Traced) -> Recording:
    """Return a recording of two blocks of a kernel on the same die.

    Raises ValueError if the code object is missing.
    """
    path = folder / f"{kernel.name}.co"
    if not path.is_file():
        raise ValueError(f"{folder} must hold {path.name}")
    (symbol,) = CodeObject(path).kernels
    args = tuple(aligned(torch.empty(ROWS, HEAD, dtype=torch.bfloat16, device="meta")) for _ in range(4))
    emulator = RecordingEmulator(str(MI308X.arch), races=False)
    return record(emulator, path, Launch("", symbol, (ROWS // 128, 1, 1), (256, 1, 1), args), [0, 8], cold=())


def loop(block: Block) -> int:
    """Return the address that the first wave branches back to most often."""
    steps = block.waves[0]
    back = [b.address for (a, _), (b, _) in itertools.pairwise(steps) if b.address < a.address]
    return max(set(back), key=back.count)


def cycles(machine: Machine, found: Recording) -> float:
    """Return the cycles of a tile while two blocks run, over both."""
    issued: dict[int, list[float]] = {}
    unit = ComputeUnit(
        machine,
        Memory(machine, launch_time.sharing(machine, found), frozenset()),
        lambda age, index, time: issued.setdefault(age, []).append(time),
    )
    unit.run(found.blocks, [0.0, 0.0], 2, lambda place, running: float(machine.arch.compute_units))
    start, waves = loop(found.blocks[0]), [wave for block in found.blocks for wave in block.waves]
    turns = [
        [time for (instr, _), time in zip(wave, issued[age], strict=True) if instr.address == start]
        for age, wave in enumerate(waves)
    ]
    begin, end = max(each[WARM] for each in turns), min(each[-WARM] for each in turns)
    done = sum(float(np.diff(np.interp((begin, end), each, range(len(each))))[0]) for each in turns)
    return (end - begin) / (done / len(found.blocks[0].waves) * TILES)


def fit_barrier(machine: Machine, kernel: Traced, found: Recording) -> float:
    """Return the cycles of a barrier that bring one kernel nearest to its trace."""
    low, high, step = BARRIERS
    return float(
        min(
            np.arange(low, high + step, step),
            key=lambda value: abs(math.log(cycles(machine.but(barrier=value), found) / kernel.cycles)),
        )
    )


def predicted(machine: Machine, recorded: Iterable[tuple[Traced, Recording]]) -> dict[str, dict[str, float]]:
    """Return, by kernel, the cycles of its trace and the model's."""
    return {
        kernel.name: {"trace": round(kernel.cycles, 1), "predicted": round(cycles(machine, found), 1)}
        for kernel, found in recorded
    }
