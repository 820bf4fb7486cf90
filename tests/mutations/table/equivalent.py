"""Mutants of operators.py that no test can see, with the proof."""

EQUIVALENT: dict[str, str] = {}
