"""Time the matrix products of Llama-3.1-405B and DeepSeek-V3 decode on this GPU beside cuBLASLt or hipBLASLt and vLLM.

    python serving_benchmarks/gemm.py [--ops NAME ...] [--m M ...] [--tp N] [--shuffled] [--vllm-library PATH] [--sweep]

Weights are rotated so that each call finds its own in HBM; otherwise as ops.py, whose options and output this shares. The
peers are those of vllm_rocm_ops/bench/peers.py: PyTorch, vLLM and AITER, as far as installed. `--shuffled` gives our ops their
weights in fragment order.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from decode_shapes import linear_layers
from ops import capture, measure, open_results, parse

from vllm_rocm_ops import ops
from vllm_rocm_ops.bench.peers import peers
from vllm_rocm_ops.families import weight_layout
from vllm_rocm_ops.op import Op

MODELS = {"llama": "llama-3.1-405b-fp8", "deepseek": "deepseek-v3"}
TP = 8
ROTATED_BYTES = 400_000_000


def shapes(quantized: bool, tp: int) -> dict[str, tuple[int, int]]:
    """(N, K) of the layers of a decode step of one of `tp` ranks whose weights are FP8, or of the others."""
    return {
        f"{name}{f' tp{tp}' * (tp != TP)} {call.layer}": (n, k)
        for name, model in MODELS.items()
        for call, n, k in linear_layers(model, tp)
        if call.count and (call.op is not ops.unquantized_gemm) == quantized
    }


@dataclass(frozen=True)
class Benchmark:
    """One op as it is timed: `inputs(m, n, k, fp8)` gives its arguments."""

    op: Op
    quantized: bool
    inputs: Callable
    weight: int = 1  # its place among the arguments


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def row_inputs(m: int, n: int, k: int, fp8: torch.dtype) -> tuple:
    scale_a, scale_b = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(n, 1, device="cuda") * 0.01
    return random(m, k, dtype=fp8), random(n, k, dtype=fp8).t(), scale_a, scale_b, torch.bfloat16, None


def block_inputs(m: int, n: int, k: int, fp8: torch.dtype) -> tuple:
    scale_a = torch.rand(-(-k // 128), m, device="cuda").t() + 0.5  # column-major, as most peers want it
    scale_b = torch.rand(-(-n // 128), -(-k // 128), device="cuda") * 0.01
    return random(m, k, dtype=fp8), random(n, k, dtype=fp8), scale_a, scale_b, torch.bfloat16


def unquantized_inputs(m: int, n: int, k: int, fp8: torch.dtype) -> tuple:
    return random(m, k, dtype=torch.bfloat16), random(n, k, dtype=torch.bfloat16)


BENCHMARKS = (
    Benchmark(ops.scaled_mm, True, row_inputs),
    Benchmark(ops.block_scaled_mm, True, block_inputs),
    Benchmark(ops.unquantized_gemm, False, unquantized_inputs),
)


def time_case(benchmark: Benchmark, layer: str, m: int, n: int, k: int, arch, options) -> list[dict]:
    """A line per configuration: the default, or all of them in a sweep."""
    op, inputs = benchmark.op, functools.partial(benchmark.inputs, m, n, k, arch.fp8_dtype)
    sets = [inputs()]
    weight_bytes = sets[0][benchmark.weight].nbytes
    sets += [inputs() for _ in range(max(3, math.ceil(ROTATED_BYTES / weight_bytes)) - 1)]
    ours = sets
    if options.shuffled:
        place = benchmark.weight
        weights = [s[place] if s[place].is_contiguous() else s[place].t() for s in sets]
        ours = [(*s[:place], weight_layout.shuffle_weight(w), *s[place + 1 :]) for s, w in zip(sets, weights)]
    a = op.Arguments(*ours[0])
    chosen = op.explain(*ours[0]).config
    configs = op.configs(a, arch) if options.sweep else [chosen]
    graphs, broken = {}, {}
    for config in configs:
        with op.running(config):
            graphs[str(config)] = capture(op, ours)
    for name, peer in peers(op).items():
        try:
            graphs[name] = capture(peer.call, [peer.prepare(*arguments) for arguments in sets])
        except Exception as error:  # noqa: BLE001  whatever a peer says, it is not available
            broken[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    times = measure(graphs, len(sets))
    result = op(*ours[0])
    exact = op.reference(*(torch.float64 if v is torch.bfloat16 else v for v in ours[0]))
    bytes_of_call = weight_bytes + sets[0][0].nbytes + result.nbytes
    return [
        {
            "op": op.name,
            "case": f"{layer} {m}x{n}x{k}" + " shuffled" * options.shuffled,
            "shape": {"m": m, "n": n, "k": k},
            "gpu": torch.cuda.get_device_name(),
            "us": round(times[str(config)], 3),
            "peers": {name: round(times[name], 3) for name in times if name in peers(op)},
            "unavailable": broken,
            "floor_us": round(bytes_of_call / options.bandwidth / 1000, 3),
            "bandwidth_gb_s": round(bytes_of_call / times[str(config)] / 1000, 1),
            "copy_gb_s": round(options.bandwidth, 1),
            "kernel": str(config),
            "chosen": config == chosen,
            "relative_error": ((result.double() - exact).norm() / exact.double().norm()).item(),
            "versions": options.versions,
            "commit": options.commit,
        }
        for config in configs
    ]


def main() -> None:
    def add_arguments(parser) -> None:
        parser.add_argument("--ops", nargs="*", help="names of ops; all by default")
        parser.add_argument("--m", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
        parser.add_argument("--tp", type=int, default=TP, help="ranks that share a layer; default: %(default)s")
        parser.add_argument("--shuffled", action="store_true", help="weights of ours in fragment order")

    options, arch = parse(__doc__, add_arguments)
    with open_results(options, "gemm") as file, torch.inference_mode():
        for benchmark in BENCHMARKS:
            if options.ops and benchmark.op.name not in options.ops:
                continue
            ratios, missed = [], []
            for layer, (n, k) in shapes(benchmark.quantized, options.tp).items():
                for m in options.m:
                    lines = time_case(benchmark, layer, m, n, k, arch, options)
                    file.writelines(json.dumps(line) + "\n" for line in lines)
                    for line in sorted(lines, key=lambda line: line["us"])[:3]:
                        best = min(line["peers"], key=line["peers"].get, default=None)
                        us = line["peers"].get(best, math.nan)
                        print(
                            f"{line['case']:38} {line['us']:7.2f}  {best} {us:7.2f}  floor {line['floor_us']:6.2f} "
                            f"{line['kernel']}  error {line['relative_error']:.1e}",
                            flush=True,
                        )
                    us = next(line["us"] for line in lines if line["chosen"])
                    missed.append(math.log(us / min(line["us"] for line in lines)))
                    ratios.append((m, min(lines[0]["peers"].values(), default=math.nan) / us))
                    torch.cuda.empty_cache()
            for low, high in ((1, 16), (32, 64)):
                of_range = [ratio for m, ratio in ratios if low <= m <= high]
                if of_range:
                    mean = math.exp(sum(map(math.log, of_range)) / len(of_range))
                    print(f"{benchmark.op.name} M {low}..{high}: {mean:.2f}x the best peer, least {min(of_range):.2f}x")
            if options.sweep and missed:
                mean = math.exp(sum(missed) / len(missed))
                print(f"{benchmark.op.name}: the chosen configurations take {mean:.3f}x the time of the best ones")


if __name__ == "__main__":
    main()
