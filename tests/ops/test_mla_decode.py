"""Test mla_decode; test_attention.py and test_attention_lengths.py have more."""

from op_tests import test_case  # noqa: F401
