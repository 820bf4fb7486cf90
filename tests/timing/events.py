"""How long blocks wait for one another through memory: events, barriers of all blocks, and data that are polled.

An event is a release (buffer_wbl2), an atomic on a counter, a poll that sees it, and an acquire (buffer_inv). Each is a trip of one lane, or
half a trip: a release to Infinity Cache, an acquire to L2, the others to where the blocks meet.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import L2, MALL, Memory
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.timing.trace import LINE, Access, Block, Instr, Step

SLEEP = 1  # of the s_sleep between two polls
LOOP = 4  # other instructions of a poll: a wait, a comparison, two of the branch
WAVE_LINES = tuple(range(8))  # that a wave stores or polls as data


class Stream(NamedTuple):
    """What other blocks load meanwhile: TB/s of the chip, and cycles of a load on average."""

    bandwidth: float = 0.0
    load: float = 0.0


QUIET = Stream()


def trip(machine: Machine, level: int, beside: Stream = QUIET) -> float:
    """Return the cycles of one lane's way to a level and back. A die's L2 answers in order, so that beside a stream no trip is shorter than
    the loads that it awaits."""
    return max(Memory(machine).latency[level], beside.load)


def poll(machine: Machine, seen: float) -> float:
    """Return the cycles from where a value is written to the end of the poll that sees it: polls are `seen` cycles, one after the other,
    and a value comes at any time between two."""
    between = seen + 64 * SLEEP + LOOP * machine["issue"] + machine["branch"]
    return between / 2 + seen / 2


def release(machine: Machine, blocks: int = 1, beside: Stream = QUIET) -> float:
    """Return the cycles until earlier stores of a die's `blocks` are where other dies see them. The L2 writes back for one after the
    other, each time a trip."""
    return blocks * trip(machine, MALL, beside)


def hop(machine: Machine, level: int, beside: Stream = QUIET, blocks: int = 1) -> float:
    """Return the cycles of an event from one block to one other, or from `blocks` of a die that release at the same time."""
    there, back = trip(machine, level, beside), trip(machine, L2, beside)
    return release(machine, blocks, beside) + there / 2 + poll(machine, there) + back


def round_trip_us(machine: Machine, level: int, beside: Stream = QUIET) -> float:
    """Return us of two events, there and back."""
    return 2 * hop(machine, level, beside) / machine["clock"]


def of_die(machine: Machine) -> int:
    """Return the compute units of a die."""
    return machine.arch.compute_units // int(machine["xcds"])


def barrier_us(machine: Machine) -> float:
    """Return us of a barrier of all blocks, one on each compute unit, that come at the same time. Atomics on its counter take no time of
    their own."""
    return hop(machine, MALL, blocks=of_die(machine)) / machine["clock"]


def data_us(machine: Machine) -> float:
    """Return us from a wave's store of data to the end of another's poll that sees them, without a fence."""
    access = Access(WAVE_LINES, LINE * len(WAVE_LINES))
    stored = Memory(machine, cold=()).store(0.0, access)
    loaded = Memory(machine, cold=()).load(0.0, access)
    return (stored / 2 + poll(machine, loaded)) / machine["clock"]


# Beside a stream

BURSTS, KIB = 24, 1024
MOST_IDLE = 1024  # issue slots before a load


def _streaming(first: int, depth: int, idle: int) -> list[Step]:
    """Return the steps of a wave that loads `depth` KiB at once, with `idle` empty issue slots before each KiB."""
    steps: list[Step] = []
    for n in range(BURSTS * depth):
        steps.append((Instr("nop", 0, 4, count=idle), None))
        steps.append((Instr("vmem", 0, 8), Access(tuple(range(first + 8 * n, first + 8 * n + 8)), KIB)))
        if n % depth == depth - 1:
            steps.append((Instr("wait", 0, 4, vm=0), None))
    return steps


def _run(machine: Machine, depth: int, idle: int) -> Stream:
    """A compute unit of a chip on whose others all the same runs: one block of four waves that streams from HBM."""
    memory, units = Memory(machine), machine.arch.compute_units
    loads: list[float] = []
    inner = memory.load

    def load(time: float, access: Access) -> float:
        arrival = inner(time, access)
        loads.append(arrival - time)
        return arrival

    memory.load = load
    block = Block(0, [_streaming(wave << 20, depth, idle) for wave in range(4)])
    end = ComputeUnit(machine, memory).run([block], [0.0], 1, lambda place, running: float(units))
    return Stream(len(loads) * KIB * units / (end / machine["clock"] * 1e6), sum(loads) / len(loads))


def stream(machine: Machine, depth: int, bandwidth: float) -> Stream:
    """Return a stream of four waves on each compute unit, `depth` loads of each at once, that takes about `bandwidth` TB/s, as it computes
    between its loads."""
    idle = bisect.bisect(range(MOST_IDLE), -bandwidth, key=lambda count: -_run(machine, depth, count).bandwidth)
    return _run(machine, depth, idle)
