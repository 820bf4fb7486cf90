"""Run published microbenchmarks of gfx942 on the model: issue, LDS and vector memory queue, HBM streams, events.

Each is rebuilt from its source's description, as steps of waves. `run` reads only the file with the measured numbers of
a compute unit, `public` only the chip's public_facts.json. The model's results for the latter are written there by

    python -m serving_benchmarks.timing_study.microbenchmarks

With a FOLDER it lists all results of the model that are beyond their limits.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_rocm_ops.timing import launch_time
from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import L2, MALL, Memory
from vllm_rocm_ops.timing.machines import CALIBRATION, MI300X, MI308X, Machine
from vllm_rocm_ops.timing.trace import LINE, Access, Block, Instr, Recording, Step, bank_cycles

from . import events

FILE = f"{MI308X.arch.name}_issue_microbench.csv"
REGISTER_LIMIT = 0.5  # cycles
RELATIVE_LIMIT = 0.1
POSITION_LIMIT = 2  # instructions
GROUPS = 64  # groups of instructions that run
SEGMENT = 256  # groups between barriers when two waves alternate; the source has 1000

WIDE_ENCODINGS = ("v_fma_f32", "v_max3_f32", "v_perm_b32", "v_pk_", "_e64", "v_mfma")
MATRIX = "v_mfma_f32_16x16x16_bf16"


class Result(NamedTuple):
    """A measured number and the model's.

    `limit` is the allowed difference: in cycles, in instructions or, if `relative`, as a ratio.
    """

    test: str
    instruction: str
    condition: str
    measured: float
    predicted: float
    limit: float
    relative: bool

    @property
    def error(self) -> float:
        """The difference, relative to the measured number if the limit is a ratio."""
        difference = self.predicted - self.measured
        return difference / self.measured if self.relative else difference

    @property
    def passes(self) -> bool:
        return abs(self.error) <= self.limit + 1e-9


class Stream:
    """The steps of a wave, at consecutive instruction addresses."""

    def __init__(self, address: int = 0):
        self.steps: list[Step] = []
        self.address = address
        self.chains: Counter[str] = Counter()

    def add(self, kind: str, size: int = 4, access: Access | None = None, **more) -> None:
        self.steps.append((Instr(kind, self.address, size, **more), access))
        self.address += size

    def vector(self, name: str) -> None:
        """Add a vector instruction on the next of its four register chains."""
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
    """Return the last cycle and, by wave, the issue cycles of the instructions of waves that start together."""
    times: list[list[float]] = [[] for _ in waves]
    warm = machine.but(fetch_new_line=0, first_instruction=0)
    unit = ComputeUnit(warm, Memory(warm), lambda age, index, time: times[age].append(time))
    return unit.run([Block(0, waves)], [0.0], 1), times


def _period(machine: Machine, group: list[str], offset: int = 0) -> float:
    """Return the cycles of a group of vector instructions that one wave repeats."""
    stream = Stream(offset)
    for name in group * (2 * GROUPS):
        stream.vector(name)
    _, (times,) = _cycles(machine, [stream.steps])
    return (times[-len(group)] - times[GROUPS * len(group)]) / (GROUPS - 1)


def _alternating(machine: Machine, anchor: str, name: str, count: int) -> float:
    """Return the cycles per group of two waves on a SIMD, one with `anchor`, the other with `count` times `name`.

    Halfway they change roles.
    """

    def wave(first: bool) -> list[Step]:
        stream = Stream()
        for phase in (first, not first):
            start = 0 if phase else 1 << 20
            stream.address = start
            for n in range(SEGMENT * (1 if phase else count)):
                stream.vector(anchor if phase else name)
                if not n and not phase and stream.steps[-1][0].size == 8:  # after a barrier of four bytes
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
    """Return the model's result for a test of registers only."""
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
"""By the condition of an LDS test: dwords between lanes.

The source's four-way conflict is a stride of eight.
"""


