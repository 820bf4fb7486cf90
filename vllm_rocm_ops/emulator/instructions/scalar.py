"""Bind scalar instructions: SOP1, SOP2, SOPC, SOPK, SOPP.

Source: AMD Instinct MI300 (CDNA3) ISA, chapters "Scalar ALU Operations" and "Instructions"; the CDNA4 ISA
repeats them. Values are numpy arrays [waves, 1] of the operand's type. A new instruction is one entry in `SCALAR`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..decode import EXEC, M0, Instruction, Operand, skips
from ..errors import UnsupportedInstruction
from ..events import wait
from ..operands import I32, I64, U32, U64, read_scalar
from .compare import COMPARE
from .integer import find_first_one, leading_signs, leading_zeros, mul_hi, popcount, reverse_bits
from .table import call


@dataclass(frozen=True)
class Scalar:
    """A scalar instruction: fn(*sources) -> result.

    scc: "" leaves SCC, "nonzero" is result != 0, "second" the second of two results, "only" the only result. With `carries` SCC is
    the first argument.
    """

    fn: Callable
    scc: str = ""
    carries: bool = False
    accumulates: bool = False  # the destination is the last source


SCALAR: dict[str, Scalar] = {}


def entries(scc: str = "", **table) -> None:
    """Add instructions with the same use of SCC; flags follow a name after two underscores: s_addc_u32__carries."""
    for name, fn in table.items():
        name, _, flag = name.partition("__")
        SCALAR[name] = Scalar(fn, scc, flag == "carries", flag == "accumulates")


def _bits(dtype) -> int:
    return np.dtype(dtype).itemsize * 8


def _shift(b, bits):
    return b.astype(U32) & U32(bits - 1)


def shl(a, b):
    """Shift a left by b modulo its width."""
    return a << _shift(b, _bits(a.dtype)).astype(a.dtype)


def shr(a, b):
    """Shift a right by b modulo its width; arithmetic for signed types."""
    return a >> _shift(b, _bits(a.dtype)).astype(a.dtype)


def _add(a, b):
    total = a + b
    return total, total < a


def _add_carry(carry, a, b):
    wide = a.astype(U64) + b + carry
    return wide.astype(U32), wide >> U64(32) != 0


def _sub_borrow(borrow, a, b):
    right = b.astype(U64) + borrow
    return (a - right).astype(U32), a < right


def _signed(fn):
    def run(a, b):
        wide = fn(a.astype(I64), b.astype(I64))
        return wide.astype(I32), wide != wide.astype(I32)

    return run


def _select(take_a, a, b):
    return np.where(take_a, a, b), take_a


def bit_field(a, b):
    """Compute S_BFE: offset in b[4:0] (b[5:0] for 64 bits), width in b[22:16]."""
    bits = _bits(a.dtype)
    offset, width = b & (bits - 1), (b >> 16) & 127
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape), a.dtype)
    signed = np.issubdtype(a.dtype, np.signedinteger)
    for i in np.ndindex(out.shape):
        value, o, n = (int(np.broadcast_to(x, out.shape)[i]) for x in (a, offset, width))
        field = ((value % (1 << bits)) >> o) & ((1 << n) - 1) if not signed else (value >> o) & ((1 << n) - 1)
        if signed and n and n < bits and field >> (n - 1) & 1:
            field -= 1 << n
        field %= 1 << bits
        out[i] = field - (1 << bits) if signed and field >> (bits - 1) else field
    return out


def _quads(a):
    x = a | a >> a.dtype.type(1)
    x = (x | x >> a.dtype.type(2)) & a.dtype.type(int("1" * (_bits(a.dtype) // 4), 16))
    return x


def _quad_mask(a):
    quads, out = _quads(a), np.zeros_like(a)
    for i in range(_bits(a.dtype) // 4):
        out |= (quads >> a.dtype.type(4 * i) & a.dtype.type(1)) << a.dtype.type(i)
    return out


def _replicate(a):
    out = np.zeros(a.shape, U64)
    for i in range(32):
        out |= (a.astype(U64) >> U64(i) & U64(1)) * U64(3) << U64(2 * i)
    return out


def _pack(a_high: bool, b_high: bool):
    def run(a, b):
        return (a >> U32(16) if a_high else a & U32(0xFFFF)) | (b & U32(0xFFFF0000) if b_high else b << U32(16))

    return run


def _shl_add(n: int):
    def run(a, b):
        wide = (a.astype(U64) << U64(n)) + b
        return wide.astype(U32), wide >> U64(32) != 0

    return run


# SOP2
entries(
    s_cselect_b32__carries=lambda scc, a, b: np.where(scc, a, b),
    s_cselect_b64__carries=lambda scc, a, b: np.where(scc, a, b),
    s_mul_i32=lambda a, b: a * b,
    s_mul_hi_u32=mul_hi,
    s_mul_hi_i32=mul_hi,
    s_bfm_b32=lambda a, b: ((U32(1) << (a & U32(31))) - U32(1)) << (b & U32(31)),
    s_bfm_b64=lambda a, b: ((U64(1) << (a & 63).astype(U64)) - U64(1)) << (b & 63).astype(U64),
    s_pack_ll_b32_b16=_pack(False, False),
    s_pack_lh_b32_b16=_pack(False, True),
    s_pack_hh_b32_b16=_pack(True, True),
)
entries(
    "second",
    s_add_u32=_add,
    s_sub_u32=lambda a, b: (a - b, a < b),
    s_addc_u32__carries=_add_carry,
    s_subb_u32__carries=_sub_borrow,
    s_add_i32=_signed(np.add),
    s_sub_i32=_signed(np.subtract),
    s_min_i32=lambda a, b: _select(a < b, a, b),
    s_min_u32=lambda a, b: _select(a < b, a, b),
    s_max_i32=lambda a, b: _select(a >= b, a, b),
    s_max_u32=lambda a, b: _select(a >= b, a, b),
    s_lshl1_add_u32=_shl_add(1),
    s_lshl2_add_u32=_shl_add(2),
    s_lshl3_add_u32=_shl_add(3),
    s_lshl4_add_u32=_shl_add(4),
)
LOGIC = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}
_of_bits = {
    **LOGIC,
    "lshl": shl,
    "lshr": shr,
    "not": lambda a: ~a,
    "wqm": lambda a: _quads(a) * a.dtype.type(15),
    "bcnt0_i32": lambda a: popcount(~a),
    "bcnt1_i32": popcount,
    "quadmask": _quad_mask,
}
for _size in ("b32", "b64"):
    entries("nonzero", **{f"s_{name}_{_size}": fn for name, fn in _of_bits.items()})
entries(
    "nonzero",
    s_ashr_i32=shr,
    s_ashr_i64=shr,
    s_bfe_u32=bit_field,
    s_bfe_i32=bit_field,
    s_bfe_u64=bit_field,
    s_bfe_i64=bit_field,
    s_absdiff_i32=lambda a, b: np.abs(a.astype(I64) - b).astype(I32),
    # SOP1
    s_abs_i32=np.abs,
)
entries(
    s_mov_b32=lambda a: a,
    s_mov_b64=lambda a: a,
    s_brev_b32=reverse_bits,
    s_brev_b64=reverse_bits,
    s_ff1_i32_b32=find_first_one,
    s_ff1_i32_b64=find_first_one,
    s_ff0_i32_b32=lambda a: find_first_one(~a),
    s_ff0_i32_b64=lambda a: find_first_one(~a),
    s_flbit_i32_b32=leading_zeros,
    s_flbit_i32_b64=leading_zeros,
    s_flbit_i32=leading_signs,
    s_flbit_i32_i64=leading_signs,
    s_sext_i32_i8=lambda a: a.astype(np.int8),
    s_sext_i32_i16=lambda a: a.astype(np.int16),
    s_bitset0_b32__accumulates=lambda a, d: d & ~(U32(1) << (a & U32(31))),
    s_bitset1_b32__accumulates=lambda a, d: d | U32(1) << (a & U32(31)),
    s_bitset0_b64__accumulates=lambda a, d: d & ~(U64(1) << (a & 63).astype(U64)),
    s_bitset1_b64__accumulates=lambda a, d: d | U64(1) << (a & 63).astype(U64),
    s_bitreplicate_b64_b32=_replicate,
    # SOPK
    s_movk_i32=lambda k: k,
    s_mulk_i32__accumulates=lambda k, d: k * d,
)
entries("second", s_addk_i32__accumulates=lambda k, d: _signed(np.add)(k, d))
for _name in ("s_cmov_b32", "s_cmov_b64", "s_cmovk_i32"):
    SCALAR[_name] = Scalar(lambda scc, a, d: np.where(scc, a, d), carries=True, accumulates=True)
# SOPC, and SOPK's comparisons, whose left side is the destination field
for _name in ("eq", "lg", "gt", "ge", "lt", "le"):
    _fn = COMPARE[_name]
    for _type in ("i32", "u32"):
        SCALAR[f"s_cmp_{_name}_{_type}"] = Scalar(_fn, "only")
        SCALAR[f"s_cmpk_{_name}_{_type}"] = Scalar(lambda k, d, fn=_fn: fn(d, k), "only", accumulates=True)
    SCALAR[f"s_cmp_{_name}_u64"] = Scalar(_fn, "only")
for _value in (0, 1):
    for _size in (32, 64):
        SCALAR[f"s_bitcmp{_value}_b{_size}"] = Scalar(lambda a, b, v=_value: (shr(a, b) & a.dtype.type(1)) == v, "only")

# SOP1: EXEC is saved to the destination, then combined with the source.
SAVE_EXEC = {**LOGIC, "andn1": lambda s, e: ~s & e, "orn1": lambda s, e: ~s | e}


def _immediate(instruction: Instruction) -> int:
    value = instruction.fields["simm16"]
    return value - 0x10000 if value & 0x8000 else value


class Diverge:
    """A branch that some waves take: `taken` is bool [waves]."""

    __slots__ = ("taken", "target")

    def __init__(self, taken, target):
        self.taken, self.target = taken, target


class Signal:
    """Name the requests of an instruction to the scheduler."""

    END, BARRIER, YIELD, PAUSE = -1, -2, -3, -4


_CONDITIONS = {
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: w.S64[106] == 0,
    "s_cbranch_vccnz": lambda w: w.S64[106] != 0,
    "s_cbranch_execz": lambda w: w.S64[126] == 0,
    "s_cbranch_execnz": lambda w: w.S64[126] != 0,
}
_NOTHING = {
    "s_nop", "s_setprio", "s_sethalt", "s_setkill", "s_icache_inv", "s_incperflevel", "s_decperflevel", "s_ttracedata",
    "s_sendmsg", "s_wakeup", "s_set_gpr_idx_off", "s_trap_handled",
}  # fmt: skip


def _bind_sopp(ins: Instruction, program):
    name = ins.mnemonic
    if name in _NOTHING:
        return lambda w: None
    if name in ("s_endpgm", "s_endpgm_saved"):
        return lambda w: Signal.END
    if name == "s_barrier":
        return lambda w: Signal.BARRIER
    if name == "s_sleep":
        return lambda w: Signal.YIELD
    if name == "s_waitcnt":
        field = ins.fields["simm16"]
        vm, lgkm = (field & 15) | (field >> 10 & 0x30), field >> 8 & 15
        return lambda w: wait(w, vm, lgkm)
    target = ins.address + 4 + 4 * _immediate(ins)
    if name == "s_branch":
        return lambda w: program.index[target]
    condition = _CONDITIONS[name]

    def run(w):
        taken = condition(w)
        count = np.count_nonzero(taken)
        if count == 0:
            return None
        if count == w.count:
            return program.index[target]
        return Diverge(taken[:, 0], program.index[target])

    return run


def _bind_pc(ins: Instruction, program):
    """Bind S_GETPC, S_SETPC, S_SWAPPC and S_CALL."""
    here = program.base + ins.address + ins.size
    name = ins.mnemonic
    destination = ins.operands["sdst"].code if "sdst" in ins.operands else None

    def jump(w, address):
        first = int(address[0, 0])
        if (address != first).any():
            return Diverge((address != first)[:, 0], None)
        return w.scheduler.index_of(first)

    if name == "s_getpc_b64":
        return lambda w: w.write_pair(destination, here)
    if name == "s_call_b64":
        target = here + 4 * _immediate(ins)

        def call(w):
            w.write_pair(destination, here)
            return w.scheduler.index_of(target)

        return call
    read = read_scalar(ins.sources[0], ins, U64)
    if name == "s_setpc_b64":
        return lambda w: jump(w, read(w))

    def swap(w):
        address = read(w).copy()
        w.write_pair(destination, here)
        return jump(w, address)

    return swap


def _hardware_register(w, program, register: int) -> int:
    """Return S_GETREG's value: MODE and XCC_ID, 0 for other registers."""
    if register == 1:
        return w.mode | 1 << 8 | program.saturate << 23
    return int(w.block[0]) % 8 if register == 20 else 0


