"""Test layer_norm and its quantizations; test_mx_outputs.py has more of MX-FP8."""

from op_tests import test_case  # noqa: F401
