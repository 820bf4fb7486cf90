"""Bind vector ALU instructions: VOP1, VOP2, VOP3, VOP3P, VOPC.

A new instruction is a new table entry in the file of its theme: a function on numpy arrays of the operand types in the decoding tables
(`F32` float32, `B32` uint32, `M64` one bool per lane, packed and 8-bit types raw uint32).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import VCC, Instruction, Operand
from ..errors import UnsupportedInstruction
from ..operands import (
    I64,
    MASK,
    U16,
    U32,
    Dpp,
    dtype_of,
    modified,
    output,
    read,
    sdwa_source,
    sdwa_write,
    write,
    write_lanes,
)
from . import compare, convert, float, integer, lanes, matrix, packed  # noqa: F401  some are here to fill the table
from .table import VECTOR, call, entries

entries(v_nop=lambda: None)


def bind(ins: Instruction, program) -> Callable:
    """Resolve a vector instruction to a function on waves."""
    name = ins.mnemonic
    if "gpr_idx" in ins.fields:
        if name == "v_mov_b32":
            return lanes.bind_indexed_move(ins, program)
        return lanes.bind_indexed_source(ins, program, bind)
    if family := special(name):
        return family(ins, program)
    if name in packed.PACKED_OPS:
        return packed.bind(ins, program, packed.PACKED_OPS[name])
    entry = VECTOR.get(name)
    if entry is None:
        raise UnsupportedInstruction(name)
    fn = entry.fn
    if "arch" in entry.flags:
        fn = lambda *args: entry.fn(program, *args)
    reads = _sources(ins, program)
    if "accumulates" in entry.flags:
        reads.append(read(ins.operands["vdst"], ins, program))
    if "reads_vcc" in entry.flags:
        reads.append(lambda w: w.lanes(VCC))
    dpp = Dpp(ins) if ins.variant == "DPP16" else None
    if dpp:
        first = reads[0]
        reads[0] = lambda w: dpp.take(w, first(w))
    compute = call(fn, reads)
    if name.startswith("v_cmp"):
        store = write_lanes(ins.operands["sdst"], name.startswith("v_cmpx"))
        return lambda w: store(w, compute(w))
    if name == "v_nop":
        return lambda w: None
    destination = ins.operands["vdst"]
    compute = _with_output(ins, compute, dtype_of(destination), reads, fn)
    if ins.variant == "SDWA":
        store = sdwa_write(destination, ins, program)
    else:
        store = _destination(ins, destination, program, "keeps" in entry.flags)
    if "carries" in entry.flags:
        carry = write_lanes(ins.operands["sdst"], False)

        def run_carry(w):
            result, lanes = compute(w)
            active = dpp.lanes(w) if dpp else None
            store(w, result, active)
            carry(w, lanes, active)

        return run_carry
    if dpp:
        return lambda w: store(w, compute(w), dpp.lanes(w))
    return lambda w: store(w, compute(w))


def _sources(ins: Instruction, program) -> list[Callable]:
    """Return readers of the sources, with modifiers, SDWA and op_sel applied."""
    neg, absolute = ins.fields.get("neg", 0), ins.fields.get("abs", 0)
    if ins.variant == "DPP16":
        neg = ins.fields["src0_neg"] | ins.fields["src1_neg"] << 1
        absolute = ins.fields["src0_abs"] | ins.fields["src1_abs"] << 1
    select = ins.fields.get("opsel", 0) if ins.encoding == "VOP3" else 0
    reads = []
    for position, operand in enumerate(ins.sources):
        dtype = dtype_of(operand)
        if dtype == MASK:
            reads.append(read(operand, ins, program))
        elif ins.variant == "SDWA" and f"src{position}_sel" in ins.fields:
            reads.append(sdwa_source(operand, ins, program, position, dtype))
        else:
            half = select >> position & 1
            sixteen = np.dtype(dtype).itemsize == 2
            reader = read(operand, ins, program, dtype, half if sixteen else 0)
            if half and not sixteen and operand.format in ("PK2_FP8", "PK2_BF8", "PK2_FP4", "FP8", "BF8"):
                reader = _shifted(reader, select, operand)
            reads.append(modified(reader, dtype, operand, position, neg, absolute))
    return reads


def _shifted(reader, select: int, operand: Operand):
    """Apply op_sel to an 8-bit source: bit 0 selects a half (packed), bits 1:0 a byte (CDNA4 ISA, V_CVT_SCALEF32_*)."""
    shift = 16 * (select & 1) if operand.bits == 16 else 8 * (select & 3)
    return lambda w: reader(w) >> U32(shift)


def _with_output(ins: Instruction, compute, dtype, reads, fn) -> Callable:
    """Apply omod and clamp; integer clamp saturates, which needs the exact result."""
    if dtype == MASK or not (ins.fields.get("omod", 0) or ins.fields.get("clmp", 0)):
        return compute
    if np.issubdtype(dtype, np.floating):
        modify = output(ins, dtype)
        return lambda w: modify(compute(w))
    info = np.iinfo(dtype)
    return lambda w: np.clip(fn(*(r(w).astype(I64) for r in reads)), info.min, info.max).astype(dtype)


# op_sel selects the part of the destination for results of these widths.
def _destination(ins: Instruction, operand: Operand, program, keeps: bool) -> Callable:
    select = ins.fields.get("opsel", 0) if ins.encoding == "VOP3" else 0
    if operand.bits == 8:
        return write(operand, ins, program, (8 * (select >> 2 & 3), 8))
    if operand.bits == 16:
        high = select >> 3 & 1
        # GFX9 16-bit results clear the high half; op_sel writes one half and keeps the other
        return write(operand, ins, program, (16 * high, 16), zero=not (high or keeps))
    return write(operand, ins, program)


def _bind_bitop3(ins, program):
    """Bind V_BITOP3, whose truth table is in omod, abs and neg."""
    table = ins.fields["omod"] << 6 | ins.fields["abs"] << 3 | ins.fields["neg"]
    sixteen = ins.mnemonic.endswith("b16")
    select = ins.fields["opsel"]
    reads = [
        read(operand, ins, program, U16 if sixteen else U32, select >> i & 1 if sixteen else 0)
        for i, operand in enumerate(ins.sources)
    ]

    def fn(a, b, c):
        out = a & a.dtype.type(0)
        for row in range(8):
            if table >> row & 1:
                out = out | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return out

    store, compute = _destination(ins, ins.operands["vdst"], program, False), call(fn, reads)
    return lambda w: store(w, compute(w))


SPECIAL: dict[str, Callable] = {
    "v_pk_mov_b32": packed.bind_move,
    "v_mad_mix_f32": packed.bind_mix,
    "v_mad_mixlo_f16": packed.bind_mix,
    "v_mad_mixhi_f16": packed.bind_mix,
    "v_readlane_b32": lanes.bind_readlane,
    "v_readfirstlane_b32": lanes.bind_readlane,
    "v_writelane_b32": lanes.bind_writelane,
    "v_swap_b32": lanes.bind_swap,
    "v_permlane16_swap_b32": lanes.bind_permlane_swap,
    "v_permlane32_swap_b32": lanes.bind_permlane_swap,
    "v_bitop3_b32": _bind_bitop3,
    "v_bitop3_b16": _bind_bitop3,
}


def special(name: str) -> Callable | None:
    """Return the binder of an instruction family, by name."""
    if name.startswith("v_cvt_scalef32_"):
        return convert.bind_scaled
    if name.startswith(("v_mfma_", "v_smfmac_")):
        return matrix.bind
    return SPECIAL.get(name)
