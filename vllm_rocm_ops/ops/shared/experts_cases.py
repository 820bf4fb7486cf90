"""Make the inputs of fused_experts: every instance, for tests, emulator and benchmarks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.op import Case, case_maker
from vllm_rocm_ops.core.quantization import E5M2, MX_SCALES
from vllm_rocm_ops.ops.shared.experts import CONVERTED, SCHEMES, is_packed
from vllm_rocm_ops.ops.shared.weight_layout import shuffle_weight

CLAMPED = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
"""The activation of gpt-oss, with a limit that clamps many values."""


def cases() -> Iterator[Case]:
    """Yield every instance; tokens around a tile; experts without tokens and with all; sizes around 128."""
    case = case_maker(_inputs)
    yield case("block", 3, 2, 8, 256, 128)
    yield case("block-m1", 1, 3, 8, 384, 256)
    yield case("block-m1-repeated", 1, 5, 2, 128, 64, shared_experts=1)
    yield case("block-m1-map", 1, 6, 5, 128, 64, mapped=True, ids=torch.int64)
    yield case("block-m17-one-expert", 17, 1, 4, 256, 128, one_expert=True)
    yield case("block-quantized", 5, 2, 4, 256, 128, quantized=True)
    yield case("block-odd", 4, 2, 6, 208, 80, shared_experts=1)
    yield case("block-map", 6, 3, 5, 256, 128, mapped=True, ids=torch.int64, shared_experts=1)
    yield case("block-input-weight", 3, 1, 4, 128, 128, apply_router_weight_on_input=True)
    yield case("block-repeated", 3, 3, 2, 128, 64)
    yield case("bf16-repeated-m22", 22, 3, 2, 64, 16, scheme="none", one_expert=True)  # a token's pairs in two waves
    yield case("bf16-repeated-m44", 44, 6, 4, 64, 16, scheme="none", ids=torch.int64)
    yield case("block-distinct-m1", 1, 8, 16, 128, 64, distinct=True)  # pairs fill their lists in multiples of 8
    yield case("bf16-distinct-m2", 2, 4, 8, 64, 16, scheme="none", distinct=True)
    yield case("block-long", 2, 1, 2, 2688, 16)  # more groups of K than a wave has in registers
    yield case("block-m40", 40, 4, 16, 128, 64, shared_experts=1)
    yield case("block-m65", 65, 2, 8, 256, 128)
    for m in (2, 70):
        yield case(f"512-m{m}", m, 10, 512, 64, 64)
    yield case("channel", 4, 2, 4, 192, 96, scheme="channel")
    yield case("tensor-static", 4, 2, 4, 128, 96, scheme="tensor", static=True, out_dtype=torch.float16)
    yield case("tensor", 9, 2, 4, 128, 64, scheme="tensor")
    yield case("tensor-static-quant", 3, 2, 4, 128, 128, scheme="tensor", static=True)
    yield case("channel-static-quant", 2, 3, 4, 96, 256, scheme="channel", static=True, out_dtype=torch.float16)
    yield case(
        "block-quant-many", 5, 6, 8, 128, 384, out_dtype=torch.float16, distinct=True
    )  # beyond a lane's first chunks
    yield case("bf16", 5, 2, 4, 128, 72, scheme="none")
    yield case("fp16", 18, 2, 4, 120, 64, scheme="none", out_dtype=torch.float16, shared_experts=1)
    yield case("bf16-m70", 70, 2, 4, 160, 64, scheme="none")
    yield case("block-odd-m70", 70, 2, 6, 208, 80, out_dtype=torch.float16, shared_experts=2)
    yield case("channel-m70", 70, 2, 3, 208, 80, scheme="channel", out_dtype=torch.float16)
    yield case("channel-static-m65", 65, 2, 4, 112, 96, scheme="channel", static=True)
    yield case("fp16-m70", 70, 2, 4, 136, 72, scheme="none", out_dtype=torch.float16, shared_experts=1)
    yield case("mx", 3, 2, 8, 256, 128, scheme="mx")
    yield case("mx-m1", 1, 3, 8, 416, 96, scheme="mx", shared_experts=1)
    yield case("mx-m17-one-expert", 17, 1, 4, 288, 160, scheme="mx", one_expert=True, out_dtype=torch.float16)
    yield case("mx-quantized", 5, 2, 4, 160, 224, scheme="mx", quantized=True)
    yield case("mx-m40-map", 40, 3, 5, 128, 64, scheme="mx", mapped=True, shared_experts=1, scale_dtype=MX_SCALES[1])
    yield case("mx-quant", 5, 3, 6, 128, 256, scheme="mx", out_dtype=torch.float16, shared_experts=1)
    yield case("mx-m65", 65, 2, 4, 64, 32, scheme="mx")
    yield case("block-shuffled", 3, 2, 4, 256, 64, shuffled=True)
    yield case("bf16-shuffled", 3, 2, 4, 96, 32, scheme="none", shuffled=True)
    yield case("block-shuffled-m70", 70, 2, 4, 192, 64, shuffled=True)
    yield case("no-tokens", 0, 2, 4, 128, 128)
    yield case("e5m2-block-m70", 70, 2, 4, 208, 80, weights="e5m2", shared_experts=1)
    for kind in ("int8", "e5m2"):
        of_kind = functools.partial(case, weights=kind)
        yield of_kind(kind, 5, 2, 4, 192, 96, scheme="channel", shared_experts=1)
        yield of_kind(f"{kind}-m70", 70, 2, 3, 208, 80, scheme="channel", out_dtype=torch.float16)
        yield of_kind(f"{kind}-static", 4, 2, 4, 144, 96, scheme="tensor", static=True, out_dtype=torch.float16)
        yield of_kind(f"{kind}-quantized", 20, 2, 4, 128, 64, scheme="tensor", quantized=True)
        yield of_kind(f"{kind}-shuffled", 3, 2, 4, 128, 64, scheme="channel", shuffled=True)
    for kind in ("int8", "e4m3", "e5m2"):
        alone = functools.partial(case, weights=kind, weight_only=True, scheme="channel")
        yield alone(f"{kind}-alone", 5, 2, 4, 192, 80, shared_experts=1)
        yield alone(f"{kind}-alone-m70", 70, 2, 3, 208, 96, out_dtype=torch.float16)
        yield alone(f"{kind}-alone-shuffled", 3, 2, 4, 128, 64, shuffled=True)
    for kind, inner in (("block", 640), ("channel", 96), ("none", 320)):  # down in several units
        of_kind = functools.partial(case, scheme=kind, **CLAMPED)
        yield of_kind(f"{kind}-clamped-bias", 3, 2, 4, 208, inner, bias=True, shared_experts=1)
        yield of_kind(f"{kind}-clamped-m70", 70, 2, 4, 208, 80, bias=True, interleaved=True, shared_experts=1)
        yield of_kind(f"{kind}-clamped-m65", 65, 1, 4, 144, 176, out_dtype=torch.float16, mapped=True)
    yield case("block-bias-k1024", 2, 2, 4, 1024, 16, bias=True)  # whole rounds of the waves
    yield case("block-limit-quant", 2, 3, 4, 128, 128, swiglu_limit=0.5)
    yield case("fp16-clamped", 4, 2, 4, 96, 72, scheme="none", out_dtype=torch.float16, bias=True, **CLAMPED)
    yield case("block-interleaved-m1", 1, 3, 8, 384, 256, interleaved=True)
    yield case("bf16-interleaved-bias", 18, 2, 4, 96, 32, scheme="none", interleaved=True, shuffled=True, bias=True)
    yield case("tensor-static-clamped", 4, 2, 4, 128, 96, scheme="tensor", static=True, bias=True, **CLAMPED)
    yield case("block-bias-on-input", 3, 1, 4, 128, 128, apply_router_weight_on_input=True, bias=True)
    yield case("block-bias-on-input-m65", 65, 1, 4, 128, 128, apply_router_weight_on_input=True, bias=True)
    yield case("block-bias-map", 6, 3, 5, 256, 128, mapped=True, shared_experts=1, bias=True)
    yield case("mx-clamped", 5, 3, 6, 128, 256, scheme="mx", shared_experts=1, **CLAMPED)
    yield case("mx-bias-interleaved", 3, 2, 4, 128, 160, scheme="mx", bias=True, interleaved=True, **CLAMPED)
    yield case("int8-static-bf16", 4, 2, 4, 144, 96, scheme="tensor", weights="int8", static=True)
    for kind, scheme in CONVERTED.items():
        of_kind = functools.partial(case, scheme=kind)
        yield of_kind(kind, 3, 2, 8, 384, 128, shared_experts=1)
        yield of_kind(f"{kind}-m1", 1, 3, 7, 256, 256)
        yield of_kind(f"{kind}-m21", 21, 3, 5, 128, 256, mapped=True, ids=torch.int64)
        yield of_kind(f"{kind}-m17-one-expert", 17, 1, 3, 640, 128, one_expert=True)
        yield of_kind(f"{kind}-clamped", 3, 2, 4, 128, 640, bias=True, interleaved=True, **CLAMPED)
        yield of_kind(f"{kind}-on-input", 2, 1, 4, 128, 128, apply_router_weight_on_input=True, bias=True)
        if scheme.group == 32:  # incomplete slices, and groups at the end of a row
            yield of_kind(f"{kind}-odd", 4, 2, 5, 224, 96, shared_experts=1)
            yield of_kind(f"{kind}-odd-long", 2, 2, 3, 928, 32)
            yield of_kind(f"{kind}-odd-clamped", 5, 2, 4, 96, 672, bias=True, interleaved=True, **CLAMPED)
        if scheme.scales == MX_SCALES:
            yield of_kind(f"{kind}-extremes", 3, 2, 4, 160, 64, extremes=True, scale_dtype=MX_SCALES[1])
            yield of_kind(f"{kind}-m65", 65, 1, 2, 64, 32)
    yield case("int8-alone-tensor", 4, 2, 4, 144, 48, weights="int8", weight_only=True, scheme="tensor")


def _inputs(m, topk, experts, hidden, intermediate, given, device, generator, fp8_dtype) -> tuple:
    kind, shared = SCHEMES[given.get("scheme", "block")], given.get("shared_experts", 0)
    out_dtype = given.get("out_dtype", torch.bfloat16)
    dtype = kind.weight_dtype(out_dtype, fp8_dtype)
    of_fp8 = {"int8": torch.int8, "e5m2": next(e5m2 for e5m2, e4m3 in E5M2.items() if e4m3 == fp8_dtype)}
    weight_dtype = of_fp8.get(given.get("weights"), dtype)
    dtype = torch.int8 if weight_dtype == torch.int8 else dtype
    step = 1 / 64 if dtype == torch.int8 else 1.0  # int8 has smaller scales and larger values

    bounds = (-127, 127) if dtype == torch.int8 else (-math.inf, math.inf)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).to(device)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def scales(*shape: int, times: float = 1.0) -> Tensor:
        if MX_SCALES[0] not in kind.scales:
            return ((rand(*shape) + 0.5) * times * step).to(kind.scales[0])
        exponents = torch.randint(-2, 3, shape, generator=generator) + round(math.log2(times))
        return (exponents + 127).to(torch.uint8).view(given.get("scale_dtype", torch.uint8)).to(device)

    def weight(n: int, k: int) -> Tensor:
        if kind.numbers:
            return torch.randint(0, 256, (experts, n, k // 2), generator=generator, dtype=torch.uint8).to(device)
        plain = (randn(experts, n, k) * (1 / step if kind.scaled else k**-0.5)).clamp(*bounds).to(weight_dtype)
        if not given.get("shuffled"):
            return plain
        shuffled = torch.stack([shuffle_weight(expert).view(torch.uint8) for expert in plain])
        return shuffled.view(weight_dtype).view(plain.shape)

    local, sizes = experts - shared, ((2 * intermediate, hidden), (hidden, intermediate))
    known = 2 * local if given.get("mapped") else local
    ids = torch.randint(-2, known + 2, (m, topk), generator=generator)
    ids[-1:, -1:] = min(1, known - 1)  # the last pair has an expert
    if given.get("distinct"):  # as a router chooses
        ids = torch.stack([torch.randperm(known, generator=generator)[:topk] for _ in range(m)])
    if given.get("one_expert"):
        ids.fill_(min(1, known - 1))
    expert_map = None
    if given.get("mapped"):
        expert_map = torch.full((known,), -1, dtype=torch.int32)
        expert_map[1::2] = torch.arange(local, dtype=torch.int32)
        expert_map[0] = local  # the shared expert, if any, which no id names
        expert_map = expert_map.to(device)
    ids = ids.to(given.get("ids", torch.int32))
    if ids.dtype == torch.int64:  # beyond what 32 bits hold
        ids[::3, 0] += 2**32
        ids[1::3, -1] -= 2**32
    x, x_scale = randn(m, hidden).to(out_dtype), None
    if given.get("quantized"):
        x = (randn(m, hidden) / step).clamp(*bounds).to(dtype)
        x_scale = scales(m, kind.groups(hidden))
    if given.get("static"):
        x_scale = torch.full((1,), 0.02).to(device)
    weights = [weight(*size) for size in sizes]
    weight_scales = [
        scales(*kind.shape(experts, *size), times=size[1] ** -0.5) if kind.scaled else None for size in sizes
    ]
    if given.get("extremes"):  # NaN in a row's last group of the first expert; of the others NaN, 2^-127 and 2^127
        first, second = (scale.view(torch.uint8) for scale in weight_scales)
        first[0, 3, -1] = second[1:, 2, -1] = 255
        second[1:, 5] = 0
        second[1:, 7, 0], weights[1][1:, 7, : 32 // (1 + is_packed(weights[1]))] = 254, 0
        weights[1][1:, 7, 0] = 1 if is_packed(weights[1]) else 0.5
        if not is_packed(weights[0]):  # all bytes but NaN
            every = (torch.arange(hidden) + 96 * torch.arange(8)[:, None]) % 256
            every[every % 128 == 127] -= 1
            weights[0][:, 16:24] = every.to(torch.uint8).view(torch.float8_e4m3fn).to(device)
    return (
        x,
        *weights,
        rand(m, topk),
        ids.to(device),
        out_dtype,
        *weight_scales,
        x_scale,
        torch.full((1,), 0.05).to(device) if given.get("static") else None,
        expert_map,
        shared,
        given.get("apply_router_weight_on_input", False),
        given.get("shuffled", False),
        given.get("weight_only", kind.alone),
        *(randn(experts, size[0]).to(out_dtype) if given.get("bias") else None for size in sizes),
        given.get("swiglu_limit"),
        given.get("swiglu_alpha", 1.0),
        given.get("swiglu_beta", 0.0),
        given.get("interleaved", False),
    )
