"""Plant plausible mistakes that tests must catch: table/ lists some, operators.py makes others, run.py plants them."""
