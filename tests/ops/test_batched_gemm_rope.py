"""Test batched_gemm_rope; test_same_bits.py compares it with separate launches."""

from op_tests import test_case  # noqa: F401
