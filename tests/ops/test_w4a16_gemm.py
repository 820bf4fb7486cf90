"""Test w4a16_gemm."""

from op_tests import test_case  # noqa: F401
