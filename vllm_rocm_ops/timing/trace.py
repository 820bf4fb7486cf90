"""What waves did, as the emulator saw it: their instructions in order, with real program counters, waits and addresses.

Recording is an emulator of its own, whose programs note what they run; others are as fast as without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_rocm_ops import tensors
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.counters import Counters, instruction_class
from vllm_rocm_ops.emulator.decode import Instruction
from vllm_rocm_ops.emulator.instructions.matrix import MATRIX
from vllm_rocm_ops.emulator.program import Program
from vllm_rocm_ops.emulator.sanitizer import effects
from vllm_rocm_ops.emulator.scheduler import Scheduler

LINE = 128  # bytes of a cache line


class Instr(NamedTuple):
    """What the replay knows of an instruction. `kind` is salu, branch, wait, nop, priority, barrier, end, valu, wide, transcendental,
    packed, matrix, lds, vmem or smem. `cycles` are a matrix instruction's; `count` is an s_nop's, s_sleep's or s_setprio's number.
    `vm` and `lgkm` are what an s_waitcnt lets stay outstanding. `chained` are the registers of an accumulator."""

    kind: str
    address: int
    size: int
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    cycles: int = 0
    count: int = 0
    vm: int = 63
    lgkm: int = 15
    chained: frozenset[int] = frozenset()
    text: str = ""


class Access(NamedTuple):
    """What a memory instruction of one wave touched. `lines` are 128-byte lines of global memory, `bytes` what moved, `cycles` those of
    the LDS's banks."""

    lines: tuple[int, ...] = ()
    bytes: int = 0
    cycles: int = 0
    store: bool = False


Step = tuple[Instr, Access | None]


@dataclasses.dataclass
class Block:
    """A recorded block: the steps of each of its waves."""

    number: int
    waves: list[list[Step]]

    @property
    def lines(self) -> set[int]:
        """The lines of global memory that it touched."""
        return {
            line
            for wave in self.waves
            for instr, access in wave
            if access and instr.kind == "vmem"
            for line in access.lines
        }


@dataclasses.dataclass
class Recording:
    """A launch: `blocks` of its `grid` ran, and a compute unit can hold `held` of them at once."""

    name: str
    grid: int
    held: int
    blocks: list[Block]
    lds: int = 0


_PACKED = ("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")
_KINDS = {"global": "vmem", "scratch": "vmem"}


def decoded(ins: Instruction, arch: str) -> Instr:
    """What the replay knows of a decoded instruction."""
    name, kind = ins.mnemonic, instruction_class(ins)
    kind = _KINDS.get(kind, kind)
    more: dict = {}
    if name.startswith("s_endpgm"):
        kind = "end"
    elif name == "s_waitcnt":
        field = ins.fields["simm16"]
        more = {"vm": field & 15 | (field >> 14 & 3) << 4, "lgkm": field >> 8 & 15}
    elif name in ("s_nop", "s_sleep", "s_setprio"):
        kind = {"s_nop": "nop", "s_sleep": "sleep", "s_setprio": "priority"}[name]
        more = {"count": ins.fields["simm16"] & 127}
    elif kind == "matrix":
        cycles = MATRIX[name].cycles(arch, ins.fields.get("cbsz", 0), ins.fields.get("blgp", 0))
        accumulator = ins.operands.get("src2", ins.operands["vdst"])
        more = {"cycles": cycles, "chained": frozenset(accumulator.registers)}
    elif kind == "valu" and name.startswith(_PACKED):
        kind = "packed"
    elif kind == "valu" and any(word in name for word in ("_f64", "_u64", "_i64", "_b64")):
        kind = "wide"
    reads, writes = effects(ins) if name != "undecodable" else ((), ())
    return Instr(kind, ins.address, ins.size, tuple(sorted(reads)), tuple(sorted(writes)), **more, text=ins.text)


class _Recorder(Program):
    """A program that notes each instruction that it runs, and for which waves."""

    log: list  # of [index, waves, accesses]

    def bind(self, ins: Instruction):
        bound = super().bind(ins)
        index, run = self.index[ins.address], bound.run

        def noted(w):
            entry = [index, w.id, None]
            self.log.append(entry)
            w.scheduler.counters.entry = entry
            if ins.encoding == "SMEM" and "sbase" in ins.operands:
                base = w.S64[ins.operands["sbase"].code][:, 0] + np.uint64(ins.fields["offset"] & 0xFFFFF)
                entry[2] = [(np.arange(w.count), base, 64, None)]
            return run(w)

        return bound._replace(run=noted)


