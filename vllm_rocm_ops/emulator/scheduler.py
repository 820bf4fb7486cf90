"""Run a launch: its memory, its blocks, and the order of their waves.

Waves at the same program counter run together as one numpy operation over [waves, 64 lanes]. A divergent branch splits the group; a
common program counter joins it again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from . import errors, sanitizer
from .counters import Counters
from .decode import Operand
from .instructions.scalar import Diverge, Signal
from .lds import Lds
from .memory import Space
from .place import Place
from .program import Program
from .start import new_waves
from .waves import LANES, Waves

_QUANTUM = 4096  # instructions that a group runs per turn
_GROUP = 64  # waves that start as one group


class Scheduler:
    """Run the chosen blocks of a launch, by default all. `options` go to device.Options."""

    def __init__(
        self,
        program: Program,
        launch,
        space: Space,
        kernarg: int,
        options,
        chosen: Sequence[int] | None,
        place: Place | None = None,
    ):
        self.program, self.kernel = program, program.object
        threads = math.prod(launch.block)
        self.grid, self.block_size, self.threads = launch.grid, launch.block, threads
        self.waves_per_block = -(-threads // LANES)
        blocks = math.prod(launch.grid)
        self.space, self.kernarg, self.options, self.place = space, kernarg, options, place
        self.device = place.device if place else 0
        # wave -> address of a load -> the load of a word that is not the awaited one, its words.Words and the word
        self.stale: dict[int, dict[int, tuple]] = {}
        self.counters = Counters(program.arch, traffic=space.traffic, _patterns=space.patterns)
        self.counts = [0] * len(program.instructions)
        self.steps = self.last_progress = 0
        self.rng = None if options.seed is None else np.random.default_rng(options.seed)
        self.joins = self.rng is None
        if place:
            self.rng, self.joins = place.rng, place.joins
        self.epochs = np.ones(blocks, np.int64)
        self.arrived = np.zeros(blocks, np.int64)
        self.ended = np.zeros(blocks, np.int64)
        waves = blocks * self.waves_per_block
        after = place.after if place else range(0)
        self.first_wave, self.first_block = space.coherence.begin(self, waves, place.waves if place else waves, after)
        self.waves = range(self.first_wave, self.first_wave + waves)
        lds = self.kernel.lds + launch.lds
        order = np.arange(blocks) if chosen is None else np.array(chosen)
        self.held_blocks = options.resident_blocks(self.kernel, self.waves_per_block, lds)
        resident = min(len(order), self.held_blocks)
        self.resident = resident
        self.lds = Lds(resident, lds, program.lds_granule, options.races)
        self.lds.checked = not program.trusted
        self.slots = np.full(blocks, -1, np.int64)
        self.free_slots = list(range(resident))[::-1]
        self.next_blocks = deque((order if self.rng is None else self.rng.permutation(order)).tolist())
        self.queue: deque[Waves] = deque()
        self.waiting: list[Waves] = []

    def run(self) -> Counters:
        """Run all waves to their end."""
        with np.errstate(all="ignore"):
            while not self.is_done:
                self.turn()
        return self.finish()

    @property
    def is_done(self) -> bool:
        """True if all waves have ended."""
        return not (self.next_blocks or self.queue or self.waiting)

    def finish(self) -> Counters:
        """Return the counters."""
        self.counters.finish(self.program.instructions, self.counts)
        return self.counters

    def error(self, kind, ins, w, row: int, lane: int | None, message: str) -> errors.EmulatorError:
        """Return an error with its location."""
        where = self.wave_name(int(w.id[row])) + ("" if lane is None else f", lane {lane}")
        place = f"{self.kernel.name}+{ins.address - self.kernel.entry:#x} `{ins.text}`{self.line(ins)}"
        error = kind(f"{place}, {where}: {message}")
        error.located = True
        return error

    def unwritten(self, w, row: int, code: int) -> tuple[type[errors.EmulatorError], str]:
        """Return the error for a register without a value: never written, or a word that has not arrived."""
        name, mine = Operand(code, 1, "", 32), list(self.stale.get(int(w.id[row]), {}).values())
        if not mine or code not in w.defined:  # a never written register has no written lanes
            return errors.Uninitialized, f"{name} was never written"
        # other registers are computed from the first register of some load
        load, words, word = next((read for read in mine if read[0].operands["vdst"].code == code), mine[0])
        awaits = f"`{load.text}`{self.line(load)} awaits {words.awaited(word)}"
        return errors.StaleWord, f"{name} is computed from a word that has not arrived: {awaits}"

    def wave_name(self, wave: int) -> str:
        """Return the block and wave of a wave number."""
        block, wave = divmod(wave - self.first_wave, self.waves_per_block)
        x, y, _ = self.grid
        return f"{self.name}{', ' if self.name else ''}block ({block % x}, {block // x % y}, {block // x // y}), wave {wave}"

    @property
    def name(self) -> str:
        """Return the device and the epoch of the launch, if there are several devices."""
        return f"rank {self.device} in epoch {self.place.epoch}" if self.place else ""

    def line(self, ins) -> str:
        """Return the source line of an instruction, in parentheses, or ""."""
        source = self.program.code_object.lines.source_of(ins.address)
        return f" ({source})" if source else ""

    def progress(self) -> None:
        """Record a change that another wave may wait for."""
        self.last_progress = self.steps
        self.space.changes += 1

    def index_of(self, address: int) -> int:
        """Return the index of the instruction at a virtual address."""
        index = self.program.index_of(address)
        self.counts += [0] * (len(self.program.instructions) - len(self.counts))
        return index

    def is_asleep(self, w: Waves) -> bool:
        """True if waves sleep, and nothing that they wait for has changed since their last poll."""
        if not w.sleeps or not w.awaited:
            return w.sleeps and w.looked == self.space.changes
        return not w.news()[0]

    @property
    def is_waiting(self) -> bool:
        """True if all runnable waves sleep until something changes, or blocks wait for room on the device."""
        for w in self.queue:
            if not self.is_asleep(w):
                return False
        return bool(self.queue or not self.waiting) and not self._room()

    @property
    def has_none(self) -> bool:
        """True if there is neither a wave to run nor room for a block."""
        return not (self.queue or self.waiting or self._room())

    @property
    def looks_in_vain(self) -> bool:
        """True if all runnable waves sleep, and each has a load whose word is unchanged."""
        return self.has_slept and not any(w.news()[1] for w in self.queue)

    @property
    def has_slept(self) -> bool:
        """True if all runnable waves have stopped to sleep."""
        for w in self.queue:
            if not w.sleeps:
                return False
        return bool(self.queue) and not self._room()

    def turn(self) -> None:
        """Run a group of waves for a quantum."""
        if not self.queue and not self._start():
            raise self._deadlock(self.waiting[0], "no wave can run")
        if self.rng is not None and len(self.queue) > 1:
            self.queue.rotate(int(self.rng.integers(len(self.queue))))
        if self.place:
            for _ in range(len(self.queue) - 1):
                if not self.is_asleep(self.queue[0]):
                    break
                self.queue.rotate(-1)
        w = self.queue.popleft()
        quantum = _QUANTUM if self.rng is None else int(self.rng.integers(1, 200))
        if self._run(w, quantum):
            self.queue.append(w)
            self._start()
            if not self.place and self.steps - self.last_progress > self.options.patience * (len(self.queue) + 1):
                raise self._deadlock(w, f"nothing has changed for {self.options.patience} instructions of every wave")

    def _deadlock(self, w, message: str):
        return self.error(errors.Deadlock, self._instruction_of(w), w, 0, None, message)

    def _instruction_of(self, w: Waves):
        return self.program.instructions[max(0, w.pc - 1) if w in self.waiting else w.pc]

    def waits(self) -> str:
        """Describe what the launch waits for: words, or a wave's position; and room."""
        stale = [read for of_wave in self.stale.values() for read in of_wave.values()][-1:]
        said = [f"`{load.text}`{self.line(load)} awaits {words.awaited(word)}" for load, words, word in stale]
        for w in (*self.queue, *self.waiting)[: not said]:
            ins = self._instruction_of(w)
            said.append(f"{self.wave_name(int(w.id[0]))} is at `{ins.text}`{self.line(ins)}")
        if self.next_blocks:
            said.append(f"{len(self.next_blocks)} blocks wait for the {self.resident} resident ones")
        return f"{self.name}: {'; '.join(said)}"

    def _room(self) -> int:
        """Return how many blocks can start."""
        if not self.next_blocks:
            return 0
        count = min(len(self.next_blocks), len(self.free_slots), max(1, _GROUP // self.waves_per_block))
        if count and self.place and self.place.room:
            count = min(count, int(self.place.room[0] * self.held_blocks + 1e-6))
        return count

    def _start(self) -> bool:
        """Start the next blocks that fit, and return whether there were any."""
        count = self._room()
        if not count:
            return False
        if self.place and self.place.room:
            self.place.room[0] -= count / self.held_blocks
        blocks = np.array([self.next_blocks.popleft() for _ in range(count)])
        for block in blocks:
            self.slots[block] = self.free_slots.pop()
            self.lds.clear(self.slots[block])
        waves = new_waves(self, blocks)
        if self.joins:
            self.queue.append(waves)
            return True
        while waves.count > 1:
            chosen = np.zeros(waves.count, bool)
            chosen[self.rng.choice(waves.count, int(self.rng.integers(1, waves.count)), replace=False)] = True
            self.queue.append(waves.split(chosen))
        self.queue.append(waves)
        return True

    def _run(self, w: Waves, quantum: int) -> bool:
        """Run a group until it ends, waits or its quantum is over, and return whether it can continue."""
        bound, counts = self.program.bound, self.counts
        pc, count = w.pc, w.count
        joins = self.joins
        if w.sleeps:
            w.sleeps, w.looked, w.awaited = False, -1, {}
        steps = 0
        try:
            while steps < quantum:
                steps += 1
                counts[pc] += count
                entry = bound[pc]
                if entry is None:
                    entry = bound[pc] = self.program.bind(self.program.instructions[pc])
                alert = w.alert
                if alert and not entry[1].isdisjoint(alert):
                    after = sanitizer.examine(w, self.program.instructions[pc], entry)
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
                    w.sleeps = True
                    break
                elif result == Signal.PAUSE:
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
            raise self.error(type(error), self.program.instructions[pc], w, 0, None, str(error)) from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # unexpected by any instruction
            ins = self.program.instructions[min(pc, len(self.program.instructions) - 1)]
            message = f"{type(error).__name__}: {error}"
            raise self.error(errors.UnsupportedInstruction, ins, w, 0, None, message) from error
        finally:
            self.steps += steps
        w.pc = pc
        return True

    def _diverge(self, w: Waves, branch: Diverge) -> int:
        """Split the group at a branch. The part that is behind continues at the returned index, the other waits for it."""
        other = w.split(branch.taken)
        following = w.pc + 1
        if branch.target is None:
            raise errors.UnsupportedInstruction(f"{self.program.instructions[w.pc].text}: targets differ between waves")
        forward = branch.target > w.pc
        if forward:  # w falls through, other has jumped ahead
            other.pc, other.meet = branch.target, w.meet
            self.queue.append(other)
            w.meet = branch.target
            return following
        # other loops back; let w be the looping part, so that the loop ends before the code after it continues
        w.__dict__, other.__dict__ = other.__dict__, w.__dict__
        other.pc = following
        self.queue.append(other)
        w.meet = following
        return branch.target

    def _meet(self, w: Waves) -> None:
        """Merge the groups that wait at this program counter."""
        for other in [o for o in self.queue if o.pc == w.pc]:
            if w.can_join(other):
                self.queue.remove(other)
                w.meet = other.meet if other.meet != w.pc else w.meet
                w.join(other)

    def _end(self, w: Waves) -> None:
        self.progress()
        for wave in w.id.tolist() if self.stale else ():
            self.stale.pop(wave, None)
        np.add.at(self.ended, w.block, 1)
        self._check_barriers(w)
        for block in np.unique(w.block):
            if self.ended[block] == self.waves_per_block:
                self.free_slots.append(int(self.slots[block]))
                if self.place and self.place.room:
                    self.place.room[0] += 1 / self.held_blocks

    def _arrive(self, w: Waves) -> None:
        np.add.at(self.arrived, w.block, 1)
        for event in w.order:
            if event.granules is not None:  # not waited for: the write may arrive after the barrier
                self.lds.writer[event.granules] += 1 << 8
        self.waiting.append(w)
        self._check_barriers(w)
        if not self.program.trusted:
            self._open_barriers(w)

    def _check_barriers(self, w: Waves) -> None:
        if self.program.trusted:  # hardware barriers do not wait for ended waves
            self._open_barriers(w)
            return
        stuck = (self.arrived > 0) & (self.ended > 0) & (self.arrived + self.ended == self.waves_per_block)
        if stuck.any():
            block = int(np.argmax(stuck))
            inside = next(o for o in self.waiting if (o.block == block).any())
            row = int(np.argmax(inside.block == block))
            message = f"{int(self.ended[block])} waves of the block ended without reaching the barrier"
            raise self.error(
                errors.DivergentBarrier, self.program.instructions[inside.pc - 1], inside, row, None, message
            )

    def _open_barriers(self, w: Waves) -> None:
        ended = self.ended if self.program.trusted else 0
        complete = (self.arrived + ended == self.waves_per_block) & (self.arrived > 0)
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
            self.space.coherence.pass_barrier(
                self.first_block + block, self.waves[block * self.waves_per_block :][: self.waves_per_block]
            )
        self.arrived[complete] = 0
        self.progress()
        if not self.joins:
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
