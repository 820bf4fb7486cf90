"""Test serving_benchmarks/compare.py, which runs two trees' ops in one process, without its timing, which needs a GPU."""

import argparse
import functools
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from marks import few_of

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs
from vllm_rocm_ops.tools.bench import lists, report, shapes
from vllm_rocm_ops.tools.bench.shapes import ROW_OPS, routing, rows

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "serving_benchmarks"))
    import compare

    yield compare
    for name in [name for name in sys.modules if name.partition(".")[0] == compare.OTHER]:
        del sys.modules[name]


def test_the_other_trees_ops_are_its_own(compare, tmp_path):
    other_tree = tmp_path / "tree"
    package = other_tree / compare.PACKAGE
    package.mkdir(parents=True)
    for path in (ROOT / compare.PACKAGE).rglob("*.py"):
        target = package / path.relative_to(ROOT / compare.PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    reference = package / "ops" / "silu_and_mul.py"
    text = reference.read_text()
    assert "def silu_and_mul(" in text
    reference.write_text(text + "\nOF_THE_OTHER = True\n")

    other = compare.import_other(other_tree, tmp_path)
    x = torch.randn(3, 512, dtype=torch.bfloat16)
    assert other.silu_and_mul is not ops.silu_and_mul and other.silu_and_mul.torch_op is not ops.silu_and_mul.torch_op
    assert torch.equal(other.silu_and_mul(x), ops.silu_and_mul(x))
    assert hasattr(sys.modules[f"{compare.OTHER}.ops.silu_and_mul"], "OF_THE_OTHER")
    assert not hasattr(sys.modules["vllm_rocm_ops.ops.silu_and_mul"], "OF_THE_OTHER")


def test_each_shape_of_a_kind_is_a_line(compare, tmp_path, monkeypatch, capsys):
    called, output = [], tmp_path / "lines.jsonl"
    clock = argparse.Namespace(device="cpu", calls=lambda bytes_of_call: 2, arch=archs.ARCHS["gfx950"])
    origin = report.Origin("Made-up GPU", 1.0, {"torch": "2.11.0"}, "abc")
    others = {op.name: functools.partial(op) for op in (*ROW_OPS, ops.grouped_topk)}
    for op in (*ROW_OPS, ops.grouped_topk):
        others[op.name].explain = op.explain

    def capture(call, sets):
        assert len(sets) == 2
        call(*sets[0])
        called.append(call)

    monkeypatch.setattr(compare, "GpuClock", lambda: clock)
    monkeypatch.setattr(compare.report, "origin", lambda *_: origin)
    monkeypatch.setattr(compare, "import_other", lambda tree, folder: argparse.Namespace(**others))
    monkeypatch.setattr(compare, "capture", capture)
    monkeypatch.setattr(compare, "measure", lambda graphs, calls: {"other": 2.0, "this": 3.0})
    monkeypatch.setattr(shapes, "HIDDEN", (128,))
    monkeypatch.setattr(compare, "KINDS", {"rows": lambda: rows((1, 2)), "routing": lambda: routing((3,))})
    compare.main([str(tmp_path), "--kinds", "rows", "routing", "--tolerance", "0.1", "--output", str(output)])
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(lines) == 2 * len(ROW_OPS) + 1 and called[::2] == [others[line["op"]] for line in lines]
    assert called[1::2] == [getattr(ops, line["op"]) for line in lines]
    assert lines[0]["case"] == "1x128 bfloat16" and lines[-1] == lines[-1] | {
        "us": 3.0,
        "other_us": 2.0,
        "case": "3x256",
        "gpu": "Made-up GPU",
        "versions": {"torch": "2.11.0"},
        "commit": "abc",
    }
    out = capsys.readouterr().out
    assert "silu_and_mul: 1.500x the other tree's time (geometric mean)" in out and out.count("slower: ") == len(lines)


def test_the_kinds_are_those_of_the_command_bench(compare):
    assert list(compare.KINDS) == [name for name in lists.LISTS if not name.endswith(lists.VARIANTS)]
    for kind, make in compare.KINDS.items():
        names = {(shape.op.name, shape.case.name) for shape in make()}
        counts = {"rows": len(ROW_OPS) * 2 * 4, "linear": 6 * 28, "routing": 7, "moe": 6 * 13, "attention": 24}
        assert len(names) == (counts | {"gemm-dtypes": 96, "decode-attention": 2 * 52 + 3 * 3})[kind]


@pytest.mark.parametrize("script", few_of(["compare.py", "host_time.py", "figures.py"]))
def test_help(script):
    command = [sys.executable, str(ROOT / "serving_benchmarks" / script), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("usage: " + script), result.stderr
