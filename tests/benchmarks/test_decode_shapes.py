"""Test the kernel of each linear layer in a decode step, without a GPU, against tests/data/decode_kernels.csv.

The shapes are of one rank of Llama-3.1-405B FP8 and DeepSeek-V3, for several parallel configurations. A linear layer multiplies by one
weight [N, K], so norms, activations and routed experts are excluded. A layer has a row for the first M, and for each M at which a GPU's
kernel or number of blocks changes. A cell is empty where a GPU's did not change.
"""

import csv
import math
import pathlib

import pytest
import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.tools.bench.shapes import linear_layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "decode_kernels.csv"
SKINNY = 64  # tokens
GPUS = ("gfx942", "gfx942:80", "gfx950", "sm_90")
MODELS = {
    "llama405b_tp8": ("llama-3.1-405b-fp8", 8),
    "llama405b_tp4": ("llama-3.1-405b-fp8", 4),
    "dsv3_tp8": ("deepseek-v3", 8),
    "dsv3_tp4": ("deepseek-v3", 4),
    "dsv3_dp_ep": ("deepseek-v3", 1),
}
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
HEADER = ["model", "layer", "M", "N", "K", *GPUS]


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    """Return a row for each layer at each M: the kernel and blocks on each of `GPUS`, or the reason for a fallback."""
    rows = []
    layers = [(name, *layer) for name, model in MODELS.items() for layer in linear_layers(*model)]
    for name, call, n, k in layers:
        for m in TOKENS:
            choices = []
            for arch in map(archs.named, GPUS):
                arguments = call.case(m).make("meta", torch.Generator(), arch.fp8_dtype)
                chosen = call.op.explain(*arguments, arch=arch)
                launches = (f"{launch.symbol} x{math.prod(launch.grid)}" for launch in chosen.launches)
                choices.append(" + ".join(launches) or chosen.source)
            rows.append([name, call.layer, *map(str, (m, n, k)), *choices])
    return rows


def changes(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows in which a choice changes along M, without unchanged cells."""
    first = len(HEADER) - len(GPUS)
    shorter, before = [HEADER], [""] * len(HEADER)
    for row in rows:
        is_same_layer = row[:2] == before[:2]
        cells = ["" if is_same_layer and cell == old else cell for cell, old in zip(row[first:], before[first:])]
        if any(cells):
            shorter.append(row[:first] + cells)
        before = row
    return shorter


def test_every_shape_gets_the_recorded_kernel(table):
    recorded, now = list(csv.reader(RECORDED.read_text().splitlines())), changes(table)
    if recorded != now:
        written = ROOT / "build" / RECORDED.name
        written.parent.mkdir(exist_ok=True)
        with written.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(now)
        changed = [f"- {row}" for row in recorded if row not in now] + [
            f"+ {row}" for row in now if row not in recorded
        ]
        pytest.fail("\n".join((*changed, f"if it should be so, copy {written} to {RECORDED.parent}")))


def test_a_row_is_kept_where_a_choice_changes():
    def row(layer: str, m: int, *kernels: str) -> list[str]:
        return ["llama", layer, str(m), "64", "32", *kernels]

    rows = [
        *(row("qkv", 1, *"aabb"), row("qkv", 2, *"aabb"), row("qkv", 4, *"abbb"), row("qkv", 8, *"aabb")),
        *(row("o_proj", 1, *"aabb"), row("o_proj", 2, *"aabb")),
    ]
    kept = row("qkv", 4, "", "b", "", ""), row("qkv", 8, "", "a", "", ""), row("o_proj", 1, *"aabb")
    assert changes(rows) == [HEADER, row("qkv", 1, *"aabb"), *kept]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_decode_shape_has_a_kernel(table, gpu):
    assert len(table) > 500
    skinny = [row for row in table if int(row[HEADER.index("M")]) <= SKINNY]
    assert not [row for row in skinny if "fallback" in row[HEADER.index(gpu)]]
