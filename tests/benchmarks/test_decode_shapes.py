"""serving_benchmarks/decode_shapes.py: which kernel each linear layer of a decode step gets on each GPU, without one."""

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
    changed = [" -> ".join(map(str, pair)) for pair in zip(recorded, table) if pair[0] != pair[1]]
    command = "python serving_benchmarks/decode_shapes.py > tests/data/decode_kernels.csv"
    assert len(recorded) == len(table) and not changed, "\n".join((*changed, f"if it should be so, run: {command}"))


@pytest.mark.parametrize("gpu", decode_shapes.GPUS)
def test_every_decode_shape_has_a_kernel(table, gpu):
    header, *rows = table
    assert len(rows) == len(decode_shapes.decode_shapes()) > 500
    without = [row for row in rows if int(row[header.index("M")]) <= SKINNY and "fallback" in row[header.index(gpu)]]
    assert not without
