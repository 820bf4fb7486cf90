"""Access operands: SGPRs, VGPRs, AGPRs, constants; modifiers; DPP and SDWA; EXEC on writes.

Source: AMD Instinct MI300 (CDNA3) ISA, chapters "Scalar ALU Operations" (5.2, "Scalar Operands") and "Vector ALU Operations" (operands
and modifiers), and the encodings of VOP1, VOP2, VOP3, SDWA and DPP in "Microcode Formats".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .decode import VGPR, Instruction, Operand
from .errors import UnsupportedInstruction
from .waves import LANES

F16, F32, F64 = np.float16, np.float32, np.float64
U16, I16, U32, I32, U64, I64 = np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64
MASK = "mask"

# Number formats of the operand tables; all others are raw dwords.
DTYPES = {
    "F16": F16, "F32": F32, "F64": F64, "U16": U16, "B16": U16, "I16": I16, "BF16": U16, "U32": U32, "B32": U32,
    "I32": I32, "U64": U64, "B64": U64, "I64": I64, "M64": MASK, "U24": U32, "I24": I32,
}  # fmt: skip
PACKED = {"PK2_F16": F16, "PK2_I16": I16, "PK2_U16": U16, "PK2_B16": U16, "PK2_F32": F32, "PK2_B32": U32}
Read = Callable
_TINY = {np.dtype(F32): np.float32(2.0**-126), np.dtype(F16): np.float16(2.0**-14), np.dtype(F64): 2.0**-1022}


def dtype_of(operand: Operand):
    """Return the numpy type of an operand's values: raw dwords are uint32, pairs uint64."""
    known = DTYPES.get(operand.format)
    if known is not None:
        return known
    return U64 if operand.dwords == 2 else U32


# Scalar operands

_INLINE = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494309189532}


def constant(code: int, literal: int | None, dtype) -> np.ndarray:
    """Return an inline constant or literal for an operand of `dtype`, [1, 1]."""
    dtype = np.dtype(dtype)
    if code in _INLINE:
        float_type = {2: np.float16, 4: np.float32, 8: np.float64}[dtype.itemsize]
        return np.array([[_INLINE[code]]], float_type).view(dtype)
    if code == 255 and dtype == np.float64:  # the literal is the high dword
        return np.array([[literal << 32]], U64).view(dtype)
    if code == 255:
        value = literal - (1 << 32) if dtype == I64 and literal >> 31 else literal
    else:
        value = code - 128 if code <= 192 else 192 - code
    unsigned = {2: np.uint16, 4: U32, 8: U64}[dtype.itemsize]
    return np.array([[value % (1 << 8 * dtype.itemsize)]], unsigned).view(dtype)


def _special(code: int):
    """Return the readers of codes 251 to 253."""
    if code == 251:
        return lambda w: (w.S64[106] == 0).astype(U32)
    if code == 252:
        return lambda w: (w.S64[126] == 0).astype(U32)
    if code == 253:
        return lambda w: w.scc.astype(U32)
    return None


APERTURES = {
    235: 0x0001_0000_0000_0000,
    236: 0x0001_0000_FFFF_FFFF,
    237: 0x0002_0000_0000_0000,
    238: 0x0002_0000_FFFF_FFFF,
}


def scalar_dtype(operand: Operand):
    """Return the numpy type of a scalar operand."""
    signed = operand.format in ("I32", "I64", "I16")
    return (I64 if signed else U64) if operand.dwords == 2 else (I32 if signed else U32)


def read_scalar(operand: Operand, instruction: Instruction, dtype=None) -> Callable:
    """Return a function from waves to the scalar operand's value."""
    dtype = np.dtype(dtype or scalar_dtype(operand))
    code = operand.code
    if code < 128:
        if dtype.itemsize == 8:
            return (lambda w: w.S64[code]) if dtype == U64 else (lambda w: w.S64[code].view(dtype))
        return (lambda w: w.S[code]) if dtype == U32 else (lambda w: w.S[code].view(dtype))
    if code in APERTURES:  # a 64-bit read is the address, a 32-bit read its high half
        value = np.array([[APERTURES[code] >> (0 if dtype.itemsize == 8 else 32)]], U64).astype(dtype)
        return lambda w: value
    special = _special(code)
    if special:
        return lambda w: special(w).astype(dtype)
    if 128 <= code <= 208 or code in _INLINE or code == 255:
        value = constant(code, instruction.fields.get("literal"), dtype)
        return lambda w: value
    raise UnsupportedInstruction(f"source operand {code} of {instruction.text}")


