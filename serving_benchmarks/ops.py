"""Time the ops on this GPU beside vLLM's own compiled ops and eager PyTorch.

    python serving_benchmarks/ops.py [--ops NAME ...] [--rows M ...] [--hidden H ...] [--vllm-library PATH] [--sweep]

One line per case goes to serving_benchmarks/results/<gpu>/<date>-<commit>.jsonl. Every variant of a case runs in a CUDA or
HIP graph that calls it once on each of many sets of inputs; the graphs of all variants are replayed in turn, each after
other memory has filled the last-level cache, so that every call finds cold caches; the median counts. `--sweep` times every
configuration of our kernels instead of the default, which is how defaults and tuned rows are found. Results of vLLM's
op on the same inputs are compared with ours, and the share of elements that differ is part of the line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch, ops
from vllm_rocm_ops.bench import clock, peers
from vllm_rocm_ops.bench.clock import capture
from vllm_rocm_ops.op import Op

RESULTS = Path(__file__).parent / "results"
EPSILON = 1e-6


@dataclass(frozen=True)
class Benchmark:
    """One op as it is timed: `inputs(rows, hidden, dtype)` gives its arguments, `bytes_per_element` counts HBM traffic per
    element of the output."""

    op: Op
    inputs: Callable
    bytes_per_element: float


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def scale() -> torch.Tensor:
    return torch.full((1,), 0.013, device="cuda")


def benchmarks(fp8: torch.dtype) -> list[Benchmark]:
    def norm(rows, hidden, dtype):
        return tensor(rows, hidden, dtype=dtype), tensor(rows, hidden, dtype=dtype), tensor(hidden, dtype=dtype)

    def dynamic(*extra):
        def inputs(rows, hidden, dtype):
            x, residual, weight = norm(rows, hidden, dtype)
            return (x, weight, EPSILON, fp8, *extra, None, residual)

        return inputs

    return [
        Benchmark(ops.fused_add_rms_norm, lambda *k: (*norm(*k), EPSILON), 8),
        Benchmark(ops.fused_add_rms_norm_static_fp8_quant, lambda *k: (*norm(*k), scale(), EPSILON, fp8), 7),
        Benchmark(ops.rms_norm_dynamic_per_token_quant, dynamic(), 7),
        Benchmark(ops.rms_norm_per_block_quant, dynamic(128, False), 7 + 4 / 128),
        Benchmark(ops.silu_and_mul, lambda m, h, t: (tensor(m, 2 * h, dtype=t),), 6),
        Benchmark(ops.silu_and_mul_quant, lambda m, h, t: (tensor(m, 2 * h, dtype=t), scale(), fp8), 5),
        Benchmark(ops.silu_and_mul_per_token_quant, lambda m, h, t: (tensor(m, 2 * h, dtype=t), fp8, None), 5),
        Benchmark(
            ops.silu_and_mul_per_block_quant,
            lambda m, h, t: (tensor(m, 2 * h, dtype=t), fp8, 128, False, None),
            5 + 4 / 128,
        ),
    ]


def measure(graphs: dict[str, torch.cuda.CUDAGraph], calls: int) -> dict[str, float]:
    """Median microseconds per call of each graph; the graphs take turns."""
    return {name: statistics.median(times) for name, times in clock.replays(graphs, calls).items()}


def copy_bandwidth() -> float:
    """GB/s of reading and writing large tensors once, both counted."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    us = measure({"copy": capture(lambda: torch.neg(source, out=target), [()] * 4)}, 4)["copy"]
    return 2 * source.nbytes / us / 1000


def compare(benchmark: Benchmark, arguments: tuple) -> dict[str, float]:
    """How our op's results differ from vLLM's on the same inputs: the share of elements of the output, and of what is
    updated in place, with other bits; and the largest relative difference of a scale."""

    def own() -> tuple:
        return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in arguments)

    def share(a: torch.Tensor, b: torch.Tensor) -> float:
        bits = torch.uint8 if a.element_size() == 1 else torch.int16
        return (a.view(bits) != b.view(bits)).float().mean().item()

    ours_args, vllm_args = own(), own()
    ours = benchmark.op(*ours_args)
    theirs = benchmark.op.allocate(benchmark.op.Arguments(*vllm_args))
    peers.vllm_call(benchmark.op)(theirs, vllm_args)
    if benchmark.op is ops.fused_add_rms_norm:  # vLLM's op returns in its input
        theirs = vllm_args[0]
    result = {}
    if isinstance(ours, tuple):
        result["scale_relative"] = ((ours[1] - theirs[1]).abs() / theirs[1]).max().item()
        ours, theirs = ours[0], theirs[0]
    result["out"] = share(ours, theirs)
    for name, mine, vllms in zip(benchmark.op.Arguments._fields, ours_args, vllm_args):
        if name in benchmark.op.mutates:
            result[name] = share(mine, vllms)
    return result


