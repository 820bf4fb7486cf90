"""Check registers: sources must be written, and accessed registers must have arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from . import errors
from .decode import EXEC, M0, VCC, VGPR, Instruction, Operand
from .instructions import MEMORY
from .instructions.packed import HALVES
from .instructions.scalar import SCALAR
from .instructions.table import VECTOR
from .operands import dpp_lanes
from .waves import LANES

_M0_READERS = ("s_movrel", "s_sendmsg", "s_ttracedata")  # and loads to LDS
CARRYING = ("v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64")


# 64-bit integer instructions: in the first set low dwords depend on low dwords only, in the second high dwords on high ones
_CARRY_UP = {"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64"}
_CARRY_DOWN = {"v_lshrrev_b64", "v_ashrrev_i64"}


def data_flow(ins: Instruction, reads: frozenset[int], writes: frozenset[int]) -> dict[int, frozenset[int]] | None:
    """Return the source registers that each written register depends on; None if an unwritten source is a fault.

    Compilers compute with unwritten values as long as the result is unused, so arithmetic propagates them. Uses are addresses,
    data that leave the wave, comparisons, scalar arithmetic and matrix instructions.
    """
    name = ins.mnemonic
    if name.startswith(("s_mov_b", "s_cselect", "ds_bpermute", "ds_permute", "ds_swizzle")):
        return {code: reads for code in writes}
    if not ins.encoding.startswith("VOP") or name.startswith(("v_cmp", "v_mfma", "v_smfmac")):
        return None
    vdst = ins.operands.get("vdst")
    if name in CARRYING and vdst.dwords == 2:  # no low half depends on a high half
        low = {code for operand in ins.sources for code in operand.registers[:1]}
        return {vdst.code: frozenset(low), vdst.code + 1: reads}
    if name in _CARRY_UP or name in _CARRY_DOWN:
        ends = vdst.registers if name in _CARRY_UP else vdst.registers[::-1]
        unused = 1 if name in _CARRY_UP else 0
        near = reads - {o.registers[unused] for o in ins.sources if o.dwords == 2 and o.registers}
        return {code: near if code == ends[0] else reads for code in writes}
    if vdst is None or vdst.dwords != 2 or name not in HALVES:
        return {code: reads for code in writes}
    select = (ins.fields.get("opsel", 0), ins.fields.get("opsel_hi", 3) | ins.fields.get("opsel_hi2", 1) << 2)
    flow: dict[int, frozenset[int]] = {}
    for half in (0, 1):
        sources = set()
        for position, operand in enumerate(ins.sources):
            if name == "v_pk_mov_b32" and position != half:
                continue
            chosen = half if name == "v_mov_b64" else select[0 if name == "v_pk_mov_b32" else half] >> position & 1
            sources |= set(operand.registers[chosen : chosen + 1])
        flow[vdst.code + half] = frozenset(sources)
    return flow


def effects(ins: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """Return the codes of the registers that an instruction reads and writes, without EXEC."""
    reads: set[int] = set()
    writes: set[int] = set()
    name, operands = ins.mnemonic, ins.operands
    is_memory = ins.encoding in MEMORY
    for field_name, operand in operands.items():
        registers = set(operand.registers)
        if field_name in ("vdst", "sdst", "sdata"):
            writes |= registers
        elif field_name == "vdata":
            if "load" in name or ("atomic" in name and ins.fields["sc0"]):
                writes |= registers
            if "load" not in name:
                reads |= registers
        else:
            reads |= registers
    if is_memory and "atomic" in name and not ins.fields.get("sc0"):
        writes -= set(operands["vdst"].registers) if "vdst" in operands else set()
    if "store" in name and is_memory:
        writes.clear()
    entry, scalar = VECTOR.get(name), SCALAR.get(name)
    if (entry and "accumulates" in entry.flags) or name.startswith(("v_smfmac", "v_pk_fmac", "v_swap", "v_permlane")):
        reads |= set(operands["vdst"].registers)
    for scale in ("scale_src0", "scale_src1"):
        code = ins.fields.get(scale, 0)
        reads |= {code} if code >= VGPR or code < 128 and scale in ins.fields else set()
    if name.startswith(("v_swap", "v_permlane")):
        writes |= set(operands["src0"].registers)
    if entry and "reads_vcc" in entry.flags or name.startswith("s_cbranch_vcc"):
        reads |= {VCC, VCC + 1}
    if scalar and scalar.accumulates:
        reads |= set(operands["sdst"].registers)
        if scalar.scc == "only":
            writes.clear()
    if name in ("s_or_b64", "s_andn2_b64") and operands["ssrc1"].code == EXEC:
        # a loop's mask of finished lanes: the bits of active lanes are written, the others stay and may be unwritten
        reads -= writes
    if name.startswith(("s_store_", "s_atomic_")):
        reads |= set(operands["sdata"].registers)
        writes = reads & writes if "atomic" in name and ins.fields["glc"] else set()
    if name == "s_setreg_b32":
        reads, writes = reads | writes, set()
    if "gpr_idx" in ins.fields:  # the registers of an indexed move are not known statically
        if "vdst" not in operands:
            writes = {M0}
        elif ins.fields["gpr_idx"] & 1:
            reads = {M0}
        else:
            reads, writes = reads | {M0}, set()
    if "_lds_" in name or (ins.encoding == "MUBUF" and ins.fields.get("lds")):
        reads.add(M0)
    beyond = {EXEC, EXEC + 1} | set(range(108, 124)) | set(range(102, 106)) | {125}
    return frozenset(reads - beyond), frozenset(writes - beyond)


def reads_m0_too_early(before: Instruction, ins: Instruction) -> bool:
    """True if the previous instruction writes M0 and this one needs a wait state before reading it.

    Source: CDNA3 and CDNA4 ISA, 4.5 "Manually inserted wait states". Any instruction in between is one, a branch too.
    """
    takes_m0 = ins.encoding in MEMORY and M0 in effects(ins)[0] or ins.mnemonic.startswith(_M0_READERS)
    if not takes_m0 or not before.encoding.startswith("SOP"):
        return False
    return M0 in effects(before)[1] and before.address + len(before.words) == ins.address


def _memory_kind(ins: Instruction) -> str:
    return {"GLOBAL": "vm", "MUBUF": "vm", "SCRATCH": "vm", "DS": "lds", "SMEM": "scalar", "FLAT": "flat"}.get(
        ins.encoding, ""
    )


def examine(w, ins: Instruction, bound) -> Callable:
    """Check an instruction that accesses undefined or pending registers, and return a function to call after it ran."""
    reads, writes, flow = bound.reads, bound.writes, bound.flow
    is_pending = not bound.registers.isdisjoint(w.pending)
    if not is_pending and reads.isdisjoint(w.undefined) and (bound.ignores_exec or w.full):
        return functools.partial(_define, w, writes)
    for code in bound.registers & w.pending.keys() if is_pending else ():
        event = w.pending[code]
        in_order = code not in reads and _memory_kind(ins) == event.kind and event.kind != "scalar"
        if not in_order and not w.scheduler.program.trusted:
            name = Operand(code, 1, "", 32)
            raise w.scheduler.error(
                errors.MissingWait, ins, w, 0, None, f"{name} is used before the s_waitcnt that its load needs"
            )
    wrong = {code: lanes for code in reads & w.undefined if (lanes := _undefined_lanes(w, ins, code)).any()}
    if wrong and flow is None:
        code, lanes = next(iter(wrong.items()))
        row, lane = (int(i[0]) for i in np.nonzero(lanes))
        kind, message = w.scheduler.unwritten(w, row, code)
        raise w.scheduler.error(kind, ins, w, row, None if code < VGPR else lane, message)
    if wrong and ins.mnemonic == "v_cndmask_b32":
        wrong = _selected(w, ins, wrong)
    bad_of = {
        code: functools.reduce(np.logical_or, [wrong[c] for c in (flow or {}).get(code, reads) if c in wrong], False)
        for code in writes
    }
    mask = True if bound.ignores_exec else w.mask
    if wrong and ins.mnemonic == "v_writelane_b32":
        mask = _lane(ins)

    def after():
        for code in writes:
            bad = bad_of[code]
            if bad is False and code not in w.undefined:
                continue
            if code < VGPR:
                if bad is False:
                    w.undefined.discard(code)
                    w.defined.pop(code, None)
                else:
                    w.undefined.add(code)
                    w.defined[code] = np.broadcast_to(~bad.any(axis=1, keepdims=True), (w.count, LANES)).copy()
            else:
                defined = w.defined.get(code)
                if defined is None:
                    defined = np.full((w.count, LANES), code not in w.undefined)
                defined = np.where(mask, np.logical_not(bad), defined)
                w.defined[code] = defined
                if defined.all():
                    w.undefined.discard(code)
                    del w.defined[code]
                else:
                    w.undefined.add(code)
            if code in w.undefined or code in w.pending:
                w.alert.add(code)
            else:
                w.alert.discard(code)

    return after


def _define(w, writes: frozenset[int]) -> None:
    """Mark all lanes of these registers as written."""
    for code in writes:
        if code in w.undefined:
            w.undefined.discard(code)
            w.defined.pop(code, None)
            if code not in w.pending:
                w.alert.discard(code)


def _undefined_lanes(w, ins: Instruction, code: int) -> np.ndarray:
    """Return the active lanes of a register that the instruction would read unwritten."""
    defined = w.defined.get(code)
    if code < VGPR:
        return np.ones((w.count, LANES), bool) if defined is None else ~defined
    if defined is None:
        return w.mask
    if ins.mnemonic == "v_readlane_b32":
        return ~defined & _lane(ins)
    if ins.variant == "DPP16" and code in ins.operands["src0"].registers:
        source, valid = dpp_lanes(ins.fields["dpp"])
        return w.mask & valid & w.mask[:, source] & ~defined[:, source]
    return w.mask & ~defined


def _lane(ins: Instruction) -> np.ndarray:
    """Return the lanes (bool [LANES]) that V_READLANE or V_WRITELANE may access, one if it is a constant."""
    constant = ins.sources[1].code - 128  # of an inline constant from 0 to 64
    return np.arange(LANES) == constant if 0 <= constant < LANES else np.ones(LANES, bool)


def _selected(w, ins: Instruction, wrong: dict) -> dict:
    """Return V_CNDMASK's undefined lanes: only the source that a lane selects counts."""
    if ins.operands["src2"].code in wrong:
        return wrong
    chosen = w.lanes(ins.operands["src2"].code)
    a, b = (operand.code for operand in ins.sources[:2])
    if a == b:
        return wrong
    return {code: lanes & (chosen if code == b else ~chosen) for code, lanes in wrong.items()}
