"""Multiply by an MoE router's weight and choose experts, in one launch for few tokens; kernels: csrc/ops/router_gemm_topk.hip."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, Workspace
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops import moe_routing
from vllm_rocm_ops.ops.moe_routing import EPSILON, MAX_GROUP_LANES, grouped_topk
from vllm_rocm_ops.ops.shared import gemm, routing, skinny_gemm, weight_layout
from vllm_rocm_ops.ops.shared.skinny_gemm import SkinnyConfig
from vllm_rocm_ops.ops.unquantized_gemm import unquantized_gemm

__all__ = ["router_gemm_topk"]

MODULE = "router_gemm_topk"
ROWS = 16  # experts per tile
VALUES = (4, 8, 16)  # experts per lane, by kernel
WAVES = 4  # per block; in the last block each routes a token
MAX_TOKENS = 64
GROUP_TOKENS = {torch.bfloat16: (4, 8, 16), torch.float32: (8, 16)}  # of a group, at most, by the weight's dtype
MOST_BLOCKS = 2  # per compute unit
UNIT = weight_layout.STEP * skinny_gemm.WAVE_SPLIT_K_UNIT  # bytes of x along K
FLOAT_STEP = 2 * weight_layout.STEP  # bytes of a float32 weight along K that a step multiplies
# The cost model: units of a slice whose loads are in flight at once, kStages of csrc/gemm/skinny/wave_split_k.h; microseconds of another
# unit, and of a wave for a token. They fit the predictions of timing/ for DeepSeek-V3 and Qwen3-30B-A3B on MI300X.
UNITS_IN_FLIGHT, UNIT_US, ROUTE_US = 4, 0.1, 2.0
# At least, of each block of a compute unit, with a float32 weight or several groups: chosen configurations of `bench gates` on H200.
GROUP_BLOCK_US = 1.1


def _operands(a) -> tuple[gemm.Operand, gemm.Operand]:
    """Return x and the weight, with x's bytes along K for both: a step multiplies the same elements of both."""
    x = gemm.activations(a.x)
    return x, gemm.weight(a.weight)._replace(k=x.k)


def _experts(a) -> int:
    return gemm.weight(a.weight).rows


