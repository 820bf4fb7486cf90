"""An H200 in the model, with AMD's instructions in place of its own, beside measured times of all configurations.

    python -m vllm_rocm_ops.timing.stand_in record FOLDER        # traces of the calls of configurations.py
    python -m vllm_rocm_ops.timing.stand_in judge FOLDER FILE    # the times that configurations.py measured; --fit finds the constants

No emulator runs our kernels' code for sm_90. The same source compiled for gfx942 runs in the emulator, in the configurations and with
the grids of an H200's 132 multiprocessors; its waves of 64 stand for the same blocks' warps.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import pickle
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops import emulated
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.families.rowwise import RowConfig
from vllm_rocm_ops.launch import Launch

from . import configurations, fitting, launch_time, predict
from .configurations import Point
from .h200 import H200, MACHINE, REGISTERS, RESULT, RESULT_OF, TRACED
from .launch_time import Sharing, Work
from .machines import Machine
from .trace import Access, Block, RecordingEmulator, Step

BLOCKS = 32  # of a launch that are recorded
MOST_WAVES = 512, 4096  # of a launch that runs whole; of the first, which may sort, more
MOST_STEPS = 60_000  # of a configuration that is fitted, as the others take most of the time
LOADS = 8  # that a stretch must have to run in two turns
HALVES = ("fit", "held out")


class _Program(RecordingEmulator.program_type):
    computes_matrices = False


class _Emulator(RecordingEmulator):
    program_type = _Program


# Recording


def held(one: Launch) -> int:
    """Blocks of an H200's launch that a multiprocessor holds: by threads, registers, shared memory and their number."""
    threads = math.prod(one.block)
    registers, shared = REGISTERS[one.symbol]
    by_registers = 65536 // (-(-registers // 8) * 8 * -(-threads // 32) * 32)
    return max(1, min(2048 // threads, by_registers, 32, 233472 // (one.lds + shared + 1024)))


def _traced(config):
    """The configuration of gfx942 that stands for one of an H200: whole waves."""
    if isinstance(config, RowConfig):
        return dataclasses.replace(config, threads=-(-config.threads // TRACED.wave_lanes) * TRACED.wave_lanes)
    return config


def _reduced(one: Work) -> Work:
    """Without what is shared of lines that the chosen blocks do not touch."""
    lines = set().union(*(block.lines for block in one.chosen))
    for block in one.chosen:
        block.__dict__.pop("lines", None)  # is found again when it is asked for
    kept = ({line: count for line, count in of.items() if line in lines} for of in one.shared)
    return one._replace(shared=Sharing(*kept))


def in_two_turns(one: Work) -> Work:
    """Where a block of the H200 has half the threads: its warps do twice, each time with half of the lines, what a wave does from one access
    to shared memory or barrier to the next, if it loads more than LOADS times. So no more is under way than what warps load."""

    def half(access: Access | None, second: bool) -> Access | None:
        if access is None or len(access.lines) < 2:
            return access
        middle = len(access.lines) // 2
        lines = access.lines[middle:] if second else access.lines[:middle]
        return access._replace(lines=lines, bytes=access.bytes // 2)

    def twice(steps: list[Step]) -> tuple[list[Step], dict[int, int]]:
        found, stretch, places = [], [], {}
        for place, step in enumerate(steps):
            if step[0].kind not in ("barrier", "end", "lds"):
                stretch.append(step)
                continue
            if sum(instr.kind == "vmem" for instr, _ in stretch) > LOADS:
                stretch = [(instr, half(access, second)) for second in (False, True) for instr, access in stretch]
            found += [*stretch, step]
            stretch, places[place] = [], len(found) - 1
        return found + stretch, places

    def moved(step: Step, places: list[dict[int, int]]) -> Step:
        instr, access = step
        if access is None or access.after is None:
            return step
        wave, place = access.after
        return instr, access._replace(after=(wave, places[wave][place]))

    def block(each: Block) -> Block:
        waves = [twice(wave) for wave in each.waves]
        places = [of for _, of in waves]
        return Block(each.number, [[moved(step, places) for step in steps] for steps, _ in waves])

    return one._replace(chosen=[block(each) for each in one.chosen])


def works(point: Point, config) -> list[Work]:
    """What a multiprocessor runs of a call's launches in a configuration."""
    op, emulator = point.op, _Emulator(str(TRACED), races=False)

    def planned(arch: Arch, chosen, device) -> tuple[dict, list[Launch]]:
        given = op.Arguments(*point.case.make("meta", torch.Generator(), arch.fp8_dtype))
        values = {name: device(name, value) for name, value in given._asdict().items()}
        a = op.Arguments(**values)
        return values, list(op.plan(chosen, op.allocate(a), a, arch))

    experts = (
        len(op.Arguments(*point.case.make("meta", torch.Generator(), torch.float8_e4m3fn)).w1)
        if point.kind == "experts"
        else 1
    )
    _, of_h200 = planned(H200, config, lambda name, value: value)
    values, launches = planned(TRACED, _traced(config), lambda name, value: predict._argument(name, value, experts))
    launches = predict.at_addresses(emulated.executable(launches), values)
    if [math.prod(one.grid) for one in launches] != [math.prod(one.grid) for one in of_h200]:
        raise ValueError(f"{point.name}, {config}: the grids differ")
    cold = [value for value in values.values() if isinstance(value, torch.Tensor)]
    found = []
    for one, theirs in zip(launches, of_h200, strict=True):
        whole = MOST_WAVES[one is launches[0]]
        recording = predict.recorded(emulator, one, one is launches[-1], cold, BLOCKS, whole)
        recording.held = held(theirs)
        work = _reduced(launch_time.work(MACHINE, recording))
        found.append(in_two_turns(work) if 2 * math.prod(theirs.block) <= math.prod(one.block) else work)
    return found


def record(folder: Path, only: Iterable[str] = ()) -> Iterator[str]:
    """Records what is not in the folder yet; a line about each call."""
    for point in configurations.points():
        if not any(kind in point.kind for kind in only or ("",)):
            continue
        path = folder / f"{point.digest[:16]}.pickle.gz"
        if path.exists():
            continue
        start, found, refused = time.process_time(), {}, 0
        a = point.op.Arguments(*point.case.make("meta", torch.Generator(), H200.fp8_dtype))
        for config in configurations.configurations(point.op, a, H200):
            try:
                found[str(config)] = works(point, config)
            except ValueError as error:
                refused += 1
                print(error, file=sys.stderr)
        with gzip.open(path, "wb", 1) as file:
            pickle.dump(found, file, 5)
        yield f"{point.name}: {len(found)} configurations, {refused} without; {time.process_time() - start:.0f} s"


# Comparing


class Row(NamedTuple):
    """A configuration of a call: its measured time and its launches."""

    point: Point
    config: str
    us: float
    works: list[Work]

    @property
    def steps(self) -> int:
        """Instructions that are run."""
        return sum(len(wave) for one in self.works for block in one.chosen for wave in block.waves)

    def predicted(self, machine: Machine) -> float:
        return sum(launch_time.of_work(machine, one).us for one in self.works)


def rows(folder: Path, file: Path, most: int = 0, only: set[str] | None = None) -> list[Row]:
    """What was measured and recorded; of each call at most so many configurations, those with the least hashes, and of these calls."""
    points = {(point.op.name, point.case.name): point for point in configurations.points()}
    found = []
    for line in map(json.loads, file.read_text().splitlines()):
        point = points[line["op"], line["case"]]
        path = folder / f"{point.digest[:16]}.pickle.gz"
        if not path.exists() or (only is not None and point.name not in only):
            continue
        with gzip.open(path) as opened:
            recorded = pickle.load(opened)
        known = [config for config in line["us"] if config in recorded]
        known.sort(key=lambda config: hashlib.sha256(f"{point.name} {config}".encode()).hexdigest())
        found += [Row(point, config, line["us"][config], recorded[config]) for config in known[: most or None]]
    return found


STEPS = {
    "matrix_cycles": (0.2, 4, 0.2),
    "atomic": (0, 8000, 500),
    "wave_latency": (0, 1500, 100),
    "first_instruction": (0, 2000, 200),
    "vmem_in_flight": (16384, 131072, 16384),
    "branch": (0, 64, 8),
    "issue": (1, 12, 1),
    "start": (0.0, 4.0, 0.2),
    "valu": (2, 12, 1),
}
"""The constants that are fitted: their least and largest value, and the step between those that are tried."""


def error(found: Sequence[Row], predicted: Sequence[float]) -> float:
    """The mean |log(predicted / measured)|, of all kinds as much and of all calls of a kind as much."""
    of: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, us in zip(found, predicted, strict=True):
        of[row.point.kind][row.point.name].append(abs(math.log(us / row.us)))
    return statistics.mean(statistics.mean(map(statistics.mean, calls.values())) for calls in of.values())


class Judged(NamedTuple):
    """Predictions of the configurations of calls, beside their times."""

    calls: int
    configurations: int
    median: float
    p90: float
    bias: float
    regret: float
    largest_regret: float
    any: float
    pairs: int
    in_order: int


def judged(found: Iterable[tuple[str, float, float]]) -> Judged:
    """Of (call, measured, predicted): |log(predicted / measured)| and the median of predicted / measured; what the configuration
    predicted fastest takes beside the fastest, as a geometric mean over calls and at most, and what any takes; and of pairs of one call that
    differ by more than a tenth, how many are in order."""
    found = list(found)
    logs = [math.log(predicted / us) for _, us, predicted in found]
    of = defaultdict(list)
    for call, us, predicted in found:
        of[call].append((us, predicted))
    regrets, anys, pairs, order = [], [], 0, 0
    for times in of.values():
        best = min(us for us, _ in times)
        regrets.append(min(times, key=lambda both: both[1])[0] / best)
        anys += [statistics.geometric_mean(us / best for us, _ in times)]
        for (us, predicted), (us2, predicted2) in itertools.combinations(times, 2):
            if max(us, us2) > 1.1 * min(us, us2):
                pairs, order = pairs + 1, order + ((us < us2) == (predicted < predicted2))
    sizes = sorted(map(abs, logs))
    return Judged(
        len(of),
        len(found),
        statistics.median(sizes),
        sizes[math.ceil(0.9 * len(sizes)) - 1],
        statistics.median(logs),
        statistics.geometric_mean(regrets),
        max(regrets),
        statistics.geometric_mean(anys),
        pairs,
        order,
    )


def halves(found: Sequence[Row], predicted: Sequence[float], hidden: set[str]) -> dict[str, dict[str, dict]]:
    """What `judged` says of each kind, of the calls that were fitted and of those that were not; and of all kinds."""
    of: dict[str, dict[str, list[tuple[str, float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, us in zip(found, predicted, strict=True):
        for kind in (row.point.kind, "all"):
            of[kind][HALVES[row.point.name in hidden]].append((row.point.name, row.us, us))
    return {kind: {half: _rounded(judged(of[kind][half])) for half in HALVES if of[kind][half]} for kind in sorted(of)}


def _rounded(found: Judged) -> dict[str, float]:
    return {name: value if isinstance(value, int) else round(value, 3) for name, value in found._asdict().items()}


def chosen(file: Path, hidden: set[str]) -> dict[str, dict[str, float]]:
    """By kind and half: what the configuration that a call gets takes beside the fastest, as a geometric mean."""
    of = defaultdict(lambda: defaultdict(list))
    kinds = {(point.op.name, point.case.name): point for point in configurations.points()}
    for line in map(json.loads, file.read_text().splitlines()):
        point = kinds[line["op"], line["case"]]
        if line["chosen"] in line["us"]:
            lost = line["us"][line["chosen"]] / min(line["us"].values())
            for kind in (point.kind, "all"):
                of[kind][HALVES[point.name in hidden]].append(lost)
    return {kind: {half: statistics.geometric_mean(lost) for half, lost in found.items()} for kind, found in of.items()}


def text_of(result: dict) -> str:
    """A result as its file has it: what a kernel takes in one line."""
    return re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", json.dumps(result, indent=1)) + "\n"


def predictions(found: list[Row], machine: Machine, jobs: int = 1) -> list[float]:
    """The predicted times of configurations, in us, in so many processes."""
    if jobs == 1:
        return [row.predicted(machine) for row in found]
    _of_this_process[:] = found
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_predicted, range(len(found)), itertools.repeat(machine), chunksize=2))


_of_this_process: list[Row] = []  # what a process finds after a fork


def _predicted(place: int, machine: Machine) -> float:
    return _of_this_process[place].predicted(machine)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vllm_rocm_ops.timing.stand_in", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--jobs", type=int, default=1)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record", help="traces of the calls, in a folder")
    verb.add_argument("folder", type=Path)
    verb.add_argument("kinds", nargs="*")
    verb = verbs.add_parser("judge", help="predictions beside measured times")
    verb.add_argument("folder", type=Path)
    verb.add_argument("file", type=Path)
    verb.add_argument("--fit", type=int, metavar="N", help="first, to N configurations of each call of the fitted half")
    verb.add_argument("--write", action="store_true", help="stand_in.json")
    arguments = parser.parse_args(argv)
    if arguments.verb == "record":
        arguments.folder.mkdir(exist_ok=True)
        for line in record(arguments.folder, arguments.kinds):
            print(line, flush=True)
        return 0
    known, jobs = configurations.points(), arguments.jobs
    hidden, machine = configurations.held_out(known), MACHINE
    if arguments.fit:
        of_half = {point.name for point in known} - hidden
        found = rows(arguments.folder, arguments.file, arguments.fit, of_half)
        found = [row for row in found if row.steps < MOST_STEPS]

        def tried(machine: Machine) -> float:
            off = error(found, predictions(found, machine, jobs))
            print(f"{off:.4f}", {name: machine[name] for name in STEPS}, flush=True)
            return off

        machine = fitting.least(machine, STEPS, tried)
    found = rows(arguments.folder, arguments.file)
    classes = halves(found, predictions(found, machine, jobs), hidden)
    lost = chosen(arguments.file, hidden)
    for kind, of in classes.items():
        for half, each in of.items():
            each["cost_regret"] = round(lost[kind][half], 3)
            print(kind, half, each)
    if arguments.write:
        fitted = {name: machine[name] for name in STEPS}
        RESULT.write_text(text_of(RESULT_OF | {"fitted": fitted, "classes": classes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
