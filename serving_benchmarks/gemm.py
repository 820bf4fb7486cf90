"""Time the FP8 products of Llama-3.1-405B and DeepSeek-V3 decode on this GPU beside cuBLASLt or hipBLASLt and vLLM.

    python serving_benchmarks/gemm.py [--m M ...] [--vllm-library PATH] [--sweep]

Weights are rotated so that each call finds its own in HBM; otherwise as ops.py, whose options and output this shares. The
peers are `torch._scaled_mm` and vLLM's `cutlass_scaled_mm`, per tensor and per row, best first.
"""

from __future__ import annotations

import json
import math

import torch
from ops import capture, measure, open_results, parse

from vllm_rocm_ops import ops

# (N, K): layers of Llama-3.1-405B at TP 8, then of DeepSeek-V3 at TP 8
SHAPES = {
    "llama qkv": (2304, 16384),
    "llama o": (16384, 2048),
    "llama gate_up": (13312, 16384),
    "llama down": (16384, 6656),
    "deepseek q_a + kv_a": (2112, 7168),
    "deepseek q_b": (3072, 1536),
    "deepseek o": (7168, 2048),
    "deepseek dense gate_up": (4608, 7168),
    "deepseek dense down": (7168, 2304),
    "deepseek shared gate_up": (512, 7168),
    "deepseek shared down": (7168, 256),
}
ROTATED_BYTES = 400_000_000


def inputs(m: int, n: int, k: int, fp8: torch.dtype) -> tuple:
    a, b = (torch.randn(rows, k, device="cuda").to(fp8) for rows in (m, n))
    scale_a, scale_b = torch.rand(m, 1, device="cuda") + 0.5, torch.rand(n, 1, device="cuda") * 0.01
    return a, b.t(), scale_a, scale_b, torch.bfloat16, None


def peers(options, n: int) -> dict:
    """Name -> a call with the op's arguments."""
    calls = {
        "torch rowwise": lambda a, b, sa, sb, t, _: torch._scaled_mm(a, b, sa, sb.t(), out_dtype=t),
        "torch tensorwise": lambda a, b, sa, sb, t, _: torch._scaled_mm(a, b, sa[:1], sb[:1], out_dtype=t),
    }
    if options.vllm:
        cutlass = torch.ops._C.cutlass_scaled_mm

        def rowwise(a, b, sa, sb, t, _):
            cutlass(a.new_empty((a.shape[0], n), dtype=t), a, b, sa, sb, None)

        def tensorwise(a, b, sa, sb, t, _):
            cutlass(a.new_empty((a.shape[0], n), dtype=t), a, b, sa[:1], sb[:1], None)

        calls |= {"vllm rowwise": rowwise, "vllm tensorwise": tensorwise}
    return calls


def main() -> None:
    options, arch = parse(
        __doc__, lambda parser: parser.add_argument("--m", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    )
    op, ratios = ops.scaled_mm, []
    with open_results(options, "gemm") as file, torch.inference_mode():
        for layer, (n, k) in SHAPES.items():
            for m in options.m:
                sets = [inputs(m, n, k, arch.fp8_dtype) for _ in range(max(3, math.ceil(ROTATED_BYTES / (n * k))))]
                a = op.Arguments(*sets[0])
                configs = op.configs(a, arch) if options.sweep else [op.explain(*sets[0]).config]
                graphs, default = {}, op.default
                for config in configs:
                    op.default = lambda *_, config=config: config
                    op._executions.clear()
                    graphs[str(config)] = capture(op, sets)
                op.default = default
                op._executions.clear()
                broken = {}
                for name, call in peers(options, n).items():
                    try:
                        graphs[name] = capture(call, sets)
                    except RuntimeError as error:
                        broken[name] = str(error).splitlines()[0]
                times = measure(graphs, len(sets))
                error = (op(*sets[0]).double() - op.reference(*sets[0][:4], torch.float64)).abs().max().item()
                bytes_of_call = n * k + m * k + 2 * m * n
                of_peers = {name: round(times[name], 3) for name in times if name in peers(options, n)}
                for config in configs:
                    us = times[str(config)]
                    line = {
                        "op": op.name,
                        "case": f"{layer} {m}x{n}x{k}",
                        "shape": {"m": m, "n": n, "k": k},
                        "gpu": torch.cuda.get_device_name(),
                        "us": round(us, 3),
                        "peers": of_peers,
                        "unavailable": broken,
                        "floor_us": round(bytes_of_call / options.bandwidth / 1000, 3),
                        "bandwidth_gb_s": round(bytes_of_call / us / 1000, 1),
                        "copy_gb_s": round(options.bandwidth, 1),
                        "kernel": str(config),
                        "max_error": error,
                        "versions": options.versions,
                        "commit": options.commit,
                    }
                    file.write(json.dumps(line) + "\n")
                    best = min(of_peers, key=of_peers.get)
                    print(
                        f"{line['case']:36} {us:8.2f} us  {best} {of_peers[best]:8.2f}  floor {line['floor_us']:7.2f} {config}"
                    )
                    if not options.sweep:
                        ratios.append((m, of_peers[best] / us))
                del sets
                torch.cuda.empty_cache()
    for low, high in ((1, 16), (32, 64)):
        of_range = [ratio for m, ratio in ratios if low <= m <= high]
        if of_range:
            mean = math.exp(sum(map(math.log, of_range)) / len(of_range))
            print(f"M {low}..{high}: {mean:.2f}x the best peer as a geometric mean, least {min(of_range):.2f}x")


if __name__ == "__main__":
    main()
