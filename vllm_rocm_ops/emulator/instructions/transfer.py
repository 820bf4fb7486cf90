"""Move data between registers and bytes for memory instructions: widths, atomics, and active lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .. import formats
from ..coherence import AGENT, SYSTEM
from ..decode import Instruction, Operand
from ..errors import UnsupportedInstruction
from ..operands import F16, F32, F64, I32, I64, U16, U32, U64, check_allocated, register
from ..waves import LANES


class Site:
    """Locate an access: create errors with instruction, block, wave and lane of its n-th active lane."""

    __slots__ = ("ins", "lanes", "pauses", "rows", "stale", "w")

    def __init__(self, ins, w, rows, lanes):
        self.ins, self.w, self.rows, self.lanes = ins, w, rows, lanes
        self.pauses = False  # after a store: whether others run while it is in flight
        self.stale = None  # after a load: active lanes with a word of another epoch than the awaited one

    def part(self, index: np.ndarray | None) -> Site:
        """Return the site of some of the active lanes; of all for None."""
        if index is None:
            return self
        return Site(self.ins, self.w, self.rows[index], None if self.lanes is None else self.lanes[index])

    def __call__(self, kind, index: int, message: str):
        lane = None if self.lanes is None else int(self.lanes[index])
        return self.w.scheduler.error(kind, self.ins, self.w, int(self.rows[index]), lane, message)


@dataclass(frozen=True)
class Load:
    """A load: bytes in memory; sign-extended or not; into the low (0) or high (16) half, or the whole register."""

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


def update(view: np.ndarray, units: np.ndarray, fn, data: np.ndarray, compare=None) -> np.ndarray:
    """Apply an atomic to view[units], sequentially for lanes at equal units, and return the old values.

    With `compare`, `fn` does not matter: equal units become `data`.
    """
    before, rest = np.empty_like(data), np.arange(len(units))
    if len(units) and (units == units[0]).all():  # all lanes meet
        place = view[units[0] : units[0] + 1]
        for lane in range(len(units)):
            before[lane] = place[0]
            mine = data[lane : lane + 1]
            place[...] = fn(place, mine) if compare is None else np.where(place == compare[lane], mine, place)
        return before
    while len(rest):
        first = np.unique(units[rest], return_index=True)[1]  # the first lane at each unit
        lanes = rest[first]
        old = view[units[lanes]]
        before[lanes] = old
        view[units[lanes]] = (
            fn(old, data[lanes]) if compare is None else np.where(old == compare[lanes], data[lanes], old)
        )
        rest = np.delete(rest, first)
    return before


# Moving between registers and bytes


def load_or_store(ins: Instruction, action: str, kind: str) -> tuple[Load | None, int, int]:
    """Return the load of an instruction (None for a store), bytes per lane, and the shift of a store's data."""
    if action == "load" and kind in LOADS:
        return LOADS[kind], LOADS[kind].size, 0
    if action == "store" and kind in STORES:
        return None, *STORES[kind]
    raise UnsupportedInstruction(ins.mnemonic)


def check_code(code: int, program) -> int:
    """Return the register index of a code, which must be allocated."""
    check_allocated(Operand(code, 1, "B32", 32), program)
    return register(code)


def registers(operand: Operand, size: int, program) -> tuple[tuple[int, ...], int]:
    """Return the codes of the registers that an access of `size` bytes per lane moves, all allocated, and the first's index."""
    codes = tuple(range(operand.code, operand.code + max(1, size // 4)))
    first, *_ = [check_code(code, program) for code in codes]
    return codes, first


def extend(values: np.ndarray, load: Load) -> np.ndarray:
    """Extend bytes [n, size] to uint32 [n, dwords]."""
    if load.size >= 4:
        return values.view(U32)
    narrow = values.view(
        {(1, True): np.int8, (1, False): np.uint8, (2, True): np.int16, (2, False): U16}[load.size, load.signed]
    )
    return narrow.astype(I32 if load.signed else U32).view(U32)


def deliver(w, first: int, words: np.ndarray, load: Load) -> None:
    """Write the active lanes' loaded dwords [n, dwords] to VGPRs from `first`."""
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
    """Return the bytes [n, size] that the active lanes store from VGPRs from `first`."""
    if size < 4:
        column = w.U[first].ravel() if w.full else w.U[first][w.mask]
        column = column >> U32(shift) if shift else column
        return np.ascontiguousarray(column.astype(np.uint8 if size == 1 else U16)).view(np.uint8).reshape(-1, size)
    count = size // 4
    if count == 1:
        return np.ascontiguousarray(w.U[first].ravel() if w.full else w.U[first][w.mask])[:, None].view(np.uint8)
    columns = np.empty((w.count * LANES if w.full else len(w.active()[0]), count), U32)
    for n in range(count):
        columns[:, n] = w.U[first + n].ravel() if w.full else w.U[first + n][w.mask]
    return columns.view(np.uint8)


def lanes_of(w, values: np.ndarray) -> np.ndarray:
    """Return the active lanes' values, 1-d."""
    if values.shape != (w.count, LANES):
        values = np.broadcast_to(values, (w.count, LANES))
    return values.ravel() if w.full else values[w.mask]


def signed_offset(ins: Instruction, bits: int) -> int:
    """Return the instruction's offset field, sign-extended from `bits`."""
    offset = ins.fields["offset"]
    return offset - (1 << bits) if offset >> (bits - 1) & 1 else offset


def scope_of(ins: Instruction) -> int:
    """Return the scope of an access: 1 (agent, past the die's L2) with sc1, 2 (system) with sc0 sc1, else 0.

    For an atomic, sc0 requests the old value, and sc1 is system scope.
    """
    if "atomic" in ins.mnemonic:
        return SYSTEM if ins.fields.get("sc1") else AGENT
    return (SYSTEM if ins.fields.get("sc0") else AGENT) if ins.fields.get("sc1") else 0


def of_flag(scope: int, rows: np.ndarray, addresses: np.ndarray) -> bool:
    """True if an access at agent scope is of a flag: each wave touches one address, as with an atomic."""
    if not scope or len(rows) > 1 and rows[0] == rows[1] and addresses[0] != addresses[1]:
        return False
    if len(addresses) == 1 or (addresses == addresses[0]).all():
        return True
    starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
    return bool((np.repeat(addresses[starts], np.diff(np.append(starts, len(rows)))) == addresses).all())


def buffer_load(ins, w, address, inside, size: int) -> np.ndarray:
    """Return the bytes [n, size]; dwords outside the resource's range are 0."""
    rows, lanes = w.active()
    unit = min(size, 4)
    scope = scope_of(ins)
    if inside.all():
        return w.scheduler.space.load(address, size, unit, w, Site(ins, w, rows, lanes), False, scope)
    values = np.zeros((len(rows), size), np.uint8)
    for n in range(inside.shape[1]):
        chosen = np.flatnonzero(inside[:, n])
        if len(chosen):
            part = Site(ins, w, rows[chosen], lanes[chosen])
            loaded = w.scheduler.space.load(address[chosen] + U64(4 * n), unit, unit, w, part, False, scope)
            values[chosen, unit * n : unit * (n + 1)] = loaded
    return values
