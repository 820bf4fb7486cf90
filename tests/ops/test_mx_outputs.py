"""Ops on rows that write MX-FP8: the bytes are those of the plain op and a quantisation of its result, for every bf16 number and on
both chips, and what they write is what `mxfp8_scaled_mm` takes."""

import pytest
import torch
from marks import AMD, FULL
from test_planted_bugs import few_of_bugs, kernels, plant, require_caught  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, quantization
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.emulator import Emulator

HIDDEN = 2048


@pytest.fixture(scope="module", params=AMD)
def arch(request):
    emulator = Emulator(request.param)
    with launch.executor(emulator):
        yield emulator.arch


def all_numbers() -> torch.Tensor:
    """Every bf16 number, [32, HIDDEN]; NaN too. The largest of some groups is 1.75 * 2^i, so 448 of its scale."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).roll(-1)
    return numbers.to(torch.int16).view(torch.bfloat16).view(-1, HIDDEN)


def same_bytes(got: tuple, plain: torch.Tensor) -> bool:
    values, scale = quantization.mx(plain.float())
    return torch.equal(got[0].view(torch.uint8), values.view(torch.uint8)) and torch.equal(got[1], scale)


@pytest.mark.parametrize("general", [False, True])
def test_bytes_of_a_norm(arch, general):
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


def test_bytes_of_a_static_quantisation(arch):
    x, scale = torch.randn(3, 2 * 512).bfloat16(), torch.tensor([2.0**-4])
    plain = ops.silu_and_mul_with_clamp(x, 1.0, 1.702, 1.0)
    got = ops.silu_and_mul_with_clamp_quant(x, 1.0, scale, arch.fp8_dtype, 1.702, 1.0)
    assert torch.equal(got.float(), quantization.static(plain.float(), scale, arch.fp8_dtype).float())


@pytest.mark.parametrize("activation", ["silu_and_mul", "silu_and_mul_with_clamp"])
def test_feeds_a_product(arch, activation):
    """Of a decode layer's shape in small: what the activation writes goes into the product as it is."""
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


# name: (file, text, what replaces it, op, case, arch, what must be said), or a test in the op's place
BUGS = {
    "software conversion loses the sign of small numbers": (
        "device/amd/numerics.h",
        " | (tops & 0x80808080)",
        "",
        test_bytes_of_a_norm,
        "",
        "gfx942",
        "",
    ),
    "software conversion takes FNUZ as it is": (
        "device/amd/numerics.h",
        "clamp_e4m3(low.x * 0.5f)",
        "clamp_e4m3(low.x)",
        ops.rms_norm_mxfp8_quant,
        "bf16",
        "gfx942",
        "output 0",
    ),
    "high pair's signs in the low pair": (
        "device/amd/numerics.h",
        "0x07030c0c",
        "0x0c0c0703",
        test_bytes_of_a_norm,
        "",
        "gfx942",
        "",
    ),
    "scale of 1.75 rounded up": (
        "device/float8.h",
        "(1 << kMantissa) / 4 - 1;",
        "(1 << kMantissa) / 4;",
        test_bytes_of_a_norm,
        "",
        "gfx950",
        "",
    ),
    "general kernel takes another group's scale": (
        "device/row_output.h",
        "mem::store((u8*)scale_out + group * scale_stride, u8(scale));",
        "mem::store((u8*)scale_out + (group ^ 1) * scale_stride, u8(scale));",
        ops.layer_norm_mxfp8_quant,
        "fp16-general",
        "gfx950",
        "output 1",
    ),
    "general kernel forgets the residual": (
        "ops/rms_norm.hip",
        "if constexpr (kResidual && kRounded) {",
        "if constexpr (kResidual && kRounded && kOutput != Output::kMx) {",
        ops.rms_norm_mxfp8_quant,
        "fp16-general",
        "gfx942",
        "residual|output",
    ),
    "sum not rounded": (
        "device/norm_row.h",
        "!is_dynamic(output) || output == Output::kMx;",
        "!is_dynamic(output);",
        test_bytes_of_a_norm,
        "",
        "gfx950",
        "",
    ),
    "up clamped on one side": (
        "ops/silu_and_mul_with_clamp.hip",
        ": up < -limit ? -limit : up",
        ": up",
        ops.silu_and_mul_with_clamp,
        "bf16",
        "gfx942",
        "output 0",
    ),
    "gate clamped on both sides": (
        "ops/silu_and_mul_with_clamp.hip",
        "gate > limit ? limit : gate;",
        "gate > limit ? limit : gate < -limit ? -limit : gate;",
        ops.silu_and_mul_with_clamp_mxfp8_quant,
        "bf16",
        "gfx950",
        "output 0",
    ),
    "beta left out": (
        "ops/silu_and_mul_with_clamp.hip",
        "(u + beta)",
        "u",
        ops.silu_and_mul_with_clamp_per_token_quant,
        "bf16",
        "gfx942",
        "output",
    ),
    "NaN clamped": (
        "ops/silu_and_mul_with_clamp.hip",
        "gate > limit ? limit : gate;",
        "__builtin_fminf(gate, limit);",
        ops.silu_and_mul_with_clamp,
        "fp16-special",
        "gfx942",
        "NaNs",
    ),
    "static result not rounded before": (
        "ops/silu_and_mul_with_clamp.hip",
        "kOutput == Output::kStatic ? round_to<T>(y) : y",
        "y",
        test_bytes_of_a_static_quantisation,
        "",
        "gfx950",
        "",
    ),
}


@pytest.mark.parametrize("bug", few_of_bugs(BUGS))
def test_planted_bug_is_caught(bug, plant, monkeypatch):  # noqa: F811
    file, text, replacement, the_op, _, arch, _ = BUGS[bug]
    if isinstance(the_op, Op):
        require_caught(BUGS[bug], plant, monkeypatch)
        return
    emulator = plant(arch, file, text, replacement)
    with launch.executor(emulator), pytest.raises(AssertionError):
        the_op(*(emulator.arch, False)[: the_op.__code__.co_argcount])
