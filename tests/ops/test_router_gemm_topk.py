"""Test router_gemm_topk; test_softmax_terms.py and test_same_bits.py have more."""

from op_tests import test_case  # noqa: F401
