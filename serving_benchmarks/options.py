"""The options that the benchmarks of ops and of a decode step share, and where their results go."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_rocm_ops.bench import peers, report
from vllm_rocm_ops.bench.clock import GpuClock

RESULTS = Path(__file__).parent / "results"


def parse(description: str, add_arguments: Callable):
    """The options, with vLLM's ops loaded if there are any; and this device's arch. A benchmark with a `--device` gets no arch for
    "cpu", where it times nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--vllm-path", help="folder to import vLLM from, where it is not installed")
    parser.add_argument(
        "--vllm-library", nargs="*", help="paths of vLLM's compiled ops, where there is no more of vLLM"
    )
    parser.add_argument("--vllm-version", default="")
    parser.add_argument("--commit", default=report.commit())
    parser.add_argument("--output", type=Path, help="the .jsonl file; by default under serving_benchmarks/results")
    options = parser.parse_args()
    if getattr(options, "device", "cuda") == "cpu":
        return options, None
    try:
        options.clock = GpuClock()
    except RuntimeError as error:
        sys.exit(f"this benchmark times kernels: {error}")
    if options.vllm_path:
        sys.path.insert(0, options.vllm_path)
    options.vllm = peers.load_vllm(options.vllm_library or (), options.vllm_version)
    if options.vllm_path and options.vllm is None:
        sys.exit(f"there is no vLLM in {options.vllm_path}")
    options.origin = report.origin(options.clock, options.vllm, options.commit)
    options.versions, options.bandwidth = options.origin.versions, options.origin.copy_gb_s
    return options, options.clock.arch


def open_results(options, kind: str):
    """The file that result lines are appended to."""
    output = options.output or options.origin.file(RESULTS, kind)
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.open("a")
