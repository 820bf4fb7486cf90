"""List the linear layers of a decode step with their kernels, without a GPU.

    python serving_benchmarks/decode_shapes.py > tests/data/decode_kernels.csv

The shapes are of one rank of Llama-3.1-405B FP8 and DeepSeek-V3, for several parallel configurations. A linear layer multiplies by one
weight [N, K], so norms, activations and routed experts are excluded. A layer has a row for the first M, and for each M at which a GPU's
kernel or number of blocks changes. A cell is empty where a GPU's did not change.
"""

from __future__ import annotations

import csv
import math
import sys
from typing import NamedTuple

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.tools.bench.shapes import linear_layers

GPUS = ("gfx942", "gfx942:80", "gfx950", "sm_90")
MODELS = {
    "llama405b_tp8": ("llama-3.1-405b-fp8", 8),
    "llama405b_tp4": ("llama-3.1-405b-fp8", 4),
    "dsv3_tp8": ("deepseek-v3", 8),
    "dsv3_tp4": ("deepseek-v3", 4),
    "dsv3_dp_ep": ("deepseek-v3", 1),
}
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


class DecodeShape(NamedTuple):
    """A linear layer of a model with m tokens."""

    model: str
    call: LayerCall
    m: int
    n: int
    k: int


def decode_shapes() -> list[DecodeShape]:
    """Return every linear layer of every model at every number of tokens."""
    return [
        DecodeShape(name, call, m, n, k)
        for name, model in MODELS.items()
        for call, n, k in linear_layers(*model)
        for m in TOKENS
    ]


def kernels() -> list[list[str]]:
    """Return a table of the shapes with the kernel and blocks on each of `GPUS`, or the reason for a fallback."""
    table = [["model", "layer", "M", "N", "K", *GPUS]]
    for model, call, *sizes in decode_shapes():
        choices = []
        for arch in map(archs.named, GPUS):
            arguments = call.case(sizes[0]).make("meta", torch.Generator(), arch.fp8_dtype)
            chosen = call.op.explain(*arguments, arch=arch)
            choices.append(" + ".join(f"{l.symbol} x{math.prod(l.grid)}" for l in chosen.launches) or chosen.source)
        table.append([model, call.layer, *map(str, sizes), *choices])
    return table


def changes(table: list[list[str]]) -> list[list[str]]:
    """Return the rows in which a choice changes along M, without unchanged cells."""
    header, *rows = table
    first = len(header) - len(GPUS)
    shorter, before = [header], [""] * len(header)
    for row in rows:
        is_same_layer = row[:2] == before[:2]
        cells = ["" if is_same_layer and cell == old else cell for cell, old in zip(row[first:], before[first:])]
        if any(cells):
            shorter.append(row[:first] + cells)
        before = row
    return shorter


if __name__ == "__main__":
    csv.writer(sys.stdout, lineterminator="\n").writerows(changes(kernels()))
