"""Test serving_benchmarks/decode_shapes.py: the kernel of each linear layer in a decode step, without a GPU."""

import csv
import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "decode_kernels.csv"
SKINNY = 64  # tokens

spec = importlib.util.spec_from_file_location("decode_shapes", ROOT / "serving_benchmarks" / "decode_shapes.py")
decode_shapes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decode_shapes)


@pytest.fixture(scope="module")
def table() -> list[list[str]]:
    return decode_shapes.kernels()


def test_every_shape_gets_the_recorded_kernel(table):
    recorded = list(csv.reader(RECORDED.read_text().splitlines()))
    found = decode_shapes.changes(table)
    changed = [f"- {row}" for row in recorded if row not in found] + [
        f"+ {row}" for row in found if row not in recorded
    ]
    command = "python serving_benchmarks/decode_shapes.py > tests/data/decode_kernels.csv"
    assert recorded == found, "\n".join((*changed, f"if it should be so, run: {command}"))


def test_a_row_is_kept_where_a_choice_changes():
    header = ["model", "layer", "M", "N", "K", *decode_shapes.GPUS]

    def row(layer: str, m: int, *kernels: str) -> list[str]:
        return ["llama", layer, str(m), "64", "32", *kernels]

    table = [
        header,
        *(row("qkv", 1, *"aabb"), row("qkv", 2, *"aabb"), row("qkv", 4, *"abbb"), row("qkv", 8, *"aabb")),
        *(row("o_proj", 1, *"aabb"), row("o_proj", 2, *"aabb")),
    ]
    kept = row("qkv", 4, "", "b", "", ""), row("qkv", 8, "", "a", "", ""), row("o_proj", 1, *"aabb")
    assert decode_shapes.changes(table) == [header, row("qkv", 1, *"aabb"), *kept]


@pytest.mark.parametrize("gpu", decode_shapes.GPUS)
def test_every_decode_shape_has_a_kernel(table, gpu):
    header, *rows = table
    assert len(rows) == len(decode_shapes.decode_shapes()) > 500
    without = [row for row in rows if int(row[header.index("M")]) <= SKINNY and "fallback" in row[header.index(gpu)]]
    assert not without
