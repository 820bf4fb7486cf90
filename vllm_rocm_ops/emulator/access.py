"""Memory instructions: SMEM, FLAT, GLOBAL, SCRATCH, MUBUF and DS.

Source: AMD Instinct MI300 (CDNA3) ISA, chapters "Scalar Memory Operations", "Vector Memory Operations" (buffer addressing and
range checking), "Flat Memory Instructions" and "Data Share Operations"; CDNA4 ISA for loads to LDS of 96 and 128 bits.

Data moves when the instruction issues; the destination is then forbidden until s_waitcnt says that it has arrived. A store
has read its data by then: GFX9 needs no wait before a store's source is overwritten.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import formats
from .decode import M0, NO_ADDRESS, VGPR, Instruction, Operand
from .errors import ScratchOutOfBounds, Uninitialised, UnsupportedInstruction
from .salu import APERTURES, reader
from .vector import F16, F32, F64, I32, I64, U16, U32, U64, check_allocated, dpp_lanes, pair, register
from .waves import LANES


class Event:
    """An outstanding memory operation. `registers` arrive when it is done; `granules` [n, k] are the LDS that it writes, one
    row for each active lane, whose wave `rows` [n] tells. `region` names the memory that each wave, on average, has `size`
    bytes from. `clock` is that before a store; `acquired` and `written_back` is what waves see, and have written back, then."""

    __slots__ = (
        "acquired", "clock", "granules", "kind", "lgkm", "load", "region", "registers", "rows", "scalar", "size", "vm",
        "written_back",
    )  # fmt: skip

    def __init__(
        self, kind: str, registers=(), size: int = 0, load: bool = True, granules=None, rows=None, region="", clock=None
    ):
        self.kind, self.registers, self.size, self.load, self.region = kind, tuple(registers), size, load, region
        self.granules, self.rows, self.clock = granules, rows, clock
        self.acquired: list = []
        self.written_back: list = []
        self.vm = kind in ("vm", "flat")
        self.lgkm = kind in ("lds", "scalar", "flat")
        self.scalar = kind == "scalar"

    def part(self, keep: np.ndarray) -> Event:
        """The event as the waves that `keep` (bool [waves]) names see it."""
        other = copy.copy(self)
        if self.granules is not None:
            chosen = keep[self.rows]
            other.granules, other.rows = self.granules[chosen], (np.cumsum(keep) - 1)[self.rows[chosen]]
        return other

    def join(self, other: Event, waves: int) -> None:
        """Takes in the same event of further waves; `waves` were here before."""
        self.acquired, self.written_back = self.acquired + other.acquired, self.written_back + other.written_back
        self.clock = min((event.clock for event in (self, other) if event.clock is not None), default=None)
        if self.granules is None or other.granules is None:
            theirs = other.granules, None if other.rows is None else other.rows + waves
            self.granules, self.rows = theirs if self.granules is None else (self.granules, self.rows)
            return
        self.granules = np.concatenate([self.granules, other.granules])
        self.rows = np.concatenate([self.rows, other.rows + waves])


class Site:
    """Where an access happens: makes errors that name instruction, block, wave and lane of its n-th active lane."""

    __slots__ = ("ins", "lanes", "program", "rows", "w")

    def __init__(self, program, ins, w, rows, lanes):
        self.program, self.ins, self.w, self.rows, self.lanes = program, ins, w, rows, lanes

    def __call__(self, kind, index: int, message: str):
        lane = None if self.lanes is None else int(self.lanes[index])
        return self.program.error(kind, self.ins, self.w, int(self.rows[index]), lane, message)


@dataclass(frozen=True)
class Load:
    """bytes in memory; sign-extended or not; into the low (0) or high (16) half only, or the whole register."""

    size: int
    signed: bool = False
    half: int | None = None


LOADS = {
    "ubyte": Load(1), "sbyte": Load(1, True), "ushort": Load(2), "sshort": Load(2, True),
    "ubyte_d16": Load(1, half=0), "ubyte_d16_hi": Load(1, half=16), "sbyte_d16": Load(1, True, 0),
    "sbyte_d16_hi": Load(1, True, 16), "short_d16": Load(2, half=0), "short_d16_hi": Load(2, half=16),
    "dword": Load(4), "dwordx2": Load(8), "dwordx3": Load(12), "dwordx4": Load(16),
}  # fmt: skip
STORES = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16),
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip
DS_LOADS = {
    "b32": Load(4), "b64": Load(8), "b96": Load(12), "b128": Load(16), "i8": Load(1, True), "u8": Load(1),
    "i16": Load(2, True), "u16": Load(2), "u8_d16": Load(1, half=0), "u8_d16_hi": Load(1, half=16),
    "i8_d16": Load(1, True, 0), "i8_d16_hi": Load(1, True, 16), "u16_d16": Load(2, half=0), "u16_d16_hi": Load(2, half=16),
}  # fmt: skip
DS_STORES = {
    "b8": (1, 0), "b16": (2, 0), "b8_d16_hi": (1, 16), "b16_d16_hi": (2, 16), "b32": (4, 0), "b64": (8, 0), "b96": (12, 0),
    "b128": (16, 0),
}  # fmt: skip


def _packed_add(decode, encode):
    def run(old, new):
        pairs = [decode(old >> U32(s) & U32(0xFFFF)) + decode(new >> U32(s) & U32(0xFFFF)) for s in (0, 16)]
        return encode(pairs[0]) | encode(pairs[1]) << U32(16)

    return run


def _float(fn, dtype):
    word = {F32: U32, F64: U64}[dtype]
    return lambda old, new: fn(old.view(dtype), new.view(dtype)).view(word)


def _signed(fn):
    return lambda old, new: np.where(fn(new.view(_SIGNED[new.dtype]), old.view(_SIGNED[old.dtype])), new, old)


_SIGNED = {np.dtype(U32): I32, np.dtype(U64): I64}
_f16 = _packed_add(lambda x: x.astype(U16).view(F16), lambda x: x.view(U16).astype(U32))
_bf16 = _packed_add(lambda x: (x << U32(16)).view(F32), formats.BF16.encode)
# new memory value from old memory value and data (uint32 or uint64 arrays)
ATOMICS: dict[str, Callable] = {
    "swap": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "rsub": lambda old, new: new - old,
    "smin": _signed(np.less),
    "umin": np.minimum,
    "smax": _signed(np.greater),
    "umax": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": lambda old, new: np.where(old >= new, old.dtype.type(0), old + old.dtype.type(1)),
    "dec": lambda old, new: np.where((old == 0) | (old > new), new, old - old.dtype.type(1)),
    "add_f32": _float(np.add, F32),
    "min_f32": _float(np.fmin, F32),
    "max_f32": _float(np.fmax, F32),
    "add_f64": _float(np.add, F64),
    "min_f64": _float(np.fmin, F64),
    "max_f64": _float(np.fmax, F64),
    "pk_add_f16": _f16,
    "pk_add_bf16": _bf16,
}
_DS_ATOMICS = {"min_i": "smin", "max_i": "smax", "min_u": "umin", "max_u": "umax", "wrxchg_b": "swap"}


def update(view: np.ndarray, units: np.ndarray, fn, data: np.ndarray, compare=None) -> np.ndarray:
    """Applies an atomic to view[units], lane by lane where lanes meet; returns the old values."""
    if fn is None:
        fn = lambda old, pair_: np.where(old == pair_[1], pair_[0], old)
    apply = fn if compare is None else lambda old, i: np.where(old == compare[i], data[i], old)
    if len(np.unique(units)) == len(units):
        old = view[units]
        view[units] = fn(old, data) if compare is None else np.where(old == compare, data, old)
        return old
    old = np.empty_like(data)
    for i, unit in enumerate(units):
        old[i] = view[unit]
        value = view[unit : unit + 1].copy()
        view[unit] = (fn(value, data[i : i + 1]) if compare is None else apply(value, i))[0]
    return old


# Moving between registers and bytes


def _destination_codes(operand: Operand, load: Load) -> list[int]:
    return [operand.code + n for n in range(max(1, load.size // 4))]


def _check_code(code: int, program) -> int:
    check_allocated(Operand(code, 1, "B32", 32), program)
    return register(code)


def _first_register(operand: Operand, dwords: int, program) -> int:
    """The register index of an operand's first dword; all of them must be allocated."""
    return [_check_code(operand.code + n, program) for n in range(max(1, dwords))][0]  # noqa: RUF015 every one is checked