# Vector operands


def register(code: int) -> int:
    """Return the index into Waves.U for a VGPR or AGPR code."""
    return code - VGPR


def check_allocated(operand: Operand, program) -> None:
    """Raise for registers beyond the kernel descriptor's allocation."""
    for code in operand.registers:
        if code >= VGPR and not program.allocates(code):
            raise program.out_of_range(operand)


def pair(w, i: int, dtype) -> np.ndarray:
    """Return VGPRs i and i + 1 as 64-bit values."""
    out = np.empty((w.count, LANES, 2), U32)
    out[..., 0] = w.U[i]
    out[..., 1] = w.U[i + 1]
    return out.view(dtype)[..., 0]


def words(w, i: int, count: int) -> np.ndarray:
    """Return VGPRs i .. i + count - 1 as uint32 [waves, lanes, count]."""
    return np.stack(w.U[i : i + count], axis=-1)


def read(operand: Operand, ins: Instruction, program, dtype=None, half: int = 0) -> Read:
    """Return a function from waves to the operand's values, [waves, 64], or [waves or 1, 1] if uniform."""
    check_allocated(operand, program)
    dtype = dtype or dtype_of(operand)
    code = operand.code
    if dtype == MASK:
        return lambda w: w.lanes(code)
    size = np.dtype(dtype).itemsize
    if code >= VGPR:
        i = register(code)
        if operand.dwords > 2:
            return lambda w: words(w, i, operand.dwords)
        if size == 8:
            return lambda w: pair(w, i, dtype)
        if size == 2:
            return lambda w: w.U[i].view(dtype)[:, half::2]
        if dtype == F32:
            return lambda w: w.F[i]
        return (lambda w: w.I[i]) if dtype == I32 else (lambda w: w.U[i])
    if size == 2 and code < 128:
        shift = U32(16 * half)
        return lambda w: (w.S[code] >> shift).astype(U16).view(dtype)
    if size == 2 and half and code >= 128:
        raise UnsupportedInstruction(f"{ins.text}: op_sel on a constant")
    return read_scalar(operand, ins, dtype)


def negate(reader: Read, dtype) -> Read:
    """Apply the NEG modifier: flip the sign bit, also of integer-typed operands that hold floats."""
    if np.issubdtype(dtype, np.floating):
        return lambda w: np.negative(reader(w))
    sign = dtype(1 << (8 * np.dtype(dtype).itemsize - 1))
    return lambda w: reader(w) ^ sign


def absolute(reader: Read, dtype) -> Read:
    """Apply the ABS modifier."""
    if np.issubdtype(dtype, np.floating):
        return lambda w: np.abs(reader(w))
    mask = dtype((1 << (8 * np.dtype(dtype).itemsize - 1)) - 1)
    return lambda w: reader(w) & mask


def flushing(reader: Read, operand: Operand) -> Read:
    """Flush f32 denormals if MODE asks for it; constants have none."""
    if operand.registers == ():
        return reader

    def run(w):
        values = reader(w)
        return flush(values) if not w.mode & 0x30 else values

    return run


def flush(values: np.ndarray) -> np.ndarray:
    """Flush denormals to zero of the same sign."""
    return np.where(np.abs(values) < _TINY[values.dtype], np.copysign(values.dtype.type(0), values), values)


def modified(reader: Read, dtype, operand: Operand, position: int, neg: int, abs_: int) -> Read:
    """Apply the source modifiers of source `position`."""
    if dtype == F32:
        reader = flushing(reader, operand)
    if abs_ >> position & 1:
        reader = absolute(reader, dtype)
    if neg >> position & 1:
        reader = negate(reader, dtype)
    if operand.format == "U24":
        return lambda w: reader(w) & U32(0xFFFFFF)
    if operand.format == "I24":
        return lambda w: (reader(w) << I32(8)) >> I32(8)
    return reader


# Results