def _division(a, arch: Arch) -> tuple[int, int] | None:
    """Return the experts and the lanes, a power of two, that the smallest kernel has for a group; None if none fits."""
    groups = a.num_expert_group
    size = _experts(a) // groups
    for values in VALUES:
        lanes = 1 << (size // values - 1).bit_length() if size >= values else 1
        most = arch.wave_lanes if groups == 1 else min(MAX_GROUP_LANES, arch.wave_lanes // groups)
        if size % values == 0 and lanes <= most:
            return values, lanes
    return None


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield "x", "[M, K], floating point of 16 bits or more", describe(a.x), a.x.dim() == 2 and is_wide_float(a.x)
    k = a.x.shape[-1]
    dtypes = dict.fromkeys((a.x.dtype, torch.float32))
    holds = a.weight.dtype in dtypes and gemm.is_weight(a.weight, k) and _experts(a) > 0
    wanted = f"{' or '.join(map(str, dtypes))} [E, K={k}] or a shuffled weight of this K"
    yield "weight", wanted, describe(a.weight), holds
    yield from moe_routing.choice_contract(a, a.x.shape[0], _experts(a))


def _allocate(a) -> tuple[Tensor, Tensor, Tensor]:
    tokens, dtype = a.x.shape[0], torch.promote_types(a.x.dtype, a.weight.dtype)
    logits = a.x.new_empty((tokens, _experts(a)), dtype=dtype)
    weights = a.x.new_empty((tokens, a.topk), dtype=torch.promote_types(dtype, torch.float32))
    return logits, weights, a.x.new_empty((tokens, a.topk), dtype=torch.int32)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield "x is bfloat16", a.x.dtype == torch.bfloat16
    yield f"M is at most {MAX_TOKENS}", a.x.shape[0] <= MAX_TOKENS
    yield "a float32 weight is not shuffled", a.weight.dtype != torch.float32 or a.weight.dim() == 2
    yield from gemm.can_implement(*_operands(a))
    yield from moe_routing.choice_rules(a)
    wanted = " or ".join(map(str, VALUES))
    yield f"lanes have {wanted} experts of a group each, and a wave has all experts", _division(a, arch) is not None


def _configs(a, arch: Arch) -> list[SkinnyConfig]:
    """Return the divisions of K into slices of whole units, with a block per slice and tile.

    None if no lanes fit the experts, or a float32 weight is shuffled. Groups of tokens have such blocks each.
    """
    if _division(a, arch) is None or a.weight.dtype == torch.float32 and a.weight.dim() != 2:
        return []
    tokens, weight = _operands(a)
    tiles = -(-weight.rows // ROWS)
    units = -(-weight.k // UNIT)
    most = max(MOST_BLOCKS * arch.compute_units // tiles, 1)
    slices = dict.fromkeys(-(-units // of_slice) for of_slice in range(-(-units // most), units + 1))
    groups = {max(-(-tokens.rows // size), 1) for size in GROUP_TOKENS.get(a.weight.dtype, ())}
    return [SkinnyConfig(ROWS, split_k, tiles * split_k, count) for count in sorted(groups) for split_k in slices]


def _cost(config: SkinnyConfig, a, arch: Arch) -> dict[str, float]:
    """Return the modeled microseconds of a configuration.

    A slice costs one latency if all its loads are in flight at once. The last block loads a few slices' sums at once. Groups of tokens
    run side by side.
    """
    tokens, weight = _operands(a)
    costs, tiles, rows = arch.costs.skinny, config.blocks // config.split_k, -(-tokens.rows // config.groups)
    of_weight = weight.rows * a.x.shape[1] * a.weight.element_size()
    is_grouped = a.weight.dtype == torch.float32 or config.groups > 1
    of_block = max(costs.block_us, GROUP_BLOCK_US if is_grouped else 0.0)
    units = -(-weight.k // (UNIT * config.split_k))
    latency = max(units / UNITS_IN_FLIGHT, 1.0) * skinny_gemm.LATENCY_US + units * UNIT_US
    rounds = -(-config.split_k // skinny_gemm.SUMMED_AT_ONCE)
    of_sums = 4 * config.split_k * rows * tiles * ROWS
    return {
        "streaming": max(of_weight / (arch.bandwidth_gb_s * 1e3), latency),
        "blocks": -(-config.blocks * config.groups // arch.compute_units) * of_block,
        "sharing": costs.sharing_us,
        "sums": of_sums / arch.costs.sums_bytes_per_us + (rounds - 1) * costs.sum_round_us,
        "routing": -(-rows // WAVES) * ROUTE_US,
    }


def _plan(config: SkinnyConfig, outputs: tuple[Tensor, Tensor, Tensor], a, arch: Arch) -> list[Launch]:
    logits, *chosen = outputs
    product, is_float = gemm.Product(logits, *_operands(a)), a.weight.dtype == torch.float32
    values, lanes = _division(a, arch)
    tokens, experts = logits.shape
    of_group = config.blocks * ROWS * min(tokens, skinny_gemm.block_tokens(config, product.a))  # sums
    routing = moe_routing.choice_arguments(a, chosen, tokens, experts, lanes)
    routing |= {"logits": None, "stride": experts, "epsilon": EPSILON, "is_sigmoid": int(a.scoring_func == "sigmoid")}
    further = {
        "partials": Workspace(config.groups * of_group * 4),
        "group_partials": of_group,
        "counters": Counters(config.groups),
        "blocks": config.blocks,
        "group_tokens": -(-tokens // config.groups),
        "routing": routing,
    }
    if is_float:
        further["b_step"] = FLOAT_STEP
    return skinny_gemm.launch(MODULE, config, product, arch, kind=f"{'fp32_' * is_float}x{values}", **further)


# cases


def _cases() -> Iterator[Case]:
    """Yield every instance on every arch, tokens around waves, K around slices, groups around lanes, ties, NaN, strides.

    Logits are multiples of 1/32 within 8, so that bf16 and fp32 sums hold them exactly: experts can be compared.
    """

    def case(name, m, experts, k, topk, *routing, **given) -> Case:
        return Case(name, functools.partial(_inputs, m, experts, k, topk, routing, given))

    deepseek = 8, 4, "sigmoid", 2.5
    for m in (1, 2, 4, 5, 8, 9, 16):
        yield case(f"deepseek-m{m}", m, 256, 1536, 8, *deepseek, bias=torch.float32)
    for m in (1, 7, 16):
        yield case(f"qwen-m{m}", m, 128, 1024, 8)
    yield case("512-experts", 3, 512, 512, 10)
    yield case("512-experts-m12", 12, 512, 512, 10, renormalize=False)
    yield case("two-groups", 2, 512, 512, 8, 2, 1, "sigmoid", bias=torch.float32)
    yield case("two-groups-m9", 9, 512, 512, 8, 2, 1, "sigmoid", bias=torch.float32)
    yield case("384-experts", 2, 384, 512, 8, 1, 1, "sigmoid", 2.5, bias=torch.float32)
    yield case("64-experts", 6, 64, 512, 6, renormalize=False)
    yield case("rows-of-a-part-tile", 3, 72, 512, 6, 6, 6, "sigmoid", bias=torch.float32)
    yield case("160-experts", 3, 160, 512, 6, 8, 3, renormalize=False)
    for bias in (torch.bfloat16, torch.float16):
        yield case(f"bias-{str(bias)[6:]}", 3, 256, 512, 8, *deepseek, bias=bias)
    yield case("softmax-bias", 3, 128, 512, 8, 4, 2, bias=torch.float32)
    yield case("no-bias", 3, 256, 512, 8, *deepseek)
    yield case("four-experts", 2, 4, 64, 4)
    yield case("topk-32", 2, 32, 512, 32)
    yield case("padding", 7, 128, 512, 8, is_padded=True)
    yield case("equal", 5, 256, 512, 8, *deepseek, equal=True)
    yield case("equal-softmax", 5, 128, 512, 8, equal=True)
    yield case("not-finite", 6, 128, 512, 8, not_finite=True)
    yield case("not-finite-groups", 6, 256, 512, 8, *deepseek, not_finite=True, bias=torch.float32)
    yield case("k-tail", 2, 128, 8 * 67, 8)
    yield case("shortest-k", 2, 128, 8, 8)
    yield case("strided", 5, 128, 512, 8, padding=64)
    yield case("shuffled", 5, 128, 576, 8, shuffled=True)
    yield case("no-tokens", 0, 256, 512, 8, *deepseek)
    for m in (17, 40, 64):
        yield case(f"qwen3-next-m{m}", m, 512, 576, 10)
    yield case("deepseek-m33", 33, 256, 1544, 8, *deepseek, bias=torch.float32)
    yield case("groups-shuffled", 21, 128, 576, 8, shuffled=True)
    yield case("groups-strided-padding", 21, 128, 512, 8, padding=64, is_padded=True)
    # 17 tokens take two or three groups, 64 four or eight; lengths end within steps, slices and units.
    minimax, float_weight = (1, 1, "sigmoid", 1.0), {"dtype": torch.float32}
    for m in (1, 8, 9, 17, 40, 64):
        yield case(f"fp32-m{m}", m, 256, 576, 8, *minimax, bias=torch.float32, **float_weight)
    yield case("fp32-minimax-m5", 5, 256, 3072, 8, *minimax, bias=torch.float32, **float_weight)
    yield case("fp32-deepseek-m20", 20, 256, 1544, 8, *deepseek, bias=torch.float32, **float_weight)
    yield case("fp32-qwen-m3", 3, 128, 1024, 8, **float_weight)
    for experts, m in ((512, 3), (512, 12), (384, 2), (384, 33)):
        yield case(f"fp32-{experts}-experts-m{m}", m, experts, 512, 10, renormalize=False, **float_weight)
    yield case("fp32-two-groups-m9", 9, 512, 512, 8, 2, 1, "sigmoid", bias=torch.float32, **float_weight)
    yield case("fp32-rows-of-a-part-tile", 18, 72, 512, 6, 6, 6, "sigmoid", bias=torch.bfloat16, **float_weight)
    yield case("fp32-padding", 23, 128, 512, 8, is_padded=True, **float_weight)
    yield case("fp32-equal", 21, 128, 512, 8, equal=True, **float_weight)
    yield case("fp32-not-finite", 19, 128, 512, 8, not_finite=True, **float_weight)
    yield case("fp32-shortest-k", 2, 128, 8, 8, **float_weight)
    yield case("fp32-strided", 21, 128, 512, 8, padding=64, **float_weight)
    yield case("fp32-shuffled", 2, 128, 512, 8, shuffled=True, **float_weight)
    yield case("fp32-no-tokens", 0, 256, 512, 8, *minimax, **float_weight)


def _inputs(m, experts, k, topk, routing, given, device, generator, fp8_dtype) -> tuple:
    padding = given.get("padding", 0)

    def rows(count: int, most: int, padding: int) -> Tensor:
        values = torch.zeros(count, k)
        for row in values:  # at most 64 terms of at most 4
            row[torch.randperm(k, generator=generator)[:64]] = 1.0
        return values * torch.randint(-most, most + 1, (count, k), generator=generator)

    dtype = given.get("dtype", torch.bfloat16)
    x, weight = torch.randint(-2, 3, (m, k), generator=generator) / 32, rows(experts, 2, padding)
    if dtype == torch.float32:  # 17 more bits, which all three parts of the kernels' weights have
        weight = weight / 2 + (weight != 0) * torch.randint(-(2**15), 2**15, weight.shape, generator=generator) / 2**17
    if given.get("equal"):
        weight[1::2] = weight[:1]
        x[:1] = 0
    if given.get("not_finite"):
        x[0, 0], x[1, k - 1], x[2] = torch.nan, torch.inf, -torch.inf
        weight[:, k - 1] = torch.where(torch.arange(experts) % 3 == 0, 1.0, -1.0)
    padded = (x, padding, torch.bfloat16), (weight, 2 * padding, dtype)
    x, weight = (gemm.padded(rows, by).to(kind).to(device)[:, :k] for rows, by, kind in padded)
    if given.get("shuffled"):
        weight = weight_layout.shuffle_weight(weight)
    bias = given.get("bias") and torch.rand(experts, generator=generator).to(given["bias"]).to(device)
    is_padding = torch.arange(m, device=device) % 3 == 1 if given.get("is_padded") else None
    groups = (*routing, *(1, 1, "softmax", 1.0)[len(routing) :])
    return x, weight, topk, given.get("renormalize", True), *groups, bias, is_padding


# op


@functools.partial(
    Op,
    allocate=_allocate,
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=lambda a: {**gemm.problem(*_operands(a)), "topk": a.topk, "weight_bytes": a.weight.element_size()},
    cases=_cases,
    meanings=routing.MEANINGS,
    sums=True,
)
def router_gemm_topk(
    x: Tensor,
    weight: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply by a router's weight as `unquantized_gemm` does, then choose experts as `grouped_topk` does.

    Without groups, bias and scale, `topk_softmax` chooses the same experts. Kernels take up to 64 tokens.

    Args:
        x: [M, K], bf16, K innermost; rows may be strided.
        weight: [E, K], x's dtype or float32, K innermost; rows may be strided. Or `shuffle_weight(weight)`, which kernels
            read in bf16.
        renormalize: Divide the weights by their sum + 1e-20.

    Returns:
        The triple (logits [M, E] in weight's dtype, weights [M, topk] float32, ids [M, topk] int32, -1 for padding). Experts
        are chosen by the rounded logits.

    Source:
        vLLM's `dsv3_router_gemm` or `fp32_router_gemm`, and `grouped_topk`, in one launch.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    logits = unquantized_gemm.reference(x.to(dtype), weight.to(dtype))
    groups = num_expert_group, topk_group, scoring_func, routed_scaling_factor
    weights, ids = grouped_topk.reference(logits, topk, renormalize, *groups, e_score_correction_bias)
    return logits, weights, ids if is_padding is None else ids.masked_fill(is_padding[:, None], -1)
