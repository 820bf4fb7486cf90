"""Route tokens to experts; kernels: csrc/ops/moe_routing.hip.

Names and arguments match vLLM's, but results are returned. Everything is computed in float32. exp(x) is exp2(x * log2(e)), as
Triton compiles it for vLLM's routing: a small sigmoid has a relative error of about |logit| * 2^-24. Experts are ranked by
score + bias, or without a bias by logits; ties go to the smaller index. A NaN logit counts as -inf, a NaN or -inf sum as the
lowest finite number: a row of nothing else goes to experts 0 to topk - 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import fields
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared import routing

__all__ = ["grouped_topk", "topk_sigmoid", "topk_softmax"]

SCORES = ("softmax", "sigmoid")
EPSILON = 1e-20  # added to the sum that grouped_topk divides weights by
TOPK_VALUES = (2, 4, 8, 16)  # experts per lane, by kernel
MAX_TOPK = 32  # one per lane
MAX_GROUP_LANES = 16


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values; ties go to the smaller index."""
    return x.argsort(dim=-1, descending=True, stable=True)[..., :count]


def _route(
    gating_output: Tensor,
    bias: Tensor | None,
    topk: int,
    renormalize: bool,
    scoring_func: str,
    scale: float = 1.0,
    groups: int = 1,
    topk_group: int = 1,
    epsilon: float = 0.0,
    is_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = routing.logits(gating_output)
    scores = logits.sigmoid() if scoring_func == "sigmoid" else routing.softmax(logits)
    lowest = torch.finfo(torch.float32).min
    choice = logits if bias is None else scores + bias.to(scores.dtype)
    choice = choice.nan_to_num(nan=lowest, neginf=lowest, posinf=math.inf)
    if topk_group < groups:
        members = choice.unflatten(-1, (groups, -1))
        of_groups = members.amax(-1) if bias is None else members.topk(2).values.sum(-1)
        is_in = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, _largest(of_groups, topk_group), True)
        choice = members.masked_fill(~is_in.unsqueeze(-1), -math.inf).flatten(-2)
    ids = _largest(choice, topk)
    weights = scores.gather(-1, ids)
    if renormalize:
        total = weights.sum(-1, keepdim=True) + epsilon
        weights = weights / torch.where(total > 0, total, 1.0)
    if is_padding is not None:
        ids = ids.masked_fill(is_padding[:, None], -1)
    return weights * scale, ids.to(torch.int32, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class TopkConfig:
    """`values` is the limit of experts per lane."""

    values: int


def _groups(a) -> tuple[int, int]:
    return getattr(a, "num_expert_group", 1), getattr(a, "topk_group", 1)


def _division(a, arch: Arch) -> tuple[int, int, int]:
    """Return the experts and lanes of a group, a power of two, and the experts per lane."""
    groups, _ = _groups(a)
    experts = a.gating_output.shape[1] // groups
    lanes = arch.wave_lanes
    if groups > 1:
        lanes = min(1 << (arch.wave_lanes // groups).bit_length() >> 1, MAX_GROUP_LANES)
    return experts, lanes, -(-experts // max(lanes, 1))


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from routing.contract("gating_output", a.gating_output)
    yield from choice_contract(a, *a.gating_output.shape)


def choice_contract(a, tokens: int, experts: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of the arguments that choose experts by logits [tokens, experts]."""
    bias = a.e_score_correction_bias
    if bias is not None:
        wanted = f"[E={experts}], floating point of 16 bits or more"
        holds = bias.shape == (experts,) and is_wide_float(bias)
        yield "e_score_correction_bias", wanted, describe(bias), holds
    is_padding = getattr(a, "is_padding", None)
    if is_padding is not None:
        holds = is_padding.shape == (tokens,) and is_padding.dtype == torch.bool
        yield "is_padding", f"bool [M={tokens}]", describe(is_padding), holds
    groups, topk_group = _groups(a)
    wanted = f"a divisor of E={experts}"
    yield "num_expert_group", wanted, str(groups), groups > 0 and experts % groups == 0
    yield "topk_group", f"1 to num_expert_group={groups}", str(topk_group), 0 < topk_group <= groups
    if bias is not None and topk_group < groups:
        yield "num_expert_group", "of groups of at least two experts with a bias", str(groups), experts // groups >= 2
    most = experts // groups * topk_group
    yield "topk", f"1 to {most}, the experts in topk_group groups", str(a.topk), 0 < a.topk <= most
    scoring_func = getattr(a, "scoring_func", SCORES[0])
    yield "scoring_func", " or ".join(SCORES), scoring_func, scoring_func in SCORES


def _allocate(a) -> tuple[Tensor, Tensor]:
    x = a.gating_output
    dtype = torch.promote_types(x.dtype, torch.float32)
    shape = (x.shape[0], a.topk)
    return x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=torch.int32)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from routing.can_implement("gating_output", a.gating_output)
    yield from choice_rules(a)
    _, lanes, per_lane = _division(a, arch)
    yield f"there are at most {arch.wave_lanes} groups, one lane each", lanes > 0
    yield f"a lane has at most {TOPK_VALUES[-1]} experts", per_lane <= TOPK_VALUES[-1]


def choice_rules(a) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for the arguments that choose experts."""
    yield f"topk is at most {MAX_TOPK}", a.topk <= MAX_TOPK
    bias = a.e_score_correction_bias
    if bias is not None:
        yield "e_score_correction_bias is bfloat16, float16 or float32", bias.dtype in routing.ELEMENTS
        yield "e_score_correction_bias is contiguous", bias.is_contiguous()
    if (is_padding := getattr(a, "is_padding", None)) is not None:
        yield "is_padding is contiguous", is_padding.is_contiguous()


def _configs(a, arch: Arch) -> list[TopkConfig]:
    _, lanes, per_lane = _division(a, arch)
    return [TopkConfig(values) for values in routing.fitting(per_lane, TOPK_VALUES) if lanes]


def _plan(is_sigmoid: Callable[..., bool], epsilon: float, config: TopkConfig, outputs, a, arch: Arch):
    x = a.gating_output
    tokens, experts = x.shape
    if tokens == 0:
        return []
    _, lanes, _ = _division(a, arch)
    args = {"logits": x, "stride": x.stride(0), **choice_arguments(a, outputs, tokens, experts, lanes)}
    args |= {"is_sigmoid": int(is_sigmoid(a)), "epsilon": epsilon}
    symbol = f"moe_topk_{routing.ELEMENTS[x.dtype]}_x{config.values}"
    return [routing.launch(symbol, -(-tokens // routing.WAVES), fields("routing", args), arch)]


def choice_arguments(a, outputs: tuple[Tensor, Tensor], tokens: int, experts: int, lanes: int) -> dict:
    """Return the fields of TopkRouting in csrc/device/topk_routing.h that do not depend on the op."""
    bias, (groups, topk_group), (weights, ids) = a.e_score_correction_bias, _groups(a), outputs
    return {
        "bias": bias,
        "padding": getattr(a, "is_padding", None),
        "weights": weights,
        "ids": ids,
        "tokens": tokens,
        "bias_type": 0 if bias is None else list(routing.ELEMENTS).index(bias.dtype),
        "experts": experts,
        "topk": a.topk,
        "renormalize": int(a.renormalize),
        "groups": groups,
        "topk_group": topk_group,
        "group_size": experts // groups,
        "log2_lanes": lanes.bit_length() - 1,
        "scale": float(getattr(a, "routed_scaling_factor", 1.0)),
    }


def _op(is_sigmoid: Callable[..., bool], epsilon: float, cases: Callable) -> Callable[[Callable], Op]:
    return lambda reference: Op(
        reference,
        allocate=_allocate,
        contract=_contract,
        can_implement=_can_implement,
        configs=_configs,
        default=lambda a, arch: _configs(a, arch)[0],
        plan=functools.partial(_plan, is_sigmoid, epsilon),
        problem=lambda a: {"m": a.gating_output.shape[0], "experts": a.gating_output.shape[1], "topk": a.topk},
        cases=cases,
        meanings=routing.MEANINGS,
    )


# cases


def _topk_case(
    name: str, m: int, experts: int, topk: int, *rest, fill=routing.random, bias: torch.dtype | None = None, **given
) -> Case:
    """Return a case whose arguments have `before` and `rest` around the bias."""

    def make(device, generator, fp8_dtype) -> tuple:
        dtype = given.get("dtype", torch.bfloat16)
        x = routing.matrix(fill(m, experts, generator), dtype, given.get("padding", 0), device)
        correction = torch.rand(experts, generator=generator).to(bias).to(device) if bias else None
        arguments = x, topk, given.get("renormalize", True), *given.get("before", ()), correction, *rest
        return (*arguments, torch.arange(m, device=device) % 3 == 1) if given.get("is_padded") else arguments

    return Case(name, make)


def _topk_cases(*rest) -> Iterator[Case]:
    """Yield every instance on every arch, experts around multiples of lanes, ties, NaN, strides."""
    for dtype, label in routing.ELEMENTS.items():
        yield _topk_case(label, 3, 256, 8, *rest, dtype=dtype)
        for experts, topk in ((60, 4), (128, 8), (512, 10)):
            yield _topk_case(f"{label}-experts{experts}", 2, experts, topk, *rest, dtype=dtype, renormalize=False)
        for bias_dtype, bias_label in routing.ELEMENTS.items():
            yield _topk_case(f"{label}-bias-{bias_label}", 5, 250, 8, *rest, dtype=dtype, bias=bias_dtype)
    yield _topk_case("bias", 2, 72, 4, *rest, bias=torch.float32, renormalize=False)
    for experts, topk in ((4, 4), (8, 2), (63, 5), (65, 16), (257, 16), (511, 10)):
        yield _topk_case(f"experts{experts}", 2, experts, topk, *rest)
    yield _topk_case("one-expert", 2, 1, 1, *rest)
    yield _topk_case("all-of-32", 2, 32, 32, *rest)
    yield _topk_case("equal", 4, 130, 16, *rest, fill=routing.equal)
    yield _topk_case("not-finite", 5, 70, 8, *rest, fill=routing.not_finite)
    yield _topk_case("not-finite-bias", 5, 70, 8, *rest, fill=routing.not_finite, bias=torch.float32)
    yield _topk_case("strided", 5, 64, 6, *rest, padding=7)
    yield _topk_case("padding", 7, 64, 6, *rest, is_padded=True)
    yield _topk_case("one-token", 1, 256, 8, *rest)
    yield _topk_case("no-tokens", 0, 256, 8, *rest)


def _grouped_cases() -> Iterator[Case]:
    """Yield group sizes around multiples of lanes, group counts from one to all lanes, ties within and between groups."""

    def case(name, m, experts, topk, groups, topk_group, scoring_func="sigmoid", scale=1.0, **given) -> Case:
        return _topk_case(name, m, experts, topk, before=(groups, topk_group, scoring_func, scale), **given)

    yield case("deepseek-v3", 3, 256, 8, 8, 4, scale=2.5, bias=torch.float32)
    yield case("deepseek-v3-fp32", 6, 256, 8, 8, 4, scale=2.5, bias=torch.float32, dtype=torch.float32)
    yield case("deepseek-v2", 3, 160, 6, 8, 3, "softmax", 16.0, renormalize=False)
    for dtype, label in routing.ELEMENTS.items():
        for bias_dtype, bias_label in routing.ELEMENTS.items():
            yield case(f"{label}-bias-{bias_label}", 3, 256, 8, 8, 4, scale=2.5, bias=bias_dtype, dtype=dtype)
    yield case("no-bias", 3, 256, 8, 8, 4)
    yield case("softmax-bias", 3, 128, 8, 4, 2, "softmax", bias=torch.float32)
    yield case("one-group", 3, 384, 8, 1, 1, scale=2.5, bias=torch.float32)
    yield case("all-groups", 2, 72, 6, 6, 6, bias=torch.float32)
    for dtype, label in routing.ELEMENTS.items():
        yield case(f"{label}-two-groups", 2, 512, 16, 2, 1, bias=torch.float32, dtype=dtype)
    for groups, size in ((3, 51), (5, 33), (7, 4), (9, 17), (17, 5), (32, 16), (33, 2), (64, 8)):
        yield case(f"groups{groups}x{size}", 2, groups * size, 4, groups, 2, bias=torch.float32)
    yield case("groups-of-one", 2, 12, 3, 12, 5, "softmax")
    yield case("more-groups-than-lanes", 2, 130, 3, 65, 5, bias=torch.float32)
    yield case("equal", 4, 96, 8, 8, 3, fill=routing.equal)
    yield case("equal-softmax", 4, 96, 8, 8, 3, "softmax", fill=routing.equal, padding=5)
    yield case("tiny-scores", 3, 64, 4, 4, 2, fill=lambda m, n, _: torch.full((m, n), -46.0))  # of EPSILON
    yield case("not-finite", 5, 96, 8, 8, 3, fill=routing.not_finite, bias=torch.float32)
    yield case("not-finite-no-bias", 5, 96, 8, 8, 3, "softmax", fill=routing.not_finite)
    yield case("no-tokens", 0, 256, 8, 8, 4, bias=torch.float32)


# ops


@_op(lambda a: False, 0.0, _topk_cases)
def topk_softmax(
    gating_output: Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    is_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the topk experts of each token by softmax.

    Returns:
        The pair (weights [M, topk] float32, ids [M, topk] int32, -1 for padding).

    Source:
        vLLM's `topk_softmax`; softmax and top-k of RadeonFlow.
    """
    choice = topk, renormalize, "softmax"
    return _route(gating_output, e_score_correction_bias, *choice, is_padding=is_padding)


@_op(lambda a: True, 0.0, functools.partial(_topk_cases, 2.5))
def topk_sigmoid(
    gating_output: Tensor,
    topk: int,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the topk experts of each token by sigmoid.

    Returns:
        The pair (weights [M, topk] float32, ids [M, topk] int32, -1 for padding).

    Source:
        vLLM's `topk_sigmoid`.
    """
    choice = topk, renormalize, "sigmoid", routed_scaling_factor
    return _route(gating_output, e_score_correction_bias, *choice, is_padding=is_padding)


@_op(lambda a: a.scoring_func == "sigmoid", EPSILON, _grouped_cases)
def grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the topk experts of each token from its topk_group best groups of neighboring experts.

    A group ranks by its best expert; with a bias, by the sum of its best two.

    Args:
        renormalize: Divide the weights by their sum + 1e-20.

    Returns:
        The pair (weights [M, topk] float32, ids [M, topk] int32).

    Source:
        vLLM's `grouped_topk`, as DeepSeek-V3 routes.
    """
    groups = num_expert_group, topk_group, EPSILON
    return _route(
        gating_output, e_score_correction_bias, topk, renormalize, scoring_func, routed_scaling_factor, *groups
    )
