"""Benchmark cases, models' calls and lists of shapes (run.py) against other kernels (peers/), and autotune (tune.py)."""
