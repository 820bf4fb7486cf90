"""Count kernel and fallback calls, and warn the user once per subject."""

from __future__ import annotations

import warnings

FALLBACK = "fallback: "
NO_GPU = "PyTorch reference on this device"

_counts: dict[str, dict[str, Count]] = {}  # op -> kernel or "fallback: why" -> calls


class Count:
    """Calls of one kernel of one op."""

    calls = 0


def counter(op: str, kernel: str) -> Count:
    """Return the count of an op's calls of a kernel, or of a fallback."""
    return _counts.setdefault(op, {}).setdefault(kernel, Count())


def stats() -> dict[str, dict[str, int]]:
    """Return how often each op ran each kernel or fell back.

    Replays of a captured graph run no Python and are not counted.

    Returns:
        {op: {kernel or "fallback: why": calls}}.
    """
    called = {op: {kernel: c.calls for kernel, c in kernels.items() if c.calls} for op, kernels in _counts.items()}
    return {op: kernels for op, kernels in called.items() if kernels}


def fallbacks() -> dict[str, dict[str, int]]:
    """Return how often each op fell back on a GPU, and why: {op: {why: calls}}."""
    by_op = {
        op: {kernel.removeprefix(FALLBACK): calls for kernel, calls in kernels.items() if is_fallback(kernel)}
        for op, kernels in stats().items()
    }
    return {op: reasons for op, reasons in by_op.items() if reasons}


def is_fallback(kernel: str) -> bool:
    """True if a key of `stats()` is a fallback on a GPU."""
    return kernel.startswith(FALLBACK) and kernel != FALLBACK + NO_GPU


def reset_stats() -> None:
    """Set all counts to zero."""
    for kernels in _counts.values():
        for count in kernels.values():
            count.calls = 0


warned: set[str] = set()
"""Subjects of earlier warnings."""


def warn_once(subject: str, text: str) -> None:
    """Warn about a subject once per process."""
    if subject not in warned:
        warned.add(subject)
        warnings.warn(text, stacklevel=3)
