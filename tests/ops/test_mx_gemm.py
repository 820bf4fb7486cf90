"""Test mx_gemm."""

from op_tests import test_case  # noqa: F401
