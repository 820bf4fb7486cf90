"""Check that data passed between waves and blocks is synchronized and visible across the L2 caches of the dies.

Visibility is checked, not modeled: loads always return the newest data. Each die (XCD) has its own L2 cache, and blocks are
distributed round-robin over dies. A kernel must not rely on blocks sharing a die, so any two count as on different ones. A read of
another block's store is correct if

- the store has sc1, which writes through (agent scope), and an s_waitcnt vmcnt completed it; or a later buffer_wbl2 sc1 completed, of
  the wave, or of another wave of the block after a barrier that the store completed before;
- then, after a barrier if in another wave, an atomic or an sc1 store to a flag follows, and an atomic of the reading block, or an sc1
  load of the flag, came after that and completed, with a barrier after it if in another wave;
- the read has sc1, or follows a buffer_inv sc1 of its block that came after that.

Atomics execute where all dies see them; by themselves they order nothing. Sources: LLVM's AMDGPUUsage, "Memory Model gfx942" (load,
store and atomicrmw monotonic agent; fence release and acquire agent), which gfx950 shares. A global or flat access with sc1 by which a
wave touches one address counts as a flag access, any other as data.

Devices are coherent in uncached memory only (words.py), and at system scope: sc0 sc1 is between devices what sc1 is between blocks of
one device. A launch comes after earlier launches in its queue, with everything that these have seen.
"""

from __future__ import annotations

import bisect
import functools

import numpy as np

# Kinds of what a wave has seen of another wave: its accesses in order; of its stores those that arrived without sc1, and with it;
# and of its stores below system scope those written back at system scope.
OF_ORDER, OF_PLAIN, OF_DEVICE, OF_SYSTEM = 0, 1, 2, 3
AGENT, SYSTEM = 1, 2  # scopes: sc1, sc0 sc1


def equal(count: int, value: int) -> np.ndarray:
    """Return equal numbers. Zeros, of which there may be millions, take no memory until they are read."""
    return np.full(count, value) if value else np.zeros(count, np.int64)


