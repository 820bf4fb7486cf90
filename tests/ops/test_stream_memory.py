"""Test stream_memory."""

from op_tests import test_case  # noqa: F401
