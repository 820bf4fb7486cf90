"""Test unquantized_gemm; test_scalar_chains.py reads its machine code."""

from op_tests import test_case  # noqa: F401
