"""Route tokens in the plugin's experts: `grouped_topk`, `topk_softmax` or `topk_sigmoid`, then `fused_experts`.

vLLM calls such experts monolithic. Their classes come before the ones of fp8_experts and unquantized_experts, and save
vLLM's routing kernels and two copies of the result. For few tokens the router GEMM and the routing are one launch where
that is faster (routing_gate.py). Left to vLLM's router: expert load balancing, enable_return_routed_experts, Quark's
layers, and unsupported calls.
"""

import collections
import inspect

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.graph import moe_side_channel
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe import fp8_experts, unquantized_experts

METHODS = {
    "DeepSeekV3": ("sigmoid", True),
    "MiniMax2": ("sigmoid", True),
    "RenormalizeNaive": ("softmax", True),
    "Default": ("softmax", False),
}
"""vLLM's routing methods: the scoring function, and whether a token's weights are normalized to sum to 1."""

ROUTER = {
    *("use_grouped_topk", "num_expert_group", "topk_group", "scoring_func", "routed_scaling_factor"),
    "e_score_correction_bias",
}
"""Keywords of vLLM's `create_fused_moe_router` that `route` uses."""

APPLY = (
    *("hidden_states", "w1", "w2", "router_logits", "activation", "global_num_experts", "expert_map", "a1q_scale"),
    *("apply_router_weight_on_input", "num_expert_group", "e_score_correction_bias", "routed_scaling_factor"),
    "topk_group",
)
"""The parameters of `FusedMoEExpertsMonolithic.apply`, of which the last four have defaults; a newer vLLM has one more."""
ApplyArguments = collections.namedtuple("ApplyArguments", (*APPLY, "routing_replay_out"), defaults=(None,) * 5)


