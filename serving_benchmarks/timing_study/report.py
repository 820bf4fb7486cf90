"""Report on a calibration: errors of its points, their ranking, three simpler models, and sensitivities.

The simpler models are `BASELINES`. They are judged as the model is, on the same points.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vllm_rocm_ops.timing.machines import Machine

HALVES = ("fit", "held out")
APART = 0.10  # relative difference of two measured times from which on their order is judged
CHANGE = 0.2  # of a fitted constant, for its sensitivity
START_US = 2.5  # of the baseline of bytes


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


# Simpler models


def _bytes(fitted: Sequence[Case], bandwidth: float) -> Callable[[Case], float]:
    return lambda case: START_US + case.megabytes * 1e3 / bandwidth


def _regression(fitted: Sequence[Case], bandwidth: float) -> Callable[[Case], float]:
    """Return a regression for each kernel, by least squares of relative errors, without negative constants.

    us = fixed + rounds * (per round + K steps * per step) + MB * per MB.
    """

    def terms(case: Case) -> list[float]:
        return [1.0, case.blocks, case.blocks * case.k / 128, case.megabytes]

    constants = {}
    for kernel in {case.kernel for case in fitted}:
        mine = [case for case in fitted if case.kernel == kernel]
        rows = np.array([[term / case.us for term in terms(case)] for case in mine])
        constants[kernel] = _least_squares(rows, np.ones(len(mine)))
    return lambda case: float(np.dot(constants[case.kernel], terms(case)))


def _least_squares(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Return the non-negative solution, the best of all subsets of columns."""
    best, least = np.zeros(rows.shape[1]), math.inf
    for chosen in itertools.product((False, True), repeat=rows.shape[1]):
        if any(chosen):
            found = np.zeros(rows.shape[1])
            found[list(chosen)] = np.linalg.lstsq(rows[:, chosen], of, rcond=None)[0]
            rest = float(((rows @ found - of) ** 2).sum())
            if (found >= 0).all() and rest < least - 1e-12:
                best, least = found, rest
    return best


def _median(fitted: Sequence[Case], bandwidth: float) -> Callable[[Case], float]:
    medians = {kind: statistics.median(case.us for case in halves["fit"]) for kind, halves in by_class(fitted).items()}
    return lambda case: medians[case.kind]


BASELINES = {"bytes / bandwidth + 2.5 us": _bytes, "regression per kernel": _regression, "median of the class": _median}


def baselines(cases: Sequence[Case], bandwidth: float) -> dict[str, dict]:
    """Return the `classes` of each simpler model.

    They are fitted to the same points as the model, and use its HBM bandwidth, in GB/s.
    """
    fitted = [case for case in cases if case.half == "fit"]
    found = {}
    for name, make in BASELINES.items():
        predict = make(fitted, bandwidth)
        found[name] = classes(case._replace(predicted=predict(case)) for case in cases)
    return found


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
