"""Marks of tests."""

import os

import pytest

full = pytest.mark.skipif(not os.environ.get("FULL_TESTS"), reason="takes long: bash tests/run.sh --full")
