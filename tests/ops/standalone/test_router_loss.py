"""Test router_z_loss and load_balancing_loss."""

from op_tests import test_case  # noqa: F401
