"""Marks of tests."""

import os

import pytest

FULL = bool(os.environ.get("FULL_TESTS"))
"""With --full."""
full = pytest.mark.skipif(not FULL, reason="takes long: bash tests/run.sh --full")

SHARE = 12  # of cases and of planted bugs

BUILT = ("gfx942", "gfx950", pytest.param("sm_90", marks=full))
"""Whose code objects are there: without a GPU NVIDIA's are built with --full only."""

CHIPS = ("gfx942", pytest.param("gfx950", marks=full))
"""Emulated, or read: gfx942 by default, both with --full."""


def few_of(values) -> list:
    """A parameter for each value of a long list: the first of every `SHARE` runs by default, all with --full."""
    return [value if i % SHARE == 0 else pytest.param(value, marks=full) for i, value in enumerate(values)]
