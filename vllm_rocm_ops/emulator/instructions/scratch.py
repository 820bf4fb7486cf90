"""Bind scratch accesses: private bytes of each lane, [waves, lanes, bytes], each with a flag that tells whether it was written.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter "Flat Memory Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import NO_ADDRESS, Instruction
from ..errors import ScratchOutOfBounds, Uninitialized
from ..events import Event, issue
from ..operands import I32, I64
from . import transfer


def _positions(w, offsets, size: int, site):
    limit = w.scratch.shape[2] // 2
    if (offsets < 0).any() or (offsets + size > limit).any():
        bad = int(np.argmax((offsets < 0) | (offsets + size > limit)))
        raise site(ScratchOutOfBounds, bad, f"{size} bytes at scratch offset {int(offsets[bad])}, the lane has {limit}")
    return site.rows[:, None], site.lanes[:, None], offsets[:, None] + np.arange(size), limit


def load_bytes(w, offsets, size: int, site) -> np.ndarray:
    """Load bytes [n, size] of the active lanes, which must be written."""
    rows, lanes, positions, limit = _positions(w, offsets, size, site)
    written = w.scratch[rows, lanes, positions + limit].all(axis=1)
    if not written.all():
        bad = int(np.argmin(written))
        raise site(Uninitialized, bad, f"scratch offset {int(offsets[bad])} was never written")
    return w.scratch[rows, lanes, positions]


def store_bytes(w, offsets, values, site) -> None:
    """Store bytes [n, size] of the active lanes."""
    rows, lanes, positions, limit = _positions(w, offsets, values.shape[1], site)
    w.scratch[rows, lanes, positions] = values
    w.scratch[rows, lanes, positions + limit] = 1


def bind(ins: Instruction, program) -> Callable:
    """Bind a scratch instruction."""
    _, action, kind = ins.mnemonic.split("_", 2)
    load, size, shift = transfer.load_or_store(ins, action, kind)
    is_load = load is not None
    offset = transfer.signed_offset(ins, 13)
    vector = transfer.check_code(ins.operands["addr"].code, program) if ins.fields["sve"] else None
    scalar = ins.operands["saddr"].code if "saddr" in ins.operands else NO_ADDRESS
    codes, first = transfer.registers(ins.operands["vdst" if is_load else "data"], size, program)

    def run(w):
        rows, lanes = w.active()
        if len(rows):
            offsets = np.full(len(rows), offset, I64)
            if vector is not None:
                offsets += transfer.lanes_of(w, w.I[vector])
            if scalar != NO_ADDRESS:
                offsets += w.S[scalar][rows, 0].astype(I32)
            site = transfer.Site(ins, w, rows, lanes)
            if is_load:
                transfer.deliver(w, first, transfer.extend(load_bytes(w, offsets, size, site), load), load)
            else:
                store_bytes(w, offsets, transfer.collect(w, first, size, shift), site)
        issue(w, Event("vm", codes if is_load else (), load=is_load))

    return run
