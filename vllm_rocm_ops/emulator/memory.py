"""Global memory and LDS, with the shadow state that the sanitizer needs.

Global memory is the tensors of a launch, at virtual addresses 64 GiB apart, so that no pointer of one reaches another.

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
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap

import numpy as np

from .errors import GlobalRace, LdsOutOfBounds, LdsRace, Misaligned, MissingWait, OutOfBounds, StaleRead, Uninitialised

_SLOT = 36  # log2 of the distance of regions
# What a wave has seen of another: what came before; of its stores those that arrived, of stores without sc1 and with.
_ORDER, _PLAIN, _DEVICE = 0, 1, 2
_WATCHED = 1 << 24  # readers are remembered in regions of up to so many bytes
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}
_ONES = {size: np.frombuffer(b"\1" * size, dtype)[0] for size, dtype in _WORD.items()}


def _span(tensor) -> tuple[int, int]:
    """First byte and end of the memory that a tensor's elements occupy."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _element_offsets(tensor) -> np.ndarray:
    """Byte offsets of a tensor's elements from its first."""
    offsets = np.zeros((1,), np.int64)
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).ravel()
    return offsets * tensor.element_size()


def _sparse_zeros(count: int) -> np.ndarray:
    """int64 zeros that take memory only where they are written, and may be more than there is."""
    no_reserve = 0x4000  # Linux's MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, 8 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve), np.int64)


def _runs_of(tensor) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of a tensor's first bytes of each run of memory without gaps, and of their ends; in no order, some may overlap."""
    starts, run = np.array([tensor.data_ptr()]), tensor.element_size()
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        step = stride * tensor.element_size()
        if step <= run and len(starts) == 1:
            run += (n - 1) * step
        else:
            starts = (starts[:, None] + np.arange(n) * step).ravel()
    return starts, starts + run


