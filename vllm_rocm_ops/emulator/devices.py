"""Emulate several GPUs in one address space, with queues of launches and random schedules."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from . import errors
from .counters import Counters
from .device import Emulator, tensors_of, waves_of
from .memory import Space
from .place import Place
from .program import Program
from .scheduler import Scheduler
from .words import Fabric, Words

MAX = 8
_DELAYS = (1, 8, 64, 512)  # maximum turns until a schedule's stores are visible
_STORES_PAUSE = (0.0, 0.0, 0.1, 0.5)  # probability that others run while a store is in flight
_SPREADS = (0.0, 1.0, 3.0)  # of the logarithm of the devices' speeds
_LOOKS = 1000  # instructions in which sleeping waves poll everything that they wait for
_PAUSES = (0, 0, 0, 20, 400)  # maximum turns between two launches of a queue


class _Queued(NamedTuple):
    program: Program
    path: Path
    launch: object
    epoch: int


class _Queue:
    """The launches that run one after another on a device."""

    def __init__(self, device: int):
        self.device = device
        self.launches: deque[_Queued] = deque()
        self.running: Scheduler | None = None
        self.begins = 0  # the first turn at which the next launch may begin
        self.before = range(0)  # the previous launch's waves


class Devices:
    """Emulate up to 8 GPUs of one architecture, each with its own XCDs and L2 caches.

    `share` makes a tensor uncached fine-grained memory, which is coherent between devices at system scope (words.py). Other
    tensors are cached memory. Each device has queues of launches, named by `stream`. Launches of a queue run one after another, all
    others concurrently. `seed` determines the schedule: the devices' speeds, start times, store latencies, and the order of waves.

    `options` go to `Options`. patience: instructions of every wave without a change before a deadlock is reported, far
    fewer if waves sleep. turns: maximum per wave, whatever changes.
    """

    def __init__(
        self, arch_name: str, count: int = 1, seed: int = 0, patience: int = 20_000, turns: int = 10_000, **options
    ):
        if not 1 <= count <= MAX:
            raise ValueError(f"devices must be 1 to {MAX}, got {count}")
        self.emulator, self.count, self.seed = Emulator(arch_name, **options), count, seed
        self.patience, self.turns = patience, turns
        self.arch = self.emulator.arch
        self._queues: dict[tuple[int, object], _Queue] = {}
        self._shared: list[tuple[int, torch.Tensor, str]] = []

    def share(self, device: int, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """Make a tensor uncached fine-grained memory of a device."""
        self._shared.append((device, tensor, name or f"shared memory of rank {device}"))
        return tensor

    def enqueue(self, device: int, path: Path | str, launch, epoch: int | None = None, stream=0) -> None:
        """Add a launch to a queue. `epoch` is the epoch of its words, by default the launch's number from 1."""
        queue = self._queues.setdefault((device, stream), _Queue(device))
        epoch = len(queue.launches) + 1 if epoch is None else epoch & 0xFFFFFFFF
        queue.launches.append(_Queued(self.emulator.checked(path, launch), Path(path), launch, epoch))

    def run(self, uninitialized: Sequence[torch.Tensor] = ()) -> list[Counters]:
        """Run all launches, and return their counters in the order in which they ended."""
        queues = list(self._queues.values())
        self._queues = {}
        run = _Run(self, queues, tuple(uninitialized))
        try:
            with np.errstate(all="ignore"):
                return run.run()
        finally:
            run.release()


