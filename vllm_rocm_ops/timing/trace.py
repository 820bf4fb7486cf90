"""Record the execution of waves in the emulator: instructions in order, with program counters, waits and addresses.

Recording uses its own emulator class, so other runs stay as fast.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_rocm_ops.core import tensors
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.emulator.counters import BANKS, Counters, instruction_class
from vllm_rocm_ops.emulator.decode import Instruction
from vllm_rocm_ops.emulator.instructions.matrix import MATRIX
from vllm_rocm_ops.emulator.memory import SLOT
from vllm_rocm_ops.emulator.program import Program
from vllm_rocm_ops.emulator.sanitizer import effects
from vllm_rocm_ops.emulator.scheduler import Scheduler

LINE = 128  # bytes of a cache line
APART = 1 << 50  # between the lines of copies of a block


def region_of(line: int) -> int:
    """Return the memory region of a line."""
    return line % APART >> SLOT - 7


class Instr(NamedTuple):
    """An instruction for the replay.

    `kind` is salu, branch, wait, nop, priority, barrier, end, valu, wide, transcendental, packed, matrix, lds, vmem or smem. `cycles`
    are a matrix instruction's; `count` is the number of an s_nop, s_sleep or s_setprio. `vm` and `lgkm` are the counts that an s_waitcnt
    leaves in flight. `chained` are the registers of an accumulator.
    """

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
    """The accesses of a memory instruction in one wave.

    `lines` are 128-byte lines of global memory, `bytes` the bytes moved, `cycles` the LDS bank cycles. `after` is the wave of the block
    and its step that wrote the data of an LDS read, if no barrier is between.
    """

    lines: tuple[int, ...] = ()
    bytes: int = 0
    cycles: int = 0
    store: bool = False
    after: tuple[int, int] | None = None


Step = tuple[Instr, Access | None]


@dataclasses.dataclass
class Block:
    """A recorded block: the steps of each of its waves."""

    number: int
    waves: list[list[Step]]

    @functools.cached_property
    def lines(self) -> set[int]:
        """Return the lines of global memory that it touched."""
        return {
            line
            for wave in self.waves
            for instr, access in wave
            if access and instr.kind == "vmem"
            for line in access.lines
        }


@dataclasses.dataclass
class Recording:
    """A recorded launch.

    `blocks` of its `grid` were recorded, and a compute unit holds `held` at once. `cold` are the memory regions that no cache has.
    """

    name: str
    grid: int
    held: int
    blocks: list[Block]
    cold: frozenset[int]


_STORES = ("ds_write", "global_store", "global_atomic", "buffer_store", "buffer_atomic", "flat_store", "flat_atomic")
_PACKED = ("v_pk_add_f32", "v_pk_mul_f32", "v_pk_fma_f32", "v_pk_mov_b32")
_KINDS = {"global": "vmem", "scratch": "vmem"}


def decoded(ins: Instruction, arch: str) -> Instr:
    """Convert a decoded instruction for the replay."""
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


def _nothing(w) -> None:
    """Leave the waves unchanged."""


class _Recorder(Program):
    """Note each executed instruction and its waves in the launch's scheduler."""

    computes_matrices = True  # False: only note matrix instructions; no address depends on their results

    def bind(self, ins: Instruction):
        bound = super().bind(ins)
        index, run = self.index[ins.address], bound.run
        if not self.computes_matrices and ins.mnemonic in MATRIX and not bound.fault:
            run = _nothing

        def noted(w):
            scheduler = w.scheduler
            if scheduler.wanted is not None and not scheduler.wanted[w.id].any():
                scheduler.counters.entry = None
                return run(w)
            entry = [index, w.id, None]
            scheduler.log.append(entry)
            scheduler.counters.entry = entry
            if ins.encoding == "SMEM" and "sbase" in ins.operands:
                base = w.S64[ins.operands["sbase"].code][:, 0] + np.uint64(ins.fields["offset"] & 0xFFFFF)
                entry[2] = [(np.arange(w.count), base, 64, None)]
            return run(w)

        return bound._replace(run=noted)


