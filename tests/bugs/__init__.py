"""Plant plausible mistakes that tests must catch: table/ lists them, run.py plants them."""