class _Run:
    def __init__(self, devices: Devices, queues: list[_Queue], uninitialized: tuple):
        self.emulator, self.queues, self.patience = devices.emulator, queues, devices.patience
        self.rng, self.random = np.random.default_rng(devices.seed), random.Random(devices.seed)
        self.counted: list[Counters] = []
        self.fabric = Fabric(self.rng, self.random.choice(_DELAYS), self.random.choice(_STORES_PAUSE))
        queued = [entry for queue in queues for entry in queue.launches]
        if len({id(entry.program.code_object) for entry in queued}) > 1:
            raise errors.LaunchError("concurrent launches must be of one code object")
        self.space = self._space(devices, queues, queued, uninitialized)
        self.waves = sum(waves_of(entry.launch) for entry in queued)
        self.max_turns = devices.turns * self.waves
        self.room = [[1.0] for _ in range(devices.count)]
        spread, self.pause = self.random.choice(_SPREADS), self.random.choice(_PAUSES)
        speeds = [np.exp(spread * self.random.gauss(0, 1)) for _ in range(devices.count)]
        self.weights = [speeds[queue.device] for queue in queues]
        for queue in queues:
            queue.begins = self._pause()
        self.steps = self.changed_at = self.turns = 0
        self.is_lazy = self.random.random() < 0.75  # whether sleeping waves wake late
        self.is_forced = False  # whether sleeping waves run

    def _space(self, devices: Devices, queues: list[_Queue], queued: list[_Queued], uninitialized: tuple) -> Space:
        program = queued[0].program
        space = Space(min(entry.program.space_granule for entry in queued), self.emulator.options.races)
        assert space.add_bytes("the code object", bytes(program.code_object.relocated(program.base))) == program.base
        names = {tensor.data_ptr(): (tensor, name) for _, tensor, name in devices._shared}
        for queue in queues:
            for entry in queue.launches:
                for name, tensor in tensors_of(entry.launch):
                    names.setdefault(tensor.data_ptr(), (tensor, f"argument {name} of rank {queue.device}"))
        space.add_tensors([(name, tensor) for tensor, name in names.values()], uninitialized)
        for device, tensor, _ in devices._shared:
            region = space.regions[space.address(tensor) >> 36]
            region.words = Words(region, device, self.fabric)
            space.coherence.stores_held.append(region.words)
        space.watch(None)
        return space

    def release(self) -> None:
        """Break the cycles of memory, its words, their stores and the launches of these, which the collector would find late."""
        for words in self.space.coherence.stores_held:
            words.region.words = None
        vars(self.space).clear()

    def _pause(self) -> int:
        return self.fabric.now + (self.random.randrange(self.pause) if self.pause else 0)

    def run(self) -> list[Counters]:
        """Run turns until all launches have ended."""
        held, fabric = self.space.coherence.stores_held, self.fabric
        for _ in range(self.max_turns):  # counts turns without a runnable wave, too
            for words in held:
                if words.settle():
                    self.space.changes += 1
            for queue in self.queues:
                if queue.running is None and queue.launches and queue.begins <= fabric.now:
                    self._begin(queue)
            running = [i for i, queue in enumerate(self.queues) if queue.running]
            able = self._able(running)
            if self.is_forced:
                able = [i for i in running if not self.queues[i].running.has_none]
            later = [words.next_due for words in held if words.next_due < 1 << 62]
            later += [queue.begins for queue in self.queues if queue.running is None and queue.launches]
            if able and not (self.is_lazy and later and self._would_look_in_vain(able)):
                chosen = self._choose(able)
                fabric.now += 1
                self._turn(self.queues[chosen])
                continue
            if later:
                fabric.now = max(fabric.now, int((max if self.is_lazy else min)(later)))
            elif running:  # a wave may sleep before its first poll
                self.is_forced, self.changed_at = True, self.steps
            else:
                return self.counted
        raise self._deadlock(f"the launches have not ended after {self.max_turns} turns")

    def _able(self, running: list[int]) -> list[int]:
        """Return the queues with awake waves; in a lazy schedule, those that slept only if no other exists."""
        able = [i for i in running if not self.queues[i].running.is_waiting]
        if able and self.is_lazy:
            able = [i for i in able if not self.queues[i].running.has_slept] or able
            able = [i for i in able if not self.queues[i].running.looks_in_vain] or able
        return able

    def _would_look_in_vain(self, able: list[int]) -> bool:
        return all(self.queues[i].running.looks_in_vain for i in able)

    def _choose(self, able: list[int]) -> int:
        """Choose the next queue: at random, but round-robin if nothing has changed for long."""
        if len(able) == 1:
            return able[0]
        if self.is_forced or self.steps - self.changed_at > _LOOKS:
            self.turns += 1
            return able[self.turns % len(able)]
        return self.random.choices(able, [self.weights[i] for i in able])[0]

    def _begin(self, queue: _Queue) -> None:
        entry = queue.launches.popleft()
        kernarg = self.emulator.kernarg(self.space, entry.path, entry.launch, entry.program.object)
        # words reveal faults between devices; without them waves run separately
        joins = bool(self.space.coherence.stores_held) and self.random.random() < 0.9
        number, room = self.queues.index(queue), self.room[queue.device]
        place = Place(queue.device, number, entry.epoch, queue.before, self.waves, room, self.rng, joins)
        queue.running = Scheduler(entry.program, entry.launch, self.space, kernarg, self.emulator.options, None, place)

    def _turn(self, queue: _Queue) -> None:
        scheduler, changes, before = queue.running, self.space.changes, queue.running.steps
        scheduler.turn()
        self.steps += scheduler.steps - before
        if self.space.changes != changes:
            self.changed_at, self.is_forced = self.steps, False
        idle = self.steps - self.changed_at
        if idle > _LOOKS:
            patience = _LOOKS if self.is_forced else self.patience
            if idle > patience * sum(len(each.running.queue) + 1 for each in self.queues if each.running):
                raise self._deadlock(f"nothing has changed for {patience} instructions of every wave")
        if scheduler.is_done:
            self.counted.append(scheduler.finish())
            queue.before, queue.running = scheduler.waves, None
            visible = max((words.end(scheduler.waves) for words in self.space.coherence.stores_held), default=0)
            queue.begins = max(self._pause(), visible)

    def _deadlock(self, message: str) -> errors.Deadlock:
        waits = [queue.running.waits() for queue in self.queues if queue.running]
        return errors.Deadlock("\n".join((message, *waits)))
