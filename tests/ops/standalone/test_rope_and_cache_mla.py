"""Test rope_and_cache_mla; test_same_bits.py compares it with fused launches."""

from op_tests import test_case  # noqa: F401
