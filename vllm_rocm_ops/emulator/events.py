"""Track memory operations in flight, and apply s_waitcnt to them.

Data moves when the instruction issues; the destination is then invalid until s_waitcnt says that it has arrived. A store has read its
data by then: GFX9 needs no wait before a store's source is overwritten.
"""

from __future__ import annotations

import copy

import numpy as np

from .waves import LANES


class Event:
    """A memory operation in flight.

    `registers` arrive when it completes. `granules` [n, k] are the LDS that it writes, a row per active lane of the waves `rows` [n].
    `region` names the memory from which each wave, on average, has `size` bytes in flight. `clock` is the clock before a store.
    `acquired` and `written_back` are what waves then see and have written back. `stale` [waves, lanes] marks where the first
    register then holds a word that is not the awaited one.
    """

    __slots__ = (
        "acquired", "clock", "granules", "kind", "lgkm", "load", "region", "registers", "rows", "scalar", "size", "stale",
        "vm", "written_back",
    )  # fmt: skip

    def __init__(
        self, kind: str, registers=(), size: int = 0, load: bool = True, granules=None, rows=None, region="", clock=None
    ):
        self.kind, self.registers, self.size, self.load, self.region = kind, tuple(registers), size, load, region
        self.granules, self.rows, self.clock = granules, rows, clock
        self.acquired: list = []
        self.written_back: list = []
        self.stale: np.ndarray | None = None
        self.vm = kind in ("vm", "flat")
        self.lgkm = kind in ("lds", "scalar", "flat")
        self.scalar = kind == "scalar"

    def part(self, keep: np.ndarray) -> Event:
        """Return the event for the waves in `keep` (bool [waves])."""
        other = copy.copy(self)
        other.stale = None if self.stale is None else self.stale[keep]
        if self.granules is not None:
            chosen = keep[self.rows]
            other.granules, other.rows = self.granules[chosen], (np.cumsum(keep) - 1)[self.rows[chosen]]
        return other

    def join(self, other: Event, waves: int, count: int) -> None:
        """Merge the same event of `count` further waves into this one of `waves` waves."""
        self.acquired, self.written_back = self.acquired + other.acquired, self.written_back + other.written_back
        if self.stale is not None or other.stale is not None:
            stale = np.zeros((waves, LANES), bool) if self.stale is None else self.stale
            further = np.zeros((count, LANES), bool) if other.stale is None else other.stale
            self.stale = np.concatenate([stale, further])
        self.clock = min((event.clock for event in (self, other) if event.clock is not None), default=None)
        if self.granules is None or other.granules is None:
            further = other.granules, None if other.rows is None else other.rows + waves
            self.granules, self.rows = further if self.granules is None else (self.granules, self.rows)
            return
        self.granules = np.concatenate([self.granules, other.granules])
        self.rows = np.concatenate([self.rows, other.rows + waves])


def issue(w, event: Event) -> None:
    """Record a memory operation that s_waitcnt has to wait for."""
    w.order.append(event)
    for code in event.registers:
        w.pending[code] = event
    w.alert.update(event.registers)
    if not (event.load and event.vm):
        return
    counters, region = w.scheduler.counters, event.region
    loads = in_flight = 0
    for e in w.order:
        if e.load and e.vm:
            loads += 1
            if e.region == region:
                in_flight += e.size
    counters.loads_in_flight = max(counters.loads_in_flight, loads)
    counters.bytes_in_flight[region] = max(counters.bytes_in_flight[region], in_flight)


def wait(w, vm: int, lgkm: int) -> None:
    """Apply S_WAITCNT: at most `vm` vector and `lgkm` LDS or scalar operations stay in flight.

    Vector memory returns in order, LDS too. Scalar loads return in any order, so only lgkmcnt(0) completes anything while one is
    in flight.
    """
    order, scheduler = w.order, w.scheduler
    if not order:
        return
    excess_vm, excess_lgkm, is_scalar = -vm, -lgkm, False  # operations beyond the allowed ones
    for event in order:
        excess_vm += event.vm
        if event.lgkm:
            excess_lgkm += 1
            is_scalar |= event.scalar
    if lgkm and is_scalar:
        excess_lgkm = 0
    if excess_vm <= 0 and excess_lgkm <= 0:
        return
    waits_for_memory = excess_vm > 0
    kept, done, has_stored = [], [], False
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
        has_stored |= event.clock is not None
        for code in event.registers:
            if w.pending.get(code) is event:
                del w.pending[code]
                if code not in w.undefined:
                    w.alert.discard(code)
        if event.granules is not None and event.kind == "vm":
            scheduler.lds.in_flight[event.granules] = False
    if waits_for_memory and scheduler.counters.traffic is not None:
        scheduler.counters.traffic.wait(w.id, order, kept)
    w.order = kept
    for event in done:
        if event.stale is not None:
            w.forbid(event.registers[0], event.stale)
        if event.acquired:
            scheduler.space.coherence.acquire(w.id, event.acquired)
        if event.written_back:
            scheduler.space.coherence.has_written_back(w.id, event.written_back)
    if has_stored:
        scheduler.space.coherence.complete(w.id, next((event.clock for event in kept if event.clock is not None), None))
