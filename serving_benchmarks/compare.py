"""Time the ops of this tree beside those of another tree of this project, on the same inputs, in one process on this GPU.

    python serving_benchmarks/compare.py /path/to/other [--kinds rows gemm routing moe attention steps] [--tolerance 0.01]

The other tree is a checkout with its extension and code objects built. Its package is imported under another name, so that both
trees' graphs are replayed in turn, each after other memory has filled the last-level cache; the median counts. A case is one of
`vllm-rocm-ops bench --shapes`, or a decode step of some layers of a model as decode_step.py has it, with the ops of each tree.
One line per case goes to serving_benchmarks/results/<gpu>/<date>-<commit>-compare.jsonl. What is slower by more than the
tolerance is listed last.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from decode_paths import Inputs, Step
from decode_step import MODELS, REPLACEABLE, build
from options import open_results, parse

from vllm_rocm_ops.bench.attention import attention
from vllm_rocm_ops.bench.clock import capture, measure
from vllm_rocm_ops.bench.decode_attention import decode_attention
from vllm_rocm_ops.bench.experts import experts
from vllm_rocm_ops.bench.products import products
from vllm_rocm_ops.bench.shapes import Shape, gemm, routing, rows
from vllm_rocm_ops.op import registered

PACKAGE, OTHER = "vllm_rocm_ops", "other_vllm_rocm_ops"
TOKENS = (1, 8, 16, 32, 64, 128)
KINDS: dict[str, Callable[[], Iterable[Shape]]] = {
    "rows": lambda: rows((1, 8, 64, 1024)),
    "gemm": lambda: gemm(TOKENS),
    "products": products,
    "routing": lambda: routing((*TOKENS, 1024)),
    "moe": lambda: experts(TOKENS),
    "attention": attention,
    "decode-attention": decode_attention,
}
STEPS = "steps"
STEP_TOKENS = (1, 8, 32)
OF_STEPS = {"tp": 8, "ep": None, "quantization": "token", "layers": 8, "fold_shared": False, "device": "cuda"}


def import_other(tree: Path, folder: Path) -> ModuleType:
    """The other tree's ops, from a copy of its package in `folder` in which the package has another name."""
    shutil.copytree(tree / PACKAGE, folder / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / OTHER).rglob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, OTHER))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{OTHER}.ops")


def pairs(options, arch, other: ModuleType) -> Iterator[tuple]:
    """(name, case, the call of each tree, arguments of each, what is said of them)."""
    for kind in options.kinds:
        if kind == STEPS:
            yield from steps(arch, other)
            continue
        for shape in KINDS[kind]():
            op = shape.op
            sets = shape.sets(options.clock, shape.arguments(options.clock.device, arch.fp8_dtype))
            calls = {"other": getattr(other, op.name), "this": op}
            configs = {tree: str(call.explain(*sets[0]).config) for tree, call in calls.items()}
            yield op.name, shape.case.name, calls, sets, {"configs": configs}


def steps(arch, other: ModuleType) -> Iterator[tuple]:
    """Decode steps of a rank, on the same weights: what is not an op of ours is the same in both."""
    for model in MODELS:
        rank = build(model, argparse.Namespace(**OF_STEPS), arch.fp8_dtype)
        others = {op.name: older(getattr(other, op.name)) for op in registered() if hasattr(other, op.name)}
        for tokens in STEP_TOKENS:
            inputs = Inputs(rank, tokens, 1024)
            calls = {
                "other": Step(rank, inputs, frozenset(), others),
                "this": Step(rank, inputs, frozenset(REPLACEABLE), {}),
            }
            yield "decode step", f"{model} tp8, {OF_STEPS['layers']} layers, batch {tokens}", calls, [()], {}


def older(op) -> Callable:
    """A call of an op that may lack our last arguments, which then have their defaults."""
    known = len(op.Arguments._fields)
    return lambda *arguments: op(*arguments[:known])


def main() -> None:
    def add_arguments(parser) -> None:
        parser.add_argument("other", type=Path, help="the other tree")
        kinds = [*KINDS, STEPS]
        parser.add_argument("--kinds", nargs="*", choices=kinds, default=kinds)
        parser.add_argument(
            "--tolerance", type=float, default=0.01, help="a share of the other's time; default: %(default)s"
        )

    options, arch = parse(__doc__, add_arguments)
    slower, ratios = [], {}
    with open_results(options, "compare") as file, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        other = import_other(options.other, Path(folder))
        for name, case, calls, sets, said in pairs(options, arch, other):
            times = measure({tree: capture(call, sets) for tree, call in calls.items()}, len(sets))
            ratio = times["this"] / times["other"]
            line = {"op": name, "case": case, "us": times["this"], "other_us": times["other"], **said}
            line |= {"gpu": torch.cuda.get_device_name(), "versions": options.versions, "commit": options.commit}
            file.write(json.dumps(line) + "\n")
            print(f"{name:40} {case:48} {times['other']:9.2f} {times['this']:9.2f} us {ratio:6.3f}", flush=True)
            ratios.setdefault(name, []).append(ratio)
            if ratio > 1 + options.tolerance:
                slower.append((ratio, name, case))
            del sets, calls
            torch.cuda.empty_cache()
    for name, of_op in ratios.items():
        mean = math.exp(sum(map(math.log, of_op)) / len(of_op))
        print(f"{name}: {mean:.3f} of the other's time as a geometric mean, {min(of_op):.3f} to {max(of_op):.3f}")
    for ratio, name, case in sorted(slower, reverse=True):
        print(f"slower: {name} {case}: {ratio:.3f}")


if __name__ == "__main__":
    main()
