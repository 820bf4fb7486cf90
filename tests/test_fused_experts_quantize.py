"""The quantisation of rows inside fused_experts, by itself: bit for bit what quantization.py says."""

from __future__ import annotations

import pytest
import torch
from emulator import Emulator

from vllm_rocm_ops import launch, quantization
from vllm_rocm_ops.correctness import generator_of
from vllm_rocm_ops.launch import Workspace
from vllm_rocm_ops.ops import fused_experts_quantize
from vllm_rocm_ops.ops.fused_experts_quantize import Rows
from vllm_rocm_ops.ops.gemm import BLOCK


def run(x: torch.Tensor, arch_name: str, per_block=False, static=None, present=None):
    """Values and scales, as the emulator leaves them in memory that was filled with 0xff."""
    emulator = Emulator(arch_name)
    rows = Rows(x, len(x), x.shape[1], x.stride(0), x.dtype)
    planned = fused_experts_quantize.quantize(rows, per_block, static, emulator.arch, present)
    memory = {id(a): torch.full((a,), 0xFF, dtype=torch.uint8) for a in planned.launch.args if isinstance(a, Workspace)}
    args = tuple(memory.get(id(a), a) for a in planned.launch.args)
    emulator.run(launch.code_object(planned.launch.module, arch_name), planned.launch._replace(args=args))
    values = memory[id(planned.values)].view(emulator.arch.fp8_dtype).reshape(x.shape)
    if static is not None:
        assert planned.scale is static and planned.scale_row == 0
        return values, None, emulator.arch.fp8_dtype
    return (
        values,
        memory[id(planned.scale)].view(torch.float32).reshape(len(x), planned.scale_row),
        emulator.arch.fp8_dtype,
    )


def rows_of(m: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, columns + 8, generator=generator_of(f"{m} {columns}"))[:, :columns]
    x[0, -1], x[-1, 0], x[m // 2] = 300.0, -200.0, 0.0
    return torch.nn.functional.pad(x, (0, 8)).to(dtype)[:, :columns]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("arch_name", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [8, 80, 128, 208, 2048, 2184, 16400])
def test_rows_are_quantised(columns, dtype, arch_name):
    x = rows_of(3, columns, dtype)
    values, scale, fp8 = run(x, arch_name)
    expected, expected_scale = quantization.per_token(x.float(), fp8, None)
    assert torch.equal(scale, expected_scale) and same(values, expected)

    values, scale, _ = run(x, arch_name, per_block=True)
    blocks = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    expected_scale = quantization.scale_of(quantization.absmax(blocks), fp8)
    assert torch.equal(scale, expected_scale[..., 0])
    assert same(values, quantization.cast(blocks / expected_scale, fp8).flatten(1)[:, :columns].contiguous())

    static = torch.tensor([0.013])
    values, _, _ = run(x, arch_name, static=static)
    assert same(values, quantization.static(x.float(), static, fp8))


@pytest.mark.parametrize("per_block", [False, True])
def test_rows_that_are_not_there_stay_untouched(per_block):
    x = rows_of(4, 208, torch.bfloat16)
    values, scale, _ = run(x, "gfx942", per_block, present=torch.tensor([2], dtype=torch.int32))
    assert (values.view(torch.uint8)[2:] == 0xFF).all() and scale[2:].isnan().all() and not scale[:2].isnan().any()
