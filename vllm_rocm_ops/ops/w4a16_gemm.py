"""Multiply bf16 activations and INT4 weights with a scale per group of K; kernels: csrc/ops/w4a16_gemm.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import int4_numbers, packed_bits
from vllm_rocm_ops.core.tensors import aligned, describe, row_stride, rows_of
from vllm_rocm_ops.ops.shared import gemm, wave_split_k
from vllm_rocm_ops.ops.shared.inputs import Inputs
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig
from vllm_rocm_ops.ops.shared.wave_split_k import STEP, kernel_tokens

__all__ = ["w4a16_gemm"]

PACK_FACTOR = 8  # output channels per int32 word
TOKENS = {"amd": (16, 32, 64), "nvidia": (8, 16)}  # token limits of the kernels

# Weight bytes per microsecond of a compute unit and of a block. With more than 32 tokens on AMD, as timing/ predicts them for
# Llama-3.3-70B's layers and 64 tokens on MI300X. On NVIDIA guessed, so that resident blocks (csrc/gemm/skinny.h) fill the GPU.
MANY_BYTES_PER_US, MANY_BLOCK_BYTES_PER_US = 9.4e3, 7e3
NVIDIA_BLOCK_BYTES_PER_US = 8e3
NVIDIA_RESIDENT = {8: 4, 16: 3}  # by tokens


def _sizes(a) -> tuple[int, int, int]:
    """Return M, N and K."""
    return rows_of(a.x), PACK_FACTOR * a.weight.shape[1], a.weight.shape[0]


def _group(a) -> int:
    """Return the group size: the values of K that share a scale."""
    return a.weight.shape[0] // max(a.scale.shape[0], 1)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    holds = a.x.dim() >= 1 and a.x.dtype in gemm.HALVES
    yield "x", "bfloat16 or float16 [..., K]", describe(a.x), holds
    k = a.x.shape[-1]
    holds = a.weight.dtype == torch.int32 and a.weight.dim() == 2 and a.weight.shape[0] == k
    yield "weight", f"int32 [K={k}, N / 8]", describe(a.weight), holds
    n = PACK_FACTOR * a.weight.shape[1]
    holds = a.scale.dtype == a.x.dtype and a.scale.dim() == 2 and a.scale.shape[1] == n and a.scale.shape[0] > 0
    yield "scale", f"{a.x.dtype} [groups, N={n}]", describe(a.scale), holds
    yield "scale", f"a number of groups that divides K={k}", describe(a.scale), k % a.scale.shape[0] == 0
    yield from gemm.bias_contract(a.bias, n, a.x.dtype)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    (m, n, k), group = _sizes(a), _group(a)
    yield from wave_split_k.rules(a, m, n, k, TOKENS, arch)
    is_group = group % STEP == 0 and group.bit_count() == 1 or group == k and k % PACK_FACTOR == 0
    yield f"N is a multiple of {2 * PACK_FACTOR}", n % (2 * PACK_FACTOR) == 0
    yield f"groups are a power of two from {STEP} on, or one of a multiple of {PACK_FACTOR}", is_group
    for name in ("weight", "scale"):
        rows = getattr(a, name)
        yield f"{name} has N innermost", rows.shape[1] == 1 or rows.stride(1) == 1
    yield "rows of weight are 8-byte, of scale 16-byte aligned", aligned(a.weight, 8) and aligned(a.scale)
    yield (
        "weight and scale are below 2 GB",
        all(len(x) * row_stride(x) * x.element_size() < 2**31 for x in (a.weight, a.scale)),
    )


def _skinny_sizes(a, arch: Arch) -> wave_split_k.Sizes:
    """Return the sizes of the split-K schedule. A tile has the rows of 16 or 32 words (kRows of csrc/gemm/skinny/int4_weights.h)."""
    sizes, tokens, rows = _sizes(a), kernel_tokens(TOKENS[arch.vendor], rows_of(a.x)), 16 * PACK_FACTOR
    if arch.vendor == "nvidia":
        rates = NVIDIA_RESIDENT[tokens] * NVIDIA_BLOCK_BYTES_PER_US, False, NVIDIA_BLOCK_BYTES_PER_US
        return wave_split_k.Sizes(*sizes, rows, 1, 0.5, *rates)
    if tokens <= 32:
        return wave_split_k.Sizes(*sizes, 2 * rows, 1, 0.5)
    rates = MANY_BYTES_PER_US, True, MANY_BLOCK_BYTES_PER_US
    return wave_split_k.Sizes(*sizes, rows, 1, 0.5, *rates, many_sums=True)


def _plan(config: SkinnyConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    sizes = _skinny_sizes(a, arch)
    group = _group(a)
    shift = 31 if group == sizes.k else (group // STEP).bit_length() - 1
    return wave_split_k.launches("w4a16_gemm", STEP, TOKENS, out, a, config, sizes, arch, group_shift=shift)


def _cases() -> Iterator[Case]:
    """Yield every kernel, tiles shared by few and many blocks, odd sizes, tails of K, strides, and hard scales."""
    case = case_maker(_inputs)
    for m in (1, 7, 8, 9, 16):
        yield case(f"m{m}", m, 272, 1024)
    for group in (32, 64):
        for m in (3, 16, 17, 32, 33, 64):
            yield case(f"group{group}-m{m}", m, 144, 320, group=group)
    yield case("tiles", 5, 528, 1536)
    yield case("long-k", 2, 128, 8192, group=32)
    for m in (4, 16, 33):
        yield case(f"one-group-m{m}", m, 48, 264, group=264)
    yield case("two-words", 2, 16, 64, group=32)
    yield case("shortest-k", 3, 48, 8, group=8)
    yield case("bias", (2, 3), 528, 512, bias=True)
    yield case("padded", 5, 80, 512, padding=64)
    yield case("scales-extreme", 9, 64, 256, group=32, extreme=True)
    yield case("spikes", 2, 128, 1280, spikes=True)
    yield case("no-tokens", 0, 32, 64, group=32)


def _inputs(tokens, n, k, given, device, generator, fp8_dtype) -> tuple:
    group, padding, dtype = given.get("group", 128), given.get("padding", 0), given.get("dtype", torch.bfloat16)
    x = wave_split_k.tokens_of(tokens, k, given, generator)
    values = torch.randint(0, 16, (k, n + 2 * PACK_FACTOR * padding), generator=generator)
    scale = torch.rand(k // group, n + padding, generator=generator) * 0.02 + 0.001
    if given.get("extreme"):  # zero, subnormal, negative, large and NaN
        hard = torch.tensor([0.0, 2.0**-133, -1.0, 2.0**100, torch.nan])
        scale[0, : len(hard)], scale[-1, 8 : 8 + len(hard)] = hard, hard
    weight = packed_bits(values).view(torch.int32).to(device)[:, : n // PACK_FACTOR]
    bias = torch.randn(n, generator=generator).to(dtype).to(device) if given.get("bias") else None
    return gemm.padded(x, padding).to(dtype).to(device)[..., :k], weight, scale.to(dtype).to(device)[:, :n], bias


def _linear(tokens: int, inputs: Inputs, n: int, k: int, group: int, *has_bias: bool) -> tuple:
    """Return a layer's arguments, with groups of this size or, for 0, one group of all K."""
    words = ((inputs.scales(k, n // PACK_FACTOR) - 1.0) * 2.0**32).to(torch.int32)
    scale = inputs.scales(k // (group or k), n).to(inputs.dtype)
    return inputs.values(tokens, k), words, scale, *(inputs.values(n) for _ in has_bias)


@functools.partial(
    Op,
    allocate=lambda a: a.x.new_empty((*a.x.shape[:-1], PACK_FACTOR * a.weight.shape[1])),
    contract=_contract,
    can_implement=_can_implement,
    configs=lambda a, arch: wave_split_k.configs(_skinny_sizes(a, arch), TOKENS, arch),
    cost=lambda config, a, arch: wave_split_k.cost(config, _skinny_sizes(a, arch), arch),
    plan=_plan,
    problem=lambda a: {**dict(zip("mnk", _sizes(a))), "group": _group(a)},
    cases=_cases,
    sums=True,
    linear=_linear,
)
def w4a16_gemm(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x @ (scale * (weight - 8)) + bias; kernels sum in float32 and scale the sums of groups.

    Args:
        x: [..., K], bf16 or fp16, K innermost; rows may be strided. Kernels take bf16: 64 tokens, on NVIDIA 16.
        weight: [K, N / 8], int32: eight output channels in a word, the first in its lowest four bits; 0 to 15 for -8 to 7.
        scale: [K / group, N], x's dtype; kernels take groups of 32, 64, 128 and so on, or a single one.
        bias: [N], x's dtype, or None.

    Returns:
        [..., N], x's dtype.

    Source:
        vLLM's `triton_w4a16_gemm`, whose layout of weights and scales this is.
    """
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    numbers = int4_numbers(weight).to(exact) * scale.to(exact).repeat_interleave(len(weight) // len(scale), 0)
    product = x.to(exact) @ numbers
    return (product if bias is None else product + bias.to(exact)).to(x.dtype)