class _Noted(Counters):
    """Counters that keep the addresses of accesses."""

    entry: list | None = None

    def _note(self, *access) -> None:
        self.entry[2] = [*(self.entry[2] or ()), access]

    def vector_access(self, ins, w, addresses, size, inside=None) -> None:
        self._note(w.active()[0], addresses, size, inside)

    def lds_access(self, ins, w, addresses, size) -> None:
        rows, lanes = w.active()
        cycles = np.zeros(w.count, np.int64)
        for row in np.unique(rows):
            chosen = rows == row
            relative = addresses[chosen] - addresses[chosen][0] // 256 * 256
            key = (ins.mnemonic, size, lanes[chosen].tobytes(), relative.tobytes())
            if key not in self._patterns:
                self._patterns[key] = bank_cycles(ins.mnemonic, addresses[chosen], lanes[chosen], size, self.arch)
            cycles[row] = self._patterns[key]
        self._note(rows, cycles, size, None)


class _Lanes(NamedTuple):
    """Lanes of one wave, as Counters takes them."""

    lanes: np.ndarray

    def active(self):
        return np.zeros(len(self.lanes), np.int64), self.lanes


def bank_cycles(mnemonic: str, addresses: np.ndarray, lanes: np.ndarray, size: int, arch: str) -> int:
    """Cycles that the banks of the LDS need for an access of one wave."""
    banks = 64 if arch.endswith("950") else 32
    crossed = size == 16 and banks == 32 and "read" in mnemonic
    return Counters._bank_cycles(_Lanes(lanes), addresses, size, banks, crossed)[0]


class _RecordingScheduler(Scheduler):
    def __init__(self, program, *args):
        super().__init__(program, *args)
        self.counters = _Noted(program.arch, traffic=self.space.traffic)
        program.log = []


class RecordingEmulator(Emulator):
    """An emulator that keeps what the waves of its last launch did."""

    program_type, scheduler_type = _Recorder, _RecordingScheduler


def _accesses(found: list, is_lds: bool, store: bool) -> dict[int, Access]:
    """By row: what the accesses of one instruction touched."""
    result: dict[int, Access] = {}
    for rows, addresses, size, inside in found:
        if is_lds:
            counts = np.bincount(rows)
            for row in np.flatnonzero(counts):
                before = result.get(int(row), Access(store=store))
                moved, cycles = before.bytes + int(counts[row]) * size, before.cycles + int(addresses[row])
                result[int(row)] = Access((), moved, cycles, store)
            continue
        kept = np.ones(len(rows), bool) if inside is None else inside.any(axis=1)
        keys = np.stack(
            [addresses[kept] >> np.uint64(7), addresses[kept] + np.uint64(size - 1) >> np.uint64(7)], axis=1
        )
        chosen = rows[kept]
        for row in np.unique(chosen):
            mine = keys[chosen == row]
            result[int(row)] = Access(tuple(dict.fromkeys(mine.ravel().tolist())), len(mine) * size, 0, store)
    return result


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at an address that GPUs' allocators give: a multiple of 256, unlike the host's."""
    extent = tensors.extent(tensor)
    room = torch.empty(extent * tensor.element_size() + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    content = room[start : start + extent * tensor.element_size()].view(tensor.dtype)
    moved = content.as_strided(tensor.shape, tensor.stride())
    return moved.copy_(tensor) if tensor.device.type != "meta" else moved


def record(emulator: RecordingEmulator, path, launch, blocks: Sequence[int], held: int) -> Recording:
    """Runs these blocks of a launch and returns what their waves did."""
    program = emulator.program(path, launch.symbol)
    emulator.run(path, launch, (), list(blocks))
    per_block = -(-int(np.prod(launch.block)) // emulator.arch.wave_lanes)
    instrs: dict[int, Instr] = {}
    waves: dict[int, list[Step]] = {block * per_block + i: [] for block in blocks for i in range(per_block)}
    for index, ids, found in program.log:
        instr = instrs.get(index)
        if instr is None:
            instr = instrs[index] = decoded(program.instructions[index], program.arch)
        if found is None:
            for number in ids.tolist():
                waves[number].append((instr, None))
            continue
        store = "store" in instr.text or "write" in instr.text or "atomic" in instr.text
        touched = _accesses(found, instr.kind == "lds", store)
        for row, number in enumerate(ids.tolist()):
            waves[number].append((instr, touched.get(row)))
    program.log = []
    numbered = [Block(block, [waves[block * per_block + i] for i in range(per_block)]) for block in blocks]
    return Recording(launch.symbol, int(np.prod(launch.grid)), held, numbered, program.object.lds + launch.lds)
