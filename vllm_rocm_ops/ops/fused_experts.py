"""Run the experts of a MoE layer, from routed tokens to their weighted sum.

Kernels: csrc/ops/fused_experts.hip for few tokens (ops/shared/experts_streamed.py), csrc/ops/fused_experts_tiled.hip for many
(ops/shared/experts_tiled.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.ops.shared import experts_streamed as streamed
from vllm_rocm_ops.ops.shared import experts_tiled as tiled
from vllm_rocm_ops.ops.shared.experts import (
    MEANINGS,
    are_e4m3_or_halves,
    contract,
    scheme_of,
    scheme_of_call,
    slots,
    weight_of,
)
from vllm_rocm_ops.ops.shared.experts_cases import cases
from vllm_rocm_ops.ops.shared.experts_quantize import quantizing
from vllm_rocm_ops.ops.shared.experts_streamed import StreamedConfig
from vllm_rocm_ops.ops.shared.experts_tiled import TiledConfig
from vllm_rocm_ops.ops.shared.gated import activated
from vllm_rocm_ops.ops.shared.gemm import HALVES

__all__ = ["fused_experts"]

TILED_FROM = 17  # tokens; below, the streamed kernels were faster in every layer, on H200
NO_EXPERT = 2**15 - 1


def _reads_order(a, arch: Arch) -> bool:
    return not a.shuffled or arch.vendor == "amd"


def _can_stream(a, arch: Arch) -> bool:
    return (are_e4m3_or_halves(a) or scheme_of_call(a).converted) and streamed.takes(a, arch)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    (m, _), (experts, n, h), size = a.hidden.shape, a.w1.shape, a.w1.element_size()
    kind = scheme_of_call(a)
    known = (kind.tokens(a.w1.dtype) or a.w1.dtype) in (*HALVES, arch.fp8_dtype, torch.int8)
    yield f"{arch.name} supports the weights' dtype", known or kind.converted
    yield f"the weights are not shuffled, or {arch.name} is an AMD GPU", _reads_order(a, arch)
    if not kind.numbers:  # whose columns are multiples of 32
        yield "H and I are multiples of 16 bytes, I of 8", h * size % 16 == n // 2 * size % 16 == n // 2 % 8 == 0
    for name in ("hidden", "w1", "w2"):
        tensor = getattr(a, name)
        holds = tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
        holds = holds and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        yield f"{name}'s rows are contiguous and 16-byte aligned", holds
    for name in ("w1", "w2"):
        weight = getattr(a, name)
        yield f"an expert's {name} spans less than 2 GB", weight.shape[1] * weight.stride(1) * size < 2**31
    width = h * size
    if quantizing(a) < 2:
        width = max(a.hidden.shape[1], a.hidden.stride(0)) * a.hidden.element_size()
    yield "hidden, if no launch quantizes it first, spans less than 2 GB", m * width < 2**31
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
    if kind.native or kind.converted:
        most = f"M is at most {streamed.MAX_TOKENS}, slots {streamed.MAX_SLOTS}, M * slots * (I / {streamed.GATE_UP_ROWS})^2"
        yield (
            f"with a scale per {kind.group} along K, {most} is below 2^31, and lists of pairs and experts fit LDS",
            streamed.takes(a, arch),
        )
        yield "scales of 4-bit weights are bf16 or e8m0", a.w1_scale.dtype not in (torch.float16, torch.float64)
    elif not _can_stream(a, arch):
        yield from tiled.can_implement(a, arch)


def _configs(a, arch: Arch) -> list[StreamedConfig | TiledConfig]:
    if not _reads_order(a, arch):
        return []
    kind = scheme_of_call(a)
    can_stream = (arch.block_scales or not kind.native) and _can_stream(a, arch)
    can_tile = not kind.converted and all(holds for _, holds in tiled.can_implement(a, arch))
    tiles = can_tile and (not can_stream or a.hidden.shape[0] >= TILED_FROM)
    return (streamed.configs(a, arch) if can_stream else []) + (tiled.configs(a, arch) if tiles else [])


def _kernels(config: StreamedConfig | TiledConfig):
    return tiled if isinstance(config, TiledConfig) else streamed


def _problem(a) -> dict[str, int]:
    experts, n, _ = a.w1.shape
    return {
        "m": a.hidden.shape[0],
        "topk": slots(a),
        "experts": experts,
        "hidden": a.hidden.shape[1],
        "intermediate": n // 2,
    }


@functools.partial(
    Op,
    allocate=lambda a: a.hidden.new_empty(a.hidden.shape, dtype=a.out_dtype),
    contract=contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=lambda config, a, arch: _kernels(config).cost(config, a, arch),
    plan=lambda config, out, a, arch: _kernels(config).launches(config, out, a, arch),
    problem=_problem,
    cases=cases,
    meanings=MEANINGS,
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
        topk_weights: [M, topk], float32.
        topk_ids: [M, topk], int32 or int64; invalid ids are skipped.
        out_dtype: bf16 or fp16, also of the activation between the GEMMs.
        w2_scale: As w1_scale.
        hidden_scale: Static scale of hidden, float32, one element; or the scales of a quantized hidden: [M, 1], [1],
            [M, ceil(H / 128)] (per block) or [M, H / 32] (MX-FP8).
        act_scale: Static scale of the activation, float32, one element.
        expert_map: [global experts], int32: local expert of an id, -1 for none.
        shared_experts: The last experts of E that take every token with weight 1; no id names them.
        apply_router_weight_on_input: Scale hidden by the router weights, not the result; topk is 1.
        shuffled: Each expert's w1 and w2 are in `shuffle_weight` order, as AITER stores them, with their plain shapes.
        w1_bias: [E, 2 I], floating point: added to w1's products, in the order of its rows.
        w2_bias: [E, H], floating point: added to w2's products, before the router weights.
        swiglu_limit: Upper bound of gate, and of the absolute value of up; above 0, None for no bound.
        swiglu_alpha: Factor of gate in the sigmoid.
        swiglu_beta: Added to up.
        interleaved: Rows of w1 and w1_bias are gate, up, gate, up, as in gpt-oss.

    Returns:
        [M, H], out_dtype.

    Source:
        vLLM's TritonExperts and TritonWNA16Experts; MoE layers of RadeonFlow and the Inference Sprint; fused_moe/moe-gemm.py of AMD
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
