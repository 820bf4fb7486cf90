"""Plausible mistakes that tests must catch: table/ has them, run.py plants them."""
