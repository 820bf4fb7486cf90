"""Evidence for the timing model of vllm_rocm_ops/timing: published times of others' kernels, and how far predictions are from them.

    PYTHONPATH=tests python -m timing.calibrate --help

microbenchmarks.py compares the compute unit with published microbenchmarks, calibrate.py fits the constants that no microbenchmark gives,
points.py has published decode times and which of them may be fitted, and residuals.py all others. The tests are beside what they test.
"""
