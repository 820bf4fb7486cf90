"""Test block_scaled_mm with each of the 256 e8m0 scales, exactly."""

from __future__ import annotations

import pytest
import torch
from marks import full
from op_tests import test_case  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared.gemm import BLOCK

BLOCKS = 32  # K blocks per call, one scale each
OTHER = 0.5  # scale of the other operand: nothing overflows


def product(of: str, other: torch.dtype, scales: torch.Tensor, tokens: int, arch) -> torch.Tensor:
    """Return the [tokens, 16] fp32 result of gfx942 or gfx950 code.

    Token i is 1 only in block i of K, so that its results are the scale of this block in operand `of`, times OTHER.
    """
    blocks = len(scales)
    a = torch.zeros(tokens, blocks * BLOCK)
    a[torch.arange(tokens), torch.arange(tokens) % blocks * BLOCK + 77] = 1
    b = torch.ones(16, blocks * BLOCK)
    others = torch.full((blocks,), OTHER).to(other)
    scale_a, scale_b = (scales, others) if of == "a" else (others, scales)
    fp8 = arch.fp8_dtype
    return ops.block_scaled_mm(a.to(fp8), b.to(fp8), scale_a.repeat(tokens, 1), scale_b[None], torch.float32)


@pytest.mark.parametrize("arch_name", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("of", ["a", pytest.param("b", marks=full)])
@pytest.mark.parametrize(
    "tokens, other",
    [
        pytest.param(BLOCKS, torch.float8_e8m0fnu, id="skinny"),
        pytest.param(65, torch.float8_e8m0fnu, id="tiled"),
        pytest.param(BLOCKS, torch.float32, id="widened"),
    ],
)
def test_every_e8m0_scale(tokens, other, of, arch_name):
    emulator = Emulator(arch_name)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for scales in every.split(BLOCKS):
        with launch.executor(emulator):
            results = product(of, other, scales, tokens, emulator.arch)
        exact = (scales.float() * OTHER)[torch.arange(tokens) % BLOCKS, None].expand(-1, 16)
        if scales.view(torch.uint8)[-1] == 255:  # 0 * NaN
            exact = torch.full_like(exact, float("nan"))
        torch.testing.assert_close(results, exact, rtol=0, atol=0, equal_nan=True)
