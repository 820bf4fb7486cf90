"""Bind vector instructions on both halves, or both dwords, of their operands: VOP3P.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions", its section on VOP3P.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import Instruction, Operand
from ..operands import F16, F32, I16, I64, PACKED, U16, U32, modified, output, read, read_scalar, write
from .float import fma, ieee_extreme, maximum, minimum
from .integer import shift_left, shift_right
from .table import call

# Applied to each half (16-bit) or each dword (f32) of the operands.
PACKED_OPS: dict[str, Callable] = {
    "v_pk_add_f32": np.add,
    "v_pk_mul_f32": np.multiply,
    "v_pk_fma_f32": fma,
    "v_pk_add_f16": np.add,
    "v_pk_mul_f16": np.multiply,
    "v_pk_fma_f16": fma,
    "v_pk_fmac_f16": fma,
    "v_pk_min_f16": minimum,
    "v_pk_max_f16": maximum,
    "v_pk_minimum3_f16": ieee_extreme(minimum),
    "v_pk_maximum3_f16": ieee_extreme(maximum),
    "v_pk_mul_lo_u16": np.multiply,
    "v_pk_lshlrev_b16": shift_left,
    "v_pk_lshrrev_b16": shift_right,
    "v_pk_ashrrev_i16": shift_right,
}
for _type in ("i16", "u16"):
    PACKED_OPS[f"v_pk_mad_{_type}"] = lambda a, b, c: a * b + c
    for _name, _fn in {"add": np.add, "sub": np.subtract, "max": np.maximum, "min": np.minimum}.items():
        PACKED_OPS[f"v_pk_{_name}_{_type}"] = _fn

# 64-bit results in which each dword depends on one dword of each source
HALVES = {"v_mov_b64", "v_pk_mov_b32", *(name for name in PACKED_OPS if name.endswith("f32"))}


def bind(ins: Instruction, program, fn) -> Callable:
    """Bind a VOP3P instruction.

    op_sel selects each source's half for the low result, op_sel_hi for the high one; neg and neg_hi likewise.
    """
    select, neg = ins.fields.get("opsel", 0), (ins.fields.get("neg", 0), ins.fields.get("neg_hi", 0))
    select_high = ins.fields.get("opsel_hi", 3) | ins.fields.get("opsel_hi2", 1) << 2
    destination = ins.operands["vdst"]
    dtype = PACKED[destination.format]
    sources = list(ins.sources)
    if ins.mnemonic == "v_pk_fmac_f16":
        sources.append(destination)
    if ins.fields.get("clmp", 0) and dtype in (U16, I16):
        info, exact = np.iinfo(dtype), fn
        fn = lambda *args: np.clip(exact(*(a.astype(I64) for a in args)), info.min, info.max).astype(dtype)

    def half_readers(high: int):
        reads = []
        for position, operand in enumerate(sources):
            chosen = (select_high if high else select) >> position & 1
            kind = PACKED.get(operand.format, dtype)
            reader = _packed_half(operand, ins, program, kind, chosen)
            reads.append(
                modified(
                    reader,
                    kind,
                    Operand(operand.code, operand.dwords, "F32" if kind == F32 else "", 32),
                    position,
                    neg[high],
                    0,
                )
            )
        return call(fn, reads)

    low, high = half_readers(0), half_readers(1)
    modify = output(ins, dtype) if np.issubdtype(dtype, np.floating) else None
    if dtype == F32:
        halves_ = [Operand(destination.code + n, 1, "F32", 32) for n in (0, 1)]
        store_low, store_high = (write(half, ins, program) for half in halves_)

        def run(w):
            first, second = low(w), high(w)
            if modify:
                first, second = modify(first), modify(second)
            store_low(w, first)
            store_high(w, second)

        return run
    store = write(Operand(destination.code, 1, "B32", 32), ins, program)

    def run16(w):
        first, second = low(w), high(w)
        if modify:
            first, second = modify(first), modify(second)
        first, second = (x.astype(dtype, copy=False).view(U16).astype(U32) for x in (first, second))
        store(w, first | second << U32(16))

    return run16


def _packed_half(operand: Operand, ins: Instruction, program, dtype, chosen: int):
    if dtype in (F32, U32):
        if 128 <= operand.code < 256:  # a constant is the low dword; the high dword repeats it for op_sel
            return read(Operand(operand.code, 1, "F32", 32), ins, program, dtype)
        return read(Operand(operand.code + chosen, 1, "F32", 32), ins, program, dtype)
    if 128 <= operand.code < 256:
        value = read_scalar(Operand(operand.code, 1, "", 16), ins, dtype)
        if not chosen:
            return value
        # integers are sign-extended to 32 bits, floats occupy the low half (CDNA3 ISA, VOP3P)
        word = read_scalar(Operand(operand.code, 1, "I32", 32), ins, U32)(None)
        high = (
            (word >> U32(16)).astype(U16).view(dtype)
            if operand.code <= 208 or operand.code == 255
            else np.zeros((1, 1), dtype)
        )
        return lambda w: high
    return read(Operand(operand.code, 1, "", 16), ins, program, dtype, chosen)


def bind_move(ins, program) -> Callable:
    """Bind V_PK_MOV_B32."""
    select = ins.fields["opsel"]
    reads = [
        _packed_half(operand, ins, program, U32, select >> position & 1)
        for position, operand in enumerate(ins.sources[:2])
    ]
    code = ins.operands["vdst"].code
    stores = [write(Operand(code + n, 1, "B32", 32), ins, program) for n in (0, 1)]

    def run(w):
        values = [r(w) + U32(0) for r in reads]
        for store, value in zip(stores, values, strict=True):
            store(w, value)

    return run


def bind_mix(ins, program) -> Callable:
    """Bind V_FMA_MIX (V_MAD_MIX in the tables): op_sel_hi selects f16 sources, op_sel their half, neg_hi is ABS."""
    select, neg, absolute = ins.fields["opsel"], ins.fields["neg"], ins.fields["neg_hi"]
    wide = ins.fields["opsel_hi"] | ins.fields["opsel_hi2"] << 2
    reads = []
    for position, operand in enumerate(ins.sources):
        if wide >> position & 1:
            raw = _packed_half(operand, ins, program, F16, select >> position & 1)
            reader_ = lambda w, raw=raw: raw(w).astype(F32)
        else:
            reader_ = read(Operand(operand.code, 1, "F32", 32), ins, program, F32)
        reads.append(modified(reader_, F32, Operand(operand.code, 1, "F32", 32), position, neg, absolute))
    compute = call(fma, reads)
    modify = output(ins, F32)
    if modify:
        exact = compute
        compute = lambda w: modify(exact(w))
    destination = ins.operands["vdst"]
    if ins.mnemonic == "v_mad_mix_f32":
        store = write(Operand(destination.code, 1, "F32", 32), ins, program)
        return lambda w: store(w, compute(w))
    store = write(Operand(destination.code, 1, "F16", 16), ins, program, (16 if "hi_" in ins.mnemonic else 0, 16))
    return lambda w: store(w, compute(w).astype(F16))