def _bind_hwreg(ins: Instruction, program):
    """Bind S_GETREG and S_SETREG; only MODE has state here. 5.8 "Hardware registers": id [5:0], offset [10:6], size-1 [15:11]."""
    simm = ins.fields["simm16"]
    register, offset, size = simm & 63, simm >> 6 & 31, (simm >> 11) + 1
    field = ((1 << size) - 1) << offset
    if ins.mnemonic == "s_getreg_b32":
        code = ins.operands["sdst"].code
        return lambda w: w.write_scalar(code, (_hardware_register(w, program, register) & field) >> offset)
    if ins.mnemonic == "s_setreg_imm32_b32":
        value = ins.fields["literal"]
        read = lambda w: np.full((1, 1), value, U32)
    else:
        read = read_scalar(Operand(ins.operands["sdst"].code, 1, "B32", 32), ins)

    def run(w):
        if register == 1:
            values = read(w)
            if (values != values[0]).any():
                raise UnsupportedInstruction(f"{ins.text} with different values in different waves")
            w.mode = (w.mode & ~field) | (int(values[0, 0]) << offset & field)

    return run


def _bind_save_exec(ins: Instruction, fn, keeps_result: bool):
    read, code = read_scalar(ins.sources[0], ins, U64), ins.operands["sdst"].code

    def run(w):
        source, old = read(w), w.S64[EXEC].copy()
        new = fn(source, old)
        w.S64[code][...] = new if keeps_result else old
        w.S64[EXEC][...] = new
        w.exec_changed()
        w.scc = new != 0

    return run


