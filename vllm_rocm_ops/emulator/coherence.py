"""Whether what waves and blocks pass to each other is ordered, and gets past the caches of their dies.

What one block stores and another reads is checked, not modelled: data are always the newest. Each die (XCD) has an L2 cache of its
own, and blocks are dealt to the dies in turn; a kernel must not rely on which two share one, so any two count as apart. A read of
another block's store is right if

- the store has sc1, which writes through (agent scope), and is complete: an s_waitcnt vmcnt says so; or it has not, and a
  buffer_wbl2 sc1 behind it is complete, or one of another wave of the block, behind a barrier that it was complete before;
- then, behind a barrier if in another wave, an atomic or an sc1 store to a flag follows, and one of the reading block, or an sc1
  load of the flag, has come after and is complete, and a barrier after that if in another wave;
- the read has sc1, or is behind a buffer_inv sc1 that came after that, of its block.

Atomics execute where all dies see them; by themselves they order nothing. Sources: LLVM's AMDGPUUsage, "Memory Model gfx942" (load,
store and atomicrmw monotonic agent; fence release and acquire agent), which gfx950 shares. A global or flat
access with sc1 by which a wave touches one address is taken for one of a flag, any other for data.

Devices are coherent in uncached memory only (words.py), and at system scope: what sc1 is to blocks of one device, sc0 sc1 is to those
of two. A launch comes after the launches before it in its queue, with all that these have seen.
"""

from __future__ import annotations

import bisect
import functools
import mmap

import numpy as np

from .errors import GlobalRace, StaleRead

# What a wave has seen of another: what came before; of its stores those that arrived, of stores without sc1 and with, and of
# stores below system scope those that a write-back at system scope has taken.
_ORDER, _PLAIN, _DEVICE, _SYSTEM = 0, 1, 2, 3
AGENT, SYSTEM = 1, 2  # scopes of an access: sc1, sc0 sc1