def output(ins: Instruction, dtype) -> Callable | None:
    """Return the output modifier and clamp of floating-point results, or None."""
    omod, clamp = ins.fields.get("omod", 0), ins.fields.get("clmp", 0)
    if not omod and not clamp:
        return None
    factor = {0: 1.0, 1: 2.0, 2: 4.0, 3: 0.5}[omod]

    def run(values):
        if omod:
            values = values.astype(dtype, copy=False) * dtype(factor)
        # DX10_CLAMP is set in every HSA kernel descriptor: NaN clamps to 0
        return np.fmin(np.fmax(values, dtype(0)), dtype(1)) if clamp else values

    return run


def write(
    operand: Operand, ins: Instruction, program, part: tuple[int, int] | None = None, zero: bool = False
) -> Callable:
    """Return a function (waves, values, lanes) that writes results under a lane mask, None for EXEC.

    `part` = (shift, bits) preserves the rest of a 32-bit register; with `zero` the rest becomes zero.
    """
    check_allocated(operand, program)
    i, dtype = register(operand.code), dtype_of(operand)

    def store(w, target, values, lanes):
        if lanes is None:
            if w.full:
                target[...] = values
                return
            lanes = w.mask
        np.copyto(target, values, where=lanes, casting="unsafe")

    if part is not None or zero:
        shift, bits = part or (0, 16)
        mask = U32(((1 << bits) - 1) << shift)

        def write_part(w, values, lanes=None):
            values = values.astype(dtype, copy=False)
            if dtype in (F16, I16):
                values = values.view(U16)
            values = values.astype(U32, copy=False) << U32(shift) if shift else values.astype(U32, copy=False)
            if not zero:
                values = w.U[i] & ~mask | values & mask
            store(w, w.U[i], values, lanes)

        return write_part
    if operand.dwords == 2:

        def write_pair(w, values, lanes=None):
            halves = np.ascontiguousarray(values, dtype=dtype)[..., None].view(U32)
            store(w, w.U[i], halves[..., 0], lanes)
            store(w, w.U[i + 1], halves[..., 1], lanes)

        return write_pair
    if operand.dwords > 2:

        def write_words(w, values, lanes=None):
            for n in range(operand.dwords):
                store(w, w.U[i + n], values[..., n], lanes)

        return write_words
    if dtype == F32:

        def write_float(w, values, lanes=None):
            if not w.mode & 0x30:
                values = flush(values.astype(F32, copy=False))
            if lanes is None and w.full:
                w.F[i][...] = values
            else:
                np.copyto(w.F[i], values, where=w.mask if lanes is None else lanes, casting="unsafe")

        return write_float
    if dtype == I32:
        return lambda w, values, lanes=None: store(w, w.I[i], values, lanes)
    return lambda w, values, lanes=None: store(w, w.U[i], values, lanes)


def write_lanes(operand: Operand, and_exec: bool) -> Callable:
    """Return a function (waves, lanes) that writes one bit per lane to an SGPR pair; inactive lanes give 0."""
    code = operand.code

    def run(w, lanes, active=None):
        if active is not None or not w.full or lanes.shape[1] == 1:
            active = w.mask if active is None else active
            lanes = lanes & active
        if len(lanes) != w.count:
            lanes = np.broadcast_to(lanes, (w.count, LANES))
        w.S64[code][...] = w.bits(lanes)
        if and_exec:
            w.write_pair(126, w.S64[code])
        elif code == 126:
            w.exec_changed()

    return run


# DPP: CDNA3 ISA "DPP", table of DPP_CTRL values


