"""Benchmark every configuration of each kernel, and print the fastest three."""

import functools

from vllm_rocm_ops.tools.commands import bench

add = bench.add
run = functools.partial(bench.measure, True)