def _sparse_zeros(count: int) -> np.ndarray:
    """int64 zeros that take memory only where they are written, and may be more than there is."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), np.int64)


class Coherence:
    """What waves have seen of each other's accesses. Each region has `last`: clock << 32 | barrier epoch << 20 | wave id + 1 of each
    granule's last writer; and `readers`: the same of readers. The clock's two lowest bits are the scope of a store. Blocks and waves are
    numbered over all launches, in the order in which they begin."""

    def __init__(self, granule: int, races: bool):
        self.granule, self.races = granule, races
        self.clock = 4  # a multiple of 4; a key of a store adds its scope
        self.launches: list = []  # the schedulers, in the order in which they begin
        self.first_waves: list[int] = []
        self.block_of = self.device_of = self.queue_of = np.zeros(0, np.int64)  # by wave
        self.stores_held: list = []  # of words.Words: stores that are on their way to other devices
        # wave -> [4, waves]: the clock up to which it has seen each; of its stores, those that loads with sc1 read
        self.seen: dict[int, np.ndarray] = {}
        self.read_plainly: dict[int, np.ndarray] = {}  # the same, of those that loads without sc1 read
        self.read_below: dict[int, np.ndarray] = {}  # the same, of another device's, that loads below system scope read
        self.left: dict[int, np.ndarray] = {}  # address -> the same, as the last atomics there leave it
        self.barriers: dict[int, int] = {}  # block -> the clock of its last barrier
        self.completed = np.zeros(0, np.int64)  # per wave: the clock up to which its stores are complete
        # that at the last barrier; and up to which they were written back, at agent and at system scope
        self.at_barrier = np.zeros((3, 0), np.int64)
        # wave -> [2, waves of its block], up to which it wrote back what those stored, at agent and at system scope
        self.written_back: dict[int, np.ndarray] = {}
        self.stores: tuple[list[int], list] = ([], [])  # the clock and the instruction of each

    def begin(self, scheduler, waves: int, total: int, after: range = range(0)) -> tuple[int, int]:
        """Prepares for a launch of so many waves, of so many in all launches to come; returns its first wave and block. It comes after
        the launch that had the waves `after`."""
        start = len(self.block_of)
        block = int(self.block_of[-1]) + 1 if start else 0
        numbers = block + np.arange(waves) // scheduler.waves_per_block
        self.block_of = np.concatenate([self.block_of, numbers])
        self.device_of = np.concatenate([self.device_of, np.full(waves, scheduler.device)])
        queue = scheduler.place.queue if scheduler.place else 0
        self.queue_of = np.concatenate([self.queue_of, np.full(waves, queue)])
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

    def _is_before(self, waves: np.ndarray, scheduler) -> np.ndarray:
        """Whether waves are of launches that came before this one in its queue."""
        return (waves < scheduler.first_wave) & (self.queue_of[waves] == scheduler.place.queue)

    def scheduler_of(self, wave: int):
        """The scheduler of a wave."""
        return self.launches[bisect.bisect_right(self.first_waves, wave) - 1]

    def wave_name(self, wave: int) -> str:
        """The launch, block and wave of a wave number."""
        return self.scheduler_of(wave).wave_name(wave)

    def note_store(self, ins) -> None:
        """Remembers which instruction stores now."""
        if self.races:
            self.stores[0].append(self.clock)
            self.stores[1].append(ins)

    def _granules(self, offsets, size):
        shift = self.granule.bit_length() - 1
        first = offsets >> shift
        count = max(1, size >> shift)
        return first[:, None] + np.arange(count)

    def check_order(self, region, offsets, size, index, w, where, values, scope: int) -> None:
        """Refuses an access that nothing orders after another wave's: a read after a write; a write (`values` are the old and
        the new bytes) after a write of something else, or after a read. And one that may miss another block's store."""
        if region.last is None and region.readers is None:
            return
        rows = where.rows if index is None else where.rows[index]
        granules = self._granules(offsets, size)
        changed = True
        if values is not None:
            old, new = (np.ascontiguousarray(x).view(np.uint8).reshape(len(offsets), -1) for x in values)
            changed = (old != new).any(axis=1)[:, None]
        kinds = [("written", region.last)] if region.last is not None else []
        if values is not None and region.readers is not None:
            kinds += [("read", readers) for readers in region.readers]
        for kind, keys in kinds:
            who = keys[granules]
            suspect = self._unordered(who, w, rows) & changed
            if suspect.any():
                bad = int(np.argmax(suspect.any(axis=1)))
                other = int(who[bad, np.argmax(suspect[bad])] & 0xFFFFF) - 1
                action = "read" if values is None else "overwritten"
                message = f"byte {int(offsets[bad]) - region.start} of {region.name}, {action} here, was {kind} by "
                message += f"{self.wave_name(other)} with nothing that orders the two"
                raise where(GlobalRace, bad if index is None else int(index[bad]), message)
            if kind == "written":
                hidden = self._hidden(region, who, w, rows, scope) & changed
                if hidden.any():
                    bad = int(np.argmax(hidden.any(axis=1)))
                    key, reader = int(who[bad, np.argmax(hidden[bad])]), int(w.id[rows[bad]])
                    message = self._of_hidden(region, key, reader)
                    message = f"byte {int(offsets[bad]) - region.start} of {region.name} was stored by {message}"
                    raise where(StaleRead, bad if index is None else int(index[bad]), message)

    def _hidden(self, region, keys, w, rows, scope: int) -> np.ndarray:
        """Where a granule's last store is another block's, and this access may not find it."""
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        me = w.id[rows][:, None]
        hidden = (keys != 0) & (self.block_of[other] != self.block_of[me])
        if w.scheduler.place:
            hidden &= ~self._is_before(other, w.scheduler)
        if not hidden.any():
            return hidden
        clock = keys >> 32
        seen = self._seen_by(me, other, _PLAIN + (clock & 3 > 0), self.seen if scope else self.read_plainly)
        across = self.device_of[other] != w.scheduler.device
        if across.any():
            kind = np.where(clock & 3 == SYSTEM, _DEVICE, _SYSTEM)
            far = self._seen_by(me, other, kind, self.seen if scope == SYSTEM else self.read_below)
            seen = np.where(across, far if region.words else 0, seen)
        return hidden & (seen <= clock)

    def _of_hidden(self, region, key: int, reader: int) -> str:
        """By which instruction of which wave a granule was stored, and what is missing between that and the reader."""
        clock, wave = key >> 32, (key & 0xFFFFF) - 1
        ins = self.stores[1][bisect.bisect_left(self.stores[0], clock & ~3)]
        across = self.device_of[wave] != self.device_of[reader]
        bits = "sc0 sc1" if across else "sc1"
        is_wide = clock & 3 >= (SYSTEM if across else AGENT)
        kind = _DEVICE if is_wide else _SYSTEM if across else _PLAIN
        arrived = self._seen_by(np.array([reader]), np.array([wave]), np.array([kind]), self.seen)[0] > clock
        if across and not region.words:
            missing = "devices do not see each other's stores to cached memory"
        elif arrived:
            missing = (
                f"this access has no {bits}, and no buffer_inv {bits} came before it and after what orders the two"
            )
        elif is_wide:
            missing = "no s_waitcnt says that it was complete before what orders the two"
        else:
            missing = f"it has no {bits}, and no buffer_wbl2 {bits} was complete before what orders the two"
        scheduler = self.scheduler_of(wave)
        place = f"+{ins.address - scheduler.kernel.entry:#x} `{ins.text}`{scheduler.line(ins)}"
        return f"{place} of {scheduler.wave_name(wave)}: {missing}"

    def _unordered(self, keys, w, rows) -> np.ndarray:
        """Where a granule's last access is another wave's, and not before this one: no barrier in the block, no atomics
        that hand over."""
        suspect = keys != 0
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        me = w.id[rows][:, None]
        if suspect.any():
            suspect &= other != me
            if w.scheduler.place:
                suspect &= ~self._is_before(other, w.scheduler)
        if not suspect.any():
            return suspect
        epochs = w.scheduler.epochs[w.block[rows]][:, None]
        after_barrier = (self.block_of[other] == self.block_of[me]) & ((keys >> 20 & 0xFFF) < epochs)
        return suspect & ~after_barrier & (self._seen_by(me, other, _ORDER, self.seen) <= keys >> 32)

    def stamp_readers(self, region, offsets, size, index, w, where) -> None:
        """Remembers each granule's last reader, and the last one before that was another wave."""
        if region.readers is None:
            region.readers = np.zeros((2, -(-region.data.size // self.granule)), np.int64)
        rows = where.rows if index is None else where.rows[index]
        granules = self._granules(offsets, size)
        key = self._key(w, rows)[:, None]
        last, before = region.readers
        old = last[granules]
        another = (old & 0xFFFFF) != (key & 0xFFFFF)
        if another.any():
            before[granules[another]] = old[another]
        last[granules] = key

    def _key(self, w, rows, scope: int = 0) -> np.ndarray:
        return (self.clock | scope) << 32 | (w.scheduler.epochs[w.block[rows]] & 0xFFF) << 20 | w.id[rows] + 1

    @staticmethod
    def _seen_by(mine: np.ndarray, other: np.ndarray, kind, known: dict[int, np.ndarray]) -> np.ndarray:
        """The clock up to which wave `mine` has seen wave `other`, of a kind, by what is known."""
        waves = [wave for wave in dict.fromkeys(mine.ravel().tolist()) if wave in known] if known else ()
        mine, other, kind = np.broadcast_arrays(mine, other, kind)
        out = np.zeros(mine.shape, np.int64)
        for wave in waves:
            here = mine == wave
            out[here] = known[wave][kind[here], other[here]]
        return out

    def synchronise(self, w, site, addresses: np.ndarray, release: bool, acquire: bool) -> list:
        """Atomics order waves: what one did, and its block before the last barrier, comes before those whose atomics follow at
        that address; of its stores, those that have arrived are seen. Returns what waves see once this access is complete."""
        scheduler = w.scheduler
        if not self.races or len(self.completed) == 1:
            return []
        acquired = []
        for wave, address in dict.fromkeys(zip(w.id[site.rows].tolist(), addresses.tolist(), strict=True)):
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
                for row, clock in zip((_PLAIN, _SYSTEM), at_barrier, strict=True):
                    np.maximum(mine[row, mates], clock, out=mine[row, mates])
                mine[_ORDER, wave], mine[_DEVICE, wave] = self.clock + 1, self.completed[wave]
                self.left[address] = mine if left is None else np.maximum(mine, left)
        return acquired

    @staticmethod
    def _mates(scheduler, wave: int) -> slice:
        """The waves of a wave's block."""
        first = (
            scheduler.first_wave
            + (wave - scheduler.first_wave) // scheduler.waves_per_block * scheduler.waves_per_block
        )
        return slice(first, first + scheduler.waves_per_block)

    def acquire(self, waves: np.ndarray, acquired: list) -> None:
        """Of what `synchronise` returned, what these waves see now."""
        here = set(waves.tolist())
        for wave, left in acquired:
            if wave in here:
                seen = self.seen.get(wave)
                self.seen[wave] = left if seen is None else np.maximum(seen, left)

    def complete(self, waves: np.ndarray, clock: int | None) -> None:
        """All stores of these waves are complete, up to a clock."""
        clock = self.clock if clock is None else clock
        self.completed[waves] = np.maximum(self.completed[waves], clock)
        for held in self.stores_held:
            held.deliver(waves, clock, SYSTEM)

    def write_back(self, w, scope: int) -> list:
        """Which stores a buffer_wbl2 of these waves writes back: their own, and of their blocks those complete at a barrier."""
        written = []
        for wave in w.id.tolist() if self.races else ():
            mates = self._mates(w.scheduler, wave)
            clocks = np.zeros((2, mates.stop - mates.start), np.int64)
            clocks[:scope] = self.at_barrier[0, mates]
            clocks[:scope, wave - mates.start] = self.clock
            written.append((wave, clocks))
        return written

    def has_written_back(self, waves: np.ndarray, written: list) -> None:
        """Of what `write_back` returned, what these waves have written back now."""
        here = set(waves.tolist())
        for wave, clocks in written:
            if wave not in here:
                continue
            before = self.written_back.get(wave)
            self.written_back[wave] = clocks if before is None else np.maximum(before, clocks)
            for held in self.stores_held if clocks[1].any() else ():
                held.deliver(np.array([wave]), int(clocks[1].max()), 0)

    def invalidate(self, w, scope: int) -> None:
        """A buffer_inv of these waves: loads without sc1 now read what those with sc1 do; at system scope, other devices' too."""
        for known in (self.read_plainly, self.read_below)[:scope]:
            known.update((wave, self.seen[wave]) for wave in w.id.tolist() if wave in self.seen)

    def pass_barrier(self, block: int, waves: range) -> None:
        """All that a block's waves have seen, each of them sees after a barrier."""
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

    def stamp(self, region, offsets, size, index, w, where, values, scope: int = 0) -> None:
        if region.last is None:
            region.last = _sparse_zeros(-(-region.data.size // self.granule))
        rows = where.rows if index is None else where.rows[index]
        key = self._key(w, rows, scope)
        granules = self._granules(offsets, size)
        region.last[granules] = key[:, None]
        if values is None or w.count == 1:
            return
        other = region.last[granules] != key[:, None]
        if other.any():
            view, units, new = values
            lost = np.ascontiguousarray(view[units]).view(np.uint8) != np.ascontiguousarray(new).view(np.uint8)
            lost = lost.reshape(len(offsets), -1).any(axis=1) & other.any(axis=1)
            if lost.any():
                bad = int(np.argmax(lost))
                winner = int(region.last[granules[bad]].max() & 0xFFFFF) - 1
                message = f"byte {int(offsets[bad]) - region.start} of {region.name} is also written by "
                message += f"{self.wave_name(winner)}, with another value and nothing that orders the two"
                raise where(GlobalRace, bad if index is None else int(index[bad]), message)
