"""Test the Triton baseline of mxfp8_scaled_mm in Triton's interpreter, which must be enabled when the process starts."""

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from vllm_rocm_ops import ops
from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.tools.bench.baselines import BASELINES

def product(m, n, k):
    (a, scale_a), (b, scale_b) = (quantization.mx(torch.randn(rows, k)) for rows in (m, n))
    return a, b, scale_a, scale_b, torch.float32

baseline = BASELINES["mxfp8_scaled_mm"]["triton"]
arguments = product(70, 130, 256)
got, wanted = baseline.call(*baseline.prepare(*arguments)), ops.mxfp8_scaled_mm.reference(*arguments)
assert (got - wanted).abs().max() < 1e-6 * wanted.abs().max()
try:
    baseline.call(*product(1, 8, 160))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_it_computes_the_same_and_says_what_it_does_not_take():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "K=160 must be a multiple of 128" in ran.stdout, ran.stderr
