"""Multiply bf16 activations and MXFP8 or MXFP4 weights; kernels: csrc/ops/mx_gemm.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import MX_BLOCK, MX_SCALES, mx_numbers, packed_bits
from vllm_rocm_ops.core.tensors import aligned, describe, row_stride, rows_of
from vllm_rocm_ops.ops.shared import gemm, wave_split_k
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig

__all__ = ["mx_gemm"]

FORMATS = {torch.float8_e4m3fn: "fp8", torch.uint8: "fp4"}
TOKENS = {"amd": (16, 64), "nvidia": (8, 16)}  # token limits of the kernels
STEPS_PER_SCALE_LOAD = 4
UNIT_BYTES_PER_US = 22e3  # bytes of weight per compute unit and us, as timing/ predicts for MI300X
LANE_ROWS = 4  # adjacent rows of a lane (kLaneRows of csrc/gemm/skinny/mx_weights.h); a tile has the rows of 16 lanes
WEIGHT_BYTES = {"amd": 8, "nvidia": 16}  # of a row, that a lane loads at once
# On NVIDIA guessed, so that resident blocks (kResident there), by tokens, fill the GPU: 3.2 TB/s of an H200.
NVIDIA_UNIT_BYTES_PER_US = 24e3
NVIDIA_RESIDENT = {8: 3, 16: 2}


def _values_per_byte(a) -> int:
    """Return the weight's values per byte: 1 of e4m3, 2 of e2m1."""
    return 1 if a.weight.dtype == torch.float8_e4m3fn else 2


