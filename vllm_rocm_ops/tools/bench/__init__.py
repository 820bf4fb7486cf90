"""Benchmark cases, models' calls and lists of shapes (run.py) against other kernels (baselines/), and autotune (tune.py)."""
