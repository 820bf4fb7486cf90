"""Test the activation of shared experts with a gate, and its quantizations; tests/vllm/test_expert_gate.py has the layers."""

from op_tests import test_case  # noqa: F401
