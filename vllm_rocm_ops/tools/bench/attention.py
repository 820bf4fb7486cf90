"""Define the prefill attention shapes to benchmark against PyTorch and FlashAttention.

They are the heads of public models and the shapes of perf-kernels. FLOPs of causal calls count visible scores only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.clock import Clock
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops import flash_attention
from vllm_rocm_ops.tools.bench.baselines import ATTENTION, Baseline
from vllm_rocm_ops.tools.bench.shapes import Check, Shape, relative_error

# batch, heads, KV heads, query rows, keys, key head size, value head size; each causal (aligned to the last key) and not causal
SHAPES = {
    "llama-3.1-405b tp8": [(1, 16, 1, rows, rows, 128, 128) for rows in (1024, 4096, 8192)],
    "llama-3.1-8b": [(1, 32, 8, rows, rows, 128, 128) for rows in (1024, 4096, 16384)],
    "deepseek-v3 tp8": [(1, 16, 16, rows, rows, 192, 128) for rows in (1024, 4096)],
    "perf-kernels": [(16, 16, 16, 1024, 1024, 128, 128), (2, 48, 48, 8181, 1021, 128, 128)]
    + [(4, 48, 24, 1024, 1024, 64, 64), (1, 4, 4, 8081, 7099, 256, 256)],
}


@dataclass(frozen=True)
class Attention(Shape):
    """Define one dense attention call."""

    draws_on_device, listed = True, ATTENTION

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        """Return one set: a call is compute-bound, so its arguments need not be cold."""
        return [arguments]

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check for the relative error (norm) of the plugin's result against the fp32 reference."""
        arguments = sets[0]
        exact, _, _ = flash_attention.reference(*(v.float() if isinstance(v, Tensor) else v for v in arguments))
        return lambda: {"relative_error": relative_error(flash_attention(*arguments)[0], exact)}


def attention(dtype: torch.dtype = torch.bfloat16) -> Iterator[Attention]:
    """Yield the shapes. Raises ValueError for an unsupported dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the dtype of attention must be bfloat16 or float16, got {dtype}")
    for model, shapes in SHAPES.items():
        for (batch, heads, kv_heads, rows, keys, size, value_size), causal in ((s, c) for s in shapes for c in (1, 0)):

            def make(
                device, generator, fp8_dtype, sizes=(batch, heads, kv_heads, rows, keys, size, value_size, causal)
            ):
                batch, heads, kv_heads, rows, keys, size, value_size, causal = sizes
                q, k, v = (
                    torch.randn(batch, *shape, generator=generator, device=device, dtype=dtype)
                    for shape in ((rows, heads, size), (keys, kv_heads, size), (keys, kv_heads, value_size))
                )
                return q, k, v, size**-0.5, bool(causal)

            seen = rows * keys
            if causal:
                seen = sum(max(min(keys - rows + row + 1, keys), 0) for row in range(rows))
            sizes = {"batch": batch, "heads": heads, "rows": rows, "keys": keys, "size": size}
            sizes["flops"] = 2 * batch * heads * seen * (size + value_size)
            name = f"{model} {batch}x{heads}:{kv_heads}x{rows}x{keys}x{size}{' causal' * causal}"
            yield Attention(flash_attention, Case(name, make), sizes)
