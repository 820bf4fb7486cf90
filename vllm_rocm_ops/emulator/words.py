"""Emulate uncached fine-grained memory shared by devices: their store buffers, and words of data and flag.

A store stays in its device's store buffer and becomes visible after a random number of turns, in any order with other stores. An
s_waitcnt that completes a store at system scope (sc0 sc1) makes it visible; a store below system scope stays until a buffer_wbl2 sc0
sc1. A wave sees its own stores. Accesses wider than 8 bytes, or not aligned to them, are split into pieces of at most 4 bytes.

An 8-byte access counts as a word: a value in the low half and an epoch in the high half. Only the word itself orders such accesses.
Kernels access a payload, which flags order, by buffer instructions: theirs are none. A launch awaits one epoch. A word is used correctly
if

- it is stored as one, at system scope, with the epoch of the launch, once per epoch, after its reader has read the previous one;
- it is loaded as one, at system scope, and its value is used only if a store of the run gave it the awaited epoch. The value of any
  other word counts as never written; sanitizer.py defines what propagates it and what refuses it.

All other accesses follow coherence.py.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from .coherence import SYSTEM
from .errors import SlotOverwritten, StaleRead, TornWord, UnsupportedInstruction, WrongEpoch
from .memory import WORD

_NEVER = np.int64(1) << 62
_ARRIVALS = 3  # maximum number of times at which one store's pieces become visible


class Store(NamedTuple):
    """A store to shared memory: its instruction, launch and scope, and whether it stores words."""

    ins: object
    scheduler: object
    scope: int
    is_word: bool

    def __str__(self) -> str:
        return f"`{self.ins.text}`{self.scheduler.line(self.ins)} of {self.scheduler.name}"


class Held:
    """Hold pieces of one store in a device's store buffer until they are due."""

    __slots__ = ("_span", "clock", "due", "first_due", "number", "size", "store", "units", "values", "waves", "who")

    def __init__(self, number: int, store: Store, clock: int, who: frozenset, size: int, units, values, waves, due):
        self.number, self.store, self.clock = number, store, clock
        self.who, self.waves = who, waves  # waves that may have pieces, and each piece's wave
        self.size, self.units, self.values = size, units, values  # bytes per unit, the units and their new values
        self.due, self.first_due = due, int(due.min())
        self._span: tuple[int, int] | None = None

    def part(self, keep: np.ndarray) -> Held:
        """Return the pieces in `keep`."""
        other = copy.copy(self)
        other.units, other.values = self.units[keep], self.values[keep]
        other.waves, other.due = self.waves[keep], self.due[keep]
        other.first_due = int(other.due.min())
        return other

    def touches(self, first: int, last: int) -> bool:
        """True if the store has bytes in [first, last)."""
        if self._span is None:
            self._span = int(self.units.min()) * self.size, (int(self.units.max()) + 1) * self.size
        return self._span[0] < last and self._span[1] > first

    def of_waves(self, waves: np.ndarray) -> np.ndarray | bool:
        """Return which pieces these waves stored: all, none, or a bool for each."""
        chosen = self.who.intersection(waves.tolist())
        return len(chosen) == len(self.who) or bool(chosen) and np.isin(self.waves, waves)

    def in_words(self, words: np.ndarray) -> np.ndarray | bool:
        """Return which pieces are in these words: all, or a bool for each."""
        of_pieces = self.units * self.size >> 3
        return of_pieces.tobytes() == words.tobytes() or np.isin(of_pieces, words)

    def due_until(self, now: int) -> np.ndarray | bool:
        """Return which pieces are due."""
        return self.first_due <= now and self.due <= now


class Fabric:
    """The state common to a run's shared regions.

    It has the current turn, the stores, their maximum latency in turns, and the probability that others run while one is in flight.
    """

    def __init__(self, rng: np.random.Generator, delay: int, pauses: float):
        self.rng, self.delay, self.pauses = rng, delay, pauses
        self.now = 0
        self.seen = 0  # number of times that stores became visible
        self.has_narrow = False  # whether a store was below system scope
        self.stores: list[Store] = [None]  # 0: before the run

    def note(self, ins, scheduler, scope: int, is_word: bool) -> int:
        """Register a store and return its number."""
        self.has_narrow |= scope < SYSTEM
        self.stores.append(Store(ins, scheduler, scope, is_word))
        return len(self.stores) - 1


