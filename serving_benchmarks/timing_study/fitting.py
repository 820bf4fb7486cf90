"""Fit the constants of a machine by minimizing an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_rocm_ops.timing.machines import Machine

Steps = Mapping[str, tuple[float, float, float]]
"""By constant: minimum, maximum and step."""


def least(machine: Machine, steps: Steps, error: Callable[[Machine], float]) -> Machine:
    """Return the machine whose constants in `steps` minimize `error(machine)`, by coordinate descent."""
    known: dict[tuple, float] = {}

    def score(values: tuple) -> float:
        if values not in known:
            known[values] = error(machine.but(**dict(zip(steps, values, strict=True))))
        return known[values]

    best, changed = tuple(float(machine[name]) for name in steps), True
    while changed:
        changed = False
        for place, (low, high, step) in enumerate(steps.values()):
            for direction in (step, -step):
                while low <= (value := round(best[place] + direction, 3)) <= high:
                    tried = (*best[:place], value, *best[place + 1 :])
                    if score(tried) >= score(best):
                        break
                    best, changed = tried, True
    return machine.but(**dict(zip(steps, best, strict=True)))
