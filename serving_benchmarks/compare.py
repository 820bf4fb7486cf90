"""Time the ops of this tree beside those of another tree of this project, on the same inputs, in one process on this GPU.

    python serving_benchmarks/compare.py /path/to/other [--kinds rows gemm routing moe] [--tolerance 0.01]

The other tree is a checkout with its extension and code objects built. Its package is imported under another name, so that both
trees' graphs are replayed in turn, each after other memory has filled the last-level cache; the median counts. A case is one of
ops.py, gemm.py or moe.py, or routes tokens to DeepSeek-V3's experts. One line per case goes to
serving_benchmarks/results/<gpu>/<date>-<commit>-compare.jsonl. What is slower by more than the tolerance is listed last.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import gemm
import moe
import torch
from ops import benchmarks, measure, open_results, parse

from vllm_rocm_ops import ops
from vllm_rocm_ops.bench import clock
from vllm_rocm_ops.op import Op

PACKAGE, OTHER = "vllm_rocm_ops", "other_vllm_rocm_ops"
ROWS, HIDDEN = (1, 8, 64, 1024), (16384, 7168)
TOKENS = (1, 8, 16, 32, 64, 128)


def import_other(tree: Path, folder: Path) -> ModuleType:
    """The other tree's ops, from a copy of its package in `folder` in which the package has another name."""
    shutil.copytree(tree / PACKAGE, folder / OTHER, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / OTHER).rglob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, OTHER))
    sys.path.insert(0, str(folder))
    return importlib.import_module(f"{OTHER}.ops")


def cases(kind: str, fp8: torch.dtype) -> Iterator[tuple[Op, str, list[tuple]]]:
    """Op, name and sets of arguments of each case of a kind."""
    if kind == "rows":
        for benchmark, hidden, rows in itertools.product(benchmarks(fp8), HIDDEN, ROWS):
            count = clock.calls_of_graph(int(benchmark.bytes_per_element * rows * hidden))
            yield (
                benchmark.op,
                f"{rows}x{hidden}",
                [benchmark.inputs(rows, hidden, torch.bfloat16) for _ in range(count)],
            )
    elif kind == "gemm":
        for benchmark in gemm.BENCHMARKS:
            for (layer, (n, k)), m in itertools.product(gemm.shapes(benchmark.quantized, gemm.TP).items(), TOKENS):
                first = benchmark.inputs(m, n, k, fp8)
                others = range(clock.calls_of_graph(first[benchmark.weight].nbytes) - 1)
                yield benchmark.op, f"{layer} {m}x{n}x{k}", [first, *(benchmark.inputs(m, n, k, fp8) for _ in others)]
    elif kind == "routing":
        for m in (*TOKENS, 1024):
            logits = [torch.randn(m, 256, device="cuda").bfloat16() for _ in range(64)]
            bias = torch.randn(256, device="cuda")
            yield ops.grouped_topk, f"{m}x256", [(l, 8, True, 8, 4, "sigmoid", 2.5, bias) for l in logits]
    else:
        for name, case in moe.MODELS.items():
            weights = moe.make_weights(case, fp8)
            for m in TOKENS:
                generator = torch.Generator().manual_seed(m)
                tokens = [moe.make_tokens(case, m, generator) for _ in range(16 if m <= 16 else 8)]
                yield ops.fused_experts, f"{name} {m}", [moe.arguments(case, weights, t) for t in tokens]


def main() -> None:
    def add_arguments(parser) -> None:
        kinds = ("rows", "gemm", "routing", "moe")
        parser.add_argument("other", type=Path, help="the other tree")
        parser.add_argument("--kinds", nargs="*", choices=kinds, default=kinds)
        parser.add_argument(
            "--tolerance", type=float, default=0.01, help="a share of the other's time; default: %(default)s"
        )

    options, arch = parse(__doc__, add_arguments)
    slower, ratios = [], {}
    with open_results(options, "compare") as file, torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        other = import_other(options.other, Path(folder))
        for kind in options.kinds:
            for op, name, sets in cases(kind, arch.fp8_dtype):
                calls = {"other": getattr(other, op.name), "this": op}
                times = measure({tree: clock.capture(call, sets) for tree, call in calls.items()}, len(sets))
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
            torch.cuda.empty_cache()
    for name, of_op in ratios.items():
        mean = math.exp(sum(map(math.log, of_op)) / len(of_op))
        print(f"{name}: {mean:.3f} of the other's time as a geometric mean, {min(of_op):.3f} to {max(of_op):.3f}")
    for ratio, name, case in sorted(slower, reverse=True):
        print(f"slower: {name} {case}: {ratio:.3f}")


if __name__ == "__main__":
    main()