class Words:
    """A shared region of one device.

    `sources` has the number of the visible store by word and half, `pairs` likewise by word. `unread` has the last store to a word
    that the device has not read.
    """

    def __init__(self, region, device: int, fabric: Fabric):
        self.region, self.device, self.fabric = region, device, fabric
        count = region.data.size // 8
        self.sources = np.zeros((count, 2), np.int32)
        self.pairs = self.sources.view(np.int64)[:, 0]
        self.has_parts = False  # whether anything but words became visible
        self.unread = np.zeros(count, np.int32)
        self.stored = np.zeros(count, np.uint64)  # epoch and lane of the last store to a word
        self.held: list[Held] = []
        self.next_due = _NEVER
        self.version = 0  # number of times that stores became visible

    # Stores

    def store(self, offsets, values: np.ndarray, scope: int, is_word: bool, w, where) -> None:
        """Put [n, size] uint8 values into the store buffer. is_word: each is an aligned word."""
        fabric, scheduler, size = self.fabric, w.scheduler, values.shape[1]
        number = fabric.note(where.ins, scheduler, scope, is_word)
        piece, waves = 8 if is_word else min(4, size), w.id[where.rows]
        data = np.ascontiguousarray(values).view(WORD[piece]).ravel()
        if is_word:
            units = offsets >> 3
            self._check_store(units, data, number, w, where)
        else:
            units = ((offsets // piece)[:, None] + np.arange(size // piece)).ravel()
            waves = np.repeat(waves, size // piece)
        # stores to one place stay in order; the second of two words is refused
        self._release(lambda held: (held.size < 8 or not is_word) and held.in_words(units * piece >> 3))
        if scope == SYSTEM:
            drawn = fabric.rng.random(_ARRIVALS + len(units))
            few = fabric.now + (drawn[:_ARRIVALS] * fabric.delay).astype(np.int64)
            due = few[(drawn[_ARRIVALS:] * _ARRIVALS).astype(np.int64)]
        else:
            due = np.full(len(units), _NEVER)
        clock = scheduler.space.coherence.clock
        where.pauses = bool(fabric.pauses and fabric.rng.random() < fabric.pauses)
        held = Held(number, fabric.stores[number], clock, frozenset(w.id.tolist()), piece, units, data, waves, due)
        self.held.append(held)
        self.next_due = min(self.next_due, held.first_due)

    def _check_store(self, words, data, number: int, w, where) -> None:
        epoch, epochs = w.scheduler.place.epoch, data.view(np.uint32)[1::2]
        wrong = epochs != epoch
        if np.count_nonzero(wrong):
            bad = int(np.argmax(wrong))
            message = f"{self._place(words[bad])} gets a word of epoch {int(epochs[bad])} in a launch of epoch {epoch}"
            raise where(WrongEpoch, bad, message)
        before = self.unread[words]
        if np.count_nonzero(before):
            bad = int(np.argmax(before != 0))
            message = f"{self._place(words[bad])} is overwritten before device {self.device} has read what "
            raise where(SlotOverwritten, bad, f"{message}{self.fabric.stores[before[bad]]} stored")
        lanes = np.uint64(epoch << 32 | 1) + np.arange(len(words), dtype=np.uint64)
        again = self.stored[words] >> 32 == epoch
        self.stored[words] = lanes
        again |= self.stored[words] != lanes
        if np.count_nonzero(again):
            bad = int(np.argmax(again))
            raise where(SlotOverwritten, bad, f"{self._place(words[bad])} gets a second word of epoch {epoch}")
        self.unread[words] = number

    def _apply(self, held: Held) -> None:
        self.region.views[held.size][held.units] = held.values
        if held.size == 8:
            self.pairs[held.units] = held.number * 0x1_0000_0001
        else:
            self.has_parts = True
            self.sources.ravel()[held.units * held.size >> 2] = held.number

    def _release(self, chosen) -> bool:
        """Make the pieces in `chosen(held)` visible: all, none, or a bool for each. Returns whether there were any."""
        kept, released = [], False
        for held in self.held:
            out = chosen(held)
            if out is False or out is not True and not out.any():
                kept.append(held)
                continue
            released = True
            if out is True or out.all():
                self._apply(held)
            else:
                self._apply(held.part(out))
                kept.append(held.part(~out))
        if released:
            self.held = kept
            self.version += 1
            self.fabric.seen += 1
            self.next_due = min((held.first_due for held in kept), default=_NEVER)
        return released

    def settle(self) -> bool:
        """Make due stores visible, and return whether there were any."""
        now = self.fabric.now
        return self.next_due <= now and self._release(lambda held: held.due_until(now))

    def deliver(self, waves: np.ndarray, clock: int, scope: int) -> None:
        """Make visible what these waves stored before a clock, at this scope or wider."""
        if not self.held:
            return
        self._release(lambda held: held.clock < clock and held.store.scope >= scope and held.of_waves(waves))

    def end(self, waves: range) -> int:
        """End a launch with these waves, and return when all its stores are visible."""
        last = 0
        for held in self.held:
            mine = (held.waves >= waves.start) & (held.waves < waves.stop)
            if mine.any():
                held.due[mine] = np.where(held.due[mine] == _NEVER, self.fabric.now, held.due[mine])
                last = max(last, int(held.due[mine].max()))
                held.first_due = int(held.due.min())
                self.next_due = min(self.next_due, held.first_due)
        return last

    # Loads

    def see(self, offsets, size: int, w) -> None:
        """Make these waves' own stores at these offsets visible to them."""
        if not self.held:
            return
        first, last = int(offsets[0]), int(offsets[-1]) + size
        if first > last:  # the lanes' addresses are unordered
            first, last = int(offsets.min()), int(offsets.max()) + size
        mine = [held for held in self.held if held.store.scheduler is w.scheduler and held.touches(first, last)]
        if mine:
            is_word = size == 8 and not (offsets & 7).any()
            words = offsets >> 3 if is_word else (offsets[:, None] + np.arange(size) >> 3).ravel()
            self._release(lambda held: held in mine and held.of_waves(w.id) & held.in_words(words))

    def load(self, offsets, size: int, scope: int, is_word: bool, w, where, is_flag: bool) -> np.ndarray | None:
        """Return the words at these offsets as [n, 8] uint8 if each access is an aligned word, else None.

        `where.stale` then marks the lanes that must not use theirs.
        """
        self.see(offsets, size, w)
        words = offsets >> 3
        if scope < SYSTEM or self.fabric.has_narrow:
            self._check_scope(words, self.sources[words], scope, w, where, is_flag)
        pairs = self.pairs[words]
        if not is_word:
            if np.count_nonzero(pairs):
                self._check_parts(words, self.sources[words], where)
            return None
        if self.has_parts:
            self._check_torn(words, self.sources[words], where)
        values = self.region.views[8][words]
        fresh = values.view(np.uint32)[1::2] == w.scheduler.place.epoch
        fresh &= pairs != 0
        count, late, stale = np.count_nonzero(fresh), {}, w.scheduler.stale
        if count and w.scheduler.device == self.device:
            self.unread[words if count == len(words) else words[fresh]] = 0
        if count == len(words):
            if where.ins.address in w.awaited:
                w.awaited = {load: waited for load, waited in w.awaited.items() if load != where.ins.address}
        else:
            where.stale = ~fresh
            if where.ins.encoding != "GLOBAL":  # other loads cannot mark a value unusable
                raise where(UnsupportedInstruction, int(np.argmin(fresh)), "words are awaited with global_load")
            late_words, late_rows = words[where.stale], where.rows[where.stale]
            w.awaited = {**w.awaited, where.ins.address: (self, late_words, values[where.stale])}
            first = np.flatnonzero(late_rows[1:] != late_rows[:-1]) + 1  # lanes of a wave are adjacent
            late = {int(w.id[late_rows[lane]]): int(late_words[lane]) for lane in (0, *first.tolist())}
        for wave in w.id.tolist() if late or stale else ():
            if wave in late:
                stale.setdefault(wave, {})[where.ins.address] = (where.ins, self, late[wave])
            elif wave in stale:
                stale[wave].pop(where.ins.address, None)
                if not stale[wave]:
                    del stale[wave]
        return values.view(np.uint8).reshape(-1, 8)

    def _check_torn(self, words, sources, where) -> None:
        torn = sources[:, 0] != sources[:, 1]
        if torn.any():
            bad = int(np.argmax(torn))
            newer, older = (self.fabric.stores[n] for n in sorted(sources[bad].tolist(), reverse=True))
            seen = "what was there before" if older is None else f"what {older} stored"
            raise where(TornWord, bad, f"{self._place(words[bad])} has one half that {newer} stored beside {seen}")

    def _check_scope(self, words, sources, scope: int, w, where, is_flag: bool) -> None:
        """Raise for a load of a word, or of a flag, that may miss another device's store."""
        stores, device = self.fabric.stores, w.scheduler.device
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
        """True if one of these words has changed from `values`."""
        return self.region.views[8][words].tobytes() != values.tobytes()

    def _place(self, word) -> str:
        return f"byte {8 * int(word) - self.region.start} of {self.region.name}"

    def awaited(self, word: int) -> str:
        """Describe the word that a wave waits for."""
        epoch = int(self.region.views[8][word]) >> 32
        source = self.fabric.stores[self.sources[word, 0]]
        by = f", stored by {source}" if source else ", which nothing stored"
        return f"{self._place(word)}, where it finds epoch {epoch}{by}"