def _lds_access(machine: Machine, name: str, stride: int) -> Access:
    size = 16 if name.endswith("b128") else 4
    lanes = np.arange(64)
    cycles = bank_cycles(name, lanes * size * stride, lanes, size, machine.arch.name)
    return Access((), 64 * size, cycles)


def _lds(machine: Machine, row: dict[str, str]) -> float:
    """Return the model's result for an LDS test.

    Latency is a read and its wait, between two clock reads. Throughput is eleven reads minus one, divided by ten.
    """
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
    """Return the cycles of reads of 16 waves at a stride between lanes."""
    stream = Stream()
    for _ in range(GROUPS):
        stream.add("lds", 8, _lds_access(machine, "ds_read_b32", stride))
    return max(each[-1] - each[0] for each in _cycles(machine, [stream.steps] * 16)[1])


def _strides(machine: Machine, rows: list[dict[str, str]]) -> Iterator[Result]:
    """Yield the times of strides, relative to the slowest.

    Lanes beyond the LDS read nothing, so their strides are left out.
    """
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
    """Return the cycles between the issues of 96 accesses of a KiB each."""
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
    """Return the position of the first gap of a length, measured and by the model."""
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
    """Yield the microbenchmarks in `folder` that the model has.

    Raises ValueError without the file.
    """
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


# The chip

FILE_OF_FACTS = Path(__file__).with_name("public_facts.json")
FACTS = json.loads(FILE_OF_FACTS.read_text())
"""Public numbers of MI300X, each with its source.

`least` and `most` are the measured range, `first` is the model's number before a rule was changed for one of them, and
`now` its current one.
"""
BAND = max(half["largest"] for half in CALIBRATION["classes"]["skinny GEMM"].values())
"""The error band of streaming calls, which is also the limit of public facts."""

REGION = 7  # region of cold memory
READS = 512  # reads per wave
EXPERTS, LAYERS, HIDDEN, INNER = 8, 4, 2048, 1408  # experts of a layer, each on a die; layers that run
KIB_LINES = 8


