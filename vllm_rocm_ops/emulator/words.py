"""Uncached fine-grained memory, which several devices share: the store buffers of devices, and words that are data and flag.

A store stays in its device's store buffer and becomes visible after a random number of turns, in any order with other stores. An
s_waitcnt that completes a store at system scope (sc0 sc1) makes it visible; one below system scope stays until a buffer_wbl2 sc0 sc1.
A wave sees its own stores. Whatever is wider than 8 bytes, or not aligned to them, falls apart into pieces of at most 4 bytes.

An 8-byte access is taken for one of a word: a value in the low half and an epoch in the high half. Nothing but the word orders such
accesses. A launch awaits one epoch. A word is right if

- it is stored as one, at system scope, with the epoch of the launch, when its reader has read the one before;
- it is loaded as one, at system scope, and its value is used only if a store of the run gave it the awaited epoch. The value of any
  other word counts as never written; see sanitizer.py for what passes it on and what refuses it.

All other accesses follow coherence.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .coherence import SYSTEM
from .errors import SlotOverwritten, StaleRead, TornWord, WrongEpoch

_NEVER = np.int64(1) << 62
_ARRIVALS = 3  # how many times one store's pieces become visible at most
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Store(NamedTuple):
    """A store to shared memory: its instruction, its launch, its scope, and whether it stores words."""

    ins: object
    scheduler: object
    scope: int
    is_word: bool

    def __str__(self) -> str:
        return f"`{self.ins.text}`{self.scheduler.line(self.ins)} of {self.scheduler.name}"


@dataclass
class Held:
    """Pieces of one store, in a device's store buffer until their turn is due."""

    number: int  # in Traffic.stores
    clock: int
    size: int
    units: np.ndarray  # bytes of a unit
    values: np.ndarray
    waves: np.ndarray
    due: np.ndarray
    span: tuple[int, int]  # the first byte and the end

    def part(self, keep: np.ndarray) -> Held:
        """Return the pieces that `keep` chooses."""
        return Held(
            self.number,
            self.clock,
            self.size,
            self.units[keep],
            self.values[keep],
            self.waves[keep],
            self.due[keep],
            self.span,
        )


class Fabric:
    """The state that the shared regions of a run have in common: the turn, the stores, how many turns they take at most, and how often others run
    while one is on its way."""

    def __init__(self, rng: np.random.Generator, delay: int, pauses: float):
        self.rng, self.delay, self.pauses = rng, delay, pauses
        self.now = 0
        self.has_narrow = False  # whether a store was below system scope
        self.stores: list[Store] = [None]  # 0: before the run

    def note(self, ins, scheduler, scope: int, is_word: bool) -> int:
        """Return the number of a new store."""
        self.has_narrow |= scope < SYSTEM
        self.stores.append(Store(ins, scheduler, scope, is_word))
        return len(self.stores) - 1


