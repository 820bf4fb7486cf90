"""Plausible mistakes that tests must catch."""
