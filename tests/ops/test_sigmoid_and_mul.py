"""Test the output gate's quantizations; tests/vllm/test_gated_attention.py has their place in graphs."""

from op_tests import test_case  # noqa: F401
