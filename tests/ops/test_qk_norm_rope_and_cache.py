"""Test qk_norm_rope_and_cache; test_same_bits.py compares it with separate launches."""

from op_tests import test_case  # noqa: F401
