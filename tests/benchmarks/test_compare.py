"""serving_benchmarks/compare.py: two trees' ops in one process. What it times needs a GPU."""

import pathlib
import sys

import pytest
import torch

from vllm_rocm_ops import ops

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
