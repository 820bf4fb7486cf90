"""Test router_gemm_topk; test_softmax_terms.py and test_same_bits.py have more."""

import math

import pytest
import torch
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator

CHIPS = "gfx942", "gfx950"
MINIMAX = 8, True, 1, 1, "sigmoid", 1.0


@pytest.mark.parametrize("arch", CHIPS)
def test_logits_of_a_float_gate_have_float32s_errors(arch):
    """Each is near float64's by the errors of float32 sums, where bf16 weights would be off by 2^-9, two parts by 2^-17."""
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(21, 1024, generator=generator).bfloat16(), torch.randn(128, 1024, generator=generator)
    with launch.executor(Emulator(arch, races=False)):
        logits, weights, ids = ops.router_gemm_topk(x, weight, *MINIMAX, torch.rand(128, generator=generator))
    exact, terms = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert logits.dtype == weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert ((logits - exact).abs() / terms).max() < 2**-21


@pytest.mark.parametrize("arch", CHIPS)
def test_infinite_weights_of_a_float_gate(arch):
    """They make logits infinite, or NaN for a token that is zero there, and no other NaN."""
    x, weight = torch.ones(3, 64).bfloat16(), torch.full((16, 64), 1 + 2.0**-23)
    weight[3, 5], weight[4, 6], weight[5, 7] = math.inf, -math.inf, math.nan
    x[1, 5] = 0.0
    with launch.executor(Emulator(arch)):
        logits, *_ = ops.router_gemm_topk(x, weight, 4, True)
    wanted = x.float() @ weight.t()
    assert torch.equal(logits.isnan(), wanted.isnan()) and logits.isinf().sum() == 5
    torch.testing.assert_close(logits, wanted, equal_nan=True)


@pytest.mark.parametrize("arch", CHIPS)
def test_last_group_of_long_rows(arch):
    """Rows that are almost 32 MB apart are over 2 GB from the first to the last."""
    stride = 2**24 - 8  # elements
    x = torch.empty_strided((64 + 1, 64), (stride, 1), dtype=torch.bfloat16)[:64]
    generator = torch.Generator().manual_seed(5)
    x.copy_(torch.randn(64, 64, generator=generator))
    weight = torch.randn(16, 64, generator=generator)
    with launch.executor(Emulator(arch, races=False)):
        logits, *_ = ops.router_gemm_topk(x, weight, 4, True)
    torch.testing.assert_close(logits, x.float() @ weight.t(), rtol=1e-4, atol=1e-4)


def test_a_weight_of_another_dtype_is_an_error():
    """It names the op, the argument, what is wanted, and what it got."""
    x, wanted = (
        torch.zeros(2, 64).bfloat16(),
        r"router_gemm_topk: weight must be torch.bfloat16 or torch.float32 \[E, K=64\]",
    )
    for dtype in (torch.float16, torch.float64, torch.int8):
        with pytest.raises(ValueError, match=rf"{wanted}.*, got {str(dtype)[6:]}\[8, 64\]"):
            ops.router_gemm_topk(x, torch.zeros(8, 64, dtype=dtype), 2, True)
    with pytest.raises(ValueError, match=rf"{wanted}.*, got float32\[8, 32\]"):
        ops.router_gemm_topk(x, torch.zeros(8, 32), 2, True)
