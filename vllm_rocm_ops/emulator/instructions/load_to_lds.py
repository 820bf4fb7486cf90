"""Bind global and buffer loads to LDS.

Source: AMD Instinct MI300 (CDNA3) ISA, chapters "Flat Memory Instructions" and "Vector Memory Operations"; CDNA4 ISA for loads of 96 and 128 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import M0
from ..events import Event, issue
from ..lds import M0_MASK
from ..operands import I64, U32
from .transfer import Load, Site, buffer_load, extend, lanes_of, signed_offset


def bind(ins, program, address, load: Load, immediate: int, place) -> Callable:
    """Bind a load to LDS: lane i of a wave writes M0 + inst_offset + i * size (sizes 12 and 16 on CDNA4)."""
    size, step = load.size, max(load.size, 4)
    offset = signed_offset(ins, 13) if ins.encoding == "GLOBAL" else immediate

    def run(w):
        rows, lanes = w.active()
        granules, region, moved, inside = None, "", 0, None
        if len(rows):
            site = Site(ins, w, rows, lanes)
            if place:
                a, inside = place(w, size)
                values = buffer_load(ins, w, a, inside, size)
                moved = int(inside.sum()) * min(size, 4) // w.count
            else:
                a = lanes_of(w, address(w))
                values = w.scheduler.space.load(a, size, min(size, 4), w, site, False)
                moved = len(rows) * size // w.count
            if size < 4:
                values = np.ascontiguousarray(extend(values, load)).view(np.uint8)
            base = (w.S[M0][rows, 0] & U32(M0_MASK[program.arch])).astype(I64)
            positions = w.scheduler.lds.locate(
                base + offset + lanes * step, step, 4, w.scheduler.slots[w.block[rows]], site
            )
            granules = w.scheduler.lds.store(positions, values, w, site).reshape(len(rows), -1)
            w.scheduler.lds.begin_load(granules)
            w.scheduler.counters.vector_access(ins, w, a, size, inside)
            region = w.scheduler.space.name_at(a[0])
        where = None if granules is None else rows
        issue(w, Event("vm", size=moved, granules=granules, rows=where, region=region))

    return run