def route(
    method: tuple[str, bool],
    topk: int,
    router_logits: Tensor,
    num_expert_group: int | None,
    topk_group: int | None,
    bias: Tensor | None,
    scale: float,
    has_baseline: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the router's weights and expert ids [tokens, topk] for logits [tokens, experts].

    They may come from the router GEMM's launch (routing_gate.py). `bias` [experts] is added to scores for the selection only, and
    `scale` multiplies the weights. Calls that no kernel supports go to vLLM's router, or without a baseline to the op's reference.
    """
    scoring_func, renormalize = method

    def baseline() -> tuple[Tensor, Tensor]:
        from vllm.model_executor.layers.fused_moe.router import router_factory

        router = router_factory.create_fused_moe_router(
            topk,
            router_logits.shape[-1],
            renormalize,
            use_grouped_topk=bool(num_expert_group),
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            scoring_func=scoring_func,
            routed_scaling_factor=scale,
            e_score_correction_bias=bias,
        )
        return router.select_experts(router_logits, router_logits)

    routing = arguments_after_logits(method, topk, router_logits.shape[-1], num_expert_group, topk_group, bias, scale)
    if (routed := moe_side_channel.routed(router_logits, routing)) is not None:
        return routed
    if is_plain(routing):
        if not has_baseline:
            return torch.ops.vllm_rocm_ops.topk_softmax(router_logits, *routing)
        return ops.topk_softmax.run_kernels(router_logits, *routing, None, is_padding(len(router_logits))) or baseline()
    if scoring_func == "sigmoid" and not num_expert_group:
        if not has_baseline:
            return torch.ops.vllm_rocm_ops.topk_sigmoid(router_logits, topk, renormalize, bias, scale)
        sigmoid = topk, renormalize, bias, scale, is_padding(len(router_logits))
        return ops.topk_sigmoid.run_kernels(router_logits, *sigmoid) or baseline()
    if not has_baseline:
        return torch.ops.vllm_rocm_ops.grouped_topk(router_logits, *routing)
    return ops.grouped_topk.run_kernels(router_logits, *routing) or baseline()


def arguments_after_logits(
    method: tuple[str, bool],
    topk: int,
    num_experts: int,
    num_expert_group: int | None,
    topk_group: int | None,
    bias: Tensor | None,
    scale: float,
) -> tuple:
    """Return the arguments after the logits: `topk_softmax`'s (topk, renormalize), or `grouped_topk`'s seven, the bias last."""
    scoring_func, renormalize = method
    if bias is None and (not num_expert_group or (num_expert_group == 1 and scale == 1.0)):
        return topk, renormalize
    groups = num_expert_group or 1
    groups = (groups, topk_group or 1) if groups < num_experts and num_experts % groups == 0 else (1, 1)
    return topk, renormalize, *groups, scoring_func, scale, bias


def is_plain(routing: tuple) -> bool:
    """True if arguments after the logits are `topk_softmax`'s."""
    return len(routing) == 2


def supports(method: tuple[str, bool], config) -> bool:
    """True if kernels support the routing of a `FusedMoEConfig`. Expert groups are checked at each call, where vLLM passes them."""
    scoring_func, renormalize = method
    logits = torch.empty(1, config.num_experts, dtype=config.router_logits_dtype, device="meta")
    what = logits, config.experts_per_token, renormalize
    if scoring_func == "softmax" and not linear_base.has_kernels(ops.topk_softmax, *what):
        return False
    bias = logits[0] if scoring_func == "sigmoid" else None
    if scoring_func == "sigmoid" and not linear_base.has_kernels(ops.topk_sigmoid, *what, bias):
        return False
    return linear_base.has_kernels(ops.grouped_topk, *what, 1, 1, scoring_func, 1.0, bias)


def is_padding(tokens: int) -> Tensor | None:
    """Return vLLM's mask [tokens] of a captured graph's padding, which its routers without groups send to no expert."""
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    return fused_topk_router._get_padding_mask(tokens)


def unsupported_setting() -> str:
    """Return the setting or quantization with which vLLM must route, empty if there is none."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    if compat.returns_routed_experts(config):
        return "enable_return_routed_experts"
    quark = config.quant_config is not None and config.quant_config.get_name() == "quark"
    return "Quark layers, which call no monolithic experts" if quark else ""


def is_supported_config(experts_class: type, routing: str, moe_config, *asked) -> tuple[bool, str | None]:
    """Return `Predicates`' answer, or a refusal if no kernel supports the routing method of this name."""
    supported, why = experts.Predicates.is_supported_config(experts_class, moe_config, *asked)
    if supported and not supports(METHODS[routing], moe_config):
        return False, f"{experts_class.__name__} has no routing kernels for this layer"
    return supported, why


def monolithic(modular: type) -> type:
    """Return the monolithic counterpart of the plugin's class of modular experts."""
    from vllm.model_executor.layers.fused_moe import modular_kernel

    class RocmOpsRoutingExperts(experts.Predicates, modular_kernel.FusedMoEExpertsMonolithic):
        def __init__(self, moe_config, quant_config):
            super().__init__(moe_config, quant_config)
            self.method, self.topk = METHODS[moe_config.routing_method.name], moe_config.experts_per_token
            baseline = self.baseline_class()
            self.kernel = self.baseline = baseline and experts.modular_kernel_of(baseline(moe_config, quant_config))

        @staticmethod
        def is_supported_config(experts_class, moe_config, weight_key, activation_key, activation_format):
            if unsupported_setting():
                return False, f"{experts_class.__name__} does not support {unsupported_setting()}"
            asked = moe_config, weight_key, activation_key, activation_format
            return is_supported_config(experts_class, moe_config.routing_method.name, *asked)

        @staticmethod
        def _supports_routing_method(routing_method, weight_key, activation_key):
            return routing_method.name in METHODS

        @staticmethod
        def _supports_router_logits_dtype(router_logits_dtype, routing_method):
            return True  # is_supported_config asks the kernels

        @staticmethod
        def _supports_parallel_config(config):
            alone = config.dp_size == 1 and not config.use_all2all_kernels
            return experts.Predicates._supports_parallel_config(config) and alone and not config.enable_eplb

        def apply(self, *arguments, **named):
            a = ApplyArguments(*arguments, **named)
            scale = 1.0 if a.routed_scaling_factor is None else a.routed_scaling_factor
            groups = a.num_expert_group, a.topk_group, a.e_score_correction_bias, scale
            chosen = route(self.method, self.topk, a.router_logits, *groups, has_baseline=self.baseline is not None)
            routed = a.hidden_states, a.w1, a.w2, *chosen

            def baseline() -> Tensor:
                options = a.activation, a.global_num_experts, a.expert_map, a.apply_router_weight_on_input
                return self.baseline.apply(*routed, *options)

            fallback = None if self.baseline is None else baseline
            options = a.expert_map, a.apply_router_weight_on_input, a.activation, a.global_num_experts
            return experts.run(self, fallback, routed, options)

    name = modular.__name__.replace("Ops", "OpsRouting")
    return experts.with_attributes(RocmOpsRoutingExperts, name, modular.schemes, modular.oracle, modular.backend)


def probe() -> None:
    """Raise `Unavailable` unless a required seam is on and vLLM is as expected."""
    if not fp8_experts.PLUGIN_EXPERTS + unquantized_experts.PLUGIN_EXPERTS:
        raise seam.Unavailable("requires fp8_experts or unquantized_experts")
    probe_vllm()


def probe_vllm() -> None:
    """Raise `Unavailable` unless vLLM's monolithic experts and routers are as expected."""
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router, router_factory

    seam.require_parameters(modular_kernel.FusedMoEExpertsMonolithic.apply, *APPLY)
    seam.require_parameters(fused_topk_router._get_padding_mask, "num_tokens")
    seam.require_parameters(router_factory.create_fused_moe_router, "top_k", "global_num_experts", "renormalize")
    factory = inspect.signature(router_factory.create_fused_moe_router).parameters
    seam.require(ROUTER <= factory.keys(), f"create_fused_moe_router({', '.join(sorted(ROUTER))})")
    seam.require(METHODS.keys() <= set(RoutingMethodType.__members__), f"RoutingMethodType with {', '.join(METHODS)}")


def install() -> None:
    """Have vLLM ask the plugin's monolithic experts first."""
    for classes in (fp8_experts.PLUGIN_EXPERTS, unquantized_experts.PLUGIN_EXPERTS):
        for modular in [
            experts_class for experts_class in classes[::-1] if not experts_class.shuffled
        ]:  # with AITER's experts vLLM routes
            classes.insert(0, monolithic(modular))


SEAM = seam.Seam(
    name="routing_experts",
    replaces="routing in the layers of fp8_experts and unquantized_experts; forward of the gates of layers with the plugin's experts",
    probe=probe,
    install=install,
    ops=("grouped_topk", "topk_softmax", "topk_sigmoid", "router_gemm_topk"),
    after=("fp8_experts", "unquantized_experts"),
)
