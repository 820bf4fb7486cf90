"""Hold the architectural state of waves in lockstep: one program counter, numpy arrays over [waves, 64 lanes]."""

from __future__ import annotations

import functools

import numpy as np

LANES = 64
_FULL = b"\xff" * 8  # EXEC with all lanes
_NUMBERS = {"I": np.int32, "F": np.float32}
SGPRS = 128


@functools.cache
def _all_lanes(count: int) -> np.ndarray:
    lanes = np.ones((count, LANES), bool)
    lanes.setflags(write=False)
    return lanes


@functools.cache
def _everyone(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(count), LANES), np.tile(np.arange(LANES), count)


class _Columns(dict):
    """Map scalar register codes to [waves, 1] views, with a column per `step` registers."""

    __slots__ = ("columns", "step")

    def __init__(self, columns: np.ndarray, step: int):
        self.columns, self.step = columns, step

    def __missing__(self, code: int) -> np.ndarray:
        place = code // self.step
        self[code] = column = self.columns[:, place : place + 1]
        return column


class Waves:
    """Hold waves at one program counter.

    `U[i]`, `I[i]`, `F[i]` are VGPR i (AGPR i - 256 from 256 on) as uint32, int32 and float32 [waves, 64]; `S[i]` is SGPR i as uint32
    [waves, 1], `S64[i]` the pair at i (even) as uint64. `mask` is EXEC as bool [waves, 64], `full` whether all of it is set.
    """

    PER_WAVE = ("vgpr", "sgpr", "scc", "block", "wave", "id", "scratch")

    def __init__(self, scheduler, **state):
        self.scheduler = scheduler
        self.pc = 0
        self.meet = -1  # program counter at which waves that split off wait
        self.order: list = []  # memory events in flight, oldest first
        self.pending: dict[int, object] = {}  # register code -> its event in flight
        self.undefined: set[int] = set()  # register codes with lanes that were never written
        self.defined: dict[int, np.ndarray] = {}  # their written lanes
        self.alert: set[int] = set()  # undefined and pending
        self.looked = -1  # number of memory changes at the first load since the last s_sleep
        self.sleeps = False  # whether an s_sleep ended the last turn
        # per load since then: words.Words, words other than the awaited ones, and their values
        self.awaited: dict[int, tuple] = {}
        self._news = None
        self.mode = scheduler.kernel.float_mode
        for name in self.PER_WAVE:
            setattr(self, name, state[name])
        self._bind()

    def _bind(self) -> None:
        vgprs, agprs = self.scheduler.kernel.vgprs, self.scheduler.kernel.agprs
        self.count = self.vgpr.shape[1]
        self.U = self._named(list(self.vgpr), vgprs, agprs)
        self.__dict__.pop("I", None)
        self.__dict__.pop("F", None)
        self.S, self.S64 = _Columns(self.sgpr, 1), _Columns(self.sgpr.view(np.uint64), 2)
        self.exec_changed()

    @staticmethod
    def _named(rows: list, vgprs: int, agprs: int) -> list:
        return rows[:vgprs] + [None] * (256 - vgprs) + rows[vgprs : vgprs + agprs]

    def __getattr__(self, name: str):
        """Derive the views of EXEC and VGPRs lazily."""
        if name == "full":
            value = self.S64[126].tobytes() == _FULL * self.count
        elif name == "mask":
            value = _all_lanes(self.count) if self.full else self.lanes(126)
        elif name in _NUMBERS:
            vgprs, agprs = self.scheduler.kernel.vgprs, self.scheduler.kernel.agprs
            value = self._named(list(self.vgpr.view(_NUMBERS[name])), vgprs, agprs)
        else:
            raise AttributeError(name)
        self.__dict__[name] = value
        return value

    def exec_changed(self) -> None:
        """Invalidate `mask` and `full`; required after every write of EXEC."""
        self.__dict__.pop("full", None)
        self.__dict__.pop("mask", None)
        self._active = None

    def active(self) -> tuple[np.ndarray, np.ndarray]:
        """Return row and lane of every active lane, in order."""
        if self._active is None:
            self._active = _everyone(self.count) if self.full else np.nonzero(self.mask)
        return self._active

    def lanes(self, code: int) -> np.ndarray:
        """Return the SGPR pair at `code` as one bool per lane."""
        bits = self.sgpr[:, code : code + 2].copy().view(np.uint8)
        return np.unpackbits(bits, axis=1, bitorder="little").view(bool)

    @staticmethod
    def bits(lanes: np.ndarray) -> np.ndarray:
        """Pack one bool per lane into uint64 [waves, 1]."""
        return np.packbits(lanes, axis=1, bitorder="little").view(np.uint64)

    def write_scalar(self, code: int, value) -> None:
        """Write 32 bits to an SGPR, VCC, M0 or EXEC half."""
        self.S[code][...] = value
        if code >= 126:
            self.exec_changed()

    def write_pair(self, code: int, value) -> None:
        """Write 64 bits to an SGPR pair, VCC or EXEC."""
        self.S64[code][...] = value
        if code == 126:
            self.exec_changed()

    def forbid(self, code: int, lanes: np.ndarray) -> None:
        """Mark a VGPR as unwritten in these lanes."""
        defined = self.defined.get(code)
        if defined is None:
            defined = np.full((self.count, LANES), code not in self.undefined)
        self.defined[code] = defined & ~lanes
        self.undefined.add(code)
        self.alert.add(code)

    def news(self) -> tuple[bool, bool]:
        """Return whether any awaited word has changed, and whether each waiting load has a changed word."""
        awaited, news = self.awaited, self._news
        seen = next(iter(awaited.values()))[0].fabric.seen if awaited else 0
        if news is not None and news[0] is awaited and news[1] == seen:
            return news[3]
        versions = [words.version for words, _, _ in awaited.values()]
        if news is not None and news[0] is awaited and news[2] == versions:
            outcome = news[3]
        else:
            changed = [words.has_changed(places, values) for words, places, values in awaited.values()]
            outcome = any(changed), all(changed)
        self._news = awaited, seen, versions, outcome
        return outcome

    # Splitting and joining

    def split(self, chosen: np.ndarray) -> Waves:
        """Remove the chosen waves (bool [waves]), and return them at the same program counter."""
        whole = dict(self.__dict__)
        other = object.__new__(Waves)
        other.__dict__.update(whole)
        for waves, keep in ((other, chosen), (self, ~chosen)):
            waves.vgpr = np.ascontiguousarray(whole["vgpr"][:, keep])
            for name in self.PER_WAVE[1:]:
                setattr(waves, name, None if whole[name] is None else whole[name][keep])
            waves.defined = {code: lanes[keep] for code, lanes in whole["defined"].items()}
            waves.order = [event.part(keep) for event in whole["order"]]
            waves.pending = {code: event for event in waves.order for code in event.registers}
            waves.undefined, waves.alert = set(whole["undefined"]), set(whole["alert"])
            waves._bind()
        return other

    def can_join(self, other: Waves) -> bool:
        """True if both are at the same program counter with the same loads in flight."""
        return (
            self.pc == other.pc
            and self.mode == other.mode
            and [event.registers for event in self.order] == [event.registers for event in other.order]
        )

    def join(self, other: Waves) -> None:
        """Merge `other`'s waves."""
        for event, further in zip(self.order, other.order, strict=True):
            event.join(further, self.count, other.count)
        never = {
            code for code in self.undefined & other.undefined if not (code in self.defined or code in other.defined)
        }
        for code in (self.undefined | other.undefined) - never:
            lanes = [w.defined.get(code, np.full((w.count, LANES), code not in w.undefined)) for w in (self, other)]
            self.defined[code] = np.concatenate(lanes)
        self.undefined |= other.undefined
        self.looked, self.sleeps, self.awaited = min(self.looked, other.looked), False, {}
        self.alert = self.undefined | self.pending.keys()
        self.vgpr = np.concatenate([self.vgpr, other.vgpr], axis=1)
        for name in self.PER_WAVE[1:]:
            mine = getattr(self, name)
            setattr(self, name, mine if mine is None else np.concatenate([mine, getattr(other, name)]))
        self._bind()
