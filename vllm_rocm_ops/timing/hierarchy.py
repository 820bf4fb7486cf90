"""Model the memory of one compute unit: its vector memory path and L1, and its share of L2, Infinity Cache and HBM.

Each level beyond L1 has a latency and a bandwidth. Blocks in flight share the bandwidth evenly, so a compute unit gets its blocks' share.
Lines that other blocks of the die also load cross the fabric once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .machines import Machine
from .trace import LINE, Access, region_of

L2, MALL, HBM = range(3)
WAVE_LINES = 8  # of 64 lanes with 16 bytes each


class Sharing(NamedTuple):
    """Count the blocks that load a line, by line if more than one does: on its die, and on the chip."""

    die: Mapping[int, float]
    chip: Mapping[int, float]


NOTHING_SHARED = Sharing({}, {})


class Memory:
    """Model the memory path of a compute unit.

    `cold` holds the regions that only HBM has, None for all; Infinity Cache has the others. `load` and `store` must be called in
    issue order.
    """

    def __init__(self, machine: Machine, sharing: Sharing = NOTHING_SHARED, cold: Collection[int] | None = None):
        cycles = machine["clock"] / 1e3  # per nanosecond
        self.sharing, self.cold = sharing, cold
        self.wave_latency, base = machine["wave_latency"], machine["l2_latency"]
        self.latency = (base, base + machine["mall_latency"] * cycles, base + machine["hbm_latency"] * cycles)
        bandwidths = (machine[name] for name in ("l2_bandwidth", "mall_bandwidth", "hbm_bandwidth"))
        self.cycles_per_byte = [cycles / bandwidth for bandwidth in bandwidths]  # 1 GB/s is a byte per nanosecond
        self.path, self.limit = machine["vmem_bytes"], machine["vmem_in_flight"]
        self.l1_latency, self.depth = machine["l1_latency"], int(machine["vmem_queue"])
        self.lines = int(machine["l1_bytes"]) // LINE
        self.l1: OrderedDict[int, None] = OrderedDict()
        self.l2: set[int] = set()
        self.free = [0.0, 0.0, 0.0]  # time at which each level has served all requests
        self.port = self.returned = 0.0
        self.queue: list[float] = []  # times at which the last accesses leave the queue
        self.awaited: list[tuple[float, int]] = []
        self.bytes_awaited = 0
        self.others = 1.0  # blocks on the chip per block of this compute unit

    def room(self) -> float:
        """Return when the queue accepts another access."""
        return self.queue[-self.depth] if len(self.queue) >= self.depth else 0.0

    def _begin(self, time: float, access: Access, awaited: int) -> float:
        """Return when the access has passed the address path."""
        begin = max(time, self.port)
        while self.awaited and self.bytes_awaited + awaited > self.limit:
            arrival, size = heapq.heappop(self.awaited)
            self.bytes_awaited -= size
            begin = max(begin, arrival)
        self.port = begin + max(4, access.bytes / self.path, len(access.lines))
        self.queue.append(begin + self.l1_latency)
        if len(self.queue) > 2 * self.depth:
            del self.queue[: -self.depth]
        return begin

    def _more(self, access: Access) -> float:
        """Return the cycles beyond a single lane's: `wave_latency` for a wave that loads 16 bytes per lane, less for fewer lines."""
        return self.wave_latency * min(1.0, (len(access.lines) - 1) / (WAVE_LINES - 1))

    def _await(self, arrival: float, size: int) -> None:
        heapq.heappush(self.awaited, (arrival, size))
        self.bytes_awaited += size

    def _serve(self, level: int, time: float, size: float) -> float:
        """Return when a level has served `size` more bytes."""
        self.free[level] = max(self.free[level], time) + size * self.cycles_per_byte[level] * self.others
        return self.free[level]

    def load(self, time: float, access: Access) -> float:
        """Return when the data of a load that issues at `time` are in registers."""
        l1, l2 = self.l1, self.l2
        missed = [line for line in access.lines if line not in l1]
        for line in access.lines:
            l1[line] = None
            l1.move_to_end(line)
        while len(l1) > self.lines:
            l1.popitem(last=False)
        begin = self._begin(time, access, len(missed) * LINE)
        arrival = begin + self.l1_latency
        if missed:
            arrival = max(arrival, self._serve(L2, begin, len(missed) * LINE) + self.latency[L2])
            fresh = [line for line in missed if line not in l2]
            if fresh:
                l2.update(fresh)
                arrival = max(arrival, self._beyond(begin, fresh))
            arrival += self._more(access)
            self._await(arrival, len(missed) * LINE)
        self.returned = max(self.returned + access.bytes / self.path, arrival)
        return self.returned

    def _beyond(self, time: float, lines: list[int]) -> float:
        """Return when lines that miss this die's L2 arrive."""
        die, chip = self.sharing
        arrival = self._serve(MALL, time, LINE * sum(1 / die.get(line, 1) for line in lines)) + self.latency[MALL]
        cold = lines if self.cold is None else [line for line in lines if region_of(line) in self.cold]
        if cold:
            served = self._serve(HBM, time, LINE * sum(1 / chip.get(line, 1) for line in cold))
            arrival = max(arrival, served + self.latency[HBM])
        return arrival

    def store(self, time: float, access: Access) -> float:
        """Return when a store that issues at `time` is complete. Its write-through to Infinity Cache continues after that."""
        begin = self._begin(time, access, access.bytes)
        done = (
            max(self._serve(level, begin, access.bytes) for level in range(HBM + (self.cold is None)))
            + self.latency[MALL]
            + self.wave_latency
        )
        self._await(done, access.bytes)
        return done

    def fence(self, time: float, releases: bool) -> float:
        """Return when a fence that issues at `time` is complete: a write-back of the die's L2, or its invalidation."""
        return time + self.latency[MALL if releases else L2]

    @property
    def drained(self) -> float:
        """Return when every level has served all requests."""
        return max(self.free)
