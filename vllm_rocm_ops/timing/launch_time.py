"""Predict the time of a launch from its busiest compute unit, from kernel start to end.

Blocks are distributed round-robin over the dies, and within a die over its compute units. The recorded blocks represent all: their lines
tell which lines blocks share, and further blocks of a compute unit are copies with separate memory.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from .compute_unit import SIMDS, ComputeUnit
from .hierarchy import Memory, Sharing
from .machines import Machine
from .trace import APART, LINE, Access, Block, Recording, Step, region_of

MAX_STEPS = 400_000  # steps of a compute unit's waves to simulate


class Prediction(NamedTuple):
    """A predicted time in us, never a measured one.

    `bandwidth_us` is the time of all blocks' bytes at memory bandwidth, `cycles` the time of the compute unit, `blocks` its number of
    blocks.
    """

    us: float
    cycles: float
    bandwidth_us: float
    blocks: int
    megabytes: float

    @property
    def details(self) -> str:
        """Return a sentence about the parts of the prediction."""
        return (
            f"{self.cycles:.0f} cycles of a compute unit with {self.blocks} block{'s' * (self.blocks != 1)}, "
            f"{self.megabytes:.1f} MB, at least {self.bandwidth_us:.1f} us at memory bandwidth"
        )


def sharing(machine: Machine, recording: Recording) -> Sharing:
    """Estimate how many of all blocks load a line from the recorded blocks that do."""
    dies = int(machine["xcds"])
    chip = Counter(line for block in recording.blocks for line in block.lines)
    by_die: list[Counter] = [Counter() for _ in range(dies)]
    for block in recording.blocks:
        by_die[block.number % dies].update(block.lines)
    per_block = recording.grid / len(recording.blocks)
    of_chip = {line: count * per_block for line, count in chip.items() if count > 1}
    of_die: dict[int, float] = {}
    for counts in by_die:
        for line, count in counts.items():
            if chip[line] > 1:
                of_die[line] = max(of_die.get(line, 1), count * per_block, of_chip[line] / dies)
    return Sharing(of_die, of_chip)


def _copy(block: Block, shared: Sharing, number: int) -> Block:
    """Copy a block, with separate lines except for shared ones."""

    def step(instr, access: Access | None) -> Step:
        if access is None or not access.lines:
            return instr, access
        lines = tuple(line if line in shared.chip else line + number * APART for line in access.lines)
        return instr, access._replace(lines=lines)

    return Block(block.number, [[step(*each) for each in wave] for wave in block.waves])


def _steps(block: Block) -> int:
    return sum(map(len, block.waves))


def _chosen(recording: Recording, count: int, shared: Sharing) -> list[Block]:
    """Return the blocks of a compute unit: the longest recorded one, others spread over the grid, then copies."""
    blocks = recording.blocks
    longest = max(range(len(blocks)), key=lambda i: _steps(blocks[i]))
    chosen, step = [], max(1, len(blocks) // count)
    for n in range(count):
        block = blocks[(longest + n * step) % len(blocks)]
        chosen.append(block if n < len(blocks) else _copy(block, shared, 1 + n // len(blocks)))
    return chosen


def predict(machine: Machine, recording: Recording, shared: Sharing | None = None) -> Prediction:
    """Predict the time of a launch, at least the time of its bytes: a late block would otherwise get too much bandwidth.

    `shared` defaults to the lines that the recorded blocks share. Rounds of resident blocks beyond `MAX_STEPS` steps, but never the
    first two, are extrapolated from the last one.
    """
    units, dies, grid = machine.arch.compute_units, int(machine["xcds"]), recording.grid
    shared = shared or sharing(machine, recording)
    per_block, moved = grid / len(recording.blocks), [0.0, 0.0]
    for block in recording.blocks:
        for line in block.lines:
            moved[region_of(line) in recording.cold] += LINE * per_block / shared.chip.get(line, 1)
    most = math.ceil(math.ceil(grid / dies) / (units // dies))
    held = min(recording.held, most)
    ran = min(most, held * max(2, MAX_STEPS // max(1, held * max(map(_steps, recording.blocks)))))
    chosen = _chosen(recording, ran, shared)
    mean = sum(len(block.lines) for block in recording.blocks) / len(recording.blocks)
    busy = mean * len(chosen) / max(1, sum(len(block.lines) for block in chosen))
    cold = recording.cold if moved[0] <= machine["mall_bytes"] else None
    waves = len(chosen[0].waves)
    between = machine["dispatch"] + machine["dispatch_wave"] * (waves - 1)
    turns = math.ceil(min(grid, units * held) / (dies * machine["engines"]) / held)
    starts = [between * turns * (place + 1) if place < held else 0.0 for place in range(most)]
    capacity = units * held

    def others(place: int, running: int) -> float:
        resident = min(max(grid - place // held * capacity, 1), capacity)
        return max(1.0, resident * min(busy, 1.0) / running)

    unit = ComputeUnit(machine, Memory(machine, shared, cold))
    cycles = unit.run(chosen, starts, held, others)
    if ran < most:
        cycles += (most - ran) * (cycles - unit.ends[ran - held - 1]) / held
    least = sum(moved) / machine["mall_bandwidth"], moved[1] / machine["hbm_bandwidth"]
    us = machine["start"] + max(cycles / machine["clock"], max(least) / 1e3)
    return Prediction(us, cycles, max(least) / 1e3, most, sum(moved) / 1e6)


def loaded(machine: Machine, recording: Recording, shared: Sharing | None = None) -> Prediction:
    """Return the time of a launch at the clock under its matrix load: the plugin's kernels and others'."""
    block = recording.blocks[0]
    matrix = sum(instr.cycles for wave in block.waves for instr, _ in wave) / SIMDS
    if not matrix:
        return predict(machine, recording, shared)
    prediction = predict(machine.but(clock=machine["matrix_clock"]), recording, shared)
    busy = matrix * prediction.blocks / prediction.cycles
    clock = machine["clock"] + (machine["matrix_clock"] - machine["clock"]) * min(1.0, busy / machine["matrix_load"])
    return prediction._replace(us=machine["start"] + max(prediction.cycles / clock, prediction.bandwidth_us))