class _Noted(Counters):
    """The addresses of accesses."""

    entry: list | None = None

    def _note(self, *access) -> None:
        if self.entry is not None:
            self.entry[2] = [*(self.entry[2] or ()), access]

    def vector_access(self, ins, w, addresses, size, inside=None) -> None:
        self._note(w.active()[0], addresses, size, inside)

    def lds_access(self, ins, w, addresses, size) -> None:
        if self.entry is None:
            return
        rows, lanes = w.active()
        cycles = np.zeros(w.count, np.int64)
        for row in np.unique(rows):
            chosen = rows == row
            relative = addresses[chosen] - addresses[chosen][0] // 256 * 256
            key = (ins.mnemonic, size, lanes[chosen].tobytes(), relative.tobytes())
            if key not in self._patterns:
                self._patterns[key] = bank_cycles(ins.mnemonic, addresses[chosen], lanes[chosen], size, self.arch)
            cycles[row] = self._patterns[key]
        self._note(rows, cycles, size, addresses)


class _Lanes(NamedTuple):
    """The lanes of one wave in the form that Counters needs."""

    lanes: np.ndarray

    def active(self):
        return np.zeros(len(self.lanes), np.int64), self.lanes


def bank_cycles(mnemonic: str, addresses: np.ndarray, lanes: np.ndarray, size: int, arch: str) -> int:
    """Return the cycles that the LDS banks need for an access of one wave."""
    banks = BANKS[arch]
    crossed = size == 16 and banks == 32 and "read" in mnemonic
    return Counters._bank_cycles(_Lanes(lanes), addresses, size, banks, crossed)[0]


class _RecordingScheduler(Scheduler):
    """Run a launch and log [index of an instruction, waves, accesses]. `wanted` selects the recorded waves; None records all."""

    def __init__(self, wanted: np.ndarray | None, program: Program, *args):
        super().__init__(program, *args)
        self.counters = _Noted(program.arch, traffic=self.space.traffic)
        self.wanted, self.log = wanted, []


class RecordingEmulator(Emulator):
    """Emulate launches, and keep the log of the last one in `launched`."""

    program_type = _Recorder
    wanted: np.ndarray | None = None  # by wave of the next launches: whether to record it; None: all
    launched: _RecordingScheduler | None = None

    def scheduler_type(self, *args) -> _RecordingScheduler:
        self.launched = _RecordingScheduler(self.wanted, *args)
        return self.launched


def _global_accesses(accesses: list, store: bool) -> dict[int, Access]:
    """Merge the global memory accesses of one instruction, by row."""
    result: dict[int, Access] = {}
    for rows, addresses, size, inside in accesses:
        kept = np.ones(len(rows), bool) if inside is None else inside.any(axis=1)
        keys = np.stack(
            [addresses[kept] >> np.uint64(7), addresses[kept] + np.uint64(size - 1) >> np.uint64(7)], axis=1
        )
        chosen = rows[kept]
        order = np.argsort(chosen, kind="stable")
        starts = np.flatnonzero(np.diff(chosen[order], prepend=-1))
        for row, mine in zip(chosen[order][starts].tolist(), np.split(keys[order], starts[1:]), strict=False):
            lines = mine.ravel()
            lines = lines[np.append(True, lines[1:] != lines[:-1])]  # neighboring lanes mostly touch the same line
            result[row] = Access(tuple(dict.fromkeys(lines.tolist())), len(mine) * size, 0, store)
    return result


