"""Compare the timing model of vllm_rocm_ops/timing with published times, and predict decode steps with it.

    python -m serving_benchmarks.step --model deepseek-v3 --tp 8
    python -m serving_benchmarks.timing_study.calibrate --help

microbenchmarks.py compares the compute unit with published microbenchmarks, calibrate.py fits the constants that no
microbenchmark gives, points.py has published decode times and which of them may be fitted, and residuals.py all other
times. tests/benchmarks/timing_study/ has the tests, which run with --full.
"""