def _bind_index_mode(ins: Instruction, program):
    """Bind S_SET_GPR_IDX_ON: the index goes to M0[7:0]; `decode` has marked the following instructions."""
    read = read_scalar(ins.operands["ssrc0"], ins, U32)

    def run(w):
        w.S[M0][...] = w.S[M0] & ~U32(255) | read(w) & U32(255)

    return run


def set_scc(w, value: np.ndarray) -> None:
    """Write SCC, with a row per wave; constants have one row."""
    w.scc = value if len(value) == w.count else np.broadcast_to(value, w.scc.shape)


def bind(ins: Instruction, program) -> Callable:
    """Resolve a scalar instruction to a function on waves."""
    name = ins.mnemonic
    if ins.encoding == "SOPP":
        if name in _NOTHING or name in _CONDITIONS or name in (
            "s_endpgm", "s_endpgm_saved", "s_barrier", "s_sleep", "s_waitcnt", "s_branch"
        ):  # fmt: skip
            return _bind_sopp(ins, program)
        raise UnsupportedInstruction(name)
    if name in ("s_getpc_b64", "s_setpc_b64", "s_swappc_b64", "s_call_b64"):
        return _bind_pc(ins, program)
    if name == "s_setvskip":
        if skips(ins) is None:
            raise UnsupportedInstruction(f"{ins.text}: the bit number must be a constant")
        return lambda w: None  # `decode` has marked the following instructions
    if name == "s_set_gpr_idx_on":
        return _bind_index_mode(ins, program)
    if name.startswith(("s_getreg", "s_setreg")):
        return _bind_hwreg(ins, program)
    for suffix, keeps in (("_saveexec_b64", False), ("_wrexec_b64", True)):
        if name.endswith(suffix):
            return _bind_save_exec(ins, SAVE_EXEC[name[2 : -len(suffix)]], keeps)
    entry = SCALAR.get(name)
    if entry is None:
        raise UnsupportedInstruction(name)
    reads = [read_scalar(operand, ins) for operand in ins.sources]
    destination = ins.operands.get("sdst")
    if ins.encoding == "SOPK":
        dtype = U32 if name.endswith("u32") else I32
        immediate = ins.fields["simm16"] if dtype == U32 else _immediate(ins)
        value = np.array([[immediate]], dtype)
        reads = [lambda w: value]
        if entry.accumulates:
            reads.append(read_scalar(destination, ins, dtype))
    elif entry.accumulates:
        reads.append(read_scalar(destination, ins))
    if entry.carries:
        reads.insert(0, lambda w: w.scc)
    compute = call(entry.fn, reads)
    if entry.scc == "only":

        def compare(w):
            set_scc(w, compute(w))

        return compare
    code = destination.code
    write = _writer(code, destination.dwords)
    if not entry.scc:
        return lambda w: write(w, compute(w))
    if entry.scc == "second":

        def run_second(w):
            result, scc = compute(w)
            write(w, result)
            set_scc(w, scc)

        return run_second

    def run(w):
        result = compute(w)
        write(w, result)
        set_scc(w, result != 0)

    return run


def _writer(code: int, dwords: int):
    changes_exec = code >= EXEC

    def write32(w, value):
        w.S[code][...] = value if not isinstance(value, np.ndarray) or value.dtype == U32 else value.astype(U32)
        if changes_exec:
            w.exec_changed()

    def write64(w, value):
        w.S64[code][...] = value if not isinstance(value, np.ndarray) or value.dtype == U64 else value.astype(U64)
        if changes_exec:
            w.exec_changed()

    return write64 if dwords == 2 else write32