def extend(values: np.ndarray, load: Load) -> np.ndarray:
    """[n, size] bytes as uint32 [n, dwords]."""
    if load.size >= 4:
        return values.view(U32)
    narrow = values.view(
        {(1, True): np.int8, (1, False): np.uint8, (2, True): np.int16, (2, False): U16}[load.size, load.signed]
    )
    return narrow.astype(I32 if load.signed else U32).view(U32)


def deliver(w, first: int, words: np.ndarray, load: Load) -> None:
    """Writes the active lanes' loaded dwords [n, dwords] to VGPRs from `first` on."""
    for n in range(words.shape[1]):
        column, target = words[:, n], w.U[first + n]
        if load.half is not None:
            shift = U32(load.half)
            keep = U32(0xFFFF0000 >> load.half)
            old = target.ravel() if w.full else target[w.mask]
            column = old & keep | (column & U32(0xFFFF)) << shift
        if w.full:
            target[...] = column.reshape(w.count, LANES)
        else:
            target[w.mask] = column


def collect(w, first: int, size: int, shift: int) -> np.ndarray:
    """The bytes [n, size] that the active lanes store from VGPRs from `first` on."""
    if size < 4:
        column = w.U[first].ravel() if w.full else w.U[first][w.mask]
        column = column >> U32(shift) if shift else column
        return np.ascontiguousarray(column.astype(np.uint8 if size == 1 else U16)).view(np.uint8).reshape(-1, size)
    count = size // 4
    columns = [w.U[first + n].ravel() if w.full else w.U[first + n][w.mask] for n in range(count)]
    return np.ascontiguousarray(np.stack(columns, axis=1)).view(np.uint8)


