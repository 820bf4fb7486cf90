"""Test rope_and_cache; tests/vllm/test_rope_and_cache_seam.py has its seam."""

from op_tests import test_case  # noqa: F401
