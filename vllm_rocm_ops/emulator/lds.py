"""Hold the LDS of resident blocks, with the sanitizer's shadow state."""

from __future__ import annotations

import numpy as np

from .errors import LdsOutOfBounds, LdsRace, Misaligned, MissingWait, Uninitialized
from .memory import WORD

BANKS = {"gfx90a": 32, "gfx942": 32, "gfx950": 64}
"""Banks of 4 bytes by arch."""
M0_MASK = {"gfx90a": 0xFFFF, "gfx942": 0xFFFF, "gfx950": 0x3FFFF}
"""Bits of M0 that are an LDS address, by arch."""

# Low byte of an LDS shadow key: the wave, with a bit for atomics, or a mark for several waves.
WAVE, ATOMIC, MANY_ATOMICS, MANY_WAVES = 31, 32, 254, 255


class Lds:
    """The LDS of the resident blocks, a slot each. Shadow keys per granule are barrier epoch << 8 | wave; 0 means never."""

    def __init__(self, slots: int, size: int, granule: int, races: bool):
        self.size, self.granule, self.races = size, granule, races
        self.stride = -(-max(size, 16) // 16) * 16
        self.data = np.zeros(slots * self.stride, np.uint8)
        self.views = {unit: self.data.view(dtype) for unit, dtype in WORD.items()}
        self.shift = granule.bit_length() - 1
        count = slots * self.stride >> self.shift
        self.writer = np.zeros(count, np.int32)
        self.reader = np.zeros(count, np.int32)
        self.in_flight = np.zeros(count, bool)
        self.checked = True  # whether unwritten or in-flight data is an error
        self.has_loads = False  # whether a load was ever in flight

    def clear(self, slot: int) -> None:
        """Mark a slot's LDS unwritten, for a new block."""
        here = slice(slot * self.stride >> self.shift, (slot + 1) * self.stride >> self.shift)
        self.writer[here], self.reader[here], self.in_flight[here] = 0, 0, False

    def locate(self, a: np.ndarray, size: int, align: int, slots: np.ndarray, where) -> np.ndarray:
        """Check LDS addresses (1-d, int64), and return their byte positions in `data`."""
        low, high = int(a.min()), int(a.max())
        if low < 0 or high + size > self.size:
            bad = int(np.argmax((a < 0) | (a + size > self.size)))
            raise where(LdsOutOfBounds, bad, f"{size} bytes at LDS address {int(a[bad])}, the block has {self.size}")
        if align > 1 and int(np.bitwise_or.reduce(a)) & (align - 1):
            bad = int(np.argmax(a & (align - 1) != 0))
            raise where(Misaligned, bad, f"LDS address {int(a[bad])} must be a multiple of {align}")
        return a + slots * self.stride

    def _granules(self, positions, size):
        first = positions >> self.shift
        count = max(1, size >> self.shift)
        return first if count == 1 else first[:, None] + np.arange(count)

    def _unit(self, positions, size):
        bits = int(np.bitwise_or.reduce(positions)) | size
        unit = min(bits & -bits, 16)
        units = positions >> (unit.bit_length() - 1)
        return unit, units if unit == size else units[:, None] + np.arange(size // unit)

    def load(self, positions, size: int, w, where) -> np.ndarray:
        """Return the bytes [n, size]."""
        granules = self._granules(positions, size)
        self._check(granules, w, where, positions, reading=True)
        unit, units = self._unit(positions, size)
        return np.ascontiguousarray(self.views[unit][units]).view(np.uint8).reshape(len(positions), size)

    def store(self, positions, values, w, where) -> np.ndarray:
        """Write bytes [n, size], and return the granules."""
        size = values.shape[1]
        granules = self._granules(positions, size)
        self._check(granules, w, where, positions, reading=False)
        unit, units = self._unit(positions, size)
        self.views[unit][units] = np.ascontiguousarray(values).view(WORD[unit]).reshape(units.shape)
        self.mark(granules, w, where, positions)
        return granules

    def begin_load(self, granules) -> None:
        """Mark a load to these granules as in flight."""
        self.in_flight[granules] = self.has_loads = True

    def mark(self, granules, w, where, positions) -> None:
        """Record the waves as writers."""
        key = self._key(w, where, granules)
        self.writer[granules] = key
        if w.count > 1 and self.races:
            lost = self.writer[granules] != key
            if lost.any():
                self._raise_race(lost, granules, where, positions, "two waves write it in the same instruction")

    def _key(self, w, where, granules):
        key = (w.scheduler.epochs[w.block[where.rows]] << 8 | w.wave[where.rows]).astype(np.int32)
        return key if granules.ndim == 1 else key[:, None]

    def _check(self, granules, w, where, positions, reading: bool) -> None:
        if not self.checked:
            return
        key = self._key(w, where, granules)
        now = key & ~255
        writer = self.writer[granules]
        if reading:
            self._check_written(writer, positions, where)
        if self.has_loads and (flying := self.in_flight[granules]).any():
            bad = self._first(flying)
            raise where(
                MissingWait, bad, f"a load to LDS address {int(positions[bad]) % self.stride} may still be in flight"
            )
        if not self.races:
            return
        since = writer >= now
        if since.any() and (race := since & (writer & WAVE != key & WAVE)).any():
            verb = "read" if reading else "written"
            self._raise_race(race, granules, where, positions, f"{verb} here, written by {{}} since the last barrier")
        reader = self.reader[granules]
        others = (reader >= now) & (reader != key)
        if reading:
            new = np.where(others, now | MANY_WAVES, key) if others.any() else key
            self.reader[granules] = new
            if w.count > 1:  # lanes of other waves may read the same granule in this instruction
                lost = self.reader[granules] != new
                if lost.any():
                    self.reader[granules[lost]] = np.broadcast_to(now, granules.shape)[lost] | MANY_WAVES
        elif others.any():
            self._raise_race(others, granules, where, positions, "written here, read by {} since the last barrier")

    def _check_written(self, writer, positions, where) -> None:
        if not writer.all():
            bad = self._first(writer == 0)
            raise where(Uninitialized, bad, f"LDS address {int(positions[bad]) % self.stride} was never written")

    @staticmethod
    def _first(bad) -> int:
        return int(np.argmax(bad if bad.ndim == 1 else bad.any(axis=1)))

    def _raise_race(self, race, granules, where, positions, message: str) -> None:
        bad = self._first(race)
        column = 0 if race.ndim == 1 else int(np.argmax(race[bad]))
        granule = granules[bad] if race.ndim == 1 else granules[bad, column]
        source = self.reader if "read by" in message else self.writer
        other = int(source[granule]) & 255
        atomic = "an atomic of " if other & ATOMIC else ""
        name = {MANY_ATOMICS: "atomics", MANY_WAVES: "other waves"}.get(other, f"{atomic}wave {other & WAVE}")
        address = (int(granule) << self.shift) % self.stride
        raise where(LdsRace, bad, f"LDS address {address}: " + message.format(name))

    def check_atomic(self, positions, size: int, w, where) -> None:
        """Check that an atomic meets no plain access of another wave."""
        granules = self._granules(positions, size)
        key = self._key(w, where, granules)
        now = key & ~255
        writer, reader = self.writer[granules], self.reader[granules]
        self._check_written(writer, positions, where)
        if self.races:
            race = (writer >= now) & (writer & WAVE != key & WAVE) & (writer & ATOMIC == 0)
            if race.any():
                self._raise_race(
                    race, granules, where, positions, "changed by an atomic here, written by {} since the last barrier"
                )
            race = (reader >= now) & (reader != key)
            if race.any():
                self._raise_race(
                    race, granules, where, positions, "changed by an atomic here, read by {} since the last barrier"
                )
        met = (writer >= now) & (writer & WAVE != key & WAVE)
        new = np.where(met, now | MANY_ATOMICS, key | ATOMIC).astype(np.int32)
        self.writer[granules] = new
        lost = self.writer[granules] != new  # lanes of other waves met in this instruction
        self.writer[granules[lost]] = np.broadcast_to(now, granules.shape)[lost] | MANY_ATOMICS
