"""The Triton kernel that is timed beside mxfp8_scaled_mm, in Triton's interpreter."""

import importlib
import importlib.util
import sys

import pytest
import torch

from vllm_rocm_ops import ops, quantization
from vllm_rocm_ops.bench.peers import OTHERS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
[(_, PEER, _)] = OTHERS["mxfp8_scaled_mm"]


@pytest.fixture
def interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "vllm_rocm_ops.bench.triton_mx", raising=False)
    yield
    sys.modules.pop("vllm_rocm_ops.bench.triton_mx", None)


def product(m: int, n: int, k: int) -> tuple:
    (a, scale_a), (b, scale_b) = (quantization.mx(torch.randn(rows, k)) for rows in (m, n))
    return a, b, scale_a, scale_b, torch.float32


def test_it_computes_the_same(interpreter):
    arguments = product(70, 130, 256)
    got, wanted = PEER.call(*PEER.prepare(*arguments)), ops.mxfp8_scaled_mm.reference(*arguments)
    assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_it_says_what_it_does_not_take(interpreter):
    with pytest.raises(ValueError, match="K=160 must be a multiple of 128"):
        PEER.call(*product(1, 8, 160))
