"""Define the GEMM shapes of each dtype that `gemm` supports: perf-kernels' sizes, and Llama-3.1-8B's layers in INT8."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.ops.shared.gemm import BLOCK, E5M2
from vllm_rocm_ops.tools.bench.shapes import Shape, beside_float64

KINDS = ("int8", "e4m3", "e5m2", "bf16", "fp16")
LARGE = (*((1024 * i,) * 3 for i in (1, 2, 4, 8)), (4864, 4096, 8192), (9728, 8192, 65536), (4864, 8192, 4160))
FEW = ((1, 8192, 28672), (1, 6144, 6144), (1, 4096, 4096), (2, 16384, 16384), (1, 4096, 3078))  # fp16
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))  # N and K


def gemm_dtypes(tokens: Iterable[int] = (1, 8, 16, 32, 64, 256, 2048)) -> Iterator[Shape]:
    """Yield `LARGE` in each dtype, `FEW` in fp16, and int8 layers at each number of tokens, with row and block scales."""
    sizes = [(*product, kind) for product in LARGE for kind in KINDS] + [(*product, "fp16") for product in FEW]
    sizes += [(m, *layer, kind) for kind in ("int8", "int8 blocks") for layer in LAYERS for m in tokens]
    for m, n, k, kind in sizes:
        case = Case(f"{m}x{n}x{k} {kind}", functools.partial(_arguments, m, n, k, kind))
        yield Shape(ops.gemm, case, {"m": m, "n": n, "k": k}, beside_float64)


def _arguments(m: int, n: int, k: int, scheme: str, device: str, generator: torch.Generator, fp8: torch.dtype) -> tuple:
    kind, _, blocks = scheme.partition(" ")
    types = {"int8": torch.int8, "e4m3": fp8, "e5m2": E5M2[fp8], "bf16": torch.bfloat16, "fp16": torch.float16}

    def rows(count: int) -> Tensor:
        values = torch.randn(count, k, device=device, generator=generator)
        return ((40 * values).round().clamp(-127, 127) if kind == "int8" else values).to(types[kind])

    def scale(count: int) -> Tensor:
        return torch.rand(count, 1, device=device, generator=generator) / 100

    if blocks:
        per_k = -(-k // BLOCK)
        scales = [torch.rand(count, per_k, device=device, generator=generator) / 100 for count in (m, -(-n // BLOCK))]
        return rows(m), rows(n).t(), torch.bfloat16, scales[0], scales[1].t(), None, "none", True
    scales = (None, None) if kind in ("bf16", "fp16") else (scale(m), scale(n))
    return rows(m), rows(n).t(), torch.bfloat16, *scales
