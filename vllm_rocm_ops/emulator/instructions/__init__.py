"""Define the semantics of instructions. `bind` resolves an instruction to a function on waves, once for all its executions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..decode import EXEC, Instruction
from ..errors import UnsupportedInstruction
from . import buffer, global_memory, lds, scalar, scalar_memory, scratch, vector

MEMORY: dict[str, Callable] = {
    "SMEM": scalar_memory.bind,
    "GLOBAL": global_memory.bind,
    "FLAT": global_memory.bind,
    "SCRATCH": scratch.bind,
    "MUBUF": buffer.bind,
    "DS": lds.bind,
}
BINDERS = MEMORY | dict.fromkeys(("SOP1", "SOP2", "SOPC", "SOPK", "SOPP"), scalar.bind)


def bind(ins: Instruction, program) -> Callable:
    """Resolve an instruction of `program` to a function on waves."""
    if "vskip" in ins.fields:
        return _bind_skipped(ins, program)
    if ins.encoding.startswith("VOP"):
        return vector.bind(ins, program)
    if ins.encoding not in BINDERS:
        raise UnsupportedInstruction(f"{ins.words.hex()}: {ins.fields.get('error', ins.encoding)}")
    return BINDERS[ins.encoding](ins, program)


def _bind_skipped(ins: Instruction, program) -> Callable:
    """Bind an instruction in the range of an S_SETVSKIP, which waves with the bit set skip."""
    code, bit = ins.fields["vskip"], ins.fields["vskip_bit"]
    others = {name: value for name, value in ins.fields.items() if name not in ("vskip", "vskip_bit")}
    run = bind(replace(ins, fields=others), program)

    def run_unskipped(w):
        skipped = (w.S[code][:, 0] >> bit & 1).astype(bool)
        if skipped.all():
            return None
        if not skipped.any():
            return run(w)
        saved = w.S64[EXEC].copy()
        w.S64[EXEC][skipped] = 0
        w.exec_changed()
        result = run(w)
        w.S64[EXEC][...] = saved
        w.exec_changed()
        return result

    return run_unskipped
