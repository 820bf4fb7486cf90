"""Bind LDS reads, writes and atomics: DS.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter "Data Share Operations"; CDNA4 ISA for transposing reads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..decode import Instruction
from ..errors import UnsupportedInstruction
from ..events import Event, issue
from ..operands import I64, U32, U64, register
from . import lanes, transfer

_DS_ATOMICS = {"min_i": "smin", "max_i": "smax", "min_u": "umin", "max_u": "umax", "wrxchg_b": "swap"}


def bind(ins: Instruction, program) -> Callable:
    """Bind a DS instruction."""
    name = ins.mnemonic.removeprefix("ds_")
    if name == "nop":
        return lambda w: None
    if name in ("bpermute_b32", "permute_b32", "swizzle_b32"):
        return lanes.bind_ds(ins, program, name)
    if "_tr_" in name:
        return _bind_ds_transpose(ins, program, name)
    action, _, kind = name.partition("_")
    fields = ins.fields
    address = transfer.check_code(ins.operands["addr"].code, program) if "addr" in ins.operands else None
    offset = fields["offset0"] | fields["offset1"] << 8
    if fields["gds"]:
        raise UnsupportedInstruction(f"{ins.mnemonic} gds")

    def positions(w, offset: int, size: int, align: int, site):
        a = transfer.lanes_of(w, w.U[address]).astype(I64) + offset
        return w.scheduler.lds.locate(a, size, align, w.scheduler.slots[w.block[site.rows]], site), a

    if action in ("read", "write") and kind in (transfer.DS_LOADS if action == "read" else transfer.DS_STORES):
        offsets, what = [offset], (transfer.DS_LOADS if action == "read" else transfer.DS_STORES)[kind]
    elif action in ("read2", "read2st64", "write2", "write2st64"):
        size = 4 if kind == "b32" else 8
        scale = size * (64 if "st64" in action else 1)
        offsets = [fields["offset0"] * scale, fields["offset1"] * scale]
        what = transfer.Load(size) if action.startswith("read") else (size, 0)
    else:
        return _bind_ds_atomic(ins, program, name, positions, offset)
    if isinstance(what, transfer.Load):
        size = what.size
        align = 16 if size == 12 else size
        per = max(1, size // 4)
        codes, first = transfer.registers(ins.operands["vdst"], 4 * per * len(offsets), program)

        def run_read(w):
            rows, lanes = w.active()
            if len(rows):
                site = transfer.Site(ins, w, rows, lanes)
                parts = []
                for displacement in offsets:
                    where, a = positions(w, displacement, size, align, site)
                    parts.append(w.scheduler.lds.load(where, size, w, site))
                    w.scheduler.counters.lds_access(ins, w, a, size)
                for n, values in enumerate(parts):
                    transfer.deliver(w, first + n * per, transfer.extend(values, what), what)
            issue(w, Event("lds", codes))

        return run_read
    size, shift = what
    align = 16 if size == 12 else size
    sources = [ins.operands[n] for n in ("data0", "data1") if n in ins.operands][: len(offsets)]
    firsts = [transfer.registers(operand, size, program)[1] for operand in sources]

    def run_write(w):
        rows, lanes = w.active()
        granules = None
        if len(rows):
            site = transfer.Site(ins, w, rows, lanes)
            written = []
            for displacement, first in zip(offsets, firsts, strict=True):
                where, a = positions(w, displacement, size, align, site)
                written.append(
                    w.scheduler.lds.store(where, transfer.collect(w, first, size, shift), w, site).reshape(
                        len(rows), -1
                    )
                )
                w.scheduler.counters.lds_access(ins, w, a, size)
            granules = np.concatenate(written, axis=1)
            w.scheduler.progress()
        issue(w, Event("lds", load=False, granules=granules, rows=None if granules is None else rows))

    return run_write


def _bind_ds_atomic(ins, program, name: str, positions, offset: int):
    returns = "_rtn_" in name
    name = name.replace("_rtn", "")
    swap = name.startswith("cmpst_")
    key = _DS_ATOMICS.get(name[:-2], name if name in transfer.ATOMICS else name.rpartition("_")[0])
    if not swap and key not in transfer.ATOMICS:
        raise UnsupportedInstruction(ins.mnemonic)
    size = 8 if name.endswith("64") else 4
    word = U64 if size == 8 else U32
    sources = [register(ins.operands[n].code) for n in ("data0", "data1") if n in ins.operands]
    destination = ins.operands["vdst"].code if returns else None
    codes = tuple(range(destination, destination + size // 4)) if returns else ()

    def run(w):
        rows, lanes = w.active()
        if len(rows):
            site = transfer.Site(ins, w, rows, lanes)
            where, a = positions(w, offset, size, size, site)
            w.scheduler.lds.check_atomic(where, size, w, site)
            data = [transfer.collect(w, first, size, 0).view(word)[:, 0] for first in sources]
            units = where >> (size.bit_length() - 1)
            view = w.scheduler.lds.views[size]
            if swap:  # DS_CMPST: data0 is compared, data1 stored
                old = transfer.update(view, units, None, data[1], data[0])
            else:
                old = transfer.update(view, units, transfer.ATOMICS[key], data[0])
            if returns:
                transfer.deliver(
                    w, register(destination), old.view(np.uint8).reshape(-1, size).view(U32), transfer.Load(size)
                )
            w.scheduler.counters.lds_access(ins, w, a, size)
            w.scheduler.progress()
        issue(w, Event("lds", codes))

    return run


def _bind_ds_transpose(ins, program, name: str):
    """Bind DS_READ_B64_TR_B16 / B8 / B4 and DS_READ_B96_TR_B6: a row of 16 lanes reads a tile, each lane gets a column."""
    bits = int(name.rpartition("b")[2])
    size = 12 if bits == 6 else 8
    codes, first = transfer.registers(ins.operands["vdst"], size, program)
    address = transfer.check_code(ins.operands["addr"].code, program)
    offset = ins.fields["offset0"] | ins.fields["offset1"] << 8

    def run(w):
        rows, lanes = w.active()
        if not w.full:
            raise UnsupportedInstruction(f"{ins.mnemonic} with inactive lanes")
        site = transfer.Site(ins, w, rows, lanes)
        a = transfer.lanes_of(w, w.U[address]).astype(I64) + offset
        positions = w.scheduler.lds.locate(a, size, 8, w.scheduler.slots[w.block[rows]], site)
        values = w.scheduler.lds.load(positions, size, w, site)
        words = transpose_rows(values, bits).view(U32)
        transfer.deliver(w, first, words, transfer.Load(size))
        w.scheduler.counters.lds_access(ins, w, a, size)
        issue(w, Event("lds", codes))

    return run


def transpose_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """Move data as ds_read_*_tr_*: [n * 16 lanes, bytes] to the same shape.

    A row's 16 lanes hold, in lane order, 16 * k elements (k = 4, 8 or 16 of 16, 8 or 4 and 6 bits), a row-major k x 16 matrix; lane j
    receives column j. For 16 bits Modular's ds_read_tr16_b64_row describes it so; for 8 bits as two interleaved 8 x 8 transposes,
    which is equivalent; 4 and 6 bits follow by analogy.
    """
    stream = np.unpackbits(values, axis=1, bitorder="little")
    per_lane = stream.shape[1] // bits
    elements = stream.reshape(-1, 16 * per_lane, bits)
    matrix = elements.reshape(-1, per_lane, 16, bits)
    columns = np.ascontiguousarray(matrix.transpose(0, 2, 1, 3))
    return np.packbits(columns.reshape(values.shape[0], -1), axis=1, bitorder="little")
