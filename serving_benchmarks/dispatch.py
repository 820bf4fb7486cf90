"""Time what an eager call of an op costs the host, beside a PyTorch call.

    python serving_benchmarks/dispatch.py

On a GPU the calls launch kernels asynchronously, so that the host's time is what is measured. Without one, an executor that
discards its launches stands in, which leaves out the driver's own time. A captured graph pays nothing of this.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch

CALLS, ROUNDS = 200, 25


class Discard:
    """An executor that runs nothing."""

    arch = archs.ARCHS["gfx950"]

    def launch(self, launch, uninitialised) -> None:
        pass


def microseconds(call, synchronize) -> float:
    """Median host time of one call."""
    times = []
    for _ in range(ROUNDS):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    gpu = torch.cuda.is_available()
    device, synchronize = ("cuda", torch.cuda.synchronize) if gpu else ("cpu", lambda: None)
    fp8 = archs.of_device(0).fp8_dtype if gpu else Discard.arch.fp8_dtype
    x, residual = (torch.randn(1, 4096, device=device).bfloat16() for _ in range(2))
    weight, scale = torch.ones(4096, device=device).bfloat16(), torch.ones(1, device=device)
    tokens, weights = (torch.zeros(rows, 16384, device=device).to(fp8) for rows in (1, 2304))
    out, two = torch.empty_like(x), torch.randn(1, 8192, device=device).bfloat16()
    calls = {
        "torch.add, out given": lambda: torch.add(x, residual, out=out),
        "rms_norm": lambda: torch.ops.vllm_rocm_ops.rms_norm(x, weight, 1e-6),
        "silu_and_mul": lambda: torch.ops.vllm_rocm_ops.silu_and_mul(two),
        "fused_add_rms_norm_static_fp8_quant": lambda: torch.ops.vllm_rocm_ops.fused_add_rms_norm_static_fp8_quant(
            x, residual, weight, scale, 1e-6, fp8
        ),
        "rms_norm_per_block_quant": lambda: torch.ops.vllm_rocm_ops.rms_norm_per_block_quant(
            x, weight, 1e-6, fp8, 128, False, None, residual
        ),
        "scaled_mm, with counters": lambda: torch.ops.vllm_rocm_ops.scaled_mm(
            tokens, weights.t(), scale, scale, torch.bfloat16
        ),
    }
    print(f"host time per call on {torch.cuda.get_device_name() if gpu else 'CPU, launches discarded'}")
    with torch.inference_mode(), contextlib.nullcontext() if gpu else launch.executor(Discard()):
        for name, call in calls.items():
            print(f"{name:40} {microseconds(call, synchronize):6.2f} us")


if __name__ == "__main__":
    main()
