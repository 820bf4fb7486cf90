"""Compute the auxiliary losses of a MoE router; kernels: csrc/ops/standalone/router_loss.h.

Everything is computed in float32. A NaN logit counts as -inf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, Workspace, fields
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import routing

__all__ = ["load_balancing_loss", "router_z_loss"]

MAX_EXPERTS = (256, routing.MAX_EXPERTS)  # expert limit, by kernel


@dataclass(frozen=True)
class LossConfig:
    """`experts` is the kernel's expert limit; `blocks` share the tokens."""

    experts: int
    blocks: int


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from routing.contract("logits", a.logits)
    if hasattr(a, "topk_ids"):
        ids, m = a.topk_ids, a.logits.shape[0]
        holds = ids.dim() == 2 and ids.shape[0] == m and ids.shape[1] > 0 and ids.dtype in (torch.int32, torch.int64)
        yield "topk_ids", f"int32 or int64 [M={m}, topk]", describe(ids), holds


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from routing.can_implement("logits", a.logits)
    yield "there are fewer than 2^31 rows", a.logits.shape[0] < 2**31
    if hasattr(a, "topk_ids"):
        yield "topk_ids is int32 and contiguous", a.topk_ids.dtype == torch.int32 and a.topk_ids.is_contiguous()


def _configs(a, arch: Arch) -> list[LossConfig]:
    m, experts = a.logits.shape
    most = max(min(-(-m // routing.WAVES), arch.compute_units), 1)
    fitting = routing.fitting(experts, MAX_EXPERTS)
    return [LossConfig(taken, blocks) for taken in fitting for blocks in sorted({1, most})]


def _plan(name: str, config: LossConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    x, ids = a.logits, getattr(a, "topk_ids", None)
    tokens, experts = x.shape
    sums = config.blocks * (1 if ids is None else experts)
    topk = 0 if ids is None else ids.shape[1]
    if ids is None:
        scale = a.coefficient / max(tokens, 1)
    else:
        scale = a.coefficient * experts / (max(tokens, 1) ** 2 * topk)
    args = {
        "logits": x,
        "ids": ids,
        "loss": out,
        "sums": Workspace(4 * sums),
        "counts": None if ids is None else Workspace(4 * sums),
        "counter": Counters(1),
        "stride": x.stride(0),
        "tokens": tokens,
        "experts": experts,
        "topk": topk,
        "blocks": config.blocks,
        "scale": scale,
    }
    symbol = f"{name}_{routing.ELEMENTS[x.dtype]}_{config.experts}"
    return [routing.launch(symbol, config.blocks, fields("loss", args), arch)]


def _cases(with_ids: bool) -> Iterator[Case]:
    """Yield every instance on every arch, tokens below and above the waves, many tokens, NaN, strides, invalid ids."""

    def case(name, m, experts, topk=4, fill=routing.random, no_expert=False, **given) -> Case:
        def make(device, generator, fp8_dtype) -> tuple:
            dtype = given.get("dtype", torch.bfloat16)
            x = routing.matrix(fill(m, experts, generator), dtype, given.get("padding", 0), device)
            if not with_ids:
                return x, 0.001
            ids = torch.rand(m, experts, generator=generator).argsort(-1)[:, :topk].to(torch.int32)
            if no_expert:
                ids[::2, 0], ids[1::2, -1] = -1, experts
            return x, ids.to(device), 0.01

        return Case(name, make)

    for dtype, label in routing.ELEMENTS.items():
        yield case(label, 13, 32, dtype=dtype)
        yield case(f"{label}-experts512", 3, 512, dtype=dtype)
    for experts in (4, 63, 65, 129, 511):
        yield case(f"experts{experts}", 3, experts)
    yield case("padded", 9, 100, padding=3)
    yield case("equal", 8, 12, fill=routing.equal)
    yield case("not-finite", 6, 70, fill=routing.not_finite)
    yield case("nan", 6, 70, fill=routing.some_nan)
    yield case("one-token", 1, 8, topk=1)
    yield case("no-tokens", 0, 8)
    yield case("many-tokens", 200, 40)
    if with_ids:
        yield case("no-expert", 7, 24, no_expert=True)


def _op(reference: Callable) -> Op:
    return Op(
        reference,
        allocate=lambda a: a.logits.new_empty((), dtype=torch.promote_types(a.logits.dtype, torch.float32)),
        contract=_contract,
        can_implement=_can_implement,
        configs=_configs,
        default=lambda a, arch: _configs(a, arch)[-1],
        plan=functools.partial(_plan, reference.__name__),
        problem=lambda a: {"m": a.logits.shape[0], "experts": a.logits.shape[1]},
        cases=functools.partial(_cases, reference.__name__ == "load_balancing_loss"),
    )


@_op
def router_z_loss(logits: Tensor, coefficient: float = 0.001) -> Tensor:
    """Compute coefficient * mean over tokens of logsumexp(logits)^2, which keeps router logits small.

    Args:
        logits: [M, E], bf16, fp16 or fp32; rows at any stride.
        coefficient: Factor of the loss.

    Returns:
        A float32 scalar; 0 without tokens.

    Source:
        The router z-loss of the Inference Sprint.
    """
    exponentials, maximum = routing.exponentials(routing.logits(logits))
    log_sum = maximum.squeeze(-1) + exponentials.sum(-1).log()
    return coefficient * log_sum.square().sum() / max(logits.shape[0], 1)


@_op
def load_balancing_loss(logits: Tensor, topk_ids: Tensor, coefficient: float = 0.01) -> Tensor:
    """Compute coefficient * E * sum over experts of (share of topk_ids * mean probability).

    Args:
        logits: [M, E], bf16, fp16 or fp32; rows at any stride.
        topk_ids: [M, topk], int32 or int64; ids outside 0 to E - 1 are skipped. Kernels take int32.
        coefficient: Factor of the loss, which is the loss of a balanced router.

    Returns:
        A float32 scalar; 0 without tokens.

    Source:
        The load-balancing loss of the Inference Sprint.
    """
    m, experts = logits.shape
    probabilities = routing.softmax(routing.logits(logits)).sum(0)
    named = topk_ids.long().masked_fill((topk_ids < 0) | (topk_ids >= experts), experts).flatten()
    counts = named.new_zeros(experts + 1).scatter_add_(0, named, torch.ones_like(named))[:experts]
    return (probabilities * counts).sum() * (coefficient * experts / (max(m, 1) ** 2 * topk_ids.shape[1]))