def dpp_lanes(control: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each lane's source lane, and whether it exists."""
    lane = np.arange(LANES)
    row, column = lane & ~15, lane & 15
    if control < 0x100:
        source = lane & ~3 | np.array([control >> 2 * k & 3 for k in range(4)])[lane & 3]
        return source, np.ones(LANES, bool)
    n = control & 15
    if 0x101 <= control <= 0x10F:  # row_shl: from higher lanes
        return np.minimum(lane + n, 63), column + n < 16
    if 0x111 <= control <= 0x11F:  # row_shr: from lower lanes
        return np.maximum(lane - n, 0), column >= n
    if 0x121 <= control <= 0x12F:  # row_ror
        return row | (column - n) & 15, np.ones(LANES, bool)
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row | n, np.ones(LANES, bool)
    source, valid = {
        0x130: (lane + 1, lane < 63),  # wave_shl:1
        0x134: ((lane + 1) % LANES, lane >= 0),  # wave_rol:1
        0x138: (lane - 1, lane > 0),  # wave_shr:1
        0x13C: ((lane - 1) % LANES, lane >= 0),  # wave_ror:1
        0x140: (row | 15 - column, lane >= 0),  # row_mirror
        0x141: (lane & ~7 | 7 - (lane & 7), lane >= 0),  # row_half_mirror
        0x142: (row - 1, lane >= 16),  # row_bcast:15
        0x143: (np.full(LANES, 31), lane >= 32),  # row_bcast:31
    }[control]
    return source % LANES, valid


class Dpp:
    """Permute lanes as a DPP instruction: `take` permutes source 0, `lanes` returns the written lanes."""

    def __init__(self, ins: Instruction):
        fields = ins.fields
        lane = np.arange(LANES)
        self.source, self.valid = dpp_lanes(fields["dpp"])
        self.bound = bool(fields["bc"])
        self.all_valid = bool(self.valid.all())
        self.enabled = (fields["row_mask"] >> lane // 16 & 1 == 1) & (fields["bank_mask"] >> (lane % 16) // 4 & 1 == 1)
        self.all_enabled = bool(self.enabled.all())

    def readable(self, w) -> np.ndarray | None:
        """Return the lanes whose source lane exists and is active; None for all."""
        if w.full:
            return None if self.all_valid else self.valid
        return w.mask[:, self.source] & self.valid

    def take(self, w, values: np.ndarray) -> np.ndarray:
        """Return source 0 as each lane sees it."""
        if values.shape[1] == 1:
            return values
        values = values.take(self.source, axis=1)
        readable = self.readable(w)
        if self.bound and readable is not None:
            values = np.where(readable, values, values.dtype.type(0))
        return values

    def lanes(self, w) -> np.ndarray | None:
        """Return the written lanes."""
        readable = None if self.bound else self.readable(w)
        if self.all_enabled and readable is None:
            return None
        lanes = w.mask & self.enabled
        return lanes if readable is None else lanes & readable


# SDWA: CDNA3 ISA "SDWA"

_SELECT = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16), 6: (0, 32)}


def sdwa_source(operand: Operand, ins: Instruction, program, position: int, dtype) -> Read:
    """Return a reader of an SDWA-selected source, with sign extension and modifiers."""
    fields = ins.fields
    shift, bits = _SELECT[fields[f"src{position}_sel"]]
    extend = fields[f"src{position}_sext"]
    raw = read(operand, ins, program, U32)
    size = np.dtype(dtype).itemsize

    def select(w):
        values = raw(w)
        if bits == 32:
            return values
        if extend:
            return ((values << U32(32 - shift - bits)).view(I32) >> I32(32 - bits)).view(U32)
        return values >> U32(shift) & U32((1 << bits) - 1)

    if size == 2:
        typed = lambda w: select(w).astype(U16).view(dtype)
    else:
        typed = lambda w: select(w).view(dtype)
    neg, absolute_ = fields[f"src{position}_neg"] << position, fields[f"src{position}_abs"] << position
    return modified(typed, dtype, operand, position, neg, absolute_)


def sdwa_write(operand: Operand, ins: Instruction, program) -> Callable:
    """Return a writer of an SDWA-selected destination: dst_unused 0 zeroes the rest, 1 sign-extends, 2 preserves it."""
    check_allocated(operand, program)
    shift, bits = _SELECT[ins.fields["dst_sel"]]
    unused = ins.fields["dst_unused"]
    whole = Operand(operand.code, 1, "B32", 32)
    if bits == 32 and operand.bits >= 32:
        return write(operand, ins, program)
    store = write(whole, ins, program, (shift, bits) if unused == 2 else None)
    dtype = dtype_of(operand)

    def run(w, values, lanes=None):
        values = values.astype(dtype, copy=False)
        values = values.view(U16).astype(U32) if values.dtype.itemsize == 2 else values.view(U32)
        if unused == 2:
            store(w, values & U32((1 << bits) - 1), lanes)
            return
        low = values & U32((1 << bits) - 1) if bits < 32 else values
        if unused == 1:
            low = ((low << U32(32 - bits)).view(I32) >> I32(32 - bits)).view(U32)
        store(w, low << U32(shift), lanes)

    return run
