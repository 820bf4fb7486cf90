"""Track the last accesses to each granule of global memory, and check that later ones are ordered after them and see their data."""

from __future__ import annotations

import bisect
import mmap

import numpy as np

from .coherence import AGENT, OF_DEVICE, OF_ORDER, OF_PLAIN, OF_SYSTEM, SYSTEM, Coherence
from .errors import GlobalRace, StaleRead


def _sparse_zeros(count: int) -> np.ndarray:
    """Return int64 zeros in lazily committed memory, possibly more than physical memory."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), np.int64)


class Accesses:
    """The last accesses to granules of regions, and check them against what waves have seen (coherence.py).

    Each region has `last`, the granules' last writers as clock << 32 | barrier epoch << 20 | wave id + 1, and `readers`, likewise.
    The two lowest bits of the clock are a store's scope.
    """

    def __init__(self, granule: int, coherence: Coherence):
        self.granule, self.coherence = granule, coherence

    def check_order(self, region, offsets, size, w, where, values, scope: int) -> None:
        """Raise for an access that is unordered after another wave's, or that may miss another block's store.

        Unordered accesses are a read after a write, a write (`values` are the old and new bytes) after a write of another value, and
        a write after a read.
        """
        if region.last is None and region.readers is None:
            return
        rows, granules = where.rows, self._granules(offsets, size)
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
                message += f"{self.coherence.wave_name(other)} without synchronization"
                raise where(GlobalRace, bad, message)
            if kind == "written":
                hidden = self._hidden(region, who, w, rows, scope) & changed
                if hidden.any():
                    bad = int(np.argmax(hidden.any(axis=1)))
                    key, reader = int(who[bad, np.argmax(hidden[bad])]), int(w.id[rows[bad]])
                    message = self._of_hidden(region, key, reader)
                    message = f"byte {int(offsets[bad]) - region.start} of {region.name} was stored by {message}"
                    raise where(StaleRead, bad, message)

    def _hidden(self, region, keys, w, rows, scope: int) -> np.ndarray:
        """Return where a granule's last store is another block's and may be invisible to this access."""
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        me = w.id[rows][:, None]
        known = self.coherence
        hidden = (keys != 0) & (known.block_of[other] != known.block_of[me])
        if w.scheduler.place:
            hidden &= ~known.is_before(other, w.scheduler)
        if not hidden.any():
            return hidden
        clock = keys >> 32
        seen = known.seen_by(me, other, OF_PLAIN + (clock & 3 > 0), known.seen if scope else known.read_plainly)
        across = known.device_of[other] != w.scheduler.device
        if across.any():
            kind = np.where(clock & 3 == SYSTEM, OF_DEVICE, OF_SYSTEM)
            far = known.seen_by(me, other, kind, known.seen if scope == SYSTEM else known.read_below)
            seen = np.where(across, far if region.words else 0, seen)
        return hidden & (seen <= clock)

    def _of_hidden(self, region, key: int, reader: int) -> str:
        """Describe the instruction and wave that stored a granule, and the missing step before the reader."""
        known, clock, wave = self.coherence, key >> 32, (key & 0xFFFFF) - 1
        ins = known.stores[1][bisect.bisect_left(known.stores[0], clock & ~3)]
        across = known.device_of[wave] != known.device_of[reader]
        bits = "sc0 sc1" if across else "sc1"
        is_wide = clock & 3 >= (SYSTEM if across else AGENT)
        kind = OF_DEVICE if is_wide else OF_SYSTEM if across else OF_PLAIN
        arrived = known.seen_by(np.array([reader]), np.array([wave]), np.array([kind]), known.seen)[0] > clock
        if across and not region.words:
            missing = "devices do not see each other's stores to cached memory"
        elif arrived:
            missing = f"this access has no {bits}, and no buffer_inv {bits} after the synchronization precedes it"
        elif is_wide:
            missing = "no s_waitcnt completed it before the synchronization"
        else:
            missing = f"it has no {bits}, and no buffer_wbl2 {bits} completed before the synchronization"
        scheduler = known.scheduler_of(wave)
        place = f"+{ins.address - scheduler.kernel.entry:#x} `{ins.text}`{scheduler.line(ins)}"
        return f"{place} of {scheduler.wave_name(wave)}: {missing}"

    def _unordered(self, keys, w, rows) -> np.ndarray:
        """Return where a granule's last access is another wave's and unordered before this one, by a block's barrier or atomics."""
        known, suspect = self.coherence, keys != 0
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        me = w.id[rows][:, None]
        if suspect.any():
            suspect &= other != me
            if w.scheduler.place:
                suspect &= ~known.is_before(other, w.scheduler)
        if not suspect.any():
            return suspect
        epochs = w.scheduler.epochs[w.block[rows]][:, None]
        after_barrier = (known.block_of[other] == known.block_of[me]) & ((keys >> 20 & 0xFFF) < epochs)
        return suspect & ~after_barrier & (known.seen_by(me, other, OF_ORDER, known.seen) <= keys >> 32)

    def stamp(self, region, offsets, size, w, where, values, scope: int = 0) -> None:
        """Record each granule's last writer, and raise if lanes write different `values`: the region's view, units, new values."""
        if region.last is None:
            region.last = _sparse_zeros(-(-region.data.size // self.granule))
        key = self._key(w, where.rows, scope)
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
                message += f"{self.coherence.wave_name(winner)}, with another value and without synchronization"
                raise where(GlobalRace, bad, message)

    def stamp_readers(self, region, offsets, size, w, where) -> None:
        """Record each granule's last reader, and the last one of another wave before it."""
        if region.readers is None:
            region.readers = np.zeros((2, -(-region.data.size // self.granule)), np.int64)
        granules, key = self._granules(offsets, size), self._key(w, where.rows)[:, None]
        last, before = region.readers
        old = last[granules]
        another = (old & 0xFFFFF) != (key & 0xFFFFF)
        if another.any():
            before[granules[another]] = old[another]
        last[granules] = key

    def _granules(self, offsets, size):
        shift = self.granule.bit_length() - 1
        first = offsets >> shift
        count = max(1, size >> shift)
        return first[:, None] + np.arange(count)

    def _key(self, w, rows, scope: int = 0) -> np.ndarray:
        return (self.coherence.clock | scope) << 32 | (w.scheduler.epochs[w.block[rows]] & 0xFFF) << 20 | w.id[rows] + 1
