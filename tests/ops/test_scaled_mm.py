"""Test scaled_mm; test_scaled_mm_tiled.py and test_same_bits.py have more."""

import pytest
import torch
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU; test_same_bits.py has the same in the emulator")
@pytest.mark.parametrize("m", [1, 16, 64])
def test_same_bits_in_1000_calls(m):
    """GEMMs of a decode layer, however K is split, have the same bits in any order of blocks.

    The weight is not in a cache.
    """
    n, k, arch = 2304, 16384, archs.of_device(0)
    a, b = (torch.randn(rows, k, device="cuda").to(arch.fp8_dtype) for rows in (m, n))
    scale_a, scale_b = torch.rand(m, 1, device="cuda"), torch.rand(n, 1, device="cuda")
    copies = [b.clone() for _ in range(1 + 10**9 // b.nbytes)]
    arguments = (a, b.t(), scale_a, scale_b, torch.bfloat16)
    exact = ops.scaled_mm.reference(*arguments[:4], torch.float64)
    configs = ops.scaled_mm.configs(ops.scaled_mm.Arguments(*arguments), arch)
    for config in configs:
        with ops.scaled_mm.running(config):
            first, differ = ops.scaled_mm(*arguments), torch.zeros((), device="cuda")
            for call in range(-(-1000 // len(configs))):
                differ += (ops.scaled_mm(a, copies[call % len(copies)].t(), *arguments[2:]) != first).sum()
        assert (first - exact).abs().max() <= 2**-8 * exact.abs().max() and differ == 0, config
