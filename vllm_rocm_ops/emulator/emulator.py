"""The CPU device: loads a code object, binds each kernel's instructions once, and runs its waves.

Waves that stand at the same program counter run together as one numpy operation over [waves, 64 lanes]; a branch that
divides them splits the group, a common program counter joins it again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import access, errors, salu, valu
from .access import Event
from .counters import Counters, Traffic
from .decode import AGPR, EXEC, M0, VCC, VGPR, Instruction, Operand, decode
from .memory import Lds, Space
from .objects import CodeObject, KernelObject
from .salu import Diverge, Signal
from .vector import dpp_lanes
from .waves import LANES, SGPRS, Waves

_SCALAR = ("SOP1", "SOP2", "SOPC", "SOPK", "SOPP")
_M0_READERS = ("s_movrel", "s_sendmsg", "s_ttracedata")  # and loads to LDS
_QUANTUM = 4096  # instructions that a group runs before others get their turn
_GROUP = 64  # waves that start as one group
_POISON = 0xFFA5A5A5  # a NaN in every float format


class Bound(NamedTuple):
    """An instruction ready to run."""

    run: Callable
    registers: frozenset[int]  # all that it touches, EXEC left out
    reads: frozenset[int]
    writes: frozenset[int]
    flow: dict[int, frozenset[int]] | None  # see `data_flow`
    ignores_exec: bool
    fault: str = ""  # why it cannot run


class Program:
    """A kernel of a code object, bound; and, while it runs, the launch's state."""

    def __init__(self, code: CodeObject, name: str, arch: str):
        self.object: KernelObject = code.kernels[name]
        self.code_object, self.arch = code, arch
        self.saturate = bool(self.object.rsrc1 >> 26 & 1)
        self.base = 1 << 36  # the image is the first region of every launch
        entry, size = self.object.entry, self.object.size
        self.instructions = decode(bytes(code.image[entry : entry + size]), entry)
        self.index = {ins.address: i for i, ins in enumerate(self.instructions)}
        self.stored: set[str] | None = None  # the arguments that launches so far wrote to
        self.bound: list[Bound | None] = [None] * len(self.instructions)  # bound when first executed
        self.space_granule = min(
            [_narrowest(ins.mnemonic, ("global", "buffer", "flat")) for ins in self.instructions] + [4]
        )
        self.lds_granule = min([_narrowest(ins.mnemonic, ("ds", "flat", "buffer")) for ins in self.instructions] + [4])

    # Binding

    def bind(self, ins: Instruction) -> Bound:
        """Resolves an instruction's operands once, for all its executions."""
        fault = ""
        try:
            if ins.encoding in _SCALAR:
                run = salu.bind(ins, self)
            elif ins.encoding in access.BINDERS:
                run = access.bind(ins, self)
            elif ins.encoding.startswith("VOP"):
                run = valu.bind(ins, self)
            else:
                raise errors.UnsupportedInstruction(f"{ins.words.hex()}: {ins.fields.get('error', ins.encoding)}")
        except errors.EmulatorError as error:
            kind, fault = type(error), str(error)
        except (KeyError, AttributeError) as error:
            kind, fault = errors.UnsupportedInstruction, f"{type(error).__name__} {error}"
        if not fault and self._reads_m0_too_early(ins):
            kind, fault = errors.MissingWait, "M0 is written just before; its read needs a wait state, such as s_nop 0"
        if fault:
            run = self._raising(kind, ins, fault)
        reads, writes = (frozenset(), frozenset()) if fault else effects(ins)
        ignores_exec = ins.mnemonic.startswith(("v_mfma", "v_smfmac", "v_writelane"))
        return Bound(run, reads | writes, reads, writes, data_flow(ins, reads, writes), ignores_exec, fault)

    def _reads_m0_too_early(self, ins: Instruction) -> bool:
        """Whether the instruction before writes M0 and this one needs a wait state before it reads it (CDNA3 and CDNA4 ISA, 4.5
        "Manually inserted wait states"). Whatever comes between is one, a branch too."""
        at = self.index[ins.address]
        takes_m0 = ins.encoding in access.BINDERS and M0 in effects(ins)[0] or ins.mnemonic.startswith(_M0_READERS)
        if not (takes_m0 and at) or (before := self.instructions[at - 1]).encoding not in _SCALAR:
            return False
        return M0 in effects(before)[1] and before.address + len(before.words) == ins.address

    def _raising(self, kind, ins, message: str) -> Callable:
        def run(w):
            raise self.error(kind, ins, w, 0, None, message)

        return run

    def allocates(self, code: int) -> bool:
        """Whether the kernel descriptor gives the wave this VGPR or AGPR."""
        if code < AGPR:
            return code - VGPR < self.object.vgprs
        return code - AGPR < self.object.agprs

    def out_of_range(self, operand: Operand) -> errors.RegisterOutOfRange:
        """The error for a register beyond the allocation."""
        kernel = self.object
        return errors.RegisterOutOfRange(
            f"{operand} is beyond the {kernel.vgprs} VGPRs and {kernel.agprs} AGPRs allocated"
        )

    # Errors

    def error(self, kind, ins, w, row: int, lane: int | None, message: str) -> errors.EmulatorError:
        """An error that says where it happened."""
        where = self.wave_name(int(w.id[row])) + ("" if lane is None else f", lane {lane}")
        error = kind(f"{self.object.name}+{ins.address - self.object.entry:#x} `{ins.text}`, {where}: {message}")
        error.located = True
        return error

    def wave_name(self, wave: int) -> str:
        """The block and wave of a wave number."""
        block, wave = divmod(wave, self.waves_per_block)
        x, y, _ = self.grid
        return f"block ({block % x}, {block // x % y}, {block // x // y}), wave {wave}"

    # State that instructions ask for

    def index_of(self, address: int) -> int:
        """The index of the instruction at a virtual address; a function that is called is decoded at its first call."""
        offset = address - self.base
        if offset not in self.index:
            spans = [
                (start, size) for start, size in self.code_object.symbols.values() if start <= offset < start + size
            ]
            if not spans:
                raise errors.OutOfBounds(f"a jump to {address:#x}, where no function is")
            start, size = spans[0]
            called = decode(bytes(self.code_object.image[start : start + size]), start)
            self.index.update((ins.address, len(self.instructions) + i) for i, ins in enumerate(called))
            self.instructions += called
            self.bound += [None] * len(called)
            self.counts += [0] * len(called)
        return self.index[offset]

    def hwreg(self, w, register: int) -> int:
        """S_GETREG's view: MODE and XCC_ID, 0 for the rest."""
        if register == 1:
            return w.mode | 1 << 8 | self.saturate << 23
        return int(w.block[0]) % 8 if register == 20 else 0

    def progress(self) -> None:
        """Something changed that another wave may be waiting for."""
        self.last_progress = self.steps

    def issue(self, w, ins, event: Event) -> None:
        """Records a memory operation that s_waitcnt has to wait for."""
        w.order.append(event)
        for code in event.registers:
            w.pending[code] = event
        w.alert.update(event.registers)
        if not (event.load and event.vm):
            return
        counters, region = self.counters, event.region
        loads = [e for e in w.order if e.load and e.vm]
        counters.loads_in_flight = max(counters.loads_in_flight, len(loads))
        in_flight = sum(e.size for e in loads if e.region == region)
        counters.bytes_in_flight[region] = max(counters.bytes_in_flight[region], in_flight)

    def wait(self, w, vm: int, lgkm: int) -> None:
        """S_WAITCNT: at most `vm` vector and `lgkm` LDS or scalar operations stay outstanding. Vector memory returns in
        order, LDS too; scalar loads in any order, so that only lgkmcnt(0) says anything while one is under way."""
        order = w.order
        if not order:
            return
        excess_vm = sum(e.vm for e in order) - vm
        excess_lgkm = sum(e.lgkm for e in order) - lgkm
        if lgkm and any(e.scalar and e.lgkm for e in order):
            excess_lgkm = 0
        if excess_vm <= 0 and excess_lgkm <= 0:
            return
        waits_for_memory = excess_vm > 0
        kept, done = [], []
        for event in order:
            if event.vm and excess_vm > 0:
                event.vm = False
                excess_vm -= 1
            if event.lgkm and excess_lgkm > 0:
                event.lgkm = False
                excess_lgkm -= 1
            if event.vm or event.lgkm:
                kept.append(event)
                continue
            done.append(event)
            for code in event.registers:
                if w.pending.get(code) is event:
                    del w.pending[code]
                    if code not in w.undefined:
                        w.alert.discard(code)
            if event.granules is not None and event.kind == "vm":
                self.lds.in_flight[event.granules] = False
        if waits_for_memory and self.counters.traffic is not None:
            self.counters.traffic.wait(w.id, order, kept)
        w.order = kept
        for event in done:
            if event.acquired:
                self.space.acquire(w.id, event.acquired)
            if event.written_back:
                self.space.has_written_back(w.id, event.written_back)
        if any(event.clock is not None for event in done):
            self.space.complete(w.id, next((event.clock for event in kept if event.clock is not None), None))

    # Sanitizer of registers

    def examine(self, w, at: int) -> Callable:
        """Checks an instruction that touches undefined or pending registers; returns what to do after it ran."""
        ins = self.instructions[at]
        _, _, reads, writes, flow, ignores_exec, _ = self.bound[at]
        for code in (reads | writes) & w.pending.keys():
            event = w.pending[code]
            in_order = code not in reads and _memory_kind(ins) == event.kind and event.kind != "scalar"
            if not in_order:
                name = Operand(code, 1, "", 32)
                raise self.error(
                    errors.MissingWait, ins, w, 0, None, f"{name} is used before the s_waitcnt that its load needs"
                )
        wrong = {code: lanes for code in reads & w.undefined if (lanes := self._undefined_lanes(w, ins, code)).any()}
        if wrong and flow is None:
            code, lanes = next(iter(wrong.items()))
            row, lane = (int(i[0]) for i in np.nonzero(lanes))
            name = Operand(code, 1, "", 32)
            lane = None if code < VGPR else lane
            raise self.error(errors.Uninitialised, ins, w, row, lane, f"{name} was never written")
        if wrong and ins.mnemonic == "v_cndmask_b32":
            wrong = self._selected(w, ins, wrong)
        bad_of = {
            code: functools.reduce(
                np.logical_or, [wrong[c] for c in (flow or {}).get(code, reads) if c in wrong], False
            )
            for code in writes
        }
        mask = True if ignores_exec else w.mask

        def after():
            for code in writes:
                bad = bad_of[code]
                if bad is False and code not in w.undefined:
                    continue
                if code < VGPR:
                    if bad is False:
                        w.undefined.discard(code)
                        w.defined.pop(code, None)
                    else:
                        w.undefined.add(code)
                        w.defined[code] = np.broadcast_to(~bad.any(axis=1, keepdims=True), (w.count, LANES)).copy()
                else:
                    defined = w.defined.get(code)
                    if defined is None:
                        defined = np.full((w.count, LANES), code not in w.undefined)
                    defined = np.where(mask, np.logical_not(bad), defined)
                    w.defined[code] = defined
                    if defined.all():
                        w.undefined.discard(code)
                        del w.defined[code]
                    else:
                        w.undefined.add(code)
                if code in w.undefined or code in w.pending:
                    w.alert.add(code)
                else:
                    w.alert.discard(code)

        return after

    @staticmethod
    def _undefined_lanes(w, ins: Instruction, code: int) -> np.ndarray:
        """The active lanes of a register that the instruction would read unwritten."""
        defined = w.defined.get(code)
        if code < VGPR:
            return np.ones((w.count, LANES), bool) if defined is None else ~defined
        if defined is None:
            return w.mask
        if ins.variant == "DPP16" and code in ins.operands["src0"].registers:
            source, valid = dpp_lanes(ins.fields["dpp"])
            return w.mask & valid & w.mask[:, source] & ~defined[:, source]
        return w.mask & ~defined

    @staticmethod
    def _selected(w, ins: Instruction, wrong: dict) -> dict:
        """Undefined lanes of V_CNDMASK: only the source that a lane selects counts."""
        if ins.operands["src2"].code in wrong:
            return wrong
        chosen = w.lanes(ins.operands["src2"].code)
        a, b = (operand.code for operand in ins.sources[:2])
        if a == b:
            return wrong
        return {code: lanes & (chosen if code == b else ~chosen) for code, lanes in wrong.items()}

    # Running

    def launch(
        self, launch, space: Space, kernargs: list[int], options: Options, chosen: Sequence[int] | None
    ) -> Counters:
        """Runs the chosen blocks, by default all, of as many launches as there are kernel arguments: their blocks are
        numbered launch by launch."""
        kernel = self.object
        threads = int(np.prod(launch.block))
        self.grid, self.block_size, self.threads = launch.grid, launch.block, threads
        self.waves_per_block = -(-threads // LANES)
        self.blocks_per_launch = int(np.prod(launch.grid))
        blocks = self.blocks_per_launch * len(kernargs)
        self.space, self.kernargs, self.options = space, kernargs, options
        self.counters = Counters(self.arch, traffic=space.traffic)
        self.counts = [0] * len(self.instructions)
        self.steps = self.last_progress = 0
        self.rng = None if options.seed is None else np.random.default_rng(options.seed)
        self.epochs = np.ones(blocks, np.int64)
        self.arrived = np.zeros(blocks, np.int64)
        self.ended = np.zeros(blocks, np.int64)
        self.block_of = np.arange(blocks * self.waves_per_block) // self.waves_per_block
        space.begin(len(self.block_of))
        space.watch(self.stored)
        lds = kernel.lds + launch.lds
        order = np.arange(blocks) if chosen is None else np.array(chosen)
        resident = min(len(order), options.resident_blocks(kernel, self.waves_per_block, lds))
        self.lds = Lds(resident, lds, self.lds_granule, options.races)
        self.slots = np.full(blocks, -1, np.int64)
        self.free_slots = list(range(resident))[::-1]
        self.next_blocks = deque((order if self.rng is None else self.rng.permutation(order)).tolist())
        self.queue: deque[Waves] = deque()
        self.waiting: list[Waves] = []
        with np.errstate(all="ignore"):
            while self.next_blocks or self.queue or self.waiting:
                self._turn()
        self.counters.finish(self.instructions, self.counts)
        self.stored = space.stored_names() | (self.stored or set())
        return self.counters

    def _turn(self) -> None:
        if not self.queue and not self._start():
            raise self._deadlock(self.waiting[0], "no wave can run")
        if self.rng is not None and len(self.queue) > 1:
            self.queue.rotate(int(self.rng.integers(len(self.queue))))
        w = self.queue.popleft()
        quantum = _QUANTUM if self.rng is None else int(self.rng.integers(1, 200))
        if self._run(w, quantum):
            self.queue.append(w)
            self._start()
            if self.steps - self.last_progress > self.options.patience * (len(self.queue) + 1):
                raise self._deadlock(w, f"nothing has changed for {self.options.patience} instructions of every wave")

    def _deadlock(self, w, message: str):
        at = max(0, w.pc - 1) if w in self.waiting else w.pc
        return self.error(errors.Deadlock, self.instructions[at], w, 0, None, message)

    def _start(self) -> bool:
        """Starts the next blocks that fit; returns whether there were any."""
        count = min(len(self.next_blocks), len(self.free_slots), max(1, _GROUP // self.waves_per_block))
        if not count:
            return False
        blocks = np.array([self.next_blocks.popleft() for _ in range(count)])
        for block in blocks:
            self.slots[block] = self.free_slots.pop()
            self.lds.clear(self.slots[block])
        waves = self._new_waves(blocks)
        if self.rng is None:
            self.queue.append(waves)
            return True
        while waves.count > 1:
            chosen = np.zeros(waves.count, bool)
            chosen[self.rng.choice(waves.count, int(self.rng.integers(1, waves.count)), replace=False)] = True
            self.queue.append(waves.split(chosen))
        self.queue.append(waves)
        return True

    def _new_waves(self, blocks: np.ndarray) -> Waves:
        kernel, per_block = self.object, self.waves_per_block
        block = np.repeat(blocks, per_block)
        wave = np.tile(np.arange(per_block), len(blocks))
        count = len(block)
        vgpr = np.full((kernel.vgprs + kernel.agprs, count, LANES), _POISON, np.uint32)
        thread = wave[:, None] * LANES + np.arange(LANES)
        x, y, _ = self.block_size
        axes = kernel.rsrc2 >> 11 & 3  # ENABLE_VGPR_WORKITEM_ID: x, xy or xyz, packed
        vgpr[0] = thread % x | (thread // x % y << 10 if axes else 0) | (thread // x // y << 20 if axes > 1 else 0)
        sgpr = np.full((count, SGPRS), _POISON, np.uint32)
        known = self._set_sgprs(sgpr, block)
        sgpr.view(np.uint64)[:, EXEC // 2] = Waves.bits(thread < self.threads)[:, 0]
        scratch = np.zeros((count, LANES, 2 * kernel.scratch), np.uint8) if kernel.scratch else None
        start = kernel.preloaded_entry if self.options.preloads_arguments else kernel.entry
        w = Waves(
            self,
            vgpr=vgpr,
            sgpr=sgpr,
            scc=np.zeros((count, 1), bool),
            block=block,
            wave=wave,
            id=block * per_block + wave,
            scratch=scratch,
        )
        registers = {
            *range(VGPR + 1, VGPR + kernel.vgprs),
            *range(AGPR, AGPR + kernel.agprs),
            *range(102),
            VCC,
            VCC + 1,
            M0,
        }
        w.pc = self.index[start]
        w.undefined = registers - known
        w.alert = set(w.undefined)
        return w

    def _set_sgprs(self, sgpr: np.ndarray, block: np.ndarray) -> set[int]:
        """Initial SGPRs, in the order of AMDGPUUsage "Initial Kernel Execution State"; returns which are set."""
        properties, rsrc2 = self.object.properties, self.object.rsrc2
        which, block = np.divmod(block, self.blocks_per_launch)
        kernarg = np.array(self.kernargs)[which]
        at = 0
        known: set[int] = set()

        def put(count: int, values=None) -> None:
            nonlocal at
            for n in range(count):
                sgpr[:, at + n] = 0 if values is None else values[n]
            known.update(range(at, at + count))
            at += count

        for bit, count in enumerate(
            (4, 2, 2, 2, 2, 2, 1)
        ):  # private buffer, dispatch, queue, kernarg, dispatch id, scratch, size
            if properties >> bit & 1:
                put(count, (kernarg & 0xFFFFFFFF, kernarg >> 32) if bit == 3 else None)
        preloaded, first = self.object.kernarg_preload, self.object.kernarg_preload_offset
        if self.options.preloads_arguments and preloaded:
            regions = [self.space.regions[address >> 36] for address in self.kernargs]
            put(preloaded, np.array([region.views[4][first:][:preloaded] for region in regions])[which].T)
        else:
            at += preloaded
        assert at == self.object.user_sgprs
        gx, gy, _ = self.grid
        coordinates = (block % gx, block // gx % gy, block // gx // gy)
        for axis, bit in enumerate((7, 8, 9)):
            if rsrc2 >> bit & 1:
                put(1, (coordinates[axis],))
        if rsrc2 >> 10 & 1:
            put(1)
        if rsrc2 & 1:
            put(1)
        return known

    def _run(self, w: Waves, quantum: int) -> bool:
        """Runs a group until it ends, waits or its quantum is over; returns whether it can go on."""
        bound, counts = self.bound, self.counts
        pc, count = w.pc, w.count
        joins = self.rng is None
        steps = 0
        try:
            while steps < quantum:
                steps += 1
                counts[pc] += count
                entry = bound[pc]
                if entry is None:
                    entry = bound[pc] = self.bind(self.instructions[pc])
                alert = w.alert
                if alert and not entry[1].isdisjoint(alert):
                    after = self.examine(w, pc)
                    result = entry[0](w)
                    after()
                else:
                    result = entry[0](w)
                if result is None:
                    pc += 1
                elif type(result) is int and result >= 0:
                    pc = result
                elif result == Signal.YIELD:
                    pc += 1
                    break
                elif result == Signal.END:
                    w.pc = pc
                    self._end(w)
                    return False
                elif result == Signal.BARRIER:
                    w.pc = pc + 1
                    self._arrive(w)
                    return False
                else:
                    w.pc = pc
                    pc = self._diverge(w, result)
                    count = w.count
                if pc == w.meet and joins:
                    w.pc = pc
                    self._meet(w)
                    count = w.count
        except errors.EmulatorError as error:
            if error.located:
                raise
            raise self.error(type(error), self.instructions[pc], w, 0, None, str(error)) from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # what no instruction here foresaw
            ins = self.instructions[min(pc, len(self.instructions) - 1)]
            message = f"{type(error).__name__}: {error}"
            raise self.error(errors.UnsupportedInstruction, ins, w, 0, None, message) from error
        finally:
            self.steps += steps
        w.pc = pc
        return True

    def _diverge(self, w: Waves, branch: Diverge) -> int:
        """Splits the group at a branch; the part that is behind goes on, the other waits for it. Returns where to go on."""
        other = w.split(branch.taken)
        following = w.pc + 1
        if branch.target is None:
            raise errors.UnsupportedInstruction(f"{self.instructions[w.pc].text}: targets differ between waves")
        forward = branch.target > w.pc
        if forward:  # w falls through, other has jumped ahead
            other.pc, other.meet = branch.target, w.meet
            self.queue.append(other)
            w.meet = branch.target
            return following
        # other loops back; let w be the looping part, so that the loop ends before the code behind it goes on
        w.__dict__, other.__dict__ = other.__dict__, w.__dict__
        other.pc = following
        self.queue.append(other)
        w.meet = following
        return branch.target

    def _meet(self, w: Waves) -> None:
        """Takes in groups that wait at this program counter."""
        for other in [o for o in self.queue if o.pc == w.pc]:
            if w.can_join(other):
                self.queue.remove(other)
                w.meet = other.meet if other.meet != w.pc else w.meet
                w.join(other)

    def _end(self, w: Waves) -> None:
        self.progress()
        np.add.at(self.ended, w.block, 1)
        self._check_barriers(w)
        for block in np.unique(w.block):
            if self.ended[block] == self.waves_per_block:
                self.free_slots.append(int(self.slots[block]))

    def _arrive(self, w: Waves) -> None:
        np.add.at(self.arrived, w.block, 1)
        for event in w.order:
            if event.granules is not None:  # not waited for: the write may land after the barrier
                self.lds.writer[event.granules] += 1 << 8
        self.waiting.append(w)
        self._check_barriers(w)
        self._open_barriers(w)

    def _check_barriers(self, w: Waves) -> None:
        stuck = (self.arrived > 0) & (self.ended > 0) & (self.arrived + self.ended == self.waves_per_block)
        if stuck.any():
            block = int(np.argmax(stuck))
            inside = next(o for o in self.waiting if (o.block == block).any())
            row = int(np.argmax(inside.block == block))
            message = f"{int(self.ended[block])} waves of the block ended without reaching the barrier"
            raise self.error(errors.DivergentBarrier, self.instructions[inside.pc - 1], inside, row, None, message)

    def _open_barriers(self, w: Waves) -> None:
        complete = self.arrived == self.waves_per_block
        if not complete[w.block].any():
            return
        opened: list[Waves] = []
        for group in list(self.waiting):
            ready = complete[group.block]
            if ready.all():
                self.waiting.remove(group)
                opened.append(group)
            elif ready.any():
                opened.append(group.split(ready))
        self.counters.barriers += int(complete.sum())
        self.epochs[complete] += 1
        for block in np.flatnonzero(complete).tolist():
            self.space.pass_barrier(block, range(block * self.waves_per_block, (block + 1) * self.waves_per_block))
        self.arrived[complete] = 0
        self.progress()
        if self.rng is not None:
            self.queue.extend(opened)
            return
        joined: list[Waves] = []
        for group in opened:
            group.meet = -1
            host = next((j for j in joined if j.can_join(group) and j.count + group.count <= _GROUP), None)
            if host is None:
                joined.append(group)
            else:
                host.join(group)
        self.queue.extendleft(reversed(joined))


def _narrowest(mnemonic: str, prefixes: tuple[str, ...]) -> int:
    """Bytes of the narrowest access of such a memory instruction, at most 4."""
    if not mnemonic.startswith(prefixes):
        return 4
    for size, words in ((1, ("byte", "_b8", "_u8", "_i8")), (2, ("short", "_b16", "_u16", "_i16"))):
        if any(word in mnemonic for word in words):
            return size
    return 4


def _memory_kind(ins: Instruction) -> str:
    return {"GLOBAL": "vm", "MUBUF": "vm", "SCRATCH": "vm", "DS": "lds", "SMEM": "scalar", "FLAT": "flat"}.get(
        ins.encoding, ""
    )


CARRYING = ("v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64")


# 64-bit integer instructions: in the first set the low dword depends on low dwords alone, in the second the high on high ones
_CARRY_UP = {"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64"}
_CARRY_DOWN = {"v_lshrrev_b64", "v_ashrrev_i64"}


def data_flow(ins: Instruction, reads: frozenset[int], writes: frozenset[int]) -> dict[int, frozenset[int]] | None:
    """Which source registers each written register depends on; None if an unwritten source is a fault in itself.

    Compilers compute with values that nothing wrote as long as nobody looks at the result, so arithmetic passes them on.
    Looking is: an address, data that leave the wave, a comparison, scalar arithmetic, a matrix instruction.
    """
    name = ins.mnemonic
    if name.startswith(("s_mov_b", "s_cselect", "ds_bpermute", "ds_permute", "ds_swizzle")):
        return {code: reads for code in writes}
    if not ins.encoding.startswith("VOP") or name.startswith(("v_cmp", "v_mfma", "v_smfmac")):
        return None
    vdst = ins.operands.get("vdst")
    if name in CARRYING and vdst.dwords == 2:  # no low half depends on a high one
        low = {code for operand in ins.sources for code in operand.registers[:1]}
        return {vdst.code: frozenset(low), vdst.code + 1: reads}
    if name in _CARRY_UP or name in _CARRY_DOWN:
        ends = vdst.registers if name in _CARRY_UP else vdst.registers[::-1]
        unused = 1 if name in _CARRY_UP else 0
        near = reads - {o.registers[unused] for o in ins.sources if o.dwords == 2 and o.registers}
        return {code: near if code == ends[0] else reads for code in writes}
    if vdst is None or vdst.dwords != 2 or name not in valu.HALVES:
        return {code: reads for code in writes}
    select = (ins.fields.get("opsel", 0), ins.fields.get("opsel_hi", 3) | ins.fields.get("opsel_hi2", 1) << 2)
    flow: dict[int, frozenset[int]] = {}
    for half in (0, 1):
        sources = set()
        for position, operand in enumerate(ins.sources):
            if name == "v_pk_mov_b32" and position != half:
                continue
            chosen = half if name == "v_mov_b64" else select[0 if name == "v_pk_mov_b32" else half] >> position & 1
            sources |= set(operand.registers[chosen : chosen + 1])
        flow[vdst.code + half] = frozenset(sources)
    return flow


def effects(ins: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """The codes of the registers that an instruction reads and writes, EXEC left out."""
    reads: set[int] = set()
    writes: set[int] = set()
    name, operands = ins.mnemonic, ins.operands
    is_memory = ins.encoding in access.BINDERS
    for field_name, operand in operands.items():
        registers = set(operand.registers)
        if field_name in ("vdst", "sdst", "sdata"):
            writes |= registers
        elif field_name == "vdata":
            if "load" in name or ("atomic" in name and ins.fields["sc0"]):
                writes |= registers
            if "load" not in name:
                reads |= registers
        else:
            reads |= registers
    if is_memory and "atomic" in name and not ins.fields.get("sc0"):
        writes -= set(operands["vdst"].registers) if "vdst" in operands else set()
    if "store" in name and is_memory:
        writes.clear()
    entry, scalar = valu.VECTOR.get(name), salu.SCALAR.get(name)
    if (entry and "accumulates" in entry.flags) or name.startswith(("v_smfmac", "v_pk_fmac", "v_swap", "v_permlane")):
        reads |= set(operands["vdst"].registers)
    for scale in ("scale_src0", "scale_src1"):
        code = ins.fields.get(scale, 0)
        reads |= {code} if code >= VGPR or code < 128 and scale in ins.fields else set()
    if name.startswith(("v_swap", "v_permlane")):
        writes |= set(operands["src0"].registers)
    if entry and "reads_vcc" in entry.flags or name.startswith("s_cbranch_vcc"):
        reads |= {VCC, VCC + 1}
    if scalar and scalar.accumulates:
        reads |= set(operands["sdst"].registers)
        if scalar.scc == "only":
            writes.clear()
    if name == "s_setreg_b32":
        reads, writes = reads | writes, set()
    if "gpr_idx" in ins.fields:  # which registers an indexed move touches is not known here
        if "vdst" not in operands:
            writes = {M0}
        elif ins.fields["gpr_idx"] & 1:
            reads = {M0}
        else:
            reads, writes = reads | {M0}, set()
    if "_lds_" in name or (ins.encoding == "MUBUF" and ins.fields.get("lds")):
        reads.add(M0)
    beyond = {EXEC, EXEC + 1} | set(range(108, 124)) | set(range(102, 106)) | {125}
    return frozenset(reads - beyond), frozenset(writes - beyond)


@dataclasses.dataclass(frozen=True)
class Options:
    """races: report races. seed: run waves in a random order instead of together. patience: instructions without progress
    before a deadlock is reported. traffic: count what each block moves of each tensor. preloads_arguments: whether firmware leaves a
    kernel's first arguments in SGPRs, as it does since ROCm 6. compute_units and lds_bytes: the chip, for how many blocks are
    resident at once."""

    races: bool = True
    seed: int | None = None
    patience: int = 200_000
    traffic: bool = False
    preloads_arguments: bool = True
    compute_units: int = 304
    lds_bytes: int = 65536

    def resident_blocks(self, kernel: KernelObject, waves_per_block: int, lds: int) -> int:
        """Blocks that the chip holds at once, as registers and LDS limit them."""
        blocks = max(1, 4 * kernel.waves_per_simd // waves_per_block)
        if lds:
            blocks = max(1, min(blocks, self.lds_bytes // lds))
        return blocks * self.compute_units


class Emulator:
    """A CPU device for one architecture, by a name that arch.named takes ("gfx950:3" has 3 compute units): an executor of
    `vllm_rocm_ops.launch.Launch`.

    `options` are those of `Options`. `last` is the last launch's `Counters`, `history` those of all launches with their
    symbols.
    """

    def __init__(self, arch_name: str, **options):
        from vllm_rocm_ops import arch

        self.arch = arch.named(arch_name)
        self.options = Options(compute_units=self.arch.compute_units, lds_bytes=self.arch.lds_bytes, **options)
        self.last: Counters | None = None
        self.history: list[tuple[str, Counters]] = []
        self._objects: dict[tuple, CodeObject] = {}
        self._programs: dict[tuple, Program] = {}

    def launch(self, launch, uninitialised: tuple = ()) -> None:
        """Runs a launch of an op's module."""
        from vllm_rocm_ops.launch import code_object

        self.run(code_object(launch.module, self.arch.name), launch, uninitialised)

    def run(
        self,
        path: Path | str,
        launch,
        uninitialised: tuple = (),
        blocks: Sequence[int] | None = None,
        beside: Sequence = (),
    ) -> Counters:
        """Runs a launch of the code object at `path`; of its blocks only those given, as if the others were late. `beside` are
        launches that differ in their arguments alone and run at the same time, as launches on several streams do."""
        program = self.program(path, launch.symbol)
        kernel = program.object
        threads = int(np.prod(launch.block))
        if threads > kernel.max_block or not threads:
            raise errors.LaunchError(
                f"{launch.symbol}: block must be at most {kernel.max_block} threads, got {launch.block}"
            )
        if kernel.lds + launch.lds > self.arch.lds_bytes:
            raise errors.LaunchError(
                f"{launch.symbol}: lds must be at most {self.arch.lds_bytes}, got {kernel.lds + launch.lds}"
            )
        if not int(np.prod(launch.grid)):
            raise errors.LaunchError(f"{launch.symbol}: grid must be positive, got {launch.grid}")
        waves = int(np.prod(launch.grid)) * -(-threads // LANES) * (1 + len(beside))
        traffic = Traffic(waves) if self.options.traffic else None
        space = Space(program.space_granule, self.options.races, traffic)
        assert space.add_bytes("the code object", bytes(program.code_object.relocated(program.base))) == program.base
        kernargs = [self._kernarg(space, each, kernel, uninitialised) for each in (launch, *beside)]
        self.last = program.launch(launch, space, kernargs, self.options, blocks)
        self.history.append((launch.symbol, self.last))
        return self.last

    def _kernarg(self, space: Space, launch, kernel: KernelObject, uninitialised: tuple) -> int:
        import torch

        from vllm_rocm_ops.launch import I64, pack

        tensors = [(f"argument {i}", arg) for i, arg in enumerate(launch.args) if isinstance(arg, torch.Tensor)]
        space.add_tensors(tensors, uninitialised)
        args = tuple(I64(space.address(arg)) if isinstance(arg, torch.Tensor) else arg for arg in launch.args)
        content = pack(args)
        explicit = [arg for arg in kernel.metadata.get(".args", ()) if not arg[".value_kind"].startswith("hidden_")]
        expected = max((arg[".offset"] + arg[".size"] for arg in explicit), default=0)
        if len(content) != expected:
            raise errors.LaunchError(f"{launch.symbol}: args must be {expected} bytes, got {len(content)}")
        # the segment is allocated in 64-byte lines, and compilers read to their ends
        size = -(-max(kernel.kernarg_size, 1) // 64) * 64
        content = bytearray(content.ljust(size, b"\0"))
        for arg in kernel.metadata.get(".args", ()):
            kind, axis = arg[".value_kind"][:-2], "xyz".find(arg[".value_kind"][-1])
            hidden = {"hidden_block_count": launch.grid, "hidden_group_size": launch.block}
            if kind in hidden:
                value = hidden[kind][axis].to_bytes(arg[".size"], "little")
                content[arg[".offset"] : arg[".offset"] + arg[".size"]] = value
        return space.add_bytes("the kernel arguments", bytes(content))

    def program(self, path: Path | str, symbol: str) -> Program:
        """The bound kernel; cached until the file changes."""
        path = Path(path)
        stamp = (path, path.stat().st_mtime_ns, path.stat().st_size)
        code = self._objects.get(stamp)
        if code is None:
            code = self._objects[stamp] = CodeObject(path)
            if code.arch != self.arch.name:
                raise errors.LaunchError(f"{path} must be compiled for {self.arch.name}, got {code.arch}")
        key = (*stamp, symbol)
        if key not in self._programs:
            if symbol not in code.kernels:
                raise errors.LaunchError(f"{path} must hold {symbol}, got {sorted(code.kernels)}")
            self._programs[key] = Program(code, symbol, self.arch.name)
        return self._programs[key]
