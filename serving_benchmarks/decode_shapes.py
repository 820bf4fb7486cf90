"""The linear layers of a decode step, and the kernels that they get; the latter needs no GPU.

    python serving_benchmarks/decode_shapes.py > tests/data/decode_kernels.csv

decode_shapes.csv holds, for Llama-3.1-405B FP8 and DeepSeek-V3 as one rank of each way to divide them sees them, the layers
with a weight [N, K] that M tokens are multiplied with, and how often a step has each. Left out is what is no linear GEMM of
ours: routed experts, attention, and the bf16 batched products that MLA absorbs (W_UK and W_UV).
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import ops
from vllm_rocm_ops.op import Op
from vllm_rocm_ops.ops.gemm import BLOCK

GPUS = ("gfx942", "gfx942:80", "gfx950", "sm_90")


class DecodeShape(NamedTuple):
    """One line of decode_shapes.csv."""

    model: str
    layer: str
    m: int
    n: int
    k: int
    weight_bytes_per_element: int
    count_per_step: int

    def call(self, device: str, fp8_dtype: torch.dtype) -> tuple[Op, tuple]:
        """The op, and arguments of zeros on a device: bf16 layers as they are; FP8 with scales per token and per channel in
        Llama, per 1x128 and 128x128 in DeepSeek."""
        m, n, k = self.m, self.n, self.k
        if self.weight_bytes_per_element == 2:
            a, b = (torch.zeros(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
            return ops.unquantized_gemm, (a, b)
        a, b = (torch.zeros(rows, k, dtype=torch.uint8, device=device).view(fp8_dtype) for rows in (m, n))
        if self.model.startswith("llama"):
            scales = (torch.zeros(rows, 1, device=device) for rows in (m, n))
            return ops.scaled_mm, (a, b.t(), *scales, torch.bfloat16)
        scales = (torch.zeros(rows, -(-k // BLOCK), device=device) for rows in (m, -(-n // BLOCK)))
        return ops.block_scaled_mm, (a, b, *scales, torch.bfloat16)


def decode_shapes() -> list[DecodeShape]:
    """All lines of decode_shapes.csv."""
    with Path(__file__).with_suffix(".csv").open() as file:
        _, *lines = csv.reader(file)
    return [DecodeShape(model, layer, *map(int, numbers)) for model, layer, *numbers in lines]


def kernels() -> list[list[str]]:
    """A table of the shapes: what each runs on each of `GPUS`, as kernel and blocks, or why it falls back."""
    table = [["model", "layer", "M", "N", "K", *GPUS]]
    for shape in decode_shapes():
        found = []
        for arch in map(archs.named, GPUS):
            op, arguments = shape.call("meta", arch.fp8_dtype)
            chosen = op.explain(*arguments, arch=arch)
            found.append(" + ".join(f"{l.symbol} x{math.prod(l.grid)}" for l in chosen.launches) or chosen.source)
        table.append([shape.model, shape.layer, *map(str, (shape.m, shape.n, shape.k)), *found])
    return table


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows(kernels())