def lanes_of(w, values: np.ndarray) -> np.ndarray:
    """Per-lane values of the active lanes, 1-d."""
    if values.shape != (w.count, LANES):
        values = np.broadcast_to(values, (w.count, LANES))
    return values.ravel() if w.full else values[w.mask]


# SMEM


def _bind_scalar(ins: Instruction, program):
    name = ins.mnemonic
    if name in ("s_dcache_wb", "s_dcache_inv", "s_dcache_wb_vol", "s_dcache_inv_vol", "s_dcache_discard"):
        return lambda w: None
    destination = ins.operands["sdata"].code if "sdata" in ins.operands else None
    if name in ("s_memtime", "s_memrealtime"):

        def clock(w):
            w.S64[destination][...] = program.steps
            program.issue(w, ins, Event("scalar", (destination, destination + 1)))

        return clock
    buffer = name.startswith("s_buffer_load_dword")
    if not (buffer or name.startswith("s_load_dword")):
        raise UnsupportedInstruction(name)
    count = int(name.rpartition("x")[2]) if "dwordx" in name else 1
    base = ins.operands["sbase"].code
    immediate = ins.fields["offset"] if ins.fields["imm"] else 0
    immediate -= (immediate & 0x100000) << 1
    offset = reader(ins.operands["soffset"], ins, U32) if "soffset" in ins.operands else None
    if not ins.fields["imm"] and not ins.fields["soffset_en"]:  # the offset field's low bits name an SGPR
        offset = reader(Operand(ins.fields["offset"] & 0x7F, 1, "B32", 32), ins, U32)
    registers = tuple(range(destination, destination + count))
    size = 4 * count

    def run(w):
        address = w.S64[base][:, 0] + U64(immediate % (1 << 64))
        if buffer:
            address = address & U64(0xFFFF_FFFF_FFFF) if immediate >= 0 else address
        if offset is not None:
            address = address + offset(w)[:, 0].astype(U64)
        address = address & ~U64(3)
        site = Site(program, ins, w, np.arange(w.count), None)
        if buffer:
            words = _scalar_buffer(w, address, site)
        elif w.count > 1 and (address == address[0]).all():
            program.space.check_scalar_load(address, size, w, site)
            words = np.broadcast_to(program.space.load(address[:1], size, 4, w, site, True).view(U32), (w.count, count))
        else:
            program.space.check_scalar_load(address, size, w, site)
            words = program.space.load(address, size, 4, w, site, True).view(U32)
        w.sgpr[:, destination : destination + count] = words
        if destination + count > 126:
            w.exec_changed()
        program.issue(w, ins, Event("scalar", registers))

    def _scalar_buffer(w, address, site):
        start = w.S64[base][:, 0] & U64(0xFFFF_FFFF_FFFF)
        limit = w.S[base + 2][:, 0].astype(U64)
        words = np.zeros((w.count, count), U32)
        for n in range(count):
            at = address + U64(4 * n)
            inside = at - start + U64(4) <= limit
            if inside.any():
                part = Site(program, ins, w, np.flatnonzero(inside), None)
                words[inside, n] = program.space.load(at[inside], 4, 4, w, part, True).view(U32)[:, 0]
        return words

    return run


# GLOBAL, FLAT, SCRATCH


def _signed_offset(ins: Instruction, bits: int) -> int:
    offset = ins.fields["offset"]
    return offset - (1 << bits) if offset >> (bits - 1) & 1 else offset


def _global_address(ins: Instruction, program):
    """A function to 64-bit addresses [waves, 64 or 1]."""
    offset = U64((_signed_offset(ins, 13) if ins.encoding == "GLOBAL" else ins.fields["offset"]) % (1 << 64))
    vector = ins.operands["addr"].code
    scalar = ins.operands["saddr"].code if "saddr" in ins.operands else NO_ADDRESS
    i = _check_code(vector, program)
    if scalar == NO_ADDRESS or ins.encoding == "FLAT":
        _check_code(vector + 1, program)
        return lambda w: pair(w, i, U64) + offset
    return lambda w: w.S64[scalar] + w.U[i] + offset


def _device(ins: Instruction) -> bool:
    """sc1 marks accesses at agent or system scope: past the L2 cache of the die."""
    return bool(ins.fields.get("sc1"))


def _of_flag(device: bool, rows: np.ndarray, addresses: np.ndarray) -> bool:
    """Whether an access at agent scope is that of a flag: each wave touches one address, as it does with an atomic."""
    if not device:
        return False
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    return bool((np.repeat(addresses[starts], np.diff(np.append(starts, len(rows)))) == addresses).all())


def _bind_global(ins: Instruction, program):
    prefix, _, name = ins.mnemonic.partition("_")
    action, _, kind = name.partition("_")
    if kind.startswith("lds_"):
        return _bind_load_to_lds(ins, program, _global_address(ins, program), LOADS[kind[4:]].size, 0, None)
    address = _global_address(ins, program)
    if action == "atomic":
        return _bind_global_atomic(ins, program, address, kind)
    table = {"load": LOADS, "store": STORES}.get(action)
    if table is None or kind not in table:
        raise UnsupportedInstruction(ins.mnemonic)
    if prefix == "flat":
        return _bind_flat(ins, program, address, table[kind])
    if action == "load":
        return _bind_global_load(ins, program, address, table[kind], "vdst")
    return _bind_global_store(ins, program, address, *table[kind], "data")


