"""Bind buffer loads, stores and atomics through a resource with bounds: MUBUF.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter "Vector Memory Operations" (buffer addressing and range checking).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import VGPR, Instruction
from ..errors import UnsupportedInstruction
from ..events import Event, issue
from ..operands import I64, U32, U64, read_scalar, register
from ..waves import LANES
from . import load_to_lds, transfer
from .global_memory import bind_atomic


def bind(ins: Instruction, program) -> Callable:
    """Bind a buffer instruction."""
    name = ins.mnemonic.removeprefix("buffer_")
    if name in ("wbl2", "inv"):
        return _bind_cache(ins, program, name)
    action, _, kind = name.partition("_")
    resource = ins.operands["srsrc"].code
    scalar = read_scalar(ins.operands["soffset"], ins, U32)
    immediate, offen, idxen = ins.fields["offset"], ins.fields["offen"], ins.fields["idxen"]
    vector = ins.operands["vaddr"].code if "vaddr" in ins.operands else VGPR
    index_i = register(vector)
    offset_i = register(vector + (1 if idxen else 0))

    def place(w, size: int):
        """Return the addresses of the active lanes and, per dword, whether it is in range."""
        base = w.S64[resource] & U64(0xFFFF_FFFF_FFFF)
        word1, records, word3 = (w.S[resource + n].astype(I64) for n in (1, 2, 3))
        if (word1 >> 31 | word3 >> 23 & 1)[w.active()[0]].any():
            raise UnsupportedInstruction(f"{ins.text}: a swizzled or thread-indexed buffer resource")
        offset = scalar(w).astype(I64) + immediate
        if offen:
            offset = offset + w.U[offset_i]
        pieces = np.arange(0, max(size, 4), 4)
        if idxen:
            index = w.U[index_i].astype(I64)
            inside = np.broadcast_to(transfer.lanes_of(w, index < records)[:, None], (len(w.active()[0]), len(pieces)))
            return transfer.lanes_of(w, base + (index * (word1 >> 16 & 0x3FFF) + offset).astype(U64)), inside
        inside = transfer.lanes_of(w, records - offset)[:, None] >= pieces + min(size, 4)
        return transfer.lanes_of(w, base + offset.astype(U64)), inside

    if ins.fields["lds"] or kind.startswith("lds_"):
        return load_to_lds.bind(ins, program, None, transfer.LOADS[kind.removeprefix("lds_")], immediate, place)
    if action == "atomic":
        return _bind_atomic(ins, program, kind, place)
    load, size, shift = transfer.load_or_store(ins, action, kind)
    is_load = load is not None
    codes, first = transfer.registers(ins.operands["vdata"], size, program)
    unit = min(size, 4)
    scope = transfer.scope_of(ins)

    def run(w):
        rows, lanes = w.active()
        region, moved, clock = "", 0, None if is_load else w.scheduler.space.coherence.clock
        if len(rows):
            address, inside = place(w, size)
            region, moved = w.scheduler.space.name_at(address[0]), int(inside.sum()) * unit // w.count
            if is_load:
                values = transfer.buffer_load(ins, w, address, inside, size)
                transfer.deliver(w, first, transfer.extend(values, load), load)
            else:
                values = transfer.collect(w, first, size, shift)
                site = transfer.Site(ins, w, rows, lanes)
                if inside.all():
                    if w.scheduler.space.store(address, values, unit, w, site, False, scope):
                        w.scheduler.progress()
                else:
                    for n in range(inside.shape[1]):
                        chosen = np.flatnonzero(inside[:, n])
                        if len(chosen):
                            part = site.part(chosen)
                            piece = values[chosen, unit * n : unit * (n + 1)]
                            w.scheduler.space.store(address[chosen] + U64(4 * n), piece, unit, w, part, False, scope)
                            w.scheduler.progress()
            w.scheduler.counters.vector_access(ins, w, address, size, inside)
        loaded = codes if is_load else ()
        issue(w, Event("vm", loaded, size=moved, load=is_load, region=region, clock=clock))

    return run


def _bind_cache(ins, program, name: str):
    """Bind BUFFER_WBL2, which writes back the die's L2, and BUFFER_INV, which invalidates its copies of others' memory.

    Both act at agent scope with sc1, at system scope with sc0 sc1.
    """
    scope = transfer.scope_of(ins)
    if not scope:
        return lambda w: None
    if name == "inv":
        return lambda w: w.scheduler.space.coherence.invalidate(w, scope)

    def write_back(w):
        event = Event("vm", load=False)
        event.written_back = w.scheduler.space.coherence.write_back(w, scope)
        issue(w, event)

    return write_back


def _bind_atomic(ins, program, kind: str, place):
    size = 8 if kind.endswith(("_x2", "f64")) else 4

    def address(w):
        addresses, inside = place(w, size)
        if not inside.all():
            raise UnsupportedInstruction(f"{ins.text}: an atomic out of the buffer's range")
        full = np.zeros((w.count, LANES), U64)
        full[w.active()] = addresses
        return full

    return bind_atomic(ins, program, address, kind)
