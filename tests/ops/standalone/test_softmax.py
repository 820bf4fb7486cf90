"""Test softmax; test_softmax_terms.py has rows with one large term."""

from op_tests import test_case  # noqa: F401
