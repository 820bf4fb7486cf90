"""Time the ops of this tree beside those of another tree of this project, on the same inputs, in one process on this GPU.

    python serving_benchmarks/compare.py /path/to/other [--kinds rows gemm routing moe] [--tolerance 0.01]

The other tree is a checkout with its extension and code objects built. Its package is imported under another name, so that both
trees' graphs are replayed in turn, each after other memory has filled the last-level cache; the median counts. A case is one of
`vllm-rocm-ops bench --shapes`. One line per case goes to serving_benchmarks/results/<gpu>/<date>-<commit>-compare.jsonl. What is
slower by more than the tolerance is listed last.
"""

from __future__ import annotations

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
from options import open_results, parse

from vllm_rocm_ops.bench.clock import capture, measure
from vllm_rocm_ops.bench.experts import experts
from vllm_rocm_ops.bench.shapes import Shape, gemm, routing, rows

PACKAGE, OTHER = "vllm_rocm_ops", "other_vllm_rocm_ops"
TOKENS = (1, 8, 16, 32, 64, 128)
KINDS: dict[str, Callable[[], Iterable[Shape]]] = {
    "rows": lambda: rows((1, 8, 64, 1024)),
    "gemm": lambda: gemm(TOKENS),
    "routing": lambda: routing((*TOKENS, 1024)),
    "moe": lambda: experts(TOKENS),
}


def import_other(tree: Path, folder: Path) -> ModuleType:
    """The other tree's ops, from a copy of its package in `folder` in which the package has another name."""
    shutil.copytree(tree / PACKAGE, folder / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / OTHER).rglob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, OTHER))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{OTHER}.ops")


def main() -> None:
    def add_arguments(parser) -> None:
        parser.add_argument("other", type=Path, help="the other tree")
        parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
        parser.add_argument(
            "--tolerance", type=float, default=0.01, help="a share of the other's time; default: %(default)s"
        )

    options, arch = parse(__doc__, add_arguments)
    slower, ratios = [], {}
    with open_results(options, "compare") as file, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        other = import_other(options.other, Path(folder))
        for kind in options.kinds:
            for shape in KINDS[kind]():
                op, name = shape.op, shape.case.name
                sets = shape.sets(options.clock, shape.arguments(options.clock.device, arch.fp8_dtype))
                calls = {"other": getattr(other, op.name), "this": op}
                times = measure({tree: capture(call, sets) for tree, call in calls.items()}, len(sets))
                ratio = times["this"] / times["other"]
                configs = {tree: str(call.explain(*sets[0]).config) for tree, call in calls.items()}
                line = {
                    "op": op.name,
                    "case": name,
                    "us": times["this"],
                    "other_us": times["other"],
                    "configs": configs,
                }
                line |= {"gpu": torch.cuda.get_device_name(), "versions": options.versions, "commit": options.commit}
                file.write(json.dumps(line) + "\n")
                print(f"{op.name:40} {name:48} {times['other']:9.2f} {times['this']:9.2f} us {ratio:6.3f}", flush=True)
                ratios.setdefault(op.name, []).append(ratio)
                if ratio > 1 + options.tolerance:
                    slower.append((ratio, op.name, name))
                del sets
                torch.cuda.empty_cache()
    for name, of_op in ratios.items():
        mean = math.exp(sum(map(math.log, of_op)) / len(of_op))
        print(f"{name}: {mean:.3f} of the other's time as a geometric mean, {min(of_op):.3f} to {max(of_op):.3f}")
    for ratio, name, case in sorted(slower, reverse=True):
        print(f"slower: {name} {case}: {ratio:.3f}")


if __name__ == "__main__":
    main()
