"""Hand the experts that a gate's launch chose to vLLM's router, in layers whose experts do not route, as the ones beside AITER's.

There vLLM calls the layer's router with the logits, and the experts with its result. The router looks for weights and ids by the logits and
the routing arguments first (moe_side_channel.py), and routes itself otherwise. Padding gets experts, too.

vLLM's routers of grouped top-k, of top-k with a bias and of plain top-k are known. Others stay: with shared experts as further ids, with
ids by a table, with another bias for images.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_rocm_ops.ops.moe_routing import SCORES
from vllm_rocm_ops.vllm.graph import moe_side_channel
from vllm_rocm_ops.vllm.moe import routing_experts

MORE = "num_fused_shared_experts", "_hash_indices_table", "bias_vl", "skip_padding"
"""Attributes of routers that the op lacks."""


class VllmRouting:
    """The routing of a layer by vLLM's router. `method`, `topk` and `groups` are as `routing_experts.route` gets them."""

    masks = False
    """True if padding goes to no expert."""

    def __init__(self, router):
        self.router, self.plain = router, type(router)
        self.method, self.topk = (router.scoring_func, router.renormalize), router.top_k
        names = ("num_expert_group", "topk_group", "e_score_correction_bias")
        groups = (getattr(router, name, None) for name in names)
        self.groups = *groups, getattr(router, "routed_scaling_factor", 1.0)

    @property
    def beside(self) -> str:
        """The name of vLLM's router in a baseline, which AITER makes another one."""
        from vllm._aiter_ops import rocm_aiter_ops

        return self.plain.__name__ + "_aiter" * bool(rocm_aiter_ops.is_fused_moe_enabled())

    def route(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self.plain._compute_routing(self.router, x, logits, None)

    def adopt(self) -> None:
        """Make the router look for what a gate has chosen."""
        self.router._compute_routing = self.compute

    def compute(self, hidden_states: Tensor, router_logits: Tensor, *rest, **more) -> tuple[Tensor, Tensor]:
        """Return weights and ids in place of the router's method."""
        arguments = self.method, self.topk, router_logits.shape[-1], *self.groups
        chosen = moe_side_channel.routed(router_logits, routing_experts.arguments_after_logits(*arguments))
        if chosen is not None:
            return chosen
        return self.plain._compute_routing(self.router, hidden_states, router_logits, *rest, **more)


@functools.cache
def classes() -> tuple[type, ...]:
    """Return vLLM's classes of routers that choose experts as the op does."""
    from vllm.model_executor.layers.fused_moe.router import (
        fused_topk_bias_router,
        fused_topk_router,
        grouped_topk_router,
    )

    return (
        grouped_topk_router.GroupedTopKRouter,
        fused_topk_bias_router.FusedTopKBiasRouter,
        fused_topk_router.FusedTopKRouter,
    )


def routing_of(layer: torch.nn.Module) -> VllmRouting | None:
    """Return the routing of an MoE layer by vLLM's router, None if the op does not choose experts as it does."""
    router = getattr(layer, "router", None)
    if type(router) not in classes() or router.scoring_func not in SCORES:
        return None
    more = (getattr(router, name, None) for name in MORE)
    if any(isinstance(value, Tensor) or value for value in more):
        return None
    found = VllmRouting(router)
    groups, _, bias, scale = found.groups
    is_known = bias is not None or groups or (router.scoring_func, scale) == ("softmax", 1.0)
    return found if is_known else None