def appended(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Return both arrays in one."""
    return np.concatenate([known, more]) if len(known) else more


class Coherence:
    """Track what waves have seen of each other's accesses, for accesses.py.

    Blocks and waves are numbered over all launches, in the order in which they begin.
    """

    def __init__(self, races: bool):
        self.races = races
        self.clock = 4  # a multiple of 4: accesses.py adds a store's scope
        self.launches: list = []  # schedulers, in order of their begin
        self.first_waves: list[int] = []
        self.block_of = self.device_of = self.queue_of = np.zeros(0, np.int64)  # by wave
        self.stores_held: list = []  # words.Words with stores in flight to other devices
        # wave -> [4, waves]: the clock up to which it has seen each wave; its stores are visible to loads with sc1
        self.seen: dict[int, np.ndarray] = {}
        self.read_plainly: dict[int, np.ndarray] = {}  # likewise, stores visible to loads without sc1
        self.read_below: dict[int, np.ndarray] = {}  # likewise, another device's, visible to loads below system scope
        self.left: dict[int, np.ndarray] = {}  # address -> likewise, as the last atomics there leave it
        self.barriers: dict[int, int] = {}  # block -> clock of its last barrier
        self.completed = np.zeros(0, np.int64)  # per wave: the clock up to which its stores are complete
        # likewise at the last barrier; and up to which they were written back, at agent and at system scope
        self.at_barrier = np.zeros((3, 0), np.int64)
        # wave -> [2, waves of its block]: the clock up to which it wrote back their stores, at agent and at system scope
        self.written_back: dict[int, np.ndarray] = {}
        self.stores: tuple[list[int], list] = ([], [])  # clock and instruction of each store

    def begin(self, scheduler, waves: int, total: int, after: range = range(0)) -> tuple[int, int]:
        """Register a launch of `waves` waves, of `total` over all launches, and return its first wave and block.

        The launch comes after the one with the waves `after`.
        """
        start = len(self.block_of)
        block = int(self.block_of[-1]) + 1 if start else 0
        blocks = np.arange(block, block + waves // scheduler.waves_per_block)
        queue = scheduler.place.queue if scheduler.place else 0
        self.block_of = appended(self.block_of, blocks.repeat(scheduler.waves_per_block))
        self.device_of = appended(self.device_of, equal(waves, scheduler.device))
        self.queue_of = appended(self.queue_of, equal(waves, queue))
        if not self.launches:
            self.completed, self.at_barrier = np.zeros(total, np.int64), np.zeros((3, total), np.int64)
        self.launches.append(scheduler)
        self.first_waves.append(start)
        if after and self.races:
            seen = [self.seen[wave] for wave in after if wave in self.seen]
            base = functools.reduce(np.maximum, seen, np.zeros((4, total), np.int64))
            base[:, after.start : after.stop] = self.clock
            for known in (self.seen, self.read_plainly, self.read_below):
                known.update(dict.fromkeys(range(start, start + waves), base))
        return start, block

    def is_before(self, waves: np.ndarray, scheduler) -> np.ndarray:
        """Return whether waves belong to earlier launches in this one's queue."""
        return (waves < scheduler.first_wave) & (self.queue_of[waves] == scheduler.place.queue)

    def scheduler_of(self, wave: int):
        """Return the scheduler of a wave."""
        return self.launches[bisect.bisect_right(self.first_waves, wave) - 1]

    def wave_name(self, wave: int) -> str:
        """Return the launch, block and wave of a wave number."""
        return self.scheduler_of(wave).wave_name(wave)

    def note_store(self, ins) -> None:
        """Record the instruction of the current store."""
        if self.races:
            self.stores[0].append(self.clock)
            self.stores[1].append(ins)

    @staticmethod
    def seen_by(mine: np.ndarray, other: np.ndarray, kind, known: dict[int, np.ndarray]) -> np.ndarray:
        """Return the clock up to which wave `mine` has seen wave `other`, for a kind."""
        waves = [wave for wave in dict.fromkeys(mine.ravel().tolist()) if wave in known] if known else ()
        mine, other, kind = np.broadcast_arrays(mine, other, kind)
        out = np.zeros(mine.shape, np.int64)
        for wave in waves:
            here = mine == wave
            out[here] = known[wave][kind[here], other[here]]
        return out

    def synchronize(self, w, site, addresses: np.ndarray, release: bool, acquire: bool) -> list:
        """Order waves by their atomics at equal addresses, and return what waves see once this access is complete.

        A wave's earlier accesses, and its block's before the last barrier, come before waves with later atomics there. Of its stores,
        those that have arrived are visible.
        """
        scheduler = w.scheduler
        if not self.races or len(self.completed) == 1:
            return []
        acquired, rows = [], site.rows
        starts = np.append(0, 1 + np.flatnonzero((rows[1:] != rows[:-1]) | (addresses[1:] != addresses[:-1])))
        for wave, address in dict.fromkeys(zip(w.id[rows[starts]].tolist(), addresses[starts].tolist(), strict=True)):
            seen, left = self.seen.get(wave), self.left.get(address)
            if acquire and left is not None:
                acquired.append((wave, left))
            if release:
                mine = np.zeros((4, len(self.completed)), np.int64) if seen is None else seen.copy()
                block, mates = int(self.block_of[wave]), self._mates(scheduler, wave)
                completed, *at_barrier = self.at_barrier[:, mates]
                agent, system = self.written_back.get(wave, at_barrier)
                known = (np.int64(self.barriers.get(block, 0)), agent, completed, system)
                for row, clock in zip(mine[:, mates], known, strict=True):
                    np.maximum(row, clock, out=row)
                for row, clock in zip((OF_PLAIN, OF_SYSTEM), at_barrier, strict=True):
                    np.maximum(mine[row, mates], clock, out=mine[row, mates])
                mine[OF_ORDER, wave], mine[OF_DEVICE, wave] = self.clock + 1, self.completed[wave]
                self.left[address] = mine if left is None else np.maximum(mine, left)
        return acquired

    @staticmethod
    def _mates(scheduler, wave: int) -> slice:
        """Return the waves of a wave's block."""
        first = wave - (wave - scheduler.first_wave) % scheduler.waves_per_block
        return slice(first, first + scheduler.waves_per_block)

    def acquire(self, waves: np.ndarray, acquired: list) -> None:
        """Make the result of `synchronize` visible to these waves."""
        here = set(waves.tolist())
        for wave, left in acquired:
            if wave in here:
                seen = self.seen.get(wave)
                self.seen[wave] = left if seen is None else np.maximum(seen, left)

    def complete(self, waves: np.ndarray, clock: int | None) -> None:
        """Mark all stores of these waves complete, up to a clock."""
        clock = self.clock if clock is None else clock
        self.completed[waves] = np.maximum(self.completed[waves], clock)
        for held in self.stores_held:
            held.deliver(waves, clock, SYSTEM)

    def write_back(self, w, scope: int) -> list:
        """Return the stores that a buffer_wbl2 writes back: the waves' own, and their blocks' that were complete at a barrier."""
        written = []
        for wave in w.id.tolist() if self.races else ():
            mates = self._mates(w.scheduler, wave)
            clocks = np.zeros((2, mates.stop - mates.start), np.int64)
            clocks[:scope] = self.at_barrier[0, mates]
            clocks[:scope, wave - mates.start] = self.clock
            written.append((wave, clocks))
        return written

    def has_written_back(self, waves: np.ndarray, written: list) -> None:
        """Mark the result of `write_back` as written back by these waves."""
        here = set(waves.tolist())
        for wave, clocks in written:
            if wave not in here:
                continue
            before = self.written_back.get(wave)
            self.written_back[wave] = clocks if before is None else np.maximum(before, clocks)
            mates = self._mates(self.scheduler_of(wave), wave)
            mates = np.arange(mates.start, mates.stop)
            for clock in dict.fromkeys(clocks[1][clocks[1] > 0].tolist()):
                for held in self.stores_held:
                    held.deliver(mates[clocks[1] == clock], clock, 0)

    def invalidate(self, w, scope: int) -> None:
        """Apply a buffer_inv: loads without sc1 now read as with sc1; at system scope, other devices' stores too."""
        for known in (self.read_plainly, self.read_below)[:scope]:
            known.update((wave, self.seen[wave]) for wave in w.id.tolist() if wave in self.seen)

    def pass_barrier(self, block: int, waves: range) -> None:
        """Share everything that a block's waves have seen, at a barrier."""
        self.barriers[block] = self.clock
        mates = slice(waves.start, waves.stop)
        self.at_barrier[0, mates] = self.completed[mates]
        for wave in waves if self.written_back else ():
            if wave in self.written_back:
                self.at_barrier[1:, mates] = np.maximum(self.at_barrier[1:, mates], self.written_back[wave])
        for known in (self.seen, self.read_plainly, self.read_below):
            of_waves = {id(known[wave]): known[wave] for wave in waves if wave in known}
            if of_waves:
                known.update(dict.fromkeys(waves, functools.reduce(np.maximum, of_waves.values())))
