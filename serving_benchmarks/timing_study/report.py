"""Report on a calibration: errors of its points, their ranking, and sensitivities."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm_rocm_ops.timing.machines import Machine

HALVES = ("fit", "held out")
APART = 0.10  # relative difference of two measured times from which on their order is judged
CHANGE = 0.2  # of a fitted constant, for its sensitivity


class Case(NamedTuple):
    """A published time and its prediction, both in us.

    `megabytes` is the memory traffic, `blocks` the number of blocks of the fullest compute unit. It is a row of
    `points` in calibration.json in this folder.
    """

    kind: str
    kernel: str
    m: int
    n: int
    k: int
    half: str
    us: float
    predicted: float
    megabytes: float
    blocks: int


def errors(cases: Sequence[Case]) -> dict:
    """Return the relative errors of some points; for the short ones also in us.

    They are quantiles of |log(predicted / measured)|.
    """
    of = [abs(math.log(case.predicted / case.us)) for case in cases]
    above = [error for error, case in zip(of, cases, strict=True) if case.us >= 5]
    below = [abs(case.predicted - case.us) for case in cases if case.us < 5]
    return {
        "points": len(of),
        "median": _ratio(statistics.median(of)),
        "p90": _ratio(sorted(of)[max(0, math.ceil(0.9 * len(of)) - 1)]),
        "largest": _ratio(max(of)),
        "median_above_5us": _ratio(statistics.median(above)) if above else None,
        "median_us_below_5us": round(statistics.median(below), 2) if below else None,
    }


def _ratio(log: float) -> float:
    return round(math.expm1(log), 3)


def ranks(cases: Sequence[Case], same_shape: bool = False) -> dict:
    """Return the pairs whose measured times are `APART`, and how many of them the predictions order correctly.

    With `same_shape`, pairs are of different kernels for the same op on the same M, N and K.
    """
    pairs = right = 0
    for one, other in itertools.combinations(cases, 2):
        if max(one.us, other.us) <= (1 + APART) * min(one.us, other.us):
            continue
        if same_shape and ((one.kind, *one[2:5]) != (other.kind, *other[2:5]) or one.kernel == other.kernel):
            continue
        pairs += 1
        right += (one.us - other.us) * (one.predicted - other.predicted) > 0
    return {"pairs": pairs, "right": right}


def by_class(cases: Iterable[Case]) -> dict[str, dict[str, list[Case]]]:
    """Return the points of each class, by half."""
    found: dict[str, dict[str, list[Case]]] = {}
    for case in cases:
        found.setdefault(case.kind, {half: [] for half in HALVES})[case.half].append(case)
    return found


def classes(cases: Iterable[Case]) -> dict[str, dict[str, dict]]:
    """Return errors and ranks of each half of each class, without empty halves."""
    return {
        kind: {half: errors(of) | ranks(of) for half, of in halves.items() if of}
        for kind, halves in by_class(cases).items()
    }


# Constants


def sensitivity(machine: Machine, steps: dict[str, tuple], predicted: Callable[[Machine], list[float]]) -> dict:
    """Return the changes of predicted times for each fitted constant, changed by -+`CHANGE`, or by a step from zero.

    The changes are the median and the largest. `predicted(machine)` returns the times of the points; `steps` has each
    constant's minimum, maximum and step.
    """
    base, found = predicted(machine), {}
    for name, (low, _, step) in steps.items():
        value = machine[name]
        changed = {"less": max(low, value * (1 - CHANGE)), "more": value * (1 + CHANGE) if value else step}
        found[name] = {"value": value}
        for side, new in changed.items():
            if new != value:
                logs = [math.log(us / was) for us, was in zip(predicted(machine.but(**{name: new})), base, strict=True)]
                found[name][side] = {
                    "to": round(new, 3),
                    "median": _signed(statistics.median(logs)),
                    "largest": _signed(max(logs, key=abs)),
                }
    return found


def _signed(log: float) -> float:
    return round(math.expm1(log), 3) + 0.0
