"""Test row ops that write MX-FP8: bit-equal to the plain op followed by a quantization.

This holds for every bf16 number and on both chips, and `mxfp8_scaled_mm` accepts the output.
"""

import pytest
import torch
from marks import AMD, FULL

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, quantization
from vllm_rocm_ops.emulator import Emulator

HIDDEN = 2048


@pytest.fixture(scope="module", params=AMD)
def arch(request):
    emulator = Emulator(request.param)
    with launch.executor(emulator):
        yield emulator.arch


def all_numbers() -> torch.Tensor:
    """Return every bf16 number, NaN included, as [32, HIDDEN].

    The largest of some groups is 1.75 * 2^i, equal to 448 times its scale.
    """
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(-1)
    return numbers.to(torch.int16).view(torch.bfloat16).view(-1, HIDDEN)


def same_bytes(got: tuple, plain: torch.Tensor) -> bool:
    values, scale = quantization.mx(plain.float())
    return torch.equal(got[0].view(torch.uint8), values.view(torch.uint8)) and torch.equal(got[1], scale)


@pytest.mark.parametrize("general", [False, True])
def test_bytes_of_a_norm(general, arch):
    """With ones in a row, the results are the weight's numbers, both zeros among them."""
    rows = torch.ones(2, HIDDEN + general, dtype=torch.bfloat16)[:, :HIDDEN]
    rows[1] = -1.0
    numbers = all_numbers()
    mixed = numbers.t().reshape(numbers.shape)  # groups of numbers of many sizes
    some = 1 if FULL else 8
    for weight in (numbers[:: 8 if general else some], mixed[5:6], numbers[3 :: 4 * some].flip(1)):
        for one in weight:
            if one.isnan().any():  # would be NaN * rms in another order of bits
                one = one.nan_to_num()
            plain = ops.rms_norm(rows, one, 0.0)
            assert same_bytes(ops.rms_norm_mxfp8_quant(rows, one, 0.0), plain)
    residual, other = torch.randn(2, 3, HIDDEN).bfloat16()
    first, second = residual.clone(), residual.clone()
    plain = ops.fused_add_rms_norm(other, first, one, 1e-5)
    assert same_bytes(ops.rms_norm_mxfp8_quant(other, one, 1e-5, second), plain) and torch.equal(first, second)


def test_bytes_of_a_layer_norm(arch):
    x, weight, bias = torch.randn(5, 352).bfloat16(), torch.randn(352).bfloat16(), torch.randn(352).bfloat16()
    plain = ops.layer_norm(x, weight, bias, 1e-5)
    assert same_bytes(ops.layer_norm_mxfp8_quant(x, weight, bias, 1e-5), plain)


def test_bytes_of_a_static_quantization(arch):
    x, scale = torch.randn(3, 2 * 512).bfloat16(), torch.tensor([2.0**-4])
    plain = ops.silu_and_mul_with_clamp(x, 1.0, 1.702, 1.0)
    got = ops.silu_and_mul_with_clamp_quant(x, 1.0, scale, arch.fp8_dtype, 1.702, 1.0)
    assert torch.equal(got.float(), quantization.static(plain.float(), scale, arch.fp8_dtype).float())


@pytest.mark.parametrize("activation", ["silu_and_mul", "silu_and_mul_with_clamp"])
def test_feeds_a_product(arch, activation):
    """In the shape of a small decode layer, the activation's output goes into the GEMM unchanged."""
    further = () if activation == "silu_and_mul" else (7.0, 1.702, 1.0)
    x = torch.randn(3, 2 * 256).bfloat16()
    values, scale = getattr(ops, f"{activation}_mxfp8_quant")(x, *further)
    b, scale_b = quantization.mx(torch.randn(64, 256))
    got = ops.mxfp8_scaled_mm(values, b, scale, scale_b, torch.float32)
    wanted = getattr(ops, activation).reference(x.double(), *further) @ quantization.mx_numbers(b, scale_b).t()
    assert (got - wanted).norm() < 0.04 * wanted.norm()  # e4m3 has steps of 1/8, so errors of 1/16 at most


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_refuses_a_limit(limit):
    with pytest.raises(ValueError, match="silu_and_mul_with_clamp_mxfp8_quant: limit must be a number above 0"):
        ops.silu_and_mul_with_clamp_mxfp8_quant(torch.zeros(1, 64, dtype=torch.bfloat16), limit)


@pytest.mark.parametrize("columns", [0, 48])
def test_refuses_parts_of_a_group(columns):
    with pytest.raises(ValueError, match=f"rms_norm_mxfp8_quant: input must be a multiple of 32 above 0 .*{columns}"):
        ops.rms_norm_mxfp8_quant(torch.zeros(1, columns), torch.zeros(columns), 1e-5)
