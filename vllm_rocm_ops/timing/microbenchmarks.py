"""Published microbenchmarks of gfx942's issue, LDS and vector memory queue, run on the model of a compute unit.

Each is rebuilt as its source describes it, as steps of waves. `run` reads only the file with the measured numbers.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .compute_unit import ComputeUnit
from .hierarchy import Memory
from .machines import MI308X, Machine
from .trace import LINE, Access, Block, Instr, Step, bank_cycles

FILE = f"{MI308X.arch.name}_issue_microbench.csv"
REGISTER_LIMIT = 0.5  # cycles
RELATIVE_LIMIT = 0.1
POSITION_LIMIT = 2  # instructions
GROUPS = 64  # of instructions that are run
SEGMENT = 256  # groups between barriers where two waves alternate; the source has 1000

WIDE_ENCODINGS = ("v_fma_f32", "v_max3_f32", "v_perm_b32", "v_pk_", "_e64", "v_mfma")
MATRIX = "v_mfma_f32_16x16x16_bf16"


class Result(NamedTuple):
    """A number that was measured, and what the model says. `limit` is what the difference may be: cycles, a part of the measured
    number where `relative`, or instructions."""

    test: str
    instruction: str
    condition: str
    measured: float
    predicted: float
    limit: float
    relative: bool

    @property
    def error(self) -> float:
        """The difference, as a part of what was measured if the limit is one."""
        difference = self.predicted - self.measured
        return difference / self.measured if self.relative else difference

    @property
    def passes(self) -> bool:
        return abs(self.error) <= self.limit + 1e-9


class Stream:
    """Builds a wave's steps; each instruction has an address behind the last."""

    def __init__(self, address: int = 0):
        self.steps: list[Step] = []
        self.address = address
        self.chains: Counter[str] = Counter()

    def add(self, kind: str, size: int = 4, access: Access | None = None, **more) -> None:
        self.steps.append((Instr(kind, self.address, size, **more), access))
        self.address += size

    def vector(self, name: str) -> None:
        """A vector instruction on the next of its four register chains."""
        size = 8 if any(part in name for part in WIDE_ENCODINGS) else 4
        chain = self.chains[name] % 4
        self.chains[name] += 1
        if name == MATRIX:
            registers = tuple(range(600 + 4 * chain, 604 + 4 * chain))
            self.add("matrix", 8, reads=registers, writes=registers, cycles=16, chained=frozenset(registers))
            return
        kind = (
            "packed" if name.startswith("v_pk_") else "transcendental" if name in ("v_exp_f32", "v_rcp_f32") else "valu"
        )
        base = 400 if kind == "transcendental" else 300
        self.add(kind, size, reads=(base + 2 * chain + 20,), writes=(base + 2 * chain,))


def _cycles(machine: Machine, waves: list[list[Step]]) -> tuple[float, list[list[float]]]:
    """When each instruction of waves that start together issues, by wave; and the last cycle."""
    times: list[list[float]] = [[] for _ in waves]
    warm = machine.but(fetch_new_line=0, first_instruction=0)
    unit = ComputeUnit(warm, Memory(warm), lambda age, index, time: times[age].append(time))
    return unit.run([Block(0, waves)], [0.0], 1), times


def _period(machine: Machine, group: list[str], offset: int = 0) -> float:
    """Cycles of a group of vector instructions that one wave repeats."""
    stream = Stream(offset)
    for name in group * (2 * GROUPS):
        stream.vector(name)
    _, (times,) = _cycles(machine, [stream.steps])
    return (times[-len(group)] - times[GROUPS * len(group)]) / (GROUPS - 1)


def _alternating(machine: Machine, anchor: str, name: str, count: int) -> float:
    """Cycles per group of two waves of a SIMD, one with `anchor` and the other with `count` times `name`; then they change."""

    def wave(first: bool) -> list[Step]:
        stream = Stream()
        for phase in (first, not first):
            start = 0 if phase else 1 << 20
            stream.address = start
            for n in range(SEGMENT * (1 if phase else count)):
                stream.vector(anchor if phase else name)
                if not n and not phase and stream.steps[-1][0].size == 8:  # behind a barrier of four bytes
                    stream.address += 4
            stream.add("barrier")
        return stream.steps

    idle: list[Step] = [(Instr("barrier", 0, 4), None), (Instr("barrier", 4, 4), None)]
    waves = [wave(True), *([idle] * 3), wave(False), *([idle] * 3)]
    _, times = _cycles(machine, waves)
    return (max(each[-1] for each in times) - 2 * machine["barrier"]) / (2 * SEGMENT)


BUNDLES = {
    "MFMA+ALU+EXP": "m a e",
    "MFMA+EXP+ALU": "m e a",
    "MFMA2+ALU+EXP": "m m a e",
    "MFMA+ALU+MFMA+EXP": "m a m e",
    "MFMA+EXP+MFMA+ALU": "m e m a",
}


def _bundle(order: str, alus: int) -> list[str]:
    names = {"m": [MATRIX], "e": ["v_exp_f32"], "a": ["v_add_f32"] * alus}
    return [name for letter in order.split() for name in names[letter]]


