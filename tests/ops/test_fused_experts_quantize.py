"""Test the row quantization of fused_experts, alone and in the norm before it: bit-equal to quantization.py."""

from __future__ import annotations

import pytest
import torch
from marks import AMD

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, quantization
from vllm_rocm_ops.core.correctness import generator_of
from vllm_rocm_ops.core.launch import Workspace
from vllm_rocm_ops.emulator import Emulator
from vllm_rocm_ops.ops.shared import experts_quantize
from vllm_rocm_ops.ops.shared.experts import SCHEMES
from vllm_rocm_ops.ops.shared.experts_quantize import UnquantizedRows
from vllm_rocm_ops.ops.shared.gemm import BLOCK


def run(x: torch.Tensor, arch_name: str, weights="channel", static=None, present=None):
    """Return values and scales, as the emulator leaves them in memory filled with 0xff."""
    emulator = Emulator(arch_name)
    rows = UnquantizedRows(x, len(x), x.shape[1], x.stride(0), x.dtype)
    written, planned = experts_quantize.quantize(rows, SCHEMES[weights], static, emulator.arch, present)
    workspaces = [arg for arg in planned.named.values() if isinstance(arg, Workspace)]
    memory = {id(arg): torch.full((arg,), 0xFF, dtype=torch.uint8) for arg in workspaces}
    emulator.run(launch.code_object(planned.module, arch_name), planned.with_each(lambda arg: memory.get(id(arg), arg)))
    values = memory[id(written.rows)].view(emulator.arch.fp8_dtype).reshape(x.shape)
    if static is not None:
        assert written.scale is static and written.scale_row == 0
        return values, None, emulator.arch.fp8_dtype
    scale = memory[id(written.scale)].view(SCHEMES[weights].scales[0])
    return values, scale.reshape(len(x), written.scale_row), emulator.arch.fp8_dtype


def rows_of(m: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, columns + 8, generator=generator_of(f"{m} {columns}"))[:, :columns]
    x[0, -1], x[-1, 0], x[m // 2] = 300.0, -200.0, 0.0
    return torch.nn.functional.pad(x, (0, 8)).to(dtype)[:, :columns]


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [8, 80, 128, 208, 2048, 2184, 16400])
def test_rows_are_quantized(columns, dtype, arch_name):
    x = rows_of(3, columns, dtype)
    values, scale, fp8 = run(x, arch_name)
    expected, expected_scale = quantization.per_token(x.float(), fp8, None)
    assert torch.equal(scale, expected_scale) and same(values, expected)

    values, scale, _ = run(x, arch_name, "block")
    blocks = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK)).unflatten(1, (-1, BLOCK))
    expected_scale = quantization.scale_of(quantization.absmax(blocks), fp8)
    assert torch.equal(scale, expected_scale[..., 0])
    assert same(values, quantization.cast(blocks / expected_scale, fp8).flatten(1)[:, :columns].contiguous())

    static = torch.tensor([0.013])
    values, _, _ = run(x, arch_name, static=static)
    assert same(values, quantization.static(x.float(), static, fp8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [32, 96, 2080, 4128])
def test_rows_are_quantized_per_32(columns, dtype):
    """Some maxima are the limit times a power of two, one step more or less, the extremes, or infinite."""
    x = rows_of(8, columns, dtype)
    limits, largest = torch.tensor([448.0, 3.5, 2.0**-10 * 1.75], dtype=dtype), torch.finfo(dtype).max
    up, down = (torch.nextafter(limits, torch.tensor(to, dtype=dtype)) for to in (largest, 0.0))
    corners = (limits[0], up[0], down[0], -up[1], down[1], up[2], largest, -torch.inf)
    for row, corner in enumerate(corners):
        x[row, :16] = x[row, :16].clamp(-1e-4, 1e-4)
        x[row, 16:32], x[row, 16 + row] = 0.0, corner
    x[1, :16] = torch.finfo(dtype).tiny  # and the smallest that are not 0
    values, scale, _ = run(x, "gfx950", "mx")
    expected, expected_scale = quantization.mx(x.float())
    assert torch.equal(scale, expected_scale) and same(values, expected)


def test_scales_of_32_are_those_of_the_definition():
    """For all of bfloat16, the scale is the smallest power of two under which the value is at most 448."""
    x = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).double()
    values, scale = quantization.mx(x.repeat_interleave(32).reshape(-1, 32))
    exact = torch.exp2(scale.double() - 127)
    assert (x[:, None] / exact <= 448).all() and ((x[:, None] / exact > 224) | (scale == 0)).all()
    assert torch.equal(values[:, :1].double(), (x[:, None] / exact).to(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "columns, one_plus, has_residual", [(2048, False, True), (2176, True, True), (640, False, False)]
)
def test_norm_gives_the_bits_of_two_launches(columns, one_plus, has_residual, dtype, arch_name):
    """The result, the residual, and the experts' values and scales are equal in each configuration of the norm."""
    emulator = Emulator(arch_name)
    x, residual = rows_of(3, columns, dtype), rows_of(3, columns, dtype).flip(1)
    weight = (torch.rand(columns, generator=generator_of("weight")) - 0.5 + (not one_plus)).to(dtype)
    op, given = ops.rms_norm_and_per_block_quant, (x, weight, 1e-6, emulator.arch.fp8_dtype)
    configs = list(op.configs(op.Arguments(*given, residual, one_plus), emulator.arch))
    assert {config.vectors_per_thread for config in configs} >= ({0, 1} if one_plus else {0, 1, 2, 4})
    for config in configs:
        ours, theirs = ((residual.clone() if has_residual else None) for _ in range(2))
        with launch.executor(emulator):
            with op.running(config):
                out, values, scale = op(*given, ours, one_plus)
            norm = ops.fused_add_rms_norm if has_residual else ops.rms_norm
            with norm.running(config):
                alone = norm(x, *([theirs] if has_residual else []), weight, 1e-6, one_plus)
        assert same(out, alone) and (not has_residual or same(ours.contiguous(), theirs.contiguous()))
        quantized, its_scale, _ = run(alone, arch_name, "block")
        assert same(values, quantized) and torch.equal(scale, its_scale)


@pytest.mark.parametrize("weights", ["channel", "block"])
def test_rows_that_are_not_there_stay_untouched(weights):
    x = rows_of(4, 208, torch.bfloat16)
    values, scale, _ = run(x, "gfx942", weights, present=torch.tensor([2], dtype=torch.int32))
    assert (values.view(torch.uint8)[2:] == 0xFF).all() and scale[2:].isnan().all() and not scale[:2].isnan().any()
