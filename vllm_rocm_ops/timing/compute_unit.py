"""Simulate a compute unit: the waves of its blocks issue in order, each on its SIMD, subject to registers, waits and units.

Matrix instructions have priority. Among waves that could use a unit, the highest priority wins, then the oldest wave. Waves of a SIMD
issue to different units in the same cycle. A matrix instruction occupies the vector ALU while it issues, and the matrix unit for all its
cycles; packed arithmetic needs both.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from .hierarchy import Memory
from .machines import Machine
from .trace import Access, Block, Step

SIMDS = 4
VECTOR = frozenset(("valu", "wide", "transcendental", "packed", "matrix"))
RELEASE = "buffer_wbl2"
FENCES = (RELEASE, "buffer_inv")
NOTHING = Access()


class _Simd:
    __slots__ = ("lds", "lds_queue", "matrix", "matrix_wave", "scalar", "stores", "vector")

    def __init__(self):
        self.vector = self.matrix = self.scalar = self.lds = self.stores = 0.0
        self.matrix_wave: _Wave | None = None
        self.lds_queue: deque[float] = deque()


class _Group:
    """A block in flight."""

    __slots__ = ("arrived", "live", "waiting", "waves")

    def __init__(self, live: int):
        self.live, self.arrived = live, 0.0
        self.waiting: list[_Wave] = []
        self.waves: list[_Wave] = []


class _Wave:
    __slots__ = (
        "age", "awaited", "fetched", "group", "lgkm", "next", "position", "priority", "ready", "simd", "steps", "vm",
    )  # fmt: skip

    def __init__(self, steps: list[Step], simd: _Simd, group: _Group, age: int, start: float):
        self.steps, self.simd, self.group, self.age = steps, simd, group, age
        self.position = self.priority = 0
        self.next = self.fetched = start
        self.ready: dict = {}  # by register: (time written, time for a chained matrix instruction)
        self.vm: list[float] = []
        self.lgkm: list[float] = []
        self.awaited: dict[int, list[_Wave]] = {}  # by step: waves that read what it writes


class ComputeUnit:
    """Run blocks, `held` at once. `observe(wave's age, instruction's index, time)` is called at each issue."""

    def __init__(self, machine: Machine, memory: Memory, observe: Callable[[int, int, float], None] | None = None):
        self.machine, self.memory, self.observe = machine, memory, observe
        self.simds = [_Simd() for _ in range(SIMDS)]
        self.lds = 0.0
        self.code: dict[int, float] = {}
        self.waves = 0
        self.ends: list[float] = []  # of finished blocks
        self.heap: list = []

    def run(
        self,
        blocks: Iterable[Block],
        starts: Iterable[float],
        held: int,
        others: Callable[[int, int], float] | None = None,
    ) -> float:
        """Return the cycles until the last block has ended and its stores are complete.

        `starts` are the times at which the dispatcher offers each block. `others(place, running)` returns the blocks on the chip per
        block of this compute unit.
        """
        machine, memory, heap = self.machine, self.memory, self.heap
        ahead = deque(enumerate(zip(blocks, starts, strict=False)))
        running, end = 0, 0.0

        def start(time: float) -> None:
            nonlocal running
            place, (block, offered) = ahead.popleft()
            running += 1
            begin = max(time, offered) + machine["first_instruction"]
            group = _Group(len(block.waves))
            for steps in block.waves:
                wave = _Wave(steps, self.simds[self.waves % SIMDS], group, self.waves, begin)
                self.waves += 1
                group.waves.append(wave)
            for wave in group.waves:
                self._push(wave)
            if others:
                memory.others = others(place, running)

        for _ in range(min(held, len(ahead))):
            start(0.0)
        while heap:
            time, *_, wave = heapq.heappop(heap)
            ended = self._step(time, wave)
            if ended is not None:
                end = max(end, ended)
                wave.group.live -= 1
                self._open(time, wave.group)
                if not wave.group.live:
                    self.ends.append(end)
                    running -= 1
                    if ahead:
                        start(time + machine["dispatch"])
        return max(end, memory.drained)

    def _push(self, wave: _Wave) -> None:
        """Compute when the wave's next instruction could issue if all units were free, and queue it until then."""
        machine, (instr, access) = self.machine, wave.steps[wave.position]
        if access is not None and access.after is not None:
            writer, step = wave.group.waves[access.after[0]], access.after[1]
            if writer.position <= step:
                writer.awaited.setdefault(step, []).append(wave)
                return
        line = instr.address >> 6
        fetched = max(wave.fetched, wave.next - machine["fetch_ahead"])
        if line not in self.code:
            self.code[line] = fetched + (machine["fetch_new_line"] if wave.position else 0)
        crosses = instr.size == 8 and instr.address & 7
        fetched = wave.fetched = max(fetched, self.code[line]) + (machine["crossing"] if crosses else machine["issue"])
        time = max(wave.next, fetched)
        ready = wave.ready
        if ready:
            for code in instr.reads:
                if code in ready:
                    done, chain = ready[code]
                    if chain is not None and instr.kind == "matrix" and code in instr.chained:
                        done = chain
                    time = max(time, done)
        if instr.kind == "wait":
            for outstanding, allowed in ((wave.vm, instr.vm), (wave.lgkm, instr.lgkm)):
                if len(outstanding) > allowed:
                    time = max(time, outstanding[-(allowed + 1)])
                    del outstanding[: len(outstanding) - allowed]
        self._wait(time, wave, instr.kind)

    def _wait(self, time: float, wave: _Wave, kind: str) -> None:
        heapq.heappush(self.heap, (time, kind != "matrix", -wave.priority, wave.age, wave))

    def _step(self, time: float, wave: _Wave) -> float | None:
        """Issue a wave's next instruction or wait for its unit. Returns the time its stores complete if the wave has ended."""
        instr, access = wave.steps[wave.position]
        kind, simd, machine = instr.kind, wave.simd, self.machine
        busy = self._busy_until(kind, simd, wave, access)
        if busy > time:
            self._wait(busy, wave, kind)
            return None
        if self.observe:
            self.observe(wave.age, wave.position, time)
        wave.next = time + machine["issue"]
        if kind in VECTOR:
            self._vector(time, wave, instr)
        elif kind == "lds":
            self._lds(time, wave, access or NOTHING)
        elif kind == "vmem":
            self._vmem(time, wave, access, instr.text)
        elif kind == "smem":
            self._smem(time, wave, access)
        elif kind == "salu":
            simd.scalar = time + machine["issue"]
            for code in instr.writes:
                wave.ready[code] = time + machine["salu_latency"], None
        elif kind == "nop":
            wave.next = time + machine["issue"] * (instr.count + 1)
        elif kind == "sleep":
            wave.next = time + 64 * instr.count
        elif kind == "priority":
            wave.priority = instr.count & 3
        elif kind == "end":
            return max(time, wave.vm[-1] if wave.vm else 0.0)
        wave.position += 1
        for reader in wave.awaited.pop(wave.position - 1, ()) if wave.awaited else ():
            reader.next = max(reader.next, time + machine["issue"])
            self._push(reader)
        if wave.position == len(wave.steps):
            return max(time, wave.vm[-1] if wave.vm else 0.0)
        if kind == "branch" and wave.steps[wave.position][0].address != instr.address + instr.size:
            wave.next = wave.fetched = time + machine["branch"]
        if kind == "barrier":
            self._arrive(time, wave)
        else:
            self._push(wave)
        return None

    def _busy_until(self, kind: str, simd: _Simd, wave: _Wave, access: Access | None) -> float:
        """Return when the unit that an instruction needs is free."""
        if kind in VECTOR:
            if kind == "matrix":
                return max(simd.vector, simd.matrix)
            if kind == "packed" and simd.matrix > 0:
                again = self.machine["packed_after_matrix"] if simd.matrix_wave is wave else 0
                return max(simd.vector, simd.matrix + again)
            return simd.vector
        if kind == "salu":
            return simd.scalar
        if kind == "vmem" and access:
            return max(self.memory.room(), simd.stores if access.store else 0)
        if kind == "lds" and len(simd.lds_queue) >= self.machine["lds_queue"]:
            return simd.lds_queue[0]
        return 0.0

    def _vector(self, time: float, wave: _Wave, instr) -> None:
        machine, simd, kind, chain = self.machine, wave.simd, instr.kind, None
        if kind == "matrix":
            simd.vector = time + machine["matrix_issue"]
            simd.matrix, simd.matrix_wave = time + instr.cycles, wave
            done, chain = simd.matrix + machine["matrix_latency"], simd.matrix + machine["matrix_chain"]
        else:
            unit = {"wide": "wide_valu", "transcendental": "transcendental"}.get(kind, "valu")
            simd.vector = time + machine[unit]
            done = simd.vector + machine["valu_latency"] - machine["valu"]
        for code in instr.writes:
            wave.ready[code] = done, chain

    def _lds(self, time: float, wave: _Wave, access: Access) -> None:
        machine, simd = self.machine, wave.simd
        begin = max(time, self.lds, simd.lds)
        self.lds = begin + access.cycles
        simd.lds = begin + max(access.bytes / machine["lds_wave_bytes"], access.cycles)
        queue = simd.lds_queue
        queue.append(begin)
        if len(queue) > machine["lds_queue"]:
            queue.popleft()
        _complete(wave.lgkm, simd.lds + machine["lds_latency"])

    def _vmem(self, time: float, wave: _Wave, access: Access | None, text: str) -> None:
        if text.startswith(FENCES):
            _complete(wave.vm, self.memory.fence(time, text.startswith(RELEASE)))
        elif access is None:  # no active lane
            _complete(wave.vm, time)
        elif access.store:
            wave.simd.stores = time + access.bytes / self.machine["vmem_bytes"]
            _complete(wave.vm, self.memory.store(time, access))
        else:
            _complete(wave.vm, self.memory.load(time, access))

    def _smem(self, time: float, wave: _Wave, access: Access | None) -> None:
        done = time + self.machine["scalar_latency"]
        for line in access.lines if access else ():
            if ("scalar", line) not in self.code:
                self.code["scalar", line] = time + self.machine["scalar_l2"]
            done = max(done, self.code["scalar", line])
        _complete(wave.lgkm, done)

    def _arrive(self, time: float, wave: _Wave) -> None:
        wave.group.waiting.append(wave)
        self._open(time, wave.group)

    def _open(self, time: float, group: _Group) -> None:
        """Release a block's waves if all live ones are at the barrier; the last arrived, or ended, at `time`."""
        group.arrived = max(group.arrived, time)
        if group.waiting and len(group.waiting) == group.live:
            waiting, group.waiting = group.waiting, []
            for wave in waiting:
                wave.next = max(wave.next, group.arrived + self.machine["barrier"])
                self._push(wave)


def _complete(outstanding: list[float], time: float) -> None:
    """Add an operation to those that return in order."""
    outstanding.append(max(time, outstanding[-1]) if outstanding else time)
