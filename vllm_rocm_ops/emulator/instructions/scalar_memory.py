"""Bind scalar loads, stores and atomics: SMEM.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter "Scalar Memory Operations".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import Instruction, Operand
from ..errors import UnsupportedInstruction
from ..events import Event, issue
from ..operands import U32, U64, read_scalar
from .transfer import ATOMICS, Site, update


def _offset(ins: Instruction):
    """Return the immediate offset, and a reader of the SGPR offset, if there is one."""
    immediate = ins.fields["offset"] if ins.fields["imm"] else 0
    immediate -= (immediate & 0x100000) << 1
    offset = read_scalar(ins.operands["soffset"], ins, U32) if "soffset" in ins.operands else None
    if not ins.fields["imm"] and not ins.fields["soffset_en"]:  # the offset field's low bits name an SGPR
        offset = read_scalar(Operand(ins.fields["offset"] & 0x7F, 1, "B32", 32), ins, U32)
    return immediate, offset


def _bind_store(ins: Instruction) -> Callable:
    """Bind S_STORE_DWORD* and S_ATOMIC_*, once per wave; an atomic with glc returns the old value."""
    name, source, base = ins.mnemonic, ins.operands["sdata"].code, ins.operands["sbase"].code
    immediate, offset = _offset(ins)
    kind = name.removeprefix("s_atomic_")
    if name.startswith("s_atomic_") and kind not in ATOMICS:
        raise UnsupportedInstruction(name)
    count = int(name.rpartition("x")[2]) if "dwordx" in name else 1
    returned = (source,) if ins.fields["glc"] and kind != name else ()

    def run(w):
        address = w.S64[base][:, 0] + U64(immediate % (1 << 64))
        if offset is not None:
            address = address + offset(w)[:, 0].astype(U64)
        address, site, space = address & ~U64(3), Site(ins, w, np.arange(w.count), None), w.scheduler.space
        data = np.ascontiguousarray(w.sgpr[:, source : source + count])
        if kind == name:
            changed = space.store(address, data.view(np.uint8), 4, w, site, True, True)
        else:
            change = lambda view, units, chosen: update(view, units, ATOMICS[kind], data[chosen, 0])
            old, changed = space.atomic(address, 4, change, w, site), True
            if returned:
                w.S[source][:, 0] = old
        if changed:
            w.scheduler.progress()
        issue(w, Event("scalar", returned))

    return run


def bind(ins: Instruction, program) -> Callable:
    """Bind an SMEM instruction."""
    name = ins.mnemonic
    if name in ("s_dcache_wb", "s_dcache_inv", "s_dcache_wb_vol", "s_dcache_inv_vol", "s_dcache_discard"):
        return lambda w: None
    destination = ins.operands["sdata"].code if "sdata" in ins.operands else None
    if name in ("s_memtime", "s_memrealtime"):

        def clock(w):
            w.S64[destination][...] = w.scheduler.steps
            issue(w, Event("scalar", (destination, destination + 1)))

        return clock
    if name.startswith(("s_store_dword", "s_atomic_")):
        return _bind_store(ins)
    buffer = name.startswith("s_buffer_load_dword")
    if not (buffer or name.startswith("s_load_dword")):
        raise UnsupportedInstruction(name)
    count = int(name.rpartition("x")[2]) if "dwordx" in name else 1
    immediate, offset = _offset(ins)
    base = ins.operands["sbase"].code
    registers = tuple(range(destination, destination + count))
    size = 4 * count

    def run(w):
        address = w.S64[base][:, 0] + U64(immediate % (1 << 64))
        if buffer:
            address = address & U64(0xFFFF_FFFF_FFFF) if immediate >= 0 else address
        if offset is not None:
            address = address + offset(w)[:, 0].astype(U64)
        if not buffer and w.count > 1 and (address == address[0]).all():
            address = address[:1]
        address = address & ~U64(3)
        site = Site(ins, w, np.arange(w.count), None)
        if buffer:
            words = _scalar_buffer(w, address, site)
        else:
            w.scheduler.space.check_scalar_load(address, size, w, site)
            words = w.scheduler.space.load(address, size, 4, w, site, True).view(U32)
        w.sgpr[:, destination : destination + count] = words
        if destination + count > 126:
            w.exec_changed()
        issue(w, Event("scalar", registers))

    def _scalar_buffer(w, address, site):
        start = w.S64[base][:, 0] & U64(0xFFFF_FFFF_FFFF)
        limit = w.S[base + 2][:, 0].astype(U64)
        words = np.zeros((w.count, count), U32)
        for n in range(count):
            dword_address = address + U64(4 * n)
            inside = dword_address - start + U64(4) <= limit
            if inside.any():
                part = Site(ins, w, np.flatnonzero(inside), None)
                words[inside, n] = w.scheduler.space.load(dword_address[inside], 4, 4, w, part, True).view(U32)[:, 0]
        return words

    return run