def _registers(machine: Machine, row: dict[str, str]) -> float | None:
    """What the model says of a test of registers alone."""
    test, name, condition = row["test"], row["instruction"], row["condition"]
    if test == "throughput":
        return _period(machine, [name])
    if test == "fetch_alignment":
        return _period(machine, [name], 4)
    if test == "bundle":
        return _period(machine, _bundle(BUNDLES[name], int(condition[0])))
    if test == "exp_pair_same_wave":
        return _period(machine, ["v_exp_f32", name])
    if test == "exp_pair_other_wave":
        return _alternating(machine, "v_exp_f32", name, 1)
    if test == "mfma_coissue_same_wave":
        count = int(re.search(r"\+ (\d) ops", condition)[1])
        return _period(machine, [MATRIX, *[name] * count]) - _period(machine, [MATRIX])
    if test == "mfma_coissue_other_wave":
        count = int(re.search(r"(\d) ops", condition)[1])
        return _alternating(machine, MATRIX, name, count) - _period(machine, [MATRIX])
    return None


STRIDES = {"no conflict, one wave": 1, "one wave": 1, ">= 2 SIMDs": 1, "4-way conflict": 8, "all lanes one bank": 32}
"""By the condition of a test of LDS: dwords between lanes. The source's four-way conflict is a stride of eight."""


def _lds_access(machine: Machine, name: str, stride: int) -> Access:
    size = 16 if name.endswith("b128") else 4
    lanes = np.arange(64)
    cycles = bank_cycles(name, lanes * size * stride, lanes, size, machine.arch.name)
    return Access((), 64 * size, cycles)


def _lds(machine: Machine, row: dict[str, str]) -> float:
    """Latency: a read and its wait, read by two clocks. Throughput: eleven reads less one, by ten."""
    access = _lds_access(machine, row["instruction"], STRIDES[row["condition"]])
    waves = 4 if row["condition"].startswith(">=") else 1

    def elapsed(count: int) -> float:
        stream = Stream()
        for _ in range(count):
            stream.add("lds", 8, access)
        stream.add("wait", lgkm=0)
        stream.add("salu")
        return max(each[-1] for each in _cycles(machine, [stream.steps] * waves)[1]) - machine["issue"]

    if row["test"] == "lds_latency":
        return elapsed(1) - machine["issue"]
    return (elapsed(11) - elapsed(1)) / 10 / waves


def _stride(machine: Machine, stride: int) -> float:
    """Cycles of reads of 16 waves at a stride between lanes."""
    stream = Stream()
    for _ in range(GROUPS):
        stream.add("lds", 8, _lds_access(machine, "ds_read_b32", stride))
    return max(each[-1] - each[0] for each in _cycles(machine, [stream.steps] * 16)[1])


def _strides(machine: Machine, rows: list[dict[str, str]]) -> Iterator[Result]:
    """The times of strides, as parts of that of the slowest. Lanes beyond the LDS are left out: they read nothing."""
    slowest = 32
    stride_of = {int(re.search(r"stride (\d+)", row["condition"])[1]): row for row in rows}
    if slowest not in stride_of:
        return
    base = float(stride_of[slowest]["value"])
    for stride, row in stride_of.items():
        if stride != slowest and 0 < stride * 4 * 64 <= 65536:
            predicted = _stride(machine, stride) / _stride(machine, slowest)
            named = (row["test"], row["instruction"], row["condition"])
            yield Result(*named, float(row["value"]) / base, predicted, RELATIVE_LIMIT, True)


MIXES = {"96 load": "l", "96 store": "s", "48 load + 48 store": "ls", "64 load + 32 store": "lls"}


def _gaps(machine: Machine, mix: str) -> np.ndarray:
    """Cycles between the issues of 96 accesses of a KiB each."""
    stream = Stream()
    for n in range(96):
        lines = tuple(range(8 * n, 8 * n + 8))
        stream.add("vmem", 8, Access(lines, 8 * LINE, 0, mix[n % len(mix)] == "s"))
    warm = machine.but(fetch_new_line=0, first_instruction=0)
    memory, times = Memory(warm), []
    unit = ComputeUnit(warm, memory, lambda age, index, time: times.append(time))
    unit.run([Block(0, [stream.steps])], [0.0], 1, lambda place, running: float(machine.arch.compute_units))
    return np.diff(times)


def _vmem(machine: Machine, row: dict[str, str]) -> tuple[float, float] | None:
    """Where the first gap of a length is: measured, and by the model."""
    least = re.search(r"gap >= (\d+)", row["condition"])
    mix = next((letters for start, letters in MIXES.items() if row["instruction"].startswith(start)), None)
    if not least or not mix:
        return None
    measured = re.match(r"\d+", row["value"])[0]
    if row["value"][len(measured) :].startswith("-"):  # a range without a usual value
        return None
    found = np.flatnonzero(_gaps(machine, mix) >= int(least[1]) - 1e-6)
    return float(measured), float(found[0] + 1) if len(found) else float("inf")


def run(machine: Machine, folder: Path) -> Iterator[Result]:
    """The microbenchmarks in `folder` that the model has. Raises ValueError without the file."""
    path = folder / FILE
    if not path.is_file():
        raise ValueError(f"{folder} must hold {FILE}")
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if machine.arch.name in row["gpu"]]
    for row in rows:
        test, named = row["test"], (row["test"], row["instruction"], row["condition"])
        if test in ("lds_latency", "lds_throughput"):
            yield Result(*named, float(row["value"]), _lds(machine, row), RELATIVE_LIMIT, True)
        elif test == "vmem_issue_gap":
            positions = _vmem(machine, row)
            if positions:
                yield Result(*named, *positions, POSITION_LIMIT, False)
        else:
            predicted = _registers(machine, row)
            if predicted is not None:
                yield Result(*named, float(row["value"]), predicted, REGISTER_LIMIT, False)
    yield from _strides(machine, [row for row in rows if row["test"] == "lds_stride"])
