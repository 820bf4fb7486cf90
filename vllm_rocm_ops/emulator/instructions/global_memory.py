"""Bind global and flat loads, stores and atomics.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter "Flat Memory Instructions".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import NO_ADDRESS, Instruction
from ..errors import UnsupportedInstruction
from ..events import Event, issue
from ..operands import APERTURES, I64, U32, U64, pair, register
from ..waves import LANES
from . import load_to_lds, scratch, transfer
from .scalar import Signal


def _global_address(ins: Instruction, program):
    """Return a function to 64-bit addresses [waves, 64 or 1]."""
    offset = U64((transfer.signed_offset(ins, 13) if ins.encoding == "GLOBAL" else ins.fields["offset"]) % (1 << 64))
    vector = ins.operands["addr"].code
    scalar = ins.operands["saddr"].code if "saddr" in ins.operands else NO_ADDRESS
    i = transfer.check_code(vector, program)
    if scalar == NO_ADDRESS or ins.encoding == "FLAT":
        transfer.check_code(vector + 1, program)
        return (lambda w: pair(w, i, U64) + offset) if offset else lambda w: pair(w, i, U64)
    return (lambda w: w.S64[scalar] + w.U[i] + offset) if offset else lambda w: w.S64[scalar] + w.U[i]


def bind(ins: Instruction, program) -> Callable:
    """Bind a global or flat instruction."""
    prefix, _, name = ins.mnemonic.partition("_")
    action, _, kind = name.partition("_")
    if kind.startswith("lds_"):
        return load_to_lds.bind(ins, program, _global_address(ins, program), transfer.LOADS[kind[4:]], 0, None)
    address = _global_address(ins, program)
    if action == "atomic":
        return bind_atomic(ins, program, address, kind)
    load, size, shift = transfer.load_or_store(ins, action, kind)
    if prefix == "flat":
        return _bind_flat(ins, program, address, load, size, shift)
    return _bind_load(ins, program, address, load) if load else _bind_store(ins, program, address, size, shift)


def _bind_load(ins, program, address, load: transfer.Load):
    codes, first = transfer.registers(ins.operands["vdst"], load.size, program)
    scope = transfer.scope_of(ins)
    align = min(load.size, 4)

    def run(w):
        rows, lanes = w.active()
        event = Event("vm", codes)
        if len(rows):
            a = transfer.lanes_of(w, address(w))
            event.region, event.size = w.scheduler.space.name_at(a[0]), len(rows) * load.size // w.count
            flag, site = transfer.of_flag(scope, rows, a), transfer.Site(ins, w, rows, lanes)
            values = w.scheduler.space.load(a, load.size, align, w, site, flag, scope)
            transfer.deliver(w, first, transfer.extend(values, load), load)
            w.scheduler.counters.vector_access(ins, w, a, load.size)
            if site.stale is not None:
                event.stale = np.zeros((w.count, LANES), bool)
                event.stale[w.mask] = site.stale
            if flag:
                event.acquired = w.scheduler.space.coherence.synchronize(w, site, a, release=False, acquire=True)
        issue(w, event)

    return run


def _bind_store(ins, program, address, size: int, shift: int):
    _, first = transfer.registers(ins.operands["data"], size, program)
    scope = transfer.scope_of(ins)

    def run(w):
        rows, lanes = w.active()
        clock, signal = w.scheduler.space.coherence.clock, None
        if len(rows):
            a = transfer.lanes_of(w, address(w))
            values = transfer.collect(w, first, size, shift)
            flag, site = transfer.of_flag(scope, rows, a), transfer.Site(ins, w, rows, lanes)
            if flag:
                w.scheduler.space.coherence.synchronize(w, site, a, release=True, acquire=False)
            if w.scheduler.space.store(a, values, min(size, 4), w, site, flag, scope):
                w.scheduler.progress()
            w.scheduler.counters.vector_access(ins, w, a, size)
            signal = Signal.PAUSE if site.pauses else None
        issue(w, Event("vm", load=False, clock=clock))
        return signal

    return run


def bind_atomic(ins, program, address, kind: str):
    """Bind a global or flat atomic."""
    wide = kind.endswith(("_x2", "f64"))
    name, scope = kind.removesuffix("_x2"), transfer.scope_of(ins)
    swap = name == "cmpswap"
    if not swap and name not in transfer.ATOMICS:
        raise UnsupportedInstruction(ins.mnemonic)
    fn = None if swap else transfer.ATOMICS[name]
    word, size = (U64, 8) if wide else (U32, 4)
    source = ins.operands["data" if "data" in ins.operands else "vdata"]
    returns = bool(ins.fields["sc0"])
    destination = ins.operands.get("vdst", source).code
    codes = tuple(range(destination, destination + size // 4)) if returns else ()
    first = register(source.code)
    step = size // 4

    def run(w):
        rows, lanes = w.active()
        event = Event("vm", codes, clock=w.scheduler.space.coherence.clock)
        if len(rows):
            a = transfer.lanes_of(w, address(w))
            site, space = transfer.Site(ins, w, rows, lanes), w.scheduler.space
            space.coherence.note_store(ins)
            data = transfer.collect(w, first, size, 0).view(word)[:, 0]
            compare = transfer.collect(w, first + step, size, 0).view(word)[:, 0] if swap else None
            event.acquired = space.coherence.synchronize(w, site, a, release=True, acquire=True)

            def change(view, units, chosen):
                return transfer.update(view, units, fn, data[chosen], None if compare is None else compare[chosen])

            old = space.atomic(a, size, change, w, site, scope)
            w.scheduler.progress()
            if returns:
                transfer.deliver(
                    w, register(destination), old.view(np.uint8).reshape(-1, size).view(U32), transfer.Load(size)
                )
            w.scheduler.counters.vector_access(ins, w, a, size)
        issue(w, event)

    return run


def _bind_flat(ins, program, address, load: transfer.Load | None, size: int, shift: int):
    """Bind FLAT: each lane accesses LDS, scratch or global memory by its address."""
    is_load = load is not None
    codes, first = transfer.registers(ins.operands["vdst" if is_load else "data"], size, program)
    lds_high, private_high = APERTURES[235] >> 32, APERTURES[237] >> 32
    scope = transfer.scope_of(ins)

    def flag(site, addresses) -> bool:
        return transfer.of_flag(scope, site.rows, addresses)

    def run(w):
        rows, lanes = w.active()
        clock = None if is_load else w.scheduler.space.coherence.clock
        if len(rows):
            a = transfer.lanes_of(w, address(w))
            high = (a >> U64(32)).astype(U32)
            values = np.empty((len(a), size), np.uint8) if is_load else transfer.collect(w, first, size, shift)
            is_lds, is_private = high == lds_high, high == private_high
            for space, chosen in (("lds", is_lds), ("private", is_private), ("global", ~(is_lds | is_private))):
                index = np.flatnonzero(chosen)
                if not len(index):
                    continue
                site = transfer.Site(ins, w, rows[index], lanes[index])
                part = a[index]
                low = (part & U64(0xFFFFFFFF)).astype(I64)
                if space == "lds":
                    positions = w.scheduler.lds.locate(
                        low, size, min(size, 4), w.scheduler.slots[w.block[rows[index]]], site
                    )
                    if is_load:
                        values[index] = w.scheduler.lds.load(positions, size, w, site)
                    else:
                        w.scheduler.lds.store(positions, values[index], w, site)
                elif space == "private":
                    if is_load:
                        values[index] = scratch.load_bytes(w, low, size, site)
                    else:
                        scratch.store_bytes(w, low, values[index], site)
                elif is_load:
                    values[index] = w.scheduler.space.load(part, size, min(size, 4), w, site, flag(site, part), scope)
                elif w.scheduler.space.store(part, values[index], min(size, 4), w, site, flag(site, part), scope):
                    w.scheduler.progress()
            if is_load:
                transfer.deliver(w, first, transfer.extend(values, load), load)
        issue(w, Event("flat", codes if is_load else (), load=is_load, clock=clock))

    return run
