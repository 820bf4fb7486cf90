"""Benchmark the ops of this tree against another tree of this project, on the same inputs, in one process on this GPU.

    python serving_benchmarks/compare.py /path/to/other [--kinds rows linear routing moe attention] [--tolerance 0.01]

The other tree is a checkout with built extension and code objects. Its package is imported under another name, so that both trees'
graphs are replayed in turn, each with a flushed last-level cache; medians count. The cases are the lists of `vllm-rocm-ops bench`. Each
case appends a line to serving_benchmarks/results/<gpu>/<date>-<commit>-compare.jsonl. Cases that are slower by more than the tolerance
are listed last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch

from vllm_rocm_ops.core.clock import GpuClock, capture, measure
from vllm_rocm_ops.tools.bench import report
from vllm_rocm_ops.tools.bench.attention import attention
from vllm_rocm_ops.tools.bench.decode_attention import decode_attention
from vllm_rocm_ops.tools.bench.experts import experts
from vllm_rocm_ops.tools.bench.gemm_dtypes import gemm_dtypes
from vllm_rocm_ops.tools.bench.shapes import Shape, gemm, routing, rows

RESULTS = Path(__file__).parent / "results"
PACKAGE, OTHER = "vllm_rocm_ops", "other_vllm_rocm_ops"
TOKENS = (1, 8, 16, 32, 64, 128)
KINDS: dict[str, Callable[[], Iterable[Shape]]] = {
    "rows": lambda: rows((1, 8, 64, 1024)),
    "linear": lambda: gemm(TOKENS),
    "gemm-dtypes": gemm_dtypes,
    "routing": lambda: routing((*TOKENS, 1024)),
    "moe": lambda: experts(TOKENS),
    "attention": attention,
    "decode-attention": decode_attention,
}


def import_other(tree: Path, folder: Path) -> ModuleType:
    """Import the other tree's ops from a copy in `folder`, in which the package has another name."""
    shutil.copytree(tree / PACKAGE, folder / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / OTHER).rglob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, OTHER))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{OTHER}.ops")


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the other tree")
    parser.add_argument(
        "--kinds", nargs="*", choices=list(KINDS), default=list(KINDS), help="lists of shapes (default: all)"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="slowdown to report, as a fraction (default: %(default)s)"
    )
    parser.add_argument("--commit", default=report.commit(), help="commit of this tree (default: the checkout's)")
    parser.add_argument("--output", type=Path, help=".jsonl file (default: under serving_benchmarks/results)")
    options = parser.parse_args(argv)
    try:
        clock = GpuClock()
    except RuntimeError as error:
        sys.exit(f"compare.py needs a GPU: {error}")
    origin = report.origin(clock, None, options.commit)
    output = options.output or origin.file(RESULTS, "compare")
    output.parent.mkdir(parents=True, exist_ok=True)
    slower, ratios = [], {}
    with output.open("a") as file, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        other = import_other(options.other, Path(folder))
        for shape in (shape for kind in options.kinds for shape in KINDS[kind]()):
            name, case = shape.op.name, shape.case.name
            sets = shape.sets(clock, shape.arguments(clock.device, clock.arch.fp8_dtype))
            calls = {"other": getattr(other, name), "this": shape.op}
            configs = {tree: str(call.explain(*sets[0]).config) for tree, call in calls.items()}
            times = measure({tree: capture(call, sets) for tree, call in calls.items()}, len(sets))
            ratio = times["this"] / times["other"]
            line = {"op": name, "case": case, "us": times["this"], "other_us": times["other"], "configs": configs}
            line |= {"gpu": origin.gpu, "versions": origin.versions, "commit": origin.commit}
            file.write(json.dumps(line) + "\n")
            print(f"{name:40} {case:48} {times['other']:9.2f} {times['this']:9.2f} us {ratio:6.3f}", flush=True)
            ratios.setdefault(name, []).append(ratio)
            if ratio > 1 + options.tolerance:
                slower.append((ratio, name, case))
            del sets
            torch.cuda.empty_cache()
    for name, of_op in ratios.items():
        mean = math.exp(sum(map(math.log, of_op)) / len(of_op))
        print(f"{name}: {mean:.3f}x the other tree's time (geometric mean), {min(of_op):.3f} to {max(of_op):.3f}")
    for ratio, name, case in sorted(slower, reverse=True):
        print(f"slower: {name} {case}: {ratio:.3f}x")


if __name__ == "__main__":
    main()
