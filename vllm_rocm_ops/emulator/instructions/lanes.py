"""Bind instructions that move data between lanes.

They are V_READLANE, V_WRITELANE, V_SWAP, V_PERMLANE*_SWAP, indexed moves, and the DS instructions without memory access.

Source: AMD Instinct MI300 (CDNA3) ISA, chapter 12 "Instructions"; CDNA4 ISA for V_PERMLANE*_SWAP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..decode import M0, VGPR, Operand
from ..errors import UnsupportedInstruction
from ..events import Event, issue
from ..operands import I64, U32, check_allocated, dpp_lanes, read, read_scalar, register
from ..waves import LANES
from .transfer import check_code


def bind_indexed_move(ins, program) -> Callable:
    """Bind V_MOV_B32 under S_SET_GPR_IDX_ON: M0[7:0] is added to the VGPR number of source 0 (mode bit 0) or the result (bit 3)."""
    mode, source, destination = ins.fields["gpr_idx"], ins.sources[0], ins.operands["vdst"]
    if ins.mnemonic != "v_mov_b32" or ins.variant or mode not in (1, 8):
        raise UnsupportedInstruction(f"{ins.text} under VGPR indexing")
    value = read(source, ins, program, U32)

    def run(w):
        for n in range(w.count):
            index = int(w.S[M0][n, 0]) & 255
            read_code, written_code = source.code + index * (mode == 1), destination.code + index * (mode == 8)
            check_allocated(Operand(written_code if mode == 8 else read_code, 1, "B32", 32), program)
            values = w.U[register(read_code)][n] if mode == 1 else np.broadcast_to(value(w), (w.count, 64))[n]
            np.copyto(w.U[register(written_code)][n], values, where=w.mask[n])

    return run


def bind_indexed_source(ins, program, bind: Callable) -> Callable:
    """Bind other vector instructions under S_SET_GPR_IDX_ON with an indexed source 0; `bind` resolves them without an index."""
    if ins.fields["gpr_idx"] != 1 or ins.variant:
        raise UnsupportedInstruction(f"{ins.text} under VGPR indexing")
    place = next(name for name in ("src0", "vsrc0") if name in ins.operands)
    source, bound = ins.operands[place], {}
    fields = {name: value for name, value in ins.fields.items() if name != "gpr_idx"}

    def run(w):
        indices = w.S[M0][:, 0] & U32(255)
        index = int(indices[0]) if source.code >= VGPR else 0
        if (indices != indices[0]).any():
            raise UnsupportedInstruction(f"{ins.text}: indices differ between waves")
        if index not in bound:
            shifted = dataclasses.replace(source, code=source.code + index)
            bound[index] = bind(
                dataclasses.replace(ins, operands={**ins.operands, place: shifted}, fields=fields), program
            )
        return bound[index](w)

    return run


def bind_readlane(ins, program) -> Callable:
    """Bind V_READLANE and V_READFIRSTLANE."""
    source, destination = register(ins.sources[0].code), ins.operands["sdst"].code
    check_allocated(ins.sources[0], program)
    if ins.mnemonic == "v_readfirstlane_b32":

        def first(w):
            lane = np.argmax(w.mask, axis=1) if not w.full else 0
            w.write_scalar(destination, w.U[source][np.arange(w.count), lane][:, None])

        return first
    select = read_scalar(ins.sources[1], ins, U32)

    def run(w):
        lane = select(w)[:, 0] & U32(63)
        w.write_scalar(destination, w.U[source][np.arange(w.count), lane][:, None])

    return run


def bind_writelane(ins, program) -> Callable:
    """Bind V_WRITELANE."""
    check_allocated(ins.operands["vdst"], program)
    destination = register(ins.operands["vdst"].code)
    value, select = (read_scalar(operand, ins, U32) for operand in ins.sources[:2])

    def run(w):
        w.U[destination][np.arange(w.count), select(w)[:, 0] & U32(63)] = value(w)[:, 0]

    return run


def bind_swap(ins, program) -> Callable:
    """Bind V_SWAP."""
    a, b = register(ins.operands["vdst"].code), register(ins.sources[0].code)

    def run(w):
        old = w.U[a].copy()
        np.copyto(w.U[a], w.U[b], where=w.mask)
        np.copyto(w.U[b], old, where=w.mask)

    return run


def bind_permlane_swap(ins, program) -> Callable:
    """Bind V_PERMLANE16_SWAP and V_PERMLANE32_SWAP, which swap odd rows of vdst with even rows of src0."""
    a, b = register(ins.operands["vdst"].code), register(ins.sources[0].code)
    size = 16 if "16" in ins.mnemonic else 32

    def run(w):
        vdst, src = (w.U[i].reshape(w.count, 64 // (2 * size), 2, size) for i in (a, b))
        upper, lower = vdst[:, :, 1].copy(), src[:, :, 0].copy()
        vdst[:, :, 1], src[:, :, 0] = lower, upper

    return run


def bind_ds(ins, program, name: str) -> Callable:
    """Bind DS_PERMUTE, DS_BPERMUTE and DS_SWIZZLE, which move data between lanes without memory."""
    code = ins.operands["vdst"].code
    destination = check_code(code, program)
    offset = ins.fields["offset0"] | ins.fields["offset1"] << 8
    if name == "swizzle_b32":
        source = check_code(ins.operands["addr"].code, program)
        table = swizzle_lanes(offset)

        def move(w):
            values = w.U[source][:, table]
            return values if w.full else np.where(w.mask[:, table], values, U32(0))

    else:
        address = check_code(ins.operands["addr"].code, program)
        source = check_code(ins.operands["data0"].code, program)

        def move(w):
            lane = (w.U[address] + U32(offset)) >> U32(2) & U32(63)
            if name == "bpermute_b32":
                values = np.take_along_axis(w.U[source], lane.astype(I64), axis=1)
                if not w.full:
                    values = np.where(np.take_along_axis(w.mask, lane.astype(I64), axis=1), values, U32(0))
                return values
            values = np.zeros((w.count, LANES), U32)
            rows, lanes = w.active()
            values[rows, lane[rows, lanes]] = w.U[source][rows, lanes]  # the highest lane wins
            return values

    def run(w):
        np.copyto(w.U[destination], move(w), where=w.mask)
        issue(w, Event("lds", (code,)))

    return run


def swizzle_lanes(offset: int) -> np.ndarray:
    """Return DS_SWIZZLE's source lanes: quad permutation with bit 15 set, else and / or / xor masks in groups of 32."""
    lane = np.arange(LANES)
    if offset & 0x8000:
        if offset & 0x6000:
            raise UnsupportedInstruction(f"ds_swizzle_b32 offset:{offset:#x}")
        return dpp_lanes(offset & 0xFF)[0]
    within = lane & 31
    return lane & 32 | (within & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31
