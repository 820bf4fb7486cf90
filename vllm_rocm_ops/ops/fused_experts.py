"""Run the experts of a MoE layer, from routed tokens to their weighted sum.

Kernels: csrc/ops/fused_experts.hip for few tokens (ops/shared/experts_streamed.py), csrc/ops/fused_experts_tiled.hip for many
(ops/shared/experts_tiled.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.quantization import E5M2, MX_SCALES
from vllm_rocm_ops.ops.shared import experts_streamed as streamed
from vllm_rocm_ops.ops.shared import experts_tiled as tiled
from vllm_rocm_ops.ops.shared.experts import SCHEMES, are_e4m3_or_halves, contract, scheme_of, slots, weight_of
from vllm_rocm_ops.ops.shared.experts_quantize import quantizing
from vllm_rocm_ops.ops.shared.experts_streamed import StreamedConfig
from vllm_rocm_ops.ops.shared.experts_tiled import TiledConfig
from vllm_rocm_ops.ops.shared.gated import activated
from vllm_rocm_ops.ops.shared.gemm import HALVES
from vllm_rocm_ops.ops.shared.weight_layout import shuffle_weight

__all__ = ["fused_experts"]

TILED_FROM = 17  # tokens; below, the streamed kernels were faster in every layer, on H200
NO_EXPERT = 2**15 - 1
CLAMPED = {"swiglu_limit": 0.5, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
"""The activation of gpt-oss, with a limit that clamps many values."""


def _reads_order(a, arch: Arch) -> bool:
    return not a.shuffled or arch.vendor == "amd"


def _can_stream(a, arch: Arch) -> bool:
    return are_e4m3_or_halves(a) and streamed.takes(a, arch)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    (m, _), (experts, n, h), size = a.hidden.shape, a.w1.shape, a.w1.element_size()
    kind = scheme_of(a.w1, a.w1_scale)
    known = (kind.tokens(a.w1.dtype) or a.w1.dtype) in (*HALVES, arch.fp8_dtype, torch.int8)
    yield f"{arch.name} supports the weights' dtype", known
    yield f"the weights are not shuffled, or {arch.name} is an AMD GPU", _reads_order(a, arch)
    yield "H and I are multiples of 16 bytes, I of 8", h * size % 16 == n // 2 * size % 16 == n // 2 % 8 == 0
    for name in ("hidden", "w1", "w2"):
        tensor = getattr(a, name)
        holds = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        holds = holds and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        yield f"{name}'s rows are contiguous and 16-byte aligned", holds
    for name in ("w1", "w2"):
        weight = getattr(a, name)
        yield f"an expert's {name} spans less than 2 GB", weight.shape[1] * weight.stride(1) * size < 2**31
    columns = max(h, a.hidden.stride(0)) if quantizing(a) < 2 else h
    width = a.hidden.element_size() if a.weight_only else size
    yield "hidden, if no launch quantizes it first, spans less than 2 GB", m * columns * width < 2**31
    for name in ("topk_weights", "topk_ids", "hidden_scale", "w1_scale", "w2_scale", "act_scale", "expert_map"):
        tensor = getattr(a, name)
        yield f"{name} is contiguous", tensor is None or tensor.is_contiguous()
    biases = [bias for bias in (a.w1_bias, a.w2_bias) if bias is not None]
    holds = all(bias.is_contiguous() and bias.data_ptr() % 16 == 0 and bias.nbytes < 2**31 for bias in biases)
    yield "biases have out_dtype", all(bias.dtype == a.out_dtype for bias in biases)
    yield "biases are contiguous, 16-byte aligned and span less than 2 GB", holds
    yield f"there are fewer than {NO_EXPERT} experts", experts < NO_EXPERT
    if kind.native:
        yield f"{arch.name} has block-scaled matrix instructions", arch.block_scales
        most = f"M is at most {streamed.MAX_TOKENS}, slots {streamed.MAX_SLOTS}, M * slots * (I / {streamed.GATE_UP_ROWS})^2"
        yield (
            f"with a scale per {kind.group} along K, {most} is below 2^31, and lists of pairs and experts fit LDS",
            streamed.takes(a, arch),
        )
    elif not _can_stream(a, arch):
        yield from tiled.can_implement(a, arch)


def _configs(a, arch: Arch) -> list[StreamedConfig | TiledConfig]:
    if not _reads_order(a, arch):
        return []
    can_stream = (arch.block_scales or not scheme_of(a.w1, a.w1_scale).native) and _can_stream(a, arch)
    can_tile = all(holds for _, holds in tiled.can_implement(a, arch))
    tiles = can_tile and (not can_stream or a.hidden.shape[0] >= TILED_FROM)
    return (streamed.configs(a, arch) if can_stream else []) + (tiled.configs(a, arch) if tiles else [])


def _kernels(config: StreamedConfig | TiledConfig):
    return tiled if isinstance(config, TiledConfig) else streamed


def _problem(a) -> dict[str, int]:
    experts, n, h = a.w1.shape
    return {"m": a.hidden.shape[0], "topk": slots(a), "experts": experts, "hidden": h, "intermediate": n // 2}


def _cases() -> Iterator[Case]:
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
        if torch.float32 in kind.scales:
            return (rand(*shape) + 0.5) * times * step
        exponents = torch.randint(-2, 3, shape, generator=generator) + round(math.log2(times))
        return (exponents + 127).to(torch.uint8).view(given.get("scale_dtype", torch.uint8)).to(device)

    def weight(n: int, k: int) -> Tensor:
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
    return (
        x,
        *(weight(*size) for size in sizes),
        rand(m, topk),
        ids.to(device),
        out_dtype,
        *(scales(*kind.shape(experts, *size), times=size[1] ** -0.5) if kind.scaled else None for size in sizes),
        x_scale,
        torch.full((1,), 0.05).to(device) if given.get("static") else None,
        expert_map,
        shared,
        given.get("apply_router_weight_on_input", False),
        given.get("shuffled", False),
        given.get("weight_only", False),
        *(randn(experts, size[0]).to(out_dtype) if given.get("bias") else None for size in sizes),
        given.get("swiglu_limit"),
        given.get("swiglu_alpha", 1.0),
        given.get("swiglu_beta", 0.0),
        given.get("interleaved", False),
    )


@functools.partial(
    Op,
    allocate=lambda a: a.hidden.new_empty(a.hidden.shape, dtype=a.out_dtype),
    contract=contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=lambda config, a, arch: _kernels(config).cost(config, a, arch),
    plan=lambda config, out, a, arch: _kernels(config).launches(config, out, a, arch),
    problem=_problem,
    cases=_cases,
    sums=True,
)
def fused_experts(
    hidden: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    out_dtype: torch.dtype,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    hidden_scale: Tensor | None = None,
    act_scale: Tensor | None = None,
    expert_map: Tensor | None = None,
    shared_experts: int = 0,
    apply_router_weight_on_input: bool = False,
    shuffled: bool = False,
    weight_only: bool = False,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float = 1.0,
    swiglu_beta: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Sum weight * w2[expert] @ (silu(gate) * up) over a token's experts, where [gate, up] = w1[expert] @ hidden.

    Further arguments add biases to both products, or replace silu(gate) * up by `silu_and_mul_with_clamp`: gate =
    min(gate, limit), up = clamp(up, -limit, limit), gate * sigmoid(alpha * gate) * (up + beta).

    Without a static scale, hidden and the activation are quantized dynamically as the weights are scaled: per 1x128
    with block scales, per 1x32 with MX-FP8, else per token; to e4m3 for e4m3 and e5m2 weights, to int8 for int8 weights
    (W8A8).

    Args:
        hidden: [M, H], bf16 or fp16; or already quantized, e4m3 or int8, with hidden_scale.
        w1: [E, 2 I, H], gate rows first, unless interleaved; bf16, fp16, e4m3, e5m2 or int8.
        w2: [E, H, I], w1's dtype.
        topk_weights: [M, topk], float32.
        topk_ids: [M, topk], int32 or int64; invalid ids are skipped.
        out_dtype: bf16 or fp16, also of the activation between the GEMMs.
        w1_scale: float32 [E] (per tensor), [E, N] (per channel) or [E, ceil(N / 128), ceil(K / 128)] (per block); uint8
            or float8_e8m0fnu [E, N, K / 32] for MX-FP8. int8 has no block scales.
        w2_scale: As w1_scale.
        hidden_scale: Static scale of hidden, float32, one element; or the scales of a quantized hidden: [M, 1], [1],
            [M, ceil(H / 128)] (per block) or [M, H / 32] (MX-FP8).
        act_scale: Static scale of the activation, float32, one element.
        expert_map: [global experts], int32: local expert of an id, -1 for none.
        shared_experts: The last experts of E that take every token with weight 1; no id names them.
        apply_router_weight_on_input: Scale hidden by the router weights, not the result; topk is 1.
        shuffled: Each expert's w1 and w2 are in `shuffle_weight` order, as AITER stores them, with their plain shapes.
        weight_only: W8A16: 8-bit weights, activations stay bf16 or fp16.
        w1_bias: [E, 2 I], floating point: added to w1's products, in the order of its rows.
        w2_bias: [E, H], floating point: added to w2's products, before the router weights.
        swiglu_limit: Upper bound of gate, and of the absolute value of up; above 0, None for no bound.
        swiglu_alpha: Factor of gate in the sigmoid.
        swiglu_beta: Added to up.
        interleaved: Rows of w1 and w1_bias are gate, up, gate, up, as in gpt-oss.

    Returns:
        [M, H], out_dtype.

    Source:
        vLLM's TritonExperts; MoE layers of RadeonFlow and the Inference Sprint; fused_moe/moe-gemm.py of AMD
        perf-kernels; smallm_mxfp8_moe_grouped_gemm of aiter PR 3783.
    """
    exact = torch.float64 if out_dtype == torch.float64 else torch.float32
    kind = scheme_of(w1, w1_scale)
    dtype = None if weight_only else kind.tokens(w1.dtype)
    if hidden.dtype == dtype:
        x = kind.dequantized(hidden, hidden_scale, exact, 1)
    else:
        x = hidden.to(exact) if dtype is None else kind.rounded(hidden.to(exact), dtype, hidden_scale)
    routed = len(w1) - shared_experts
    local = topk_ids.long()
    if expert_map is not None:
        known = (local >= 0) & (local < len(expert_map))
        local = torch.where(known, expert_map.long()[local.clamp(0, len(expert_map) - 1)], -1)
    local = torch.where((local >= 0) & (local < routed), local, -1)
    total = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    for expert in range(len(w1)):
        chosen = local == expert
        weight = topk_weights.to(exact).where(chosen, 0.0).sum(1) if expert < routed else total.new_ones(len(total))
        gate_up = x @ weight_of(w1, w1_scale, expert, shuffled, exact).t()
        if apply_router_weight_on_input:
            gate_up = gate_up * weight[:, None]
        gate_up = gate_up if w1_bias is None else gate_up + w1_bias[expert].to(exact)
        gate, up = (gate_up[:, ::2], gate_up[:, 1::2]) if interleaved else gate_up.chunk(2, 1)
        inner = activated(gate, up, swiglu_limit, swiglu_alpha, swiglu_beta).to(out_dtype).to(exact)
        if dtype is not None:
            inner = kind.rounded(inner, dtype, act_scale)
        result = inner @ weight_of(w2, w2_scale, expert, shuffled, exact).t()
        result = result if w2_bias is None else result + w2_bias[expert].to(exact)
        if not apply_router_weight_on_input:
            result = result * weight[:, None]
        total += result if expert >= routed else torch.where(chosen.any(1, keepdim=True), result, 0.0)
    return total.to(out_dtype)
