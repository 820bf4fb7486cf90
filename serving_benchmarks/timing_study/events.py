"""Model how long blocks wait for one another through memory: events, grid barriers, and polled data.

An event is a release (buffer_wbl2), an atomic on a counter, a poll that sees it, and an acquire (buffer_inv). Each
takes a trip of one lane, or half a trip: a release to Infinity Cache, an acquire to L2, the others to the memory level
that the blocks share.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

from vllm_rocm_ops.timing.compute_unit import ComputeUnit
from vllm_rocm_ops.timing.hierarchy import L2, MALL, Memory
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.timing.trace import LINE, Access, Block, Instr, Step

SLEEP = 1  # count of the s_sleep between two polls
LOOP = 4  # other instructions of a poll: a wait, a comparison, two of the branch
WAVE_LINES = tuple(range(8))  # lines that a wave stores or polls as data


class Stream(NamedTuple):
    """The concurrent loads of other blocks: TB/s of the chip, and the average cycles of a load."""

    bandwidth: float = 0.0
    load: float = 0.0


QUIET = Stream()


def trip(machine: Machine, level: int, beside: Stream = QUIET) -> float:
    """Return the cycles of one lane's trip to a level and back.

    A die's L2 answers in order, so that during a stream no trip is shorter than the loads it queues behind.
    """
    return max(Memory(machine).latency[level], beside.load)


def poll(machine: Machine, seen: float) -> float:
    """Return the cycles from the write of a value to the end of the poll that sees it.

    Polls take `seen` cycles each, one after the other, and the write is at a random time between two.
    """
    between = seen + 64 * SLEEP + LOOP * machine["issue"] + machine["branch"]
    return between / 2 + seen / 2


def release(machine: Machine, blocks: int = 1, beside: Stream = QUIET) -> float:
    """Return the cycles until other dies see the earlier stores of a die's `blocks`.

    The L2 writes back for one block after the other, with a trip for each.
    """
    return blocks * trip(machine, MALL, beside)


def hop(machine: Machine, level: int, beside: Stream = QUIET, blocks: int = 1) -> float:
    """Return the cycles of an event from one block to another, or from `blocks` of a die that release at once."""
    there, back = trip(machine, level, beside), trip(machine, L2, beside)
    return release(machine, blocks, beside) + there / 2 + poll(machine, there) + back


def round_trip_us(machine: Machine, level: int, beside: Stream = QUIET) -> float:
    """Return the us of two events, there and back."""
    return 2 * hop(machine, level, beside) / machine["clock"]


def of_die(machine: Machine) -> int:
    """Return the compute units of a die."""
    return machine.arch.compute_units // int(machine["xcds"])


def barrier_us(machine: Machine) -> float:
    """Return the us of a barrier of all blocks, one per compute unit, that arrive at once.

    Atomics on its counter take no extra time.
    """
    return hop(machine, MALL, blocks=of_die(machine)) / machine["clock"]


def data_us(machine: Machine) -> float:
    """Return the us from a wave's store of data to the end of another's poll that sees them, without a fence."""
    access = Access(WAVE_LINES, LINE * len(WAVE_LINES))
    stored = Memory(machine, cold=()).store(0.0, access)
    loaded = Memory(machine, cold=()).load(0.0, access)
    return (stored / 2 + poll(machine, loaded)) / machine["clock"]


# During a stream

BURSTS, KIB = 24, 1024
MAX_IDLE = 1024  # issue slots before a load


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
    """Return the stream of one compute unit with a block of four waves, while all others run the same."""
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
    """Return a stream of four waves per compute unit, with `depth` loads of each in flight, at about `bandwidth` TB/s.

    The waves compute between their loads.
    """
    idle = bisect.bisect(range(MAX_IDLE), -bandwidth, key=lambda count: -_run(machine, depth, count).bandwidth)
    return _run(machine, depth, idle)