class Words:
    """A shared region of one device. `sources` has by word and half which store is visible, `unread` whether the device has not read
    the last word that was stored."""

    def __init__(self, region, device: int, fabric: Fabric):
        self.region, self.device, self.fabric = region, device, fabric
        count = region.data.size // 8
        self.sources = np.zeros((count, 2), np.int32)
        self.unread = np.zeros(count, np.int32)  # the store that it has not read
        self.held: list[Held] = []
        self.next_due = _NEVER
        self.version = 0  # how often something became visible

    # Stores

    def store(self, offsets, values: np.ndarray, scope: int, w, where, rows) -> None:
        """Put [n, size] uint8 values into the store buffer."""
        fabric, scheduler, size = self.fabric, w.scheduler, values.shape[1]
        is_word = size == 8 and not (offsets & 7).any()
        number = fabric.note(where.ins, scheduler, scope, is_word)
        piece = 8 if is_word else min(4, size)
        units = (offsets // piece)[:, None] + np.arange(size // piece)
        data = np.ascontiguousarray(values).view(_WORD[piece]).ravel()
        units, waves = units.ravel(), np.repeat(w.id[rows], size // piece)
        if is_word:
            self._check_store(units, data, number, w, where)
        else:
            self._release(lambda held: np.isin(held.units * held.size >> 3, units * piece >> 3))
        due = np.full(len(units), _NEVER)
        if scope == SYSTEM:
            few = fabric.rng.integers(0, fabric.delay, _ARRIVALS)
            due = fabric.now + few[fabric.rng.integers(0, _ARRIVALS, len(units))]
            self.next_due = min(self.next_due, int(due.min()))
        clock = scheduler.space.coherence.clock
        where.pauses = bool(fabric.pauses and fabric.rng.random() < fabric.pauses)
        self.held.append(
            Held(
                number,
                clock,
                piece,
                units,
                data,
                waves,
                due,
                (int(units.min()) * piece, (int(units.max()) + 1) * piece),
            )
        )

    def _check_store(self, words, data, number: int, w, where) -> None:
        epoch, found = w.scheduler.place.epoch, data >> np.uint64(32)
        wrong = found != epoch
        if wrong.any():
            bad = int(np.argmax(wrong))
            message = f"{self._place(words[bad])} gets a word of epoch {int(found[bad])} in a launch of epoch {epoch}"
            raise where(WrongEpoch, bad, message)
        before = self.unread[words]
        if before.any():
            bad = int(np.argmax(before != 0))
            message = f"{self._place(words[bad])} is overwritten before device {self.device} has read what "
            raise where(SlotOverwritten, bad, f"{message}{self.fabric.stores[before[bad]]} stored")
        self.unread[words] = number

    def _apply(self, held: Held) -> None:
        self.region.views[held.size][held.units] = held.values
        if held.size == 8:
            self.sources[held.units] = held.number
        else:
            self.sources.ravel()[held.units * held.size >> 2] = held.number

    def _release(self, chosen) -> bool:
        """Make the pieces visible that `chosen` finds in each store; return whether there were any."""
        kept, released = [], False
        for held in self.held:
            out = chosen(held)
            if not out.any():
                kept.append(held)
                continue
            released = True
            if out.all():
                self._apply(held)
            else:
                self._apply(held.part(out))
                kept.append(held.part(~out))
        if released:
            self.held = kept
            self.version += 1
            self.next_due = min((int(held.due.min()) for held in kept), default=_NEVER)
        return released

    def settle(self) -> bool:
        """Make visible what is due; return whether anything was."""
        now = self.fabric.now
        return self.next_due <= now and self._release(lambda held: held.due <= now)

    def deliver(self, waves: np.ndarray, clock: int, scope: int) -> None:
        """Make visible what these waves stored before a clock, at this scope at least."""
        if not self.held:
            return
        stores = self.fabric.stores
        self._release(
            lambda held: (
                np.isin(held.waves, waves)
                if held.clock < clock and stores[held.number].scope >= scope
                else np.zeros(len(held.units), bool)
            )
        )

    def end(self, waves: range) -> int:
        """Take note that a launch with these waves has ended; return when all that it stored is visible."""
        last = 0
        for held in self.held:
            mine = (held.waves >= waves.start) & (held.waves < waves.stop)
            if mine.any():
                held.due[mine] = np.where(held.due[mine] == _NEVER, self.fabric.now, held.due[mine])
                last = max(last, int(held.due[mine].max()))
                self.next_due = min(self.next_due, int(held.due.min()))
        return last

    # Loads

    def see(self, offsets, size: int, w) -> None:
        """Let these waves see what they stored here themselves."""
        stores, first, last = self.fabric.stores, int(offsets[0]), int(offsets[-1]) + size
        if first > last:  # the lanes' addresses are in no order
            first, last = int(offsets.min()), int(offsets.max()) + size
        mine = [
            held
            for held in self.held
            if stores[held.number].scheduler is w.scheduler and held.span[0] < last and held.span[1] > first
        ]
        if mine:
            words = (offsets[:, None] + np.arange(size)) >> 3

            def own(held):
                if not any(held is each for each in mine):
                    return np.zeros(len(held.units), bool)
                return np.isin(held.waves, w.id) & np.isin(held.units * held.size >> 3, words)

            self._release(own)

    def load(self, offsets, size: int, scope: int, w, where, rows, is_flag: bool) -> np.ndarray | None:
        """Return the words at these offsets as [n, 8] uint8, if the access is one of words. `where.stale` then says which lanes may not use
        theirs."""
        self.see(offsets, size, w)
        words = offsets >> 3
        sources = self.sources[words]
        self._check_scope(words, sources, scope, w, where, is_flag)
        if size != 8 or (offsets & 7).any():
            if sources.any():
                self._check_parts(words, sources, where)
            return None
        torn = sources[:, 0] != sources[:, 1]
        if torn.any():
            bad = int(np.argmax(torn))
            newer, older = (self.fabric.stores[n] for n in sorted(sources[bad].tolist(), reverse=True))
            seen = "what was there before" if older is None else f"what {older} stored"
            raise where(TornWord, bad, f"{self._place(words[bad])} has one half that {newer} stored beside {seen}")
        values = self.region.views[8][words]
        fresh = (values >> np.uint64(32) == w.scheduler.place.epoch) & (sources[:, 0] > 0)
        if w.scheduler.device == self.device:
            self.unread[words[fresh]] = 0
        if fresh.all():
            if where.ins.address in w.awaited:
                w.awaited = {load: of for load, of in w.awaited.items() if load != where.ins.address}
            if w.scheduler.stale:
                for wave in w.id.tolist():
                    w.scheduler.stale.pop((wave, where.ins.address), None)
        else:
            where.stale = ~fresh
            w.awaited = {**w.awaited, where.ins.address: (self, words[~fresh], values[~fresh])}
            bad = int(np.argmin(fresh))
            w.scheduler.stale[int(w.id[rows[bad]]), where.ins.address] = (where.ins, self, int(words[bad]))
        return values.view(np.uint8).reshape(-1, 8)

    def _check_scope(self, words, sources, scope: int, w, where, is_flag: bool) -> None:
        """Refuse a load of a word, or of a flag, that may miss another device's store."""
        stores, device = self.fabric.stores, w.scheduler.device
        if scope == SYSTEM and not self.fabric.has_narrow:
            return
        for number in np.unique(sources).tolist():
            store = stores[number]
            if store is None or store.scheduler.device == device or not (store.is_word or is_flag):
                continue
            if min(scope, store.scope) < SYSTEM:
                bad = int(np.argmax((sources == number).any(axis=1)))
                self._raise_scope(store, scope, words[bad], bad, where)
        for held in self.held:
            store = stores[held.number]
            if store.scheduler.device != device and (store.is_word or is_flag) and min(scope, store.scope) < SYSTEM:
                missed = np.isin(words, held.units * held.size >> 3)
                if missed.any():
                    bad = int(np.argmax(missed))
                    self._raise_scope(store, scope, words[bad], bad, where)

    def _raise_scope(self, store, scope: int, word, bad: int, where) -> None:
        what = "the store has" if store.scope < SYSTEM else "this access has"
        message = f"{self._place(word)} was stored by {store}: {what} no sc0 sc1, so that devices may miss it"
        raise where(StaleRead, bad, message)

    def _check_parts(self, words, sources, where) -> None:
        for number in np.unique(sources).tolist():
            if number and self.fabric.stores[number].is_word:
                bad = int(np.argmax((sources == number).any(axis=1)))
                message = (
                    f"{self._place(words[bad])} is read in parts; {self.fabric.stores[number]} stored it as a word"
                )
                raise where(TornWord, bad, message)

    def has_changed(self, words, values) -> bool:
        """Return whether one of these words has another value than it had."""
        return bool((self.region.views[8][words] != values).any())

    def _place(self, word) -> str:
        return f"byte {8 * int(word) - self.region.start} of {self.region.name}"

    def awaited(self, word: int) -> str:
        """Describe the word that a wave waits for."""
        found = int(self.region.views[8][word]) >> 32
        source = self.fabric.stores[self.sources[word, 0]]
        by = f", stored by {source}" if source else ", which nothing stored"
        return f"{self._place(word)}, where it finds epoch {found}{by}"