def _merged(runs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends of all runs in order, those that touch as one."""
    starts, ends = (np.concatenate(addresses) for addresses in zip(*runs, strict=True))
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    begins = np.append(True, starts[1:] > ends[:-1])
    return starts[begins], ends[np.append(begins[1:], True)]


def _bytes_of(tensor, low: int):
    """The index of a tensor's bytes in memory that starts at address `low`."""
    first, size = tensor.data_ptr() - low, tensor.element_size()
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(outermost_first).is_contiguous():
        return slice(first, first + tensor.numel() * size)
    return (first + _element_offsets(tensor)[:, None] + np.arange(size)).ravel()


class Region:
    """A range of memory: `data` are its bytes from `base` on, a multiple of 16; bytes `start` to `end` belong to it."""

    def __init__(self, name: str, base: int, data: np.ndarray, start: int, end: int, writable: bool = True):
        self.name, self.base, self.data = name, base, data
        self.start, self.end, self.writable = start, end, writable
        self.views = {size: data.view(dtype) for size, dtype in _WORD.items() if data.size % size == 0}
        self.runs: tuple[np.ndarray, np.ndarray] | None = None  # starts and ends of what tensors have of it, if not all
        self.written: np.ndarray | None = None  # bytes written so far, if not all are
        self.written_views: dict = {}
        self.last: np.ndarray | None = None  # per granule: who wrote it last, and when
        self.readers: np.ndarray | None = None  # who read it last, and who before
        self.watched = False  # whether readers are remembered
        self.stored = False  # whether this launch wrote to it

    def track_writes(self) -> None:
        """Starts with all bytes written."""
        if self.written is None:
            self.written = np.ones(self.data.size, np.uint8)
            self.written_views = {s: self.written.view(t) for s, t in _WORD.items() if self.data.size % s == 0}


class Space:
    """The regions of a launch."""

    def __init__(self, granule: int, races: bool, traffic=None):
        self.regions: dict[int, Region] = {}
        self.granule, self.races, self.traffic = granule, races, traffic
        self.clock = 2  # even; a key of a store with sc1 has the next odd one
        # wave -> [3, waves]: the clock up to which it has seen each; of its stores, those that loads with sc1 read
        self.seen: dict[int, np.ndarray] = {}
        self.read_plainly: dict[int, np.ndarray] = {}  # the same, of those that loads without sc1 read
        self.left: dict[int, np.ndarray] = {}  # address -> the same, as the last atomics there leave it
        self.barriers: dict[int, int] = {}  # block -> the clock of its last barrier
        self.completed = np.zeros(0, np.int64)  # per wave: the clock up to which its stores are complete
        self.at_barrier = np.zeros((2, 0), np.int64)  # that at the last barrier; and up to which they were written back
        # wave -> per wave of its block, up to which it wrote back what that stored
        self.written_back: dict[int, np.ndarray] = {}
        self.stores: tuple[list[int], list] = ([], [])  # the clock and the instruction of each
        self.addresses: dict[int, int] = {}
        self._keep: list = []

    def add_bytes(self, name: str, content: bytes) -> int:
        """A read-only region with a copy of `content`; returns its address."""
        data = np.zeros(-(-max(len(content), 1) // 16) * 16, np.uint8)
        data[: len(content)] = np.frombuffer(content, np.uint8)
        slot = len(self.regions) + 1
        self.regions[slot] = Region(name, slot << _SLOT, data, 0, len(content), writable=False)
        return slot << _SLOT

    def add_tensors(self, tensors: list, uninitialised: tuple) -> None:
        """One region per group of tensors that overlap; `addresses` maps data_ptr to virtual addresses."""
        spans = sorted(((*_span(t), t, name) for name, t in tensors), key=lambda s: s[:2])
        spans = [span for span in spans if span[0] < span[1]]
        groups: list[list] = []
        for span in spans:
            if groups and span[0] < max(s[1] for s in groups[-1]):
                groups[-1].append(span)
            else:
                groups.append([span])
        for group in groups:
            self._add_group(group, uninitialised)

    def _add_group(self, group: list, uninitialised: tuple) -> None:
        start, end = group[0][0], max(span[1] for span in group)
        low, high = start & ~15, -(-end // 16) * 16
        data = np.ctypeslib.as_array((ctypes.c_ubyte * (high - low)).from_address(low))
        slot = len(self.regions) + 1
        base = slot << _SLOT | low & 0xFFF
        name = " and ".join(dict.fromkeys(span[3] for span in group))
        region = Region(name, base, data, start - low, end - low)
        self.regions[slot] = region
        self._keep.extend(span[2] for span in group)
        for first, _, _, _ in group:
            self.addresses[first] = base + first - low
        starts, ends = _merged([_runs_of(span[2]) for span in group])
        if len(starts) > 1:
            region.runs = starts - low, ends - low
        for tensor in uninitialised:
            first, last = _span(tensor)
            if start <= first < last <= end:
                region.track_writes()
                region.written[_bytes_of(tensor, low)] = 0

    def begin(self, waves: int) -> None:
        """Prepares for a launch of so many waves."""
        self.completed, self.at_barrier = np.zeros(waves, np.int64), np.zeros((2, waves), np.int64)

    def watch(self, stored: set[str] | None) -> None:
        """Remembers readers in the regions that hold one of the named tensors; None: in all."""
        for region in self.regions.values():
            known = stored is None or not stored.isdisjoint(region.name.split(" and "))
            region.watched = self.races and region.writable and known and region.data.size <= _WATCHED

    def stored_names(self) -> set[str]:
        """The tensors of the regions that were written to."""
        return {name for region in self.regions.values() if region.stored for name in region.name.split(" and ")}

    def address(self, tensor) -> int:
        """The virtual address of a tensor of the launch; of an empty one, an address that nothing may touch."""
        return self.addresses.get(tensor.data_ptr(), 1 << 47 | tensor.data_ptr() & 0xFFF)

    def name_at(self, address) -> str:
        """The name of the region at an address."""
        region = self.regions.get(int(address) >> _SLOT)
        return region.name if region else ""

    # Checked accesses. `a` are the addresses of the active lanes, 1-d uint64; `where` names them for errors.

    def find(self, a: np.ndarray, size: int, align: int, where) -> list:
        """[(region, byte offsets, index into a or None for all, access size in bytes that divides all)]."""
        low, high = int(a.min()), int(a.max())
        bits = int(np.bitwise_or.reduce(a))
        if bits & (align - 1):
            bad = int(np.argmax(a & np.uint64(align - 1) != 0))
            raise where(Misaligned, bad, f"address {int(a[bad]):#x} must be a multiple of {align}")
        if low >> _SLOT == high >> _SLOT:
            return [self._part(a, low, high, size, bits, None, where)]
        parts = []
        slots = a >> np.uint64(_SLOT)
        for slot in np.unique(slots):
            index = np.flatnonzero(slots == slot)
            part = a[index]
            parts.append(self._part(part, int(part.min()), int(part.max()), size, bits, index, where))
        return parts

    def _part(self, a, low: int, high: int, size: int, bits: int, index, where):
        region = self.regions.get(low >> _SLOT)
        unit = (bits | size) & -(bits | size)
        unit = min(unit, 16)
        if region is None:
            bad = 0 if index is None else int(index[0])
            raise where(OutOfBounds, bad, f"address {low:#x} is in no tensor of the launch")
        if low - region.base < region.start or high - region.base + size > region.end:
            offsets = a - np.uint64(region.base)
            outside = (offsets.view(np.int64) < region.start) | (offsets.view(np.int64) + size > region.end)
            bad = int(np.argmax(outside))
            at = int(offsets.view(np.int64)[bad]) - region.start
            raise where(
                OutOfBounds,
                bad if index is None else int(index[bad]),
                f"{size} bytes at byte {at} of {region.name}, which has {region.end - region.start}",
            )
        offsets = (a - np.uint64(region.base)).view(np.int64)
        if region.runs is not None:
            starts, ends = region.runs
            inside = offsets + size <= ends[np.searchsorted(starts, offsets, side="right") - 1]
            if not inside.all():
                bad = int(np.argmin(inside))
                at = int(offsets[bad]) - region.start
                message = f"{size} bytes at byte {at} of {region.name} lie between its rows"
                raise where(OutOfBounds, bad if index is None else int(index[bad]), message)
        return region, offsets, index, unit

    @staticmethod
    def _units(offsets: np.ndarray, size: int, unit: int) -> np.ndarray:
        units = offsets >> (unit.bit_length() - 1)
        return units if size == unit else units[:, None] + np.arange(size // unit)

    def load(self, a: np.ndarray, size: int, align: int, w, where, atomic: bool, device: bool = False) -> np.ndarray:
        """The bytes at each address, [n, size] as uint8. device: with sc1."""
        out = None
        for region, offsets, index, unit in self.find(a, size, align, where):
            units = self._units(offsets, size, unit)
            values = np.ascontiguousarray(region.views[unit][units]).view(np.uint8).reshape(len(offsets), size)
            if region.written is not None:
                self._check_written(region, units, unit, size, index, where)
            if self.traffic is not None and where.lanes is not None:
                self.traffic.load(region.name, offsets, w.block[where.rows if index is None else where.rows[index]])
            if self.races and not atomic:
                self._check_order(region, offsets, size, index, w, where, None, device)
                if region.watched and where.lanes is not None:
                    self._stamp_readers(region, offsets, size, index, w, where)
            if index is None:
                return values
            if out is None:
                out = np.empty((len(a), size), np.uint8)
            out[index] = values
        return out

    def note_store(self, ins) -> None:
        """Remembers which instruction stores now."""
        if self.races:
            self.stores[0].append(self.clock)
            self.stores[1].append(ins)

    def check_scalar_load(self, a: np.ndarray, size: int, w, where) -> None:
        """Refuses a scalar load of what another wave stores."""
        region = self.regions.get(int(a[0]) >> _SLOT)
        if self.races and region is not None and region.last is not None:
            for region, offsets, index, _ in self.find(a, size, 4, where):
                self._check_order(region, offsets, size, index, w, where, None, False)

    def _check_written(self, region, units, unit, size, index, where) -> None:
        written = np.ascontiguousarray(region.written_views[unit][units]).view(np.uint8)
        if not written.all():
            bad = int(np.argmin(written.reshape(-1, size).all(axis=1)))
            at = int(np.ravel(units)[bad * (size // unit)]) * unit - region.start
            message = f"{size} bytes at byte {at} of {region.name} were never written"
            raise where(Uninitialised, bad if index is None else int(index[bad]), message)

    def store(
        self, a: np.ndarray, values: np.ndarray, align: int, w, where, atomic: bool, device: bool = False
    ) -> bool:
        """Writes [n, size] uint8 values; returns whether any byte changed. device: with sc1."""
        size = values.shape[1]
        self.note_store(where.ins)
        changed = False
        for region, offsets, index, unit in self.find(a, size, align, where):
            region.stored = True
            if self.traffic is not None:
                self.traffic.store(region.name, len(offsets) * size)
            if not region.writable:
                raise where(OutOfBounds, 0 if index is None else int(index[0]), f"{region.name} is read-only")
            mine = values if index is None else values[index]
            units = self._units(offsets, size, unit)
            new = np.ascontiguousarray(mine).view(_WORD[unit]).reshape(units.shape)
            view = region.views[unit]
            old = view[units]
            if not changed:
                changed = old.tobytes() != new.tobytes()
            if self.races and not atomic:
                self._check_order(region, offsets, size, index, w, where, (old, new), True)
            view[units] = new
            if self.races:
                self._stamp(region, offsets, size, index, w, where, None if atomic else (view, units, new), device)
            if region.written is not None:
                region.written_views[unit][units] = _ONES[unit]
        self.clock += 2
        return changed

    # Races: `last` holds clock << 32 | barrier epoch << 20 | wave id + 1 of each granule's last writer, `readers` of readers. The
    # clock's lowest bit says whether a store had sc1.

    def _granules(self, offsets, size):
        shift = self.granule.bit_length() - 1
        first = offsets >> shift
        count = max(1, size >> shift)
        return first[:, None] + np.arange(count)

    def _check_order(self, region, offsets, size, index, w, where, values, device: bool) -> None:
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
            suspect = self._unordered(who, w, rows, where.program) & changed
            if suspect.any():
                bad = int(np.argmax(suspect.any(axis=1)))
                other = int(who[bad, np.argmax(suspect[bad])] & 0xFFFFF) - 1
                action = "read" if values is None else "overwritten"
                message = f"byte {int(offsets[bad]) - region.start} of {region.name}, {action} here, was {kind} by "
                message += f"{where.program.wave_name(other)} with nothing that orders the two"
                raise where(GlobalRace, bad if index is None else int(index[bad]), message)
            if kind == "written":
                hidden = self._hidden(who, w, rows, where.program, device) & changed
                if hidden.any():
                    bad = int(np.argmax(hidden.any(axis=1)))
                    message = self._of_hidden(
                        int(who[bad, np.argmax(hidden[bad])]), int(w.id[rows[bad]]), where.program
                    )
                    message = f"byte {int(offsets[bad]) - region.start} of {region.name} was stored by {message}"
                    raise where(StaleRead, bad if index is None else int(index[bad]), message)

    def _hidden(self, keys, w, rows, program, device: bool) -> np.ndarray:
        """Where a granule's last store is another block's, and this access may not find it."""
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        hidden = (keys != 0) & (program.block_of[other] != w.block[rows][:, None])
        if not hidden.any():
            return hidden
        clock = keys >> 32
        seen = self._seen_by(w.id[rows][:, None], other, _PLAIN + (clock & 1), device)
        return hidden & (seen <= clock)

    def _of_hidden(self, key: int, reader: int, program) -> str:
        """By which instruction of which wave a granule was stored, and what is missing between that and the reader."""
        clock, wave = key >> 32, (key & 0xFFFFF) - 1
        ins = self.stores[1][bisect.bisect_left(self.stores[0], clock & ~1)]
        arrived = self._seen_by(np.array([reader]), np.array([wave]), np.array([_PLAIN + (clock & 1)]), True)[0] > clock
        if arrived:
            missing = "this access has no sc1, and no buffer_inv sc1 came before it and after what orders the two"
        elif clock & 1:
            missing = "no s_waitcnt says that it was complete before what orders the two"
        else:
            missing = "it has no sc1, and no buffer_wbl2 sc1 was complete before what orders the two"
        return f"+{ins.address - program.object.entry:#x} `{ins.text}` of {program.wave_name(wave)}: {missing}"

    def _unordered(self, keys, w, rows, program) -> np.ndarray:
        """Where a granule's last access is another wave's, and not before this one: no barrier in the block, no atomics
        that hand over."""
        suspect = keys != 0
        other = np.maximum((keys & 0xFFFFF) - 1, 0)
        me = w.id[rows][:, None]
        if suspect.any():
            suspect &= other != me
        if not suspect.any():
            return suspect
        block = w.block[rows][:, None]
        after_barrier = (program.block_of[other] == block) & ((keys >> 20 & 0xFFF) < program.epochs[block])
        return suspect & ~after_barrier & (self._seen_by(me, other, _ORDER, True) <= keys >> 32)

    def _stamp_readers(self, region, offsets, size, index, w, where) -> None:
        """Remembers each granule's last reader, and the last one before that was another wave."""
        if region.readers is None:
            region.readers = np.zeros((2, -(-region.data.size // self.granule)), np.int64)
        rows = where.rows if index is None else where.rows[index]
        granules = self._granules(offsets, size)
        key = self._key(w, rows, where.program)[:, None]
        last, before = region.readers
        old = last[granules]
        another = (old & 0xFFFFF) != (key & 0xFFFFF)
        if another.any():
            before[granules[another]] = old[another]
        last[granules] = key

    def _key(self, w, rows, program, device: bool = False) -> np.ndarray:
        return (self.clock | device) << 32 | (program.epochs[w.block[rows]] & 0xFFF) << 20 | w.id[rows] + 1

    def _seen_by(self, mine: np.ndarray, other: np.ndarray, kind, device: bool) -> np.ndarray:
        """The clock up to which wave `mine` has seen wave `other`, of a kind; of what loads with sc1 read, or others."""
        mine, other, kind = np.broadcast_arrays(mine, other, kind)
        out = np.zeros(mine.shape, np.int64)
        known = self.seen if device else self.read_plainly
        if known:
            for wave in np.unique(mine).tolist():
                if wave in known:
                    here = mine == wave
                    out[here] = known[wave][kind[here], other[here]]
        return out

    def synchronise(self, w, site, addresses: np.ndarray, release: bool, acquire: bool) -> list:
        """Atomics order waves: what one did, and its block before the last barrier, comes before those whose atomics follow at
        that address; of its stores, those that have arrived are seen. Returns what waves see once this access is complete."""
        program = site.program
        if not self.races or len(program.block_of) == 1:
            return []
        acquired = []
        for wave, address in dict.fromkeys(zip(w.id[site.rows].tolist(), addresses.tolist(), strict=True)):
            seen, left = self.seen.get(wave), self.left.get(address)
            if acquire and left is not None:
                acquired.append((wave, left))
            if release:
                mine = np.zeros((3, len(program.block_of)), np.int64) if seen is None else seen.copy()
                block = int(program.block_of[wave])
                mates = slice(block * program.waves_per_block, (block + 1) * program.waves_per_block)
                completed, written_back = self.at_barrier[:, mates]
                known = (np.int64(self.barriers.get(block, 0)), self.written_back.get(wave, written_back), completed)
                for row, clock in zip(mine[:, mates], known, strict=True):
                    np.maximum(row, clock, out=row)
                np.maximum(mine[_PLAIN, mates], written_back, out=mine[_PLAIN, mates])
                mine[_ORDER, wave], mine[_DEVICE, wave] = self.clock + 1, self.completed[wave]
                self.left[address] = mine if left is None else np.maximum(mine, left)
        return acquired

    def acquire(self, waves: np.ndarray, acquired: list) -> None:
        """Of what `synchronise` returned, what these waves see now."""
        here = set(waves.tolist())
        for wave, left in acquired:
            if wave in here:
                seen = self.seen.get(wave)
                self.seen[wave] = left if seen is None else np.maximum(seen, left)

    def complete(self, waves: np.ndarray, clock: int | None) -> None:
        """All stores of these waves are complete, up to a clock."""
        self.completed[waves] = np.maximum(self.completed[waves], self.clock if clock is None else clock)

    def write_back(self, w, program) -> list:
        """Which stores a buffer_wbl2 of these waves writes back: their own, and of their blocks those complete at a barrier."""
        written = []
        for wave in w.id.tolist() if self.races else ():
            first = wave // program.waves_per_block * program.waves_per_block
            clocks = self.at_barrier[0, first : first + program.waves_per_block].copy()
            clocks[wave - first] = self.clock
            written.append((wave, clocks))
        return written

    def has_written_back(self, waves: np.ndarray, written: list) -> None:
        """Of what `write_back` returned, what these waves have written back now."""
        here = set(waves.tolist())
        self.written_back.update((wave, clocks) for wave, clocks in written if wave in here)

    def invalidate(self, w) -> None:
        """A buffer_inv of these waves: loads without sc1 now read what those with sc1 do."""
        self.read_plainly.update((wave, self.seen[wave]) for wave in w.id.tolist() if wave in self.seen)

    def pass_barrier(self, block: int, waves: range) -> None:
        """All that a block's waves have seen, each of them sees after a barrier."""
        self.barriers[block] = self.clock
        mates = slice(waves.start, waves.stop)
        self.at_barrier[0, mates] = self.completed[mates]
        for wave in waves if self.written_back else ():
            if wave in self.written_back:
                self.at_barrier[1, mates] = np.maximum(self.at_barrier[1, mates], self.written_back[wave])
        for known in (self.seen, self.read_plainly):
            of_waves = {id(known[wave]): known[wave] for wave in waves if wave in known}
            if of_waves:
                known.update(dict.fromkeys(waves, functools.reduce(np.maximum, of_waves.values())))

    def _stamp(self, region, offsets, size, index, w, where, values, device: bool = False) -> None:
        if region.last is None:
            region.last = _sparse_zeros(-(-region.data.size // self.granule))
        rows = where.rows if index is None else where.rows[index]
        key = self._key(w, rows, where.program, device)
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
                message += f"{where.program.wave_name(winner)}, with another value and nothing that orders the two"
                raise where(GlobalRace, bad if index is None else int(index[bad]), message)


# Low byte of an LDS shadow key: the wave, with a bit for atomics; or several waves.
WAVE, ATOMIC, MANY_ATOMICS, MANY_WAVES = 31, 32, 254, 255


class Lds:
    """The LDS of the resident blocks, one slot each. Shadow keys per granule: barrier epoch << 8 | wave; 0 is never."""

    def __init__(self, slots: int, size: int, granule: int, races: bool):
        self.size, self.granule, self.races = size, granule, races
        self.stride = -(-max(size, 16) // 16) * 16
        self.data = np.zeros(slots * self.stride, np.uint8)
        self.views = {unit: self.data.view(dtype) for unit, dtype in _WORD.items()}
        self.shift = granule.bit_length() - 1
        count = slots * self.stride >> self.shift
        self.writer = np.zeros(count, np.int32)
        self.reader = np.zeros(count, np.int32)
        self.in_flight = np.zeros(count, bool)

    def clear(self, slot: int) -> None:
        """Makes a slot's LDS unwritten, for a new block."""
        here = slice(slot * self.stride >> self.shift, (slot + 1) * self.stride >> self.shift)
        self.writer[here], self.reader[here], self.in_flight[here] = 0, 0, False

    def locate(self, a: np.ndarray, size: int, align: int, slots: np.ndarray, where) -> np.ndarray:
        """Byte positions in `data` of LDS addresses (1-d, int64), checked."""
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
        """[n, size] bytes."""
        granules = self._granules(positions, size)
        self._check(granules, w, where, positions, reading=True)
        unit, units = self._unit(positions, size)
        return np.ascontiguousarray(self.views[unit][units]).view(np.uint8).reshape(len(positions), size)

    def store(self, positions, values, w, where) -> np.ndarray:
        """Writes [n, size] bytes; returns the granules."""
        size = values.shape[1]
        granules = self._granules(positions, size)
        self._check(granules, w, where, positions, reading=False)
        unit, units = self._unit(positions, size)
        self.views[unit][units] = np.ascontiguousarray(values).view(_WORD[unit]).reshape(units.shape)
        self.mark(granules, w, where, positions)
        return granules

    def mark(self, granules, w, where, positions) -> None:
        """Records the waves as writers."""
        key = self._key(w, where, granules)
        self.writer[granules] = key
        if w.count > 1 and self.races:
            lost = self.writer[granules] != key
            if lost.any():
                self._raise_race(lost, granules, where, positions, "two waves write it in the same instruction")

    def _key(self, w, where, granules):
        key = (where.program.epochs[w.block[where.rows]] << 8 | w.wave[where.rows]).astype(np.int32)
        return key if granules.ndim == 1 else key[:, None]

    def _check(self, granules, w, where, positions, reading: bool) -> None:
        key = self._key(w, where, granules)
        now = key & ~255
        writer = self.writer[granules]
        if reading and (writer == 0).any():
            bad = self._first(writer == 0)
            raise where(Uninitialised, bad, f"LDS address {int(positions[bad]) % self.stride} was never written")
        flying = self.in_flight[granules]
        if flying.any():
            bad = self._first(flying)
            raise where(
                MissingWait, bad, f"a load to LDS address {int(positions[bad]) % self.stride} may still be under way"
            )
        if not self.races:
            return
        race = (writer >= now) & (writer & WAVE != key & WAVE)
        if race.any():
            verb = "read" if reading else "written"
            self._raise_race(race, granules, where, positions, f"{verb} here, written by {{}} since the last barrier")
        reader = self.reader[granules]
        if reading:
            new = np.where((reader >= now) & (reader != key), now | MANY_WAVES, key)
            self.reader[granules] = new
            if w.count > 1:  # lanes of other waves may have read the same granule in this very instruction
                lost = self.reader[granules] != new
                if lost.any():
                    self.reader[granules[lost]] = np.broadcast_to(now, granules.shape)[lost] | MANY_WAVES
        else:
            race = (reader >= now) & (reader != key)
            if race.any():
                self._raise_race(race, granules, where, positions, "written here, read by {} since the last barrier")

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
        """Atomics may meet each other, but no plain access of another wave."""
        granules = self._granules(positions, size)
        key = self._key(w, where, granules)
        now = key & ~255
        writer, reader = self.writer[granules], self.reader[granules]
        if (writer == 0).any():
            bad = self._first(writer == 0)
            raise where(Uninitialised, bad, f"LDS address {int(positions[bad]) % self.stride} was never written")
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
        lost = self.writer[granules] != new  # another wave's lane met this one in this very instruction
        self.writer[granules[lost]] = np.broadcast_to(now, granules.shape)[lost] | MANY_ATOMICS
