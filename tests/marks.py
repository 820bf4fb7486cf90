"""Marks of tests."""

import os

import pytest

FULL = bool(os.environ.get("FULL_TESTS"))
"""With --full."""
full = pytest.mark.skipif(not FULL, reason="takes long: bash tests/run.sh --full")

CHIPS = ("gfx942", pytest.param("gfx950", marks=full))
"""Emulated, or read: gfx942 by default, both with --full."""


def third(values) -> list:
    """A parameter for each value of a long list: every third runs by default, all with --full."""
    return [pytest.param(value, marks=() if i % 3 == 0 else full) for i, value in enumerate(values)]