def _blocks(machine: Machine, make, count: int = 8) -> Recording:
    """Return a launch of one block per compute unit, recording `make(number)` for some of them."""
    units = machine.arch.compute_units
    return Recording(
        "", units, 1, [make(n * units // count // 8 * 8 + n % 8) for n in range(count)], frozenset({REGION})
    )


def _kib(place: int) -> Access:
    """Return the access to the KiB at a place of the cold region."""
    first = (REGION << 29) % (1 << 50) + KIB_LINES * place
    return Access(tuple(range(first, first + KIB_LINES)), KIB_LINES * LINE)


def _reads(machine: Machine, depth: int) -> float:
    """Return the TB/s of four waves per compute unit that sum their loads, each with `depth` KiB in flight."""
    units, turn = machine.arch.compute_units, Stream()
    for n in range(depth):
        turn.add("valu")
        turn.add("valu")
        turn.add("vmem", 8, _kib(0))
    for n in range(depth):
        turn.add("wait", vm=depth - 1 - n)
        for _ in range(4):
            turn.add("valu", reads=(1000,), writes=(1000,))
    turn.add("salu")
    turn.add("wide", 8)
    turn.add("branch")

    def block(number: int) -> Block:
        waves = []
        for wave in range(4):
            places = (_kib((n * units + number) * 4 + wave) for n in itertools.count())
            steps = [
                (instruction, access and next(places))
                for _ in range(READS // depth)
                for instruction, access in turn.steps
            ]
            waves.append([*steps, (Instr("end", turn.address, 4), None)])
        return Block(number, waves)

    found = launch_time.predict(machine, _blocks(machine, block))
    return found.megabytes / found.us


def _rows(stream: Stream, groups: range, loads: int, place: int) -> None:
    """Add dot products of groups of two rows, `loads` KiB each, with a vector in LDS.

    The next group's loads are issued before one is used.
    """
    sums = 12  # steps of two rows' sums over lanes
    for at, group in enumerate((*groups, None)):
        ahead = group is not None
        for n in range(loads if ahead else 0):
            stream.add("valu", 8)
            stream.add("vmem", 8, _kib(place + group * loads + n))
        for n in range(loads if at else 0):
            stream.add("wait", vm=loads - 1 - n + loads * ahead)
            stream.add("lds", 8, Access((), 1024, 8))
            stream.add("wait", lgkm=0)
            for _ in range(16):
                stream.add("valu")
        for _ in range(sums if at else 0):
            stream.add("lds", 8, Access((), 256, 2))
            stream.add("wait", lgkm=0)
            stream.add("valu")


def _layers(machine: Machine, handshake: float | None) -> float:
    """Return the TB/s of expert layers for one token, one expert per die: gate_up, `handshake` cycles, down."""
    units, workers = machine.arch.compute_units, machine.arch.compute_units // EXPERTS

    def block(number: int) -> Block:
        waves, worker = [], number // EXPERTS
        for wave in range(4):
            stream = Stream()
            for layer in range(LAYERS):
                stream.address, place = 0, (layer * units + number) << 11
                _rows(stream, range(wave, len(range(worker, INNER, workers)), 4), 8, place)
                stream.add("barrier")
                if handshake is not None:
                    if not wave:
                        stream.add("sleep", count=round(handshake / 64))
                    stream.add("barrier")
                _rows(stream, range(wave, -(-len(range(worker, HIDDEN, workers)) // 2), 4), 6, place + 1024)
                stream.add("barrier")
            stream.add("end")
            waves.append(stream.steps)
        return Block(number, waves)

    found = launch_time.predict(machine, _blocks(machine, block))
    return LAYERS * EXPERTS * 3 * INNER * HIDDEN * 2 / 1e6 / found.us


PUBLIC = {
    "reads": lambda machine, row: _reads(machine, row["depth"]),
    "experts": lambda machine, row: _layers(machine, None),
    "experts, last arrival releases": lambda machine, row: _layers(machine, events.hop(machine, L2)),
    "experts, each releases": lambda machine, row: _layers(
        machine, events.hop(machine, L2, blocks=events.of_die(machine))
    ),
    "event, other die": lambda machine, row: events.round_trip_us(machine, MALL),
    "event, same die": lambda machine, row: events.round_trip_us(machine, L2),
    "event beside a stream": lambda machine, row: events.round_trip_us(
        machine, MALL, events.stream(machine, row["depth"], row["bandwidth"])
    ),
    "barrier of the grid": lambda machine, row: events.barrier_us(machine),
    "data polled": lambda machine, row: events.data_us(machine),
}


def public(machine: Machine) -> Iterator[Result]:
    """Yield the public facts of the chip.

    Of a measured range, the end nearest to the model counts.
    """
    for row in FACTS:
        predicted = PUBLIC[row["test"]](machine, row)
        measured = min(max(predicted, row["least"]), row["most"])
        yield Result(row["test"], f"in {row['unit']}", row["condition"], measured, predicted, BAND, True)


def lines(folder: Path) -> Iterator[str]:
    """Yield lines about the microbenchmarks in a folder."""
    results = [*run(MI308X, folder), *public(MI300X)]
    yield f"microbenchmarks: {sum(result.passes for result in results)} of {len(results)} within their limits; the others:"
    for result in results:
        if not result.passes:
            yield (
                f"  {result.test} {result.instruction}, {result.condition}: "
                f"measured {result.measured:.3g}, predicted {result.predicted:.3g}"
            )


def main(argv: list[str]) -> int:
    """Print the results of a folder, or write the last prediction of the chip's facts."""
    if argv:
        try:
            for line in lines(Path(argv[0])):
                print(line)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        return 0
    rows = [row | {"now": float(f"{of.predicted:.3g}")} for row, of in zip(FACTS, public(MI300X), strict=True)]
    texts = (json.dumps({"first": row["now"], **row}) for row in rows)
    FILE_OF_FACTS.write_text("[\n" + ",\n".join(f" {line}" for line in texts) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