def _bind_global_load(ins, program, address, load: Load, destination: str):
    codes = tuple(_destination_codes(ins.operands[destination], load))
    first = _first_register(ins.operands[destination], len(codes), program)
    device = _device(ins)
    align = min(load.size, 4)

    def run(w):
        rows, lanes = w.active()
        event = Event("vm", codes)
        if len(rows):
            a = lanes_of(w, address(w))
            event.region, event.size = program.space.name_at(a[0]), len(rows) * load.size // w.count
            flag, site = _of_flag(device, rows, a), Site(program, ins, w, rows, lanes)
            values = program.space.load(a, load.size, align, w, site, flag, device)
            deliver(w, first, extend(values, load), load)
            program.counters.vector_access(ins, w, a, load.size)
            if flag:
                event.acquired = program.space.synchronise(w, site, a, release=False, acquire=True)
        program.issue(w, ins, event)

    return run


def _bind_global_store(ins, program, address, size: int, shift: int, source: str):
    first = _first_register(ins.operands[source], size // 4, program)
    device = _device(ins)

    def run(w):
        rows, lanes = w.active()
        clock = program.space.clock
        if len(rows):
            a = lanes_of(w, address(w))
            values = collect(w, first, size, shift)
            flag, site = _of_flag(device, rows, a), Site(program, ins, w, rows, lanes)
            if flag:
                program.space.synchronise(w, site, a, release=True, acquire=False)
            if program.space.store(a, values, min(size, 4), w, site, flag, device):
                program.progress()
            program.counters.vector_access(ins, w, a, size)
        program.issue(w, ins, Event("vm", load=False, clock=clock))

    return run


def _bind_global_atomic(ins, program, address, kind: str):
    wide = kind.endswith(("_x2", "f64"))
    name = kind.removesuffix("_x2")
    swap = name == "cmpswap"
    if not swap and name not in ATOMICS:
        raise UnsupportedInstruction(ins.mnemonic)
    fn = None if swap else ATOMICS[name]
    word, size = (U64, 8) if wide else (U32, 4)
    source = ins.operands["data" if "data" in ins.operands else "vdata"]
    returns = bool(ins.fields["sc0"])
    destination = ins.operands.get("vdst", source).code
    codes = tuple(range(destination, destination + size // 4)) if returns else ()
    first = register(source.code)
    step = size // 4

    def run(w):
        rows, lanes = w.active()
        event = Event("vm", codes, clock=program.space.clock)
        if len(rows):
            a = lanes_of(w, address(w))
            site = Site(program, ins, w, rows, lanes)
            program.space.note_store(ins)
            data = collect(w, first, size, 0).view(word)[:, 0]
            compare = collect(w, first + step, size, 0).view(word)[:, 0] if swap else None
            event.acquired = program.space.synchronise(w, site, a, release=True, acquire=True)
            old = np.empty(len(a), word)
            for region, offsets, index, _ in program.space.find(a, size, size, site):
                chosen = slice(None) if index is None else index
                units = offsets >> (size.bit_length() - 1)
                region.stored = True
                if region.written is not None:
                    program.space._check_written(region, units, size, size, index, site)
                old[chosen] = update(
                    region.views[size], units, fn, data[chosen], None if compare is None else compare[chosen]
                )
                if program.space.races:
                    program.space._stamp(region, offsets, size, index, w, site, None, True)
            program.space.clock += 2
            program.progress()
            if returns:
                deliver(w, register(destination), old.view(np.uint8).reshape(-1, size).view(U32), Load(size))
            program.counters.vector_access(ins, w, a, size)
        program.issue(w, ins, event)

    return run


def _bind_flat(ins, program, address, what):
    """FLAT: each lane goes to LDS, scratch or global memory by its address."""
    is_load = isinstance(what, Load)
    size, shift = (what.size, 0) if is_load else what
    operand = ins.operands["vdst" if is_load else "data"]
    codes = tuple(operand.code + n for n in range(max(1, size // 4)))
    first = _first_register(operand, size // 4, program)
    lds_high, private_high = APERTURES[235] >> 32, APERTURES[237] >> 32
    device = _device(ins)

    def flag(site, addresses) -> bool:
        return _of_flag(device, site.rows, addresses)

    def run(w):
        rows, lanes = w.active()
        clock = None if is_load else program.space.clock
        if len(rows):
            a = lanes_of(w, address(w))
            high = (a >> U64(32)).astype(U32)
            values = np.empty((len(a), size), np.uint8) if is_load else collect(w, first, size, shift)
            for space in ("lds", "private", "global"):
                chosen = {"lds": high == lds_high, "private": high == private_high}.get(
                    space, (high != lds_high) & (high != private_high)
                )
                index = np.flatnonzero(chosen)
                if not len(index):
                    continue
                site = Site(program, ins, w, rows[index], lanes[index])
                part = a[index]
                low = (part & U64(0xFFFFFFFF)).astype(I64)
                if space == "lds":
                    positions = program.lds.locate(low, size, min(size, 4), program.slots[w.block[rows[index]]], site)
                    if is_load:
                        values[index] = program.lds.load(positions, size, w, site)
                    else:
                        program.lds.store(positions, values[index], w, site)
                elif space == "private":
                    if is_load:
                        values[index] = _scratch_load(w, low, size, site)
                    else:
                        _scratch_store(w, low, values[index], site)
                elif is_load:
                    values[index] = program.space.load(part, size, min(size, 4), w, site, flag(site, part), device)
                elif program.space.store(part, values[index], min(size, 4), w, site, flag(site, part), device):
                    program.progress()
            if is_load:
                deliver(w, first, extend(values, what), what)
        program.issue(w, ins, Event("flat", codes if is_load else (), load=is_load, clock=clock))

    return run


# Scratch: private bytes of each lane, [waves, lanes, bytes], with one flag per byte that says whether it was written


def _scratch_positions(w, offsets, size: int, site):
    limit = w.scratch.shape[2] // 2
    if (offsets < 0).any() or (offsets + size > limit).any():
        bad = int(np.argmax((offsets < 0) | (offsets + size > limit)))
        raise site(ScratchOutOfBounds, bad, f"{size} bytes at scratch offset {int(offsets[bad])}, the lane has {limit}")
    return site.rows[:, None], site.lanes[:, None], offsets[:, None] + np.arange(size), limit


def _scratch_load(w, offsets, size: int, site) -> np.ndarray:
    rows, lanes, at, limit = _scratch_positions(w, offsets, size, site)
    written = w.scratch[rows, lanes, at + limit].all(axis=1)
    if not written.all():
        bad = int(np.argmin(written))
        raise site(Uninitialised, bad, f"scratch offset {int(offsets[bad])} was never written")
    return w.scratch[rows, lanes, at]


def _scratch_store(w, offsets, values, site) -> None:
    rows, lanes, at, limit = _scratch_positions(w, offsets, values.shape[1], site)
    w.scratch[rows, lanes, at] = values
    w.scratch[rows, lanes, at + limit] = 1


def _bind_scratch(ins: Instruction, program):
    _, action, kind = ins.mnemonic.split("_", 2)
    table = {"load": LOADS, "store": STORES}.get(action, {})
    if kind not in table:
        raise UnsupportedInstruction(ins.mnemonic)
    is_load = action == "load"
    load = table[kind] if is_load else None
    size, shift = (load.size, 0) if is_load else table[kind]
    offset = _signed_offset(ins, 13)
    vector = _check_code(ins.operands["addr"].code, program) if ins.fields["sve"] else None
    scalar = ins.operands["saddr"].code if "saddr" in ins.operands else NO_ADDRESS
    operand = ins.operands["vdst" if is_load else "data"]
    codes = tuple(operand.code + n for n in range(max(1, size // 4)))
    first = _first_register(operand, size // 4, program)

    def run(w):
        rows, lanes = w.active()
        if len(rows):
            offsets = np.full(len(rows), offset, I64)
            if vector is not None:
                offsets += lanes_of(w, w.I[vector])
            if scalar != NO_ADDRESS:
                offsets += w.S[scalar][rows, 0].astype(I32)
            site = Site(program, ins, w, rows, lanes)
            if is_load:
                deliver(w, first, extend(_scratch_load(w, offsets, size, site), load), load)
            else:
                _scratch_store(w, offsets, collect(w, first, size, shift), site)
        program.issue(w, ins, Event("vm", codes if is_load else (), load=is_load))

    return run


# MUBUF


def _bind_buffer(ins: Instruction, program):
    name = ins.mnemonic.removeprefix("buffer_")
    if name in ("wbl2", "inv"):
        return _bind_cache(ins, program, name)
    action, _, kind = name.partition("_")
    resource = ins.operands["srsrc"].code
    scalar = reader(ins.operands["soffset"], ins, U32)
    immediate, offen, idxen = ins.fields["offset"], ins.fields["offen"], ins.fields["idxen"]
    vector = ins.operands["vaddr"].code if "vaddr" in ins.operands else VGPR
    index_i = register(vector)
    offset_i = register(vector + (1 if idxen else 0))

    def place(w, size: int):
        """Addresses of the active lanes and, per dword, whether it is in range."""
        rows, _ = w.active()
        base = (w.S64[resource] & U64(0xFFFF_FFFF_FFFF))[rows, 0]
        word1, records, word3 = (w.S[resource + n][rows, 0].astype(I64) for n in (1, 2, 3))
        stride = word1 >> 16 & 0x3FFF
        if (word1 >> 31).any() or (word3 >> 23 & 1).any():
            raise UnsupportedInstruction(f"{ins.text}: a swizzled or thread-indexed buffer resource")
        offset = np.full(len(rows), immediate, I64)
        if offen:
            offset += lanes_of(w, w.U[offset_i]).astype(I64)
        extra = scalar(w)
        extra = extra[rows, 0].astype(I64) if extra.shape[0] > 1 else np.full(len(rows), int(extra[0, 0]), I64)
        index = lanes_of(w, w.U[index_i]).astype(I64) if idxen else np.zeros(len(rows), I64)
        address = base + (index * stride + offset + extra).astype(U64)
        pieces = np.arange(0, max(size, 4), 4)
        if idxen:
            inside = np.broadcast_to((index < records)[:, None], (len(rows), len(pieces)))
        else:
            inside = (offset + extra)[:, None] + pieces + min(size, 4) <= records[:, None]
        return address, inside

    if ins.fields["lds"] or kind.startswith("lds_"):
        load = LOADS[kind.removeprefix("lds_")]
        return _bind_load_to_lds(ins, program, None, load.size, immediate, place)
    if action == "atomic":
        return _bind_buffer_atomic(ins, program, kind, place)
    table = {"load": LOADS, "store": STORES}.get(action, {})
    if kind not in table:
        raise UnsupportedInstruction(ins.mnemonic)
    is_load = action == "load"
    load = table[kind] if is_load else None
    size, shift = (load.size, 0) if is_load else table[kind]
    codes = tuple(ins.operands["vdata"].code + n for n in range(max(1, size // 4)))
    first = _first_register(ins.operands["vdata"], size // 4, program)
    unit = min(size, 4)
    device = _device(ins)

    def run(w):
        rows, lanes = w.active()
        region, moved, clock = "", 0, None if is_load else program.space.clock
        if len(rows):
            address, inside = place(w, size)
            region, moved = program.space.name_at(address[0]), int(inside.sum()) * unit // w.count
            if is_load:
                values = buffer_load(program, ins, w, address, inside, size)
                deliver(w, first, extend(values, load), load)
            else:
                values = collect(w, first, size, shift)
                site = Site(program, ins, w, rows, lanes)
                if inside.all():
                    if program.space.store(address, values, unit, w, site, False, device):
                        program.progress()
                else:
                    for n in range(inside.shape[1]):
                        chosen = np.flatnonzero(inside[:, n])
                        if len(chosen):
                            part = Site(program, ins, w, rows[chosen], lanes[chosen])
                            piece = values[chosen, unit * n : unit * (n + 1)]
                            program.space.store(address[chosen] + U64(4 * n), piece, unit, w, part, False, device)
                            program.progress()
            program.counters.vector_access(ins, w, address, size)
        loaded = codes if is_load else ()
        program.issue(w, ins, Event("vm", loaded, size=moved, load=is_load, region=region, clock=clock))

    return run


def _bind_cache(ins, program, name: str):
    """BUFFER_WBL2 writes the die's L2 cache back, BUFFER_INV invalidates what it has of others' memory; at agent scope, by sc1."""
    if not _device(ins):
        return lambda w: None
    if name == "inv":
        return lambda w: program.space.invalidate(w)

    def write_back(w):
        event = Event("vm", load=False)
        event.written_back = program.space.write_back(w, program)
        program.issue(w, ins, event)

    return write_back


def buffer_load(program, ins, w, address, inside, size: int) -> np.ndarray:
    """[n, size] bytes; dwords out of the resource's range are 0."""
    rows, lanes = w.active()
    unit = min(size, 4)
    device = _device(ins)
    if inside.all():
        return program.space.load(address, size, unit, w, Site(program, ins, w, rows, lanes), False, device)
    values = np.zeros((len(rows), size), np.uint8)
    for n in range(inside.shape[1]):
        chosen = np.flatnonzero(inside[:, n])
        if len(chosen):
            part = Site(program, ins, w, rows[chosen], lanes[chosen])
            loaded = program.space.load(address[chosen] + U64(4 * n), unit, unit, w, part, False, device)
            values[chosen, unit * n : unit * (n + 1)] = loaded
    return values


def _bind_buffer_atomic(ins, program, kind: str, place):
    size = 8 if kind.endswith(("_x2", "f64")) else 4

    def address(w):
        addresses, inside = place(w, size)
        if not inside.all():
            raise UnsupportedInstruction(f"{ins.text}: an atomic out of the buffer's range")
        full = np.zeros((w.count, LANES), U64)
        full[w.active()] = addresses
        return full

    return _bind_global_atomic(ins, program, address, kind)


def _bind_load_to_lds(ins, program, address, size: int, immediate: int, place):
    """Loads to LDS: lane i of a wave writes M0 + inst_offset + i * size (sizes 12 and 16 are CDNA4's)."""
    step = max(size, 4)
    offset = _signed_offset(ins, 13) if ins.encoding == "GLOBAL" else immediate
    load = LOADS[
        ins.mnemonic.rpartition("lds_")[2] if "lds_" in ins.mnemonic else ins.mnemonic.removeprefix("buffer_load_")
    ]

    def run(w):
        rows, lanes = w.active()
        granules, region, moved = None, "", 0
        if len(rows):
            site = Site(program, ins, w, rows, lanes)
            if place:
                a, inside = place(w, size)
                values = buffer_load(program, ins, w, a, inside, size)
                moved = int(inside.sum()) * min(size, 4) // w.count
            else:
                a = lanes_of(w, address(w))
                values = program.space.load(a, size, min(size, 4), w, site, False)
                moved = len(rows) * size // w.count
            if size < 4:
                values = np.ascontiguousarray(extend(values, load)).view(np.uint8)
            base = (w.S[M0][rows, 0] & U32(0x3FFFF if program.arch == "gfx950" else 0xFFFF)).astype(I64)
            positions = program.lds.locate(base + offset + lanes * step, step, 4, program.slots[w.block[rows]], site)
            granules = program.lds.store(positions, values, w, site).reshape(len(rows), -1)
            program.lds.in_flight[granules] = True
            program.counters.vector_access(ins, w, a, size)
            region = program.space.name_at(a[0])
        where = None if granules is None else rows
        program.issue(w, ins, Event("vm", size=moved, granules=granules, rows=where, region=region))

    return run


# DS


def _bind_ds(ins: Instruction, program):
    name = ins.mnemonic.removeprefix("ds_")
    if name == "nop":
        return lambda w: None
    if name in ("bpermute_b32", "permute_b32", "swizzle_b32"):
        return _bind_ds_lanes(ins, program, name)
    if "_tr_" in name:
        return _bind_ds_transpose(ins, program, name)
    action, _, kind = name.partition("_")
    fields = ins.fields
    address = _check_code(ins.operands["addr"].code, program) if "addr" in ins.operands else None
    offset = fields["offset0"] | fields["offset1"] << 8
    if fields["gds"]:
        raise UnsupportedInstruction(f"{ins.mnemonic} gds")

    def positions(w, offset: int, size: int, align: int, site):
        a = lanes_of(w, w.U[address]).astype(I64) + offset
        return program.lds.locate(a, size, align, program.slots[w.block[site.rows]], site), a

    if action in ("read", "write") and kind in (DS_LOADS if action == "read" else DS_STORES):
        offsets, what = [offset], (DS_LOADS if action == "read" else DS_STORES)[kind]
    elif action in ("read2", "read2st64", "write2", "write2st64"):
        size = 4 if kind == "b32" else 8
        scale = size * (64 if "st64" in action else 1)
        offsets = [fields["offset0"] * scale, fields["offset1"] * scale]
        what = Load(size) if action.startswith("read") else (size, 0)
    else:
        return _bind_ds_atomic(ins, program, name, positions, offset)
    if isinstance(what, Load):
        size = what.size
        align = 16 if size == 12 else size
        per = max(1, size // 4)
        codes = tuple(ins.operands["vdst"].code + n for n in range(per * len(offsets)))
        first = _first_register(ins.operands["vdst"], len(codes), program)

        def run_read(w):
            rows, lanes = w.active()
            if len(rows):
                site = Site(program, ins, w, rows, lanes)
                parts = []
                for at in offsets:
                    where, a = positions(w, at, size, align, site)
                    parts.append(program.lds.load(where, size, w, site))
                    program.counters.lds_access(ins, w, a, size)
                for n, values in enumerate(parts):
                    deliver(w, first + n * per, extend(values, what), what)
            program.issue(w, ins, Event("lds", codes))

        return run_read
    size, shift = what
    align = 16 if size == 12 else size
    sources = [ins.operands[n] for n in ("data0", "data1") if n in ins.operands][: len(offsets)]
    firsts = [_first_register(o, size // 4, program) for o in sources]

    def run_write(w):
        rows, lanes = w.active()
        granules = None
        if len(rows):
            site = Site(program, ins, w, rows, lanes)
            written = []
            for at, first in zip(offsets, firsts, strict=True):
                where, a = positions(w, at, size, align, site)
                written.append(program.lds.store(where, collect(w, first, size, shift), w, site).reshape(len(rows), -1))
                program.counters.lds_access(ins, w, a, size)
            granules = np.concatenate(written, axis=1)
            program.progress()
        program.issue(w, ins, Event("lds", load=False, granules=granules, rows=None if granules is None else rows))

    return run_write


def _bind_ds_atomic(ins, program, name: str, positions, offset: int):
    returns = "_rtn_" in name
    name = name.replace("_rtn", "")
    swap = name.startswith("cmpst_")
    key = _DS_ATOMICS.get(name[:-2], name if name in ATOMICS else name.rpartition("_")[0])
    if not swap and key not in ATOMICS:
        raise UnsupportedInstruction(ins.mnemonic)
    size = 8 if name.endswith("64") else 4
    word = U64 if size == 8 else U32
    sources = [register(ins.operands[n].code) for n in ("data0", "data1") if n in ins.operands]
    destination = ins.operands["vdst"].code if returns else None
    codes = tuple(range(destination, destination + size // 4)) if returns else ()

    def run(w):
        rows, lanes = w.active()
        if len(rows):
            site = Site(program, ins, w, rows, lanes)
            where, a = positions(w, offset, size, size, site)
            program.lds.check_atomic(where, size, w, site)
            data = [collect(w, first, size, 0).view(word)[:, 0] for first in sources]
            units = where >> (size.bit_length() - 1)
            view = program.lds.views[size]
            if swap:  # DS_CMPST: data0 is compared, data1 stored
                old = update(view, units, None, data[1], data[0])
            else:
                old = update(view, units, ATOMICS[key], data[0])
            if returns:
                deliver(w, register(destination), old.view(np.uint8).reshape(-1, size).view(U32), Load(size))
            program.counters.lds_access(ins, w, a, size)
            program.progress()
        program.issue(w, ins, Event("lds", codes))

    return run


def _bind_ds_lanes(ins, program, name: str):
    """DS_PERMUTE, DS_BPERMUTE and DS_SWIZZLE: data between lanes, no memory."""
    code = ins.operands["vdst"].code
    destination = _check_code(code, program)
    offset = ins.fields["offset0"] | ins.fields["offset1"] << 8
    if name == "swizzle_b32":
        source = _check_code(ins.operands["addr"].code, program)
        table = swizzle_lanes(offset)

        def move(w):
            values = w.U[source][:, table]
            return values if w.full else np.where(w.mask[:, table], values, U32(0))

    else:
        address = _check_code(ins.operands["addr"].code, program)
        source = _check_code(ins.operands["data0"].code, program)

        def move(w):
            lane = (w.U[address] + U32(offset)) >> U32(2) & U32(63)
            if name == "bpermute_b32":
                values = np.take_along_axis(w.U[source], lane.astype(I64), axis=1)
                if not w.full:
                    values = np.where(np.take_along_axis(w.mask, lane.astype(I64), axis=1), values, U32(0))
                return values
            values = np.zeros((w.count, LANES), U32)
            rows, lanes = w.active()
            values[rows, lane[rows, lanes]] = w.U[source][rows, lanes]  # the highest lane wins
            return values

    def run(w):
        np.copyto(w.U[destination], move(w), where=w.mask)
        program.issue(w, ins, Event("lds", (code,)))

    return run


def swizzle_lanes(offset: int) -> np.ndarray:
    """DS_SWIZZLE's source lanes: quad permutation with bit 15 set, else and / or / xor masks in groups of 32."""
    lane = np.arange(LANES)
    if offset & 0x8000:
        if offset & 0x6000:
            raise UnsupportedInstruction(f"ds_swizzle_b32 offset:{offset:#x}")
        return dpp_lanes(offset & 0xFF)[0]
    within = lane & 31
    return lane & 32 | (within & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31


def _bind_ds_transpose(ins, program, name: str):
    """DS_READ_B64_TR_B16 / B8 / B4 and DS_READ_B96_TR_B6: each row of 16 lanes reads a tile, each lane gets a column of it."""
    bits = int(name.rpartition("b")[2])
    size = 12 if bits == 6 else 8
    codes = tuple(ins.operands["vdst"].code + n for n in range(size // 4))
    first = _first_register(ins.operands["vdst"], size // 4, program)
    address = _check_code(ins.operands["addr"].code, program)
    offset = ins.fields["offset0"] | ins.fields["offset1"] << 8

    def run(w):
        rows, lanes = w.active()
        if not w.full:
            raise UnsupportedInstruction(f"{ins.mnemonic} with inactive lanes")
        site = Site(program, ins, w, rows, lanes)
        a = lanes_of(w, w.U[address]).astype(I64) + offset
        positions = program.lds.locate(a, size, 8, program.slots[w.block[rows]], site)
        values = program.lds.load(positions, size, w, site)
        words = transpose_rows(values, bits).view(U32)
        deliver(w, first, words, Load(size))
        program.counters.lds_access(ins, w, a, size)
        program.issue(w, ins, Event("lds", codes))

    return run


def transpose_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """The data movement of ds_read_*_tr_*: [n * 16 lanes, bytes] -> the same shape.

    A row's 16 lanes hold, in lane order, 16 * k elements (k = 4, 8 or 16 of 16, 8 or 4 and 6 bits); they are a k x 16 matrix,
    row-major; lane j receives column j. For 16 bits so described by Modular's ds_read_tr16_b64_row, for 8 bits as two
    interleaved 8 x 8 transposes, which is the same; for 4 and 6 bits by analogy.
    """
    stream = np.unpackbits(values, axis=1, bitorder="little")
    per_lane = stream.shape[1] // bits
    elements = stream.reshape(-1, 16 * per_lane, bits)
    matrix = elements.reshape(-1, per_lane, 16, bits)
    columns = np.ascontiguousarray(matrix.transpose(0, 2, 1, 3))
    return np.packbits(columns.reshape(values.shape[0], -1), axis=1, bitorder="little")


BINDERS = {
    "SMEM": _bind_scalar,
    "GLOBAL": _bind_global,
    "FLAT": _bind_global,
    "SCRATCH": _bind_scratch,
    "MUBUF": _bind_buffer,
    "DS": _bind_ds,
}


def bind(ins: Instruction, program) -> Callable:
    """Resolves a memory instruction to a function on waves."""
    return BINDERS[ins.encoding](ins, program)
