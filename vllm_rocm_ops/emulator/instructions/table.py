"""Collect the vector ALU instructions by name: the sibling files fill the table by theme, and vector.py binds its entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Vector:
    """A vector instruction: fn(*sources) -> result.

    carries: returns (result, lanes for sdst). accumulates: the old destination is the last source. arch: fn's first argument is the
    program (for .arch and .saturate). keeps: a partial write preserves the rest of the register.
    """

    fn: Callable
    flags: frozenset[str] = frozenset()


VECTOR: dict[str, Vector] = {}


def entries(flags: str = "", **table) -> None:
    """Add instructions with common flags."""
    for name, fn in table.items():
        VECTOR[name] = Vector(fn, frozenset(flags.split()))


def call(fn, reads) -> Callable:
    """Return a function on waves that applies fn to the readers' values."""
    if len(reads) == 1:
        (a,) = reads
        return lambda w: fn(a(w))
    if len(reads) == 2:
        a, b = reads
        return lambda w: fn(a(w), b(w))
    if len(reads) == 3:
        a, b, c = reads
        return lambda w: fn(a(w), b(w), c(w))
    return lambda w: fn(*(r(w) for r in reads))