def run_case(benchmark: Benchmark, rows: int, hidden: int, dtype: torch.dtype, arch, options) -> list[dict]:
    op = benchmark.op
    bytes_of_call = int(benchmark.bytes_per_element * rows * hidden) + 2 * hidden
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(math.ceil(1.5 * cache / bytes_of_call), 6), 512)
    sets = [benchmark.inputs(rows, hidden, dtype) for _ in range(count)]
    a = op.Arguments(*sets[0])
    chosen = op.explain(*sets[0])
    candidates = [(str(chosen.config), chosen.launches, chosen.config)]
    if options.sweep:
        candidates = [(str(c), op.plan(c, op.allocate(a), a, arch), c) for c in op.configs(a, arch)]

    graphs = {}
    for name, _, config in candidates:
        with op.running(config):
            graphs[name] = capture(op, sets)
    timed_peers = []
    vllm = peers.vllm_call(op)
    if vllm is not None:
        outputs = [op.allocate(op.Arguments(*s)) for s in sets]
        graphs["vllm"] = capture(vllm, list(zip(outputs, sets)))
        timed_peers.append("vllm")
    if not options.sweep and count * rows * hidden < 1 << 30:
        graphs["torch"] = capture(op.reference, sets)
        timed_peers.append("torch")
    times = measure(graphs, count)
    lines = []
    for name, launches, _ in candidates:
        us = times[name]
        lines.append(
            {
                "op": op.name,
                "case": f"{rows}x{hidden} {str(dtype).removeprefix('torch.')}",
                "shape": {"rows": rows, "hidden": hidden},
                "gpu": torch.cuda.get_device_name(),
                "us": round(us, 3),
                "peers": {peer: round(times[peer], 3) for peer in timed_peers},
                "floor_us": round(bytes_of_call / options.bandwidth / 1000, 3),
                "bandwidth_gb_s": round(bytes_of_call / us / 1000, 1),
                "copy_gb_s": round(options.bandwidth, 1),
                "kernel": f"{launches[0].symbol} {launches[0].grid} {launches[0].block}",
                "differs_from_vllm": compare(benchmark, sets[0]) if "vllm" in timed_peers else None,
                "versions": options.versions,
                "commit": options.commit,
            }
        )
    return lines


def commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def parse(description: str, add_arguments: Callable):
    """The options that the benchmarks of ops share, with vLLM's ops loaded if there are any; and this device's arch. A benchmark
    with a `--device` gets no arch for "cpu", where it times nothing."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--vllm-path", help="folder to import vLLM from, where it is not installed")
    parser.add_argument(
        "--vllm-library", nargs="*", help="paths of vLLM's compiled ops, where there is no more of vLLM"
    )
    parser.add_argument("--vllm-version", default="")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of our kernels")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--output", type=Path, help="the .jsonl file; by default under serving_benchmarks/results")
    options = parser.parse_args()
    if getattr(options, "device", "cuda") == "cpu":
        return options, None
    if not torch.cuda.is_available():
        sys.exit("these benchmarks time kernels: they need a GPU")
    arch = archs.of_device(0)
    if arch is None or launch.runtime()[0] is None:
        sys.exit(f"no kernels for this device: arch {arch}, {launch.runtime()[1]}")
    if options.vllm_path:
        sys.path.insert(0, options.vllm_path)
    if options.vllm_library:
        for library in options.vllm_library:
            torch.ops.load_library(library)
        options.vllm = options.vllm_version or "library"
    else:
        try:
            import vllm
            import vllm._custom_ops

            options.vllm = vllm.__version__
        except ImportError:
            if options.vllm_path:
                raise
            options.vllm = None
    options.versions = {"torch": torch.__version__, "vllm": options.vllm, "vllm_rocm_ops": vllm_rocm_ops.__version__}
    options.bandwidth = copy_bandwidth()
    return options, arch


def open_results(options, kind: str):
    """The file that result lines are appended to."""
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    output = options.output or RESULTS / gpu / f"{datetime.date.today()}-{options.commit}-{kind}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.open("a")


def main() -> None:
    def add_arguments(parser) -> None:
        parser.add_argument("--ops", nargs="*", help="names of ops; all by default")
        parser.add_argument("--rows", nargs="*", type=int, default=[2**i for i in range(12)])
        parser.add_argument("--hidden", nargs="*", type=int, default=[16384, 7168])
        parser.add_argument("--dtype", default="bfloat16")

    options, arch = parse(__doc__, add_arguments)
    ratios: dict[str, list[float]] = {}
    with open_results(options, "ops") as file, torch.inference_mode():
        for benchmark in benchmarks(arch.fp8_dtype):
            if options.ops and benchmark.op.name not in options.ops:
                continue
            for hidden in options.hidden:
                for rows in options.rows:
                    for line in run_case(benchmark, rows, hidden, getattr(torch, options.dtype), arch, options):
                        file.write(json.dumps(line) + "\n")
                        shown = " ".join(f"{k} {v:8.2f}" for k, v in line["peers"].items())
                        print(
                            f"{line['op']:36} {line['case']:20} {line['us']:8.2f} us  {shown}  floor {line['floor_us']:7.2f}"
                            f"  differs {line['differs_from_vllm']}  {line['kernel']}",
                            flush=True,
                        )
                        if "vllm" in line["peers"] and not options.sweep:
                            ratios.setdefault(line["op"], []).append(line["peers"]["vllm"] / line["us"])
                    torch.cuda.empty_cache()
    for op, values in ratios.items():
        print(f"{op}: {statistics.geometric_mean(values):.2f}x vLLM as a geometric mean, least {min(values):.2f}x")


if __name__ == "__main__":
    main()
