"""What each instruction does. `bind` resolves one to a function on waves, once for all its executions."""

from __future__ import annotations

from collections.abc import Callable

from ..decode import Instruction
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
    """Resolves an instruction of `program` to a function on waves."""
    if ins.encoding.startswith("VOP"):
        return vector.bind(ins, program)
    if ins.encoding not in BINDERS:
        raise UnsupportedInstruction(f"{ins.words.hex()}: {ins.fields.get('error', ins.encoding)}")
    return BINDERS[ins.encoding](ins, program)
