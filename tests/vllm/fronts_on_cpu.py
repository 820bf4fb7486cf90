"""Make vLLM's CPU engine time launches before compilation, with a fake clock, and references as the plugin's kernels."""

import os
from pathlib import Path

from clocks import FakeClock

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import worker_startup
from vllm_rocm_ops.vllm.selection import kernel_selection, kernel_timing

WHAT = {"faster": ("1", "1"), "slower": ("3", "1"), "wrong": ("1", "1.05")}
"""Environments of an engine: US, the plugin's microseconds beside vLLM's 2, and FACTOR, of a result."""


def install(**results: str) -> None:
    """Install the clock, and references as kernels of ops, each with the name of the result that FACTOR multiplies."""
    samples = lambda side, tokens: [float(os.environ["US"]) if side == "plugin" else 2.0]
    worker_startup.clock, kernel_timing.limit_s = lambda: FakeClock(samples), lambda: 1000.0
    for name, result in results.items():
        op = getattr(ops, name)

        def run_kernels(*arguments, op=op, result=result):
            op.reference(*arguments)
            getattr(op.Arguments(*arguments), result).mul_(float(os.environ["FACTOR"]))
            return True

        op.run_kernels = run_kernels


def measured(engines, flavour: tuple[str, str], folder: Path, before: str, **options) -> tuple[dict, dict]:
    """Return a compiled model's answers and timing records by `WHAT`."""
    jobs = {}
    for name, (us, factor) in WHAT.items():
        environment = {"VLLM_ROCM_OPS_TABLES": str(folder / name), "US": us, "FACTOR": factor}
        jobs[name] = engines.job(flavour, compiled=True, environment=environment, **options)
    answers = engines.run(jobs, before=before)
    records = {
        name: [kernel_selection.read(path) for path in (folder / name).glob("*/measured-*.json")] for name in WHAT
    }
    return answers, records
