"""Test mx_dequantize."""

from op_tests import test_case  # noqa: F401
