"""Hold global memory, with bounds and written bytes.

Global memory consists of a launch's tensors at virtual addresses 64 GiB apart, so no pointer into one reaches another.
"""

from __future__ import annotations

import ctypes

import numpy as np

from .accesses import Accesses
from .coherence import AGENT, SYSTEM, Coherence
from .errors import Misaligned, OutOfBounds, StaleRead, Uninitialized

SLOT = 36  # log2 of the distance between regions
MAX_BYTES = (1 << SLOT) - 0x1000  # per tensor, whose offset in its slot is its offset in its page
_WATCHED = 1 << 24  # maximum bytes of regions whose readers are recorded
WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_least, _most, _any_bits = np.minimum.reduce, np.maximum.reduce, np.bitwise_or.reduce
_ONES = {size: np.frombuffer(b"\1" * size, dtype)[0] for size, dtype in WORD.items()}


def _is_word(size: int, unit: int, where) -> bool:
    """True if an access to memory between devices is one of a word (words.py): kernels access a payload by buffer instructions."""
    return size == unit == 8 and not where.ins.mnemonic.startswith("buffer_")


def span_of(tensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor's memory."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _element_offsets(tensor) -> np.ndarray:
    """Return the byte offsets of a tensor's elements from its first."""
    offsets = np.zeros((1,), np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
    return offsets * tensor.element_size()


def _runs_of(tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of a tensor's gapless runs of memory, unordered and possibly overlapping."""
    starts, run = np.array([tensor.data_ptr()]), tensor.element_size()
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if step <= run and len(starts) == 1:
            run += (n - 1) * step
        else:
            starts = (starts[:, None] + np.arange(n) * step).ravel()
    return starts, starts + run


def _merged(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of all runs in order, adjacent ones merged."""
    starts, ends = (np.concatenate(addresses) for addresses in zip(*runs, strict=True))
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.append(True, starts[1:] > ends[:-1])
    return starts[begins], ends[np.append(begins[1:], True)]


def _bytes_of(tensor, low: int):
    """Return the index of a tensor's bytes in memory that starts at address `low`."""
    first, size = tensor.data_ptr() - low, tensor.element_size()
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(outermost_first).is_contiguous():
        return slice(first, first + tensor.numel() * size)
    return (first + _element_offsets(tensor)[:, None] + np.arange(size)).ravel()


class Region:
    """A range of memory. `data` are its bytes from `base`, a multiple of 16; bytes `start` to `end` belong to it."""

    def __init__(self, name: str, base: int, data: np.ndarray, start: int, end: int, writable: bool = True):
        self.name, self.base, self.data = name, base, data
        self.start, self.end, self.writable = start, end, writable
        self.views = {size: data.view(dtype) for size, dtype in WORD.items() if data.size % size == 0}
        self.runs: tuple[np.ndarray, np.ndarray] | None = None  # starts and ends of tensors' bytes, if not all
        self.written: np.ndarray | None = None  # bytes written so far, if not all
        self.written_views: dict = {}
        self.last: np.ndarray | None = None  # per granule: the last writer and its time
        self.readers: np.ndarray | None = None  # the last reader, and the one before
        self.watched = False  # whether readers are recorded
        self.stored = False  # whether this launch wrote to it
        self.words = None  # words.Words, if devices share it

    def track_writes(self) -> None:
        """Start with all bytes written."""
        if self.written is None:
            self.written = np.ones(self.data.size, np.uint8)
            self.written_views = {s: self.written.view(t) for s, t in WORD.items() if self.data.size % s == 0}


class Space:
    """The regions of a launch."""

    def __init__(self, granule: int, races: bool, traffic=None):
        self.regions: dict[int, Region] = {}
        self.races, self.traffic = races, traffic
        self.coherence = Coherence(races)
        self.accesses = Accesses(granule, self.coherence)
        self.addresses: dict[int, int] = {}
        self.changes = 0  # number of changes of memory or progress that others may wait for
        self.patterns: dict = {}  # see Counters
        self._keep: list = []

    def add_bytes(self, name: str, content: bytes) -> int:
        """Add a read-only region with a copy of `content`, and return its address."""
        data = np.zeros(-(-max(len(content), 1) // 16) * 16, np.uint8)
        data[: len(content)] = np.frombuffer(content, np.uint8)
        slot = len(self.regions) + 1
        self.regions[slot] = Region(name, slot << SLOT, data, 0, len(content), writable=False)
        return slot << SLOT

    def add_tensors(self, tensors: list, uninitialized: tuple) -> None:
        """Add a region per group of overlapping tensors; `addresses` maps data_ptr to virtual addresses."""
        spans = sorted(((*span_of(t), t, name) for name, t in tensors), key=lambda s: s[:2])
        spans = [span for span in spans if span[0] < span[1]]
        groups: list[list] = []
        for span in spans:
            if groups and span[0] < max(s[1] for s in groups[-1]):
                groups[-1].append(span)
            else:
                groups.append([span])
        for group in groups:
            self._add_group(group, uninitialized)

    def _add_group(self, group: list, uninitialized: tuple) -> None:
        start, end = group[0][0], max(span[1] for span in group)
        low, high = start & ~15, -(-end // 16) * 16
        data = np.ctypeslib.as_array((ctypes.c_ubyte * (high - low)).from_address(low))
        slot = len(self.regions) + 1
        base = slot << SLOT | low & 0xFFF
        name = " and ".join(dict.fromkeys(span[3] for span in group))
        region = Region(name, base, data, start - low, end - low)
        self.regions[slot] = region
        self._keep.extend(span[2] for span in group)
        for first, _, _, _ in group:
            self.addresses[first] = base + first - low
        starts, ends = _merged([_runs_of(span[2]) for span in group])
        if len(starts) > 1:
            region.runs = starts - low, ends - low
        for tensor in uninitialized:
            first, last = span_of(tensor)
            if start <= first < last <= end:
                region.track_writes()
                region.written[_bytes_of(tensor, low)] = 0

    def watch(self, stored: set[str] | None) -> None:
        """Record readers in the regions with one of the named tensors, or in all for None."""
        for region in self.regions.values():
            known = stored is None or not stored.isdisjoint(region.name.split(" and "))
            region.watched = self.races and region.writable and known and region.data.size <= _WATCHED

    def stored_names(self) -> set[str]:
        """Return the tensors of the regions that were written to."""
        return {name for region in self.regions.values() if region.stored for name in region.name.split(" and ")}

    def address(self, tensor) -> int:
        """Return the virtual address of a tensor; for an empty one, an invalid address."""
        return self.addresses.get(tensor.data_ptr(), 1 << 47 | tensor.data_ptr() & 0xFFF)

    def name_at(self, address) -> str:
        """Return the name of the region at an address."""
        region = self.regions.get(int(address) >> SLOT)
        return region.name if region else ""

    def find(self, a: np.ndarray, size: int, align: int, where) -> list:
        """Return [(region, byte offsets, index into a or None for all, access size in bytes that divides all, site)]."""
        if len(a) == 1:
            low = high = bits = int(a[0])
        else:
            low, high, bits = int(_least(a)), int(_most(a)), int(_any_bits(a))
        if bits & (align - 1):
            bad = int(np.argmax(a & np.uint64(align - 1) != 0))
            raise where(Misaligned, bad, f"address {int(a[bad]):#x} must be a multiple of {align}")
        if low >> SLOT == high >> SLOT:
            return [self._part(a, low, high, size, bits, None, where)]
        parts = []
        slots = a >> np.uint64(SLOT)
        for slot in np.unique(slots):
            index = np.flatnonzero(slots == slot)
            part = a[index]
            parts.append(self._part(part, int(part.min()), int(part.max()), size, bits, index, where))
        return parts

    def _part(self, a, low: int, high: int, size: int, bits: int, index, where):
        region, where = self.regions.get(low >> SLOT), where.part(index)
        unit = (bits | size) & -(bits | size)
        unit = min(unit, 16)
        if region is None:
            raise where(OutOfBounds, 0, f"address {low:#x} is in no tensor of the launch")
        if low - region.base < region.start or high - region.base + size > region.end:
            offsets = a - np.uint64(region.base)
            outside = (offsets.view(np.int64) < region.start) | (offsets.view(np.int64) + size > region.end)
            bad = int(np.argmax(outside))
            byte = int(offsets.view(np.int64)[bad]) - region.start
            message = f"{size} bytes at byte {byte} of {region.name}, which has {region.end - region.start}"
            raise where(OutOfBounds, bad, message)
        offsets = (a - np.uint64(region.base)).view(np.int64)
        if region.runs is not None:
            starts, ends = region.runs
            inside = offsets + size <= ends[np.searchsorted(starts, offsets, side="right") - 1]
            if not inside.all():
                bad = int(np.argmin(inside))
                byte = int(offsets[bad]) - region.start
                message = f"{size} bytes at byte {byte} of {region.name} lie between its rows"
                raise where(OutOfBounds, bad, message)
        return region, offsets, index, unit, where

    @staticmethod
    def _units(offsets: np.ndarray, size: int, unit: int) -> np.ndarray:
        units = offsets >> (unit.bit_length() - 1)
        return units if size == unit else units[:, None] + np.arange(size // unit)

    def load(self, a: np.ndarray, size: int, align: int, w, where, atomic: bool, scope: int = 0) -> np.ndarray:
        """Return the bytes at each address, [n, size] as uint8. scope: 1 with sc1, 2 with sc0 sc1."""
        out = None
        if w.looked < 0:
            w.looked = self.changes
        for region, offsets, index, unit, site in self.find(a, size, align, where):
            if region.words is not None:
                values = region.words.load(offsets, size, scope, _is_word(size, unit, site), w, site, atomic)
                if values is not None:
                    if index is None:
                        return values
                    raise site(OutOfBounds, 0, f"{region.name} is read together with other memory")
            units = self._units(offsets, size, unit)
            values = np.ascontiguousarray(region.views[unit][units]).view(np.uint8).reshape(len(offsets), size)
            if region.written is not None:
                self._check_written(region, units, unit, size, site)
            if self.traffic is not None and site.lanes is not None:
                self.traffic.load(region.name, offsets, w.block[site.rows])
            if self.races and not atomic:
                self.accesses.check_order(region, offsets, size, w, site, None, scope)
                if region.watched and site.lanes is not None:
                    self.accesses.stamp_readers(region, offsets, size, w, site)
            if index is None:
                return values
            if out is None:
                out = np.empty((len(a), size), np.uint8)
            out[index] = values
        return out

    def check_scalar_load(self, a: np.ndarray, size: int, w, where) -> None:
        """Raise for a scalar load of another wave's unordered store."""
        region = self.regions.get(int(a[0]) >> SLOT)
        if self.races and region is not None and region.last is not None:
            for region, offsets, *_, site in self.find(a, size, 4, where):
                self.accesses.check_order(region, offsets, size, w, site, None, 0)

    def _check_written(self, region, units, unit, size, where) -> None:
        written = np.ascontiguousarray(region.written_views[unit][units]).view(np.uint8)
        if not written.all():
            bad = int(np.argmin(written.reshape(-1, size).all(axis=1)))
            byte = int(np.ravel(units)[bad * (size // unit)]) * unit - region.start
            message = f"{size} bytes at byte {byte} of {region.name} were never written"
            raise where(Uninitialized, bad, message)

    def store(self, a: np.ndarray, values: np.ndarray, align: int, w, where, atomic: bool, scope: int = 0) -> bool:
        """Write [n, size] uint8 values, and return whether any byte changed. scope: 1 with sc1, 2 with sc0 sc1."""
        size = values.shape[1]
        self.coherence.note_store(where.ins)
        changed = False
        for region, offsets, index, unit, site in self.find(a, size, align, where):
            region.stored = True
            if self.traffic is not None:
                self.traffic.store(region.name, len(offsets) * size)
            if not region.writable:
                raise site(OutOfBounds, 0, f"{region.name} is read-only")
            mine = values if index is None else values[index]
            if region.words is not None:
                as_word = _is_word(size, unit, site)
                if self.races and not atomic and not as_word:
                    old = region.data[offsets[:, None] + np.arange(size)]
                    self.accesses.check_order(region, offsets, size, w, site, (old, mine), SYSTEM)
                region.words.store(offsets, mine, scope, as_word, w, site)
                where.pauses = site.pauses
                if self.races and not as_word:
                    self.accesses.stamp(region, offsets, size, w, site, None, scope)
                changed = True
                continue
            units = self._units(offsets, size, unit)
            new = np.ascontiguousarray(mine).view(WORD[unit]).reshape(units.shape)
            view = region.views[unit]
            old = view[units]
            if not changed:
                changed = old.tobytes() != new.tobytes()
            if self.races and not atomic:
                self.accesses.check_order(region, offsets, size, w, site, (old, new), SYSTEM)
            view[units] = new
            if self.races:
                self.accesses.stamp(region, offsets, size, w, site, None if atomic else (view, units, new), scope)
            if region.written is not None:
                region.written_views[unit][units] = _ONES[unit]
        self.coherence.clock += 4
        return changed

    def atomic(self, a: np.ndarray, size: int, update, w, where, scope: int = AGENT) -> np.ndarray:
        """Update the words at these addresses atomically, and return all old words.

        `update(view, units, chosen)` changes units of a region's view for the chosen lanes and returns the old values.
        """
        old = np.empty(len(a), WORD[size])
        for region, offsets, index, _, site in self.find(a, size, size, where):
            chosen = slice(None) if index is None else index
            units = offsets >> (size.bit_length() - 1)
            region.stored = True
            if region.words is not None:
                region.words.see(offsets, size, w)
                if scope != SYSTEM and region.words.device != w.scheduler.device:
                    raise site(StaleRead, 0, f"{region.name} is another device's, and this atomic has no sc1")
            if region.written is not None:
                self._check_written(region, units, size, size, site)
            old[chosen] = update(region.views[size], units, chosen)
            if self.races:
                self.accesses.stamp(region, offsets, size, w, site, None, scope)
        self.coherence.clock += 4
        return old