class _Lds:
    """Track the writers of a block's LDS, so that reads know their dependence in any schedule."""

    def __init__(self, size: int):
        self.writer = np.full(max(1, size // 4), -1, np.int64)
        self.writes: list[tuple[int, int, int]] = []  # wave, step, barriers before
        self.barriers: Counter[int] = Counter()

    def access(self, accesses: list, row: int, wave: int, step: int, store: bool) -> Access:
        """Return one wave's access."""
        moved = cycles = 0
        after, last = None, -1
        for rows, by_row, size, addresses in accesses:
            chosen = addresses[rows == row]
            if not len(chosen):
                continue
            moved, cycles = moved + len(chosen) * size, cycles + int(by_row[row])
            dwords = (chosen[:, None] >> 2) + np.arange(max(1, size // 4))
            if store:
                self.writer[dwords] = len(self.writes)
            else:
                last = max(last, int(self.writer[dwords].max()))
        if store:
            self.writes.append((wave, step, self.barriers[wave]))
        elif last >= 0:
            writer, writer_step, barriers = self.writes[last]
            if writer != wave and barriers == self.barriers[wave]:
                after = writer, writer_step
        return Access((), moved, cycles, store, after)


_NO_EFFECT = frozenset(("salu", "valu", "wait", "branch", "sleep", "nop"))


def _without_spin(steps: list[Step], instr: Instr) -> None:
    """Drop a wave's steps since its last read at this address if it only slept and polled: their number depends on the schedule."""
    for place in range(len(steps) - 1, max(-1, len(steps) - 64), -1):
        before = steps[place][0]
        if before is instr:
            if any(each.kind == "sleep" for each, _ in steps[place:]):
                del steps[place:]
            return
        if before.kind not in _NO_EFFECT:
            return


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy at a multiple of 256, as GPU allocators align; a tensor on the meta device becomes zeros."""
    size = tensors.extent(tensor) * tensor.element_size()
    room = torch.from_numpy(np.zeros(size + 256, np.uint8))  # numpy allocates zeros lazily
    start = -room.data_ptr() % 256
    moved = room[start : start + size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    return moved if tensor.device.type == "meta" else moved.copy_(tensor)


def record(
    emulator: RecordingEmulator,
    path: Path,
    launch: Launch,
    blocks: Sequence[int],
    *,
    run_all: bool = False,
    cold: Collection[torch.Tensor] | None = None,
) -> Recording:
    """Run these blocks of a launch, or all with `run_all`, and return the recorded blocks.

    `cold` are the tensors that no cache has, by default all.
    """
    program = emulator.program(path, launch.symbol)
    grid, waves_per_block = math.prod(launch.grid), -(-math.prod(launch.block) // emulator.arch.wave_lanes)
    emulator.wanted = np.zeros(grid * waves_per_block, bool) if run_all else None
    waves: dict[int, list[Step]] = {block * waves_per_block + i: [] for block in blocks for i in range(waves_per_block)}
    if run_all:
        emulator.wanted[list(waves)] = True
    emulator.run(path, launch, (), None if run_all else list(blocks))
    (log, space), emulator.launched = (emulator.launched.log, emulator.launched.space), None
    instrs: dict[int, Instr] = {}
    lds = {block: _Lds(program.object.lds + launch.lds) for block in blocks}
    for index, ids, accesses in log:
        instr = instrs.get(index)
        if instr is None:
            instr = instrs[index] = decoded(program.instructions[index], program.arch)
        store = instr.text.startswith(_STORES)
        touched = _global_accesses(accesses, store) if accesses and instr.kind != "lds" else {}
        for row, number in enumerate(ids.tolist()):
            if number not in waves:
                continue
            steps, (block, wave) = waves[number], divmod(number, waves_per_block)
            access = touched.get(row)
            if instr.kind == "barrier":
                lds[block].barriers[wave] += 1
            elif instr.kind == "lds":
                if not store:
                    _without_spin(steps, instr)
                access = lds[block].access(accesses or [], row, wave, len(steps), store)
            steps.append((instr, access))
    numbered = [Block(block, [waves[block * waves_per_block + i] for i in range(waves_per_block)]) for block in blocks]
    if cold is None:
        regions = frozenset(space.regions)
    else:
        known = (space.addresses.get(tensor.data_ptr()) for tensor in cold)
        regions = frozenset(address >> SLOT for address in known if address is not None)
    one_unit = dataclasses.replace(emulator.options, compute_units=1)
    held = one_unit.resident_blocks(program.object, waves_per_block, program.object.lds + launch.lds)
    return Recording(launch.symbol, grid, held, numbered, regions)