def _sizes(a) -> tuple[int, int, int]:
    """Return M, N and K."""
    return rows_of(a.x), a.weight.shape[0], a.x.shape[-1]


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.x.dim() >= 1 and a.x.dtype in gemm.HALVES and a.x.shape[-1] % MX_BLOCK == 0
    yield "x", f"bfloat16 or float16 [..., K a multiple of {MX_BLOCK}]", describe(a.x), holds
    k = a.x.shape[-1]
    holds = a.weight.dim() == 2 and a.weight.dtype in FORMATS and a.weight.shape[1] * _values_per_byte(a) == k
    yield "weight", f"float8_e4m3fn [N, K={k}] or uint8 [N, K / 2]", describe(a.weight), holds
    n = a.weight.shape[0]
    holds = a.scale.dtype in MX_SCALES and a.scale.shape == (n, k // MX_BLOCK)
    yield "scale", f"uint8 or float8_e8m0fnu [N={n}, K / {MX_BLOCK}]", describe(a.scale), holds
    yield from gemm.bias_contract(a.bias, n, a.x.dtype)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    m, n, k = _sizes(a)
    yield from wave_split_k.rules(a, m, n, k, TOKENS, arch)
    yield (
        f"N is a multiple of {LANE_ROWS}, K of {STEPS_PER_SCALE_LOAD * MX_BLOCK}",
        n % LANE_ROWS == 0 and k % (STEPS_PER_SCALE_LOAD * MX_BLOCK) == 0,
    )
    for name in ("weight", "scale"):
        rows = getattr(a, name)
        yield f"{name} has K innermost", rows.shape[1] == 1 or rows.stride(1) == 1
        yield f"{name}'s rows are below 16 MB apart", row_stride(rows) < 2**24
    size = WEIGHT_BYTES[arch.vendor]
    yield (
        f"rows of weight are {size}-byte, of scale {STEPS_PER_SCALE_LOAD}-byte aligned",
        aligned(a.weight, size) and aligned(a.scale, STEPS_PER_SCALE_LOAD),
    )


def _skinny_sizes(a, arch: Arch) -> wave_split_k.Sizes:
    """Return the sizes of the split-K schedule. A slice has kSteps of csrc/ops/mx_gemm.hip, whose bytes or scales a lane loads at once."""
    of_value, rows = 1 / _values_per_byte(a), 16 * LANE_ROWS
    if arch.vendor == "nvidia":
        resident = NVIDIA_RESIDENT[wave_split_k.kernel_tokens(TOKENS["nvidia"], rows_of(a.x))]
        rates = NVIDIA_UNIT_BYTES_PER_US, False, NVIDIA_UNIT_BYTES_PER_US / resident
        return wave_split_k.Sizes(*_sizes(a), rows, 2 * _values_per_byte(a), of_value, *rates)
    steps = 4 if rows_of(a.x) <= 16 else 2
    return wave_split_k.Sizes(*_sizes(a), rows, steps, of_value, UNIT_BYTES_PER_US, overlap=True)


def _plan(config: SkinnyConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    return wave_split_k.launches(
        "mx_gemm", FORMATS[a.weight.dtype], TOKENS, out, a, config, _skinny_sizes(a, arch), arch
    )


def _cases() -> Iterator[Case]:
    """Yield every kernel, tiles shared by few and many blocks, odd sizes, tails of K, strides, and hard scales."""
    for name in FORMATS.values():
        case = case_maker(functools.partial(_inputs, name))
        for m in (1, 7, 8, 9, 16):
            yield case(f"{name}-m{m}", m, 68, 1024)
        for m in (17, 33, 64):
            yield case(f"{name}-m{m}", m, 132, 384)
        yield case(f"{name}-tiles", 5, 516, 1536)
        yield case(f"{name}-long-k", 2, 64, 8192)
        yield case(f"{name}-shortest", 3, 4, 128)
        yield case(f"{name}-bias", (2, 3), 132, 512, bias=True)
        yield case(f"{name}-padded", 5, 80, 512, padding=64)
        yield case(f"{name}-scales-extreme", 9, 68, 256, extreme=True)
        yield case(f"{name}-scales-e8m0", 2, 36, 256, scale_dtype=torch.float8_e8m0fnu)
        yield case(f"{name}-spikes", 2, 64, 1280, spikes=True)
        yield case(f"{name}-no-tokens", 0, 32, 128)


def _inputs(form: str, tokens, n, k, given, device, generator, fp8_dtype) -> tuple:
    padding, dtype = given.get("padding", 0), given.get("dtype", torch.bfloat16)
    x = wave_split_k.tokens_of(tokens, k, given, generator) * (2.0**-6 if given.get("extreme") else 1.0)
    x = gemm.padded(x, padding).to(dtype).to(device)[..., :k]
    weight = random_weight(form, n, k, given, device, generator)
    bias = torch.randn(n, generator=generator).to(dtype).to(device) if given.get("bias") else None
    return x, *weight, bias


def random_weight(
    form: str, n: int, k: int, given: dict, device: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a random weight [N, K] of a format, "fp8" or "fp4", without NaN, and its scales [N, K / 32]."""
    padding = given.get("padding", 0)
    bits = torch.randint(0, 256, (n, k + 2 * padding), generator=generator, dtype=torch.uint8)
    scale = torch.randint(120, 134, (n, k // MX_BLOCK + padding), generator=generator, dtype=torch.uint8)
    if given.get("extreme"):  # the smallest, a subnormal, the largest, and NaN
        scale[:, 0], scale[:, 1], scale[0, 2], scale[1, 2], scale[2, -1] = 0, 1, 254, 255, 255
    if form == "fp8":
        bits[bits & 127 == 127] -= 1
        weight = bits.view(torch.float8_e4m3fn).to(device)[:, :k]
    else:
        weight = packed_bits(bits & 15).to(device)[:, : k // 2]
    return weight, scale.view(given.get("scale_dtype", torch.uint8)).to(device)[:, : k // MX_BLOCK]


def _linear(tokens: int, inputs: Inputs, n: int, k: int, form: str, *has_bias: bool) -> tuple:
    """Return a layer's arguments, with weights of a format: "fp8" or "fp4"."""
    if form == "fp8":
        weight = inputs.values(n, k, dtype=torch.float8_e4m3fn)
    else:
        weight = ((inputs.scales(n, k // 2) - 1.0) * 256).to(torch.uint8)
    return inputs.values(tokens, k), weight, inputs.exponents(n, k // MX_BLOCK), *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=lambda a: a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0])),
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: wave_split_k.configs(_skinny_sizes(a, arch), TOKENS, arch),
    cost=lambda config, a, arch: wave_split_k.cost(config, _skinny_sizes(a, arch), arch),
    plan=_plan,
    problem=lambda a: {**dict(zip("mnk", _sizes(a))), "bits": 8 // _values_per_byte(a)},
    cases=_cases,
    sums=True,
    linear=_linear,
)
def mx_gemm(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ (scale * weight)^T + bias of an MX weight; kernels sum in float32 and scale the sums of groups.

    Args:
        x: [..., K], bf16 or fp16, K innermost and a multiple of 32; rows may be strided. Kernels take bf16, 64 tokens, on NVIDIA
            16, and K a multiple of 128.
        weight: [N, K] of float8_e4m3fn, or [N, K / 2] of uint8: two e2m1 values in a byte, the first in its lower half. Without NaN,
            which is 480 on gfx942 and NVIDIA.
        scale: [N, K / 32], uint8 or float8_e8m0fnu: s for 2^(s - 127), 255 for NaN.
        bias: [N], x's dtype, or None.

    Returns:
        [..., N], x's dtype.

    Source:
        vLLM's MXFP8 and MXFP4 linear layers, which its emulation computes from dequantized weights.
    """
    product = x.to(torch.float64) @ mx_numbers(weight, scale).t()
    return (product if bias is None else product + bias.to(torch.float64)).to(x.dtype)
