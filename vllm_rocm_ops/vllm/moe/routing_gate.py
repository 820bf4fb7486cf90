"""Run the gate of an MoE layer and the routing of its tokens in one launch, in layers that routing_experts serves.

vLLM's MoE layer calls its gate, then the experts with the gate's logits. The gate gets a subclass. For the token counts at which one launch
was timed to be faster than two, its `forward` runs `router_gemm_topk`, and hands weights and ids over (moe_side_channel.py) next to the logits
that it returns. The experts find them by the logits and the routing arguments, and route themselves otherwise. A gate whose choices never
select the op gets its class back.

Other gates stay: with a bias, another dtype of the weight or of the logits, a quantized weight, a LoRA adapter, fused with the gate of the
shared experts; in layers whose tokens move between ranks; in vLLM's batch-invariant mode.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.ops.router_gemm_topk import MAX_TOKENS
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import moe_side_channel
from vllm_rocm_ops.vllm.linear import unquantized_linear
from vllm_rocm_ops.vllm.moe import expert_support, quantized_input, routing_experts
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.key import SEPARATE, Baseline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_rocm_ops.vllm.selection.kernel_selection import Choice

OP = ops.router_gemm_topk
PLAIN = 1, 1, "softmax", 1.0, None
"""The further arguments of a router that routes as `topk_softmax`."""
"""The baseline of two launches of the plugin; the other one has vLLM's GEMM."""


class Router:
    """The choices of a gate, which must all win, and the arguments of its layer's routing."""

    choices: tuple[Choice, ...] = ()

    def __init__(self, layer: torch.nn.Module):
        self.routed_experts = layer.routed_experts
        self.experts = experts_of(layer)

    def routing(self, num_experts: int) -> tuple:
        """Return `arguments_after_logits` as `route` gets them from the layer."""
        layer, scale = self.routed_experts, self.routed_experts.routed_scaling_factor
        groups = layer.num_expert_group, layer.topk_group, layer.e_score_correction_bias
        method, topk = self.experts.method, self.experts.topk
        return routing_experts.arguments_after_logits(
            method, topk, num_experts, *groups, 1.0 if scale is None else scale
        )

    def run(self, x: Tensor, weight: Tensor, routing: tuple) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return logits, weights and ids, or None if no kernel supports the call. On CPU run the reference, or the emulator."""
        is_plain = routing_experts.is_plain(routing)
        masked = is_plain and self.experts.baseline is not None
        padding = routing_experts.is_padding(len(x)) if masked else None
        arguments = x, weight, *routing, *(PLAIN if is_plain else ()), padding
        return OP(*arguments) if x.device.type == "cpu" else OP.run_kernels(*arguments)

    def route(self, logits: Tensor, routing: tuple) -> tuple[Tensor, Tensor]:
        """Return weights and ids by a launch of their own."""
        of_method = self.experts.method, self.experts.topk, logits
        groups = (
            (None, None, None, 1.0)
            if routing_experts.is_plain(routing)
            else (routing[2], routing[3], routing[6], routing[5])
        )
        return routing_experts.route(*of_method, *groups, has_baseline=self.experts.baseline is not None)


class RoutingGate:
    """Mix into a gate's class."""

    rocm_ops_router: Router

    def forward(self, x: Tensor):
        """Return the logits as vLLM's gate does, and hand the routed tokens over if the op made them."""
        router = self.rocm_ops_router
        if not torch.compiler.is_compiling():
            if all(choice.plugin_serves(x.shape[0]) for choice in router.choices):
                weight = self.weight
                routing = router.routing(weight.shape[0])
                made = router.run(x, weight, routing) if x.dtype == weight.dtype else None
                if made is not None:
                    logits, *chosen = made
                    moe_side_channel.publish(logits, routing, *chosen)
                    return (logits, None) if self.return_bias else logits
            elif any(choice.baseline_always_serves for choice in router.choices):
                forward = super().forward  # found before the class changes
                restore_baseline(self)
                return forward(x)
        return super().forward(x)


@functools.cache
def routing(plain: type) -> type:
    """Return the plugin's subclass of a gate's class."""
    return type(f"Routing{plain.__name__}", (RoutingGate, plain), {})


def restore_baseline(gate: torch.nn.Module) -> None:
    """Give a gate its class back."""
    gate.__class__ = type(gate).__bases__[1]


def experts_of(layer: torch.nn.Module) -> object | None:
    """Return the plugin's experts that route the tokens of an MoE layer, None if it has others."""
    experts = expert_support.held_by(layer.routed_experts)
    return experts if hasattr(experts, "method") else None


@functools.cache
def gate_classes() -> tuple[type, ...]:
    """Return vLLM's classes of gates."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    with contextlib.suppress(ImportError):  # an earlier vLLM
        from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

        return GateLinear, ReplicatedLinear
    return (ReplicatedLinear,)


def refusal(layer: torch.nn.Module) -> str:
    """Return why the op does not compute an MoE layer's gate, empty if it does. The experts must be the plugin's that route."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    gate, config = getattr(layer, "gate", None), layer.moe_config
    if type(gate) not in gate_classes() or getattr(layer, "_fse_fuse_gate", False):
        return "gates in the model's code, of other classes, or with the shared experts'"
    if quantized_input.moves_tokens(config):
        return "gates whose tokens move between ranks"
    weight, out_dtype = getattr(gate, "weight", None), getattr(gate, "out_dtype", None)
    if not isinstance(gate.quant_method, UnquantizedLinearMethod) or weight.dim() != 2:
        return "quantized gates"
    if getattr(gate, "bias", None) is not None:
        return "gates with a bias"
    if weight.dtype == torch.float32:
        return "gates with float32 weights, as MiniMax-M2's: its kernels read 16-bit weights"
    if not weight.dtype == torch.bfloat16 == config.in_dtype or out_dtype not in (None, weight.dtype):
        return f"gates of {weight.dtype} with {config.in_dtype} tokens and logits of {out_dtype or weight.dtype}"
    return ""


def adopt(models: Iterable[torch.nn.Module]) -> None:
    """Give the gates of loaded models the plugin's class, and note their shapes for timing."""
    from vllm import envs as vllm_envs

    if "routing_experts" not in seam.active() or envs.VLLM_ROCM_OPS_MEASURE == "0" or vllm_envs.VLLM_BATCH_INVARIANT:
        return
    for layer in (layer for model in models for layer in quantized_input.layers_of(model)):
        if experts_of(layer) is None:
            continue
        if why := refusal(layer):
            expert_support.say_refused(why, "gates of MoE layers")
        else:
            adopt_layer(layer)


def adopt_layer(layer: torch.nn.Module) -> None:
    """Give the gate of an MoE layer the plugin's class."""
    gate, router = layer.gate, Router(layer)
    described, choices = (gate.weight, gate.weight.dtype, router), []
    for kernels in COMPARISONS:
        beside = kernels.beside()
        calls = "router", beside, kernels.describe(described)
        choices.append(kernel_selection.choice_for(calls, kernels, beside, lambda: described, gate.weight, MAX_TOKENS))
    router.choices = tuple(choices)
    gate.rocm_ops_router = router
    gate.__class__ = routing(type(gate))


# For timing


def shape_of(experts_and_k: tuple[int, int], dtype: torch.dtype, routing: tuple) -> str:
    """Return the description of a gate. `routing` may have another value in place of the bias."""
    topk, renormalize, *rest = routing
    text = (
        f"{'x'.join(map(str, experts_and_k))} {kernel_selection.types(dtype)} top {topk}{' normalized' * renormalize}"
    )
    if not rest:
        return text
    groups, topk_group, scoring_func, _, bias = rest
    of_groups = f" {topk_group} of {groups} groups" * (groups > 1)
    return f"{text} {scoring_func}{of_groups}{' bias' * (bias is not None and bias is not False)}"


def shapes_of(parameters: tuple, dtype: torch.dtype) -> list[str]:
    """Return the description of a model's call: the GEMM's sizes, and the arguments that follow the logits."""
    sizes, routing = parameters[:2], parameters[2:]
    is_plain = (*routing[2:-1], routing[-1] or None) == PLAIN
    return [shape_of(sizes, dtype, routing[:2] if is_plain else routing)]


class RoutingGates(LayerComparison):
    """One launch against vLLM's GEMM and the plugin's routing. A layer: the weight, its dtype, and its `Router`."""

    op, limit = OP, 0

    def beside(self) -> Baseline:
        return Baseline(unquantized_linear.replaced())

    def describe(self, layer: tuple) -> str:
        weight, dtype, router = layer
        return shape_of(tuple(weight.shape), dtype, router.routing(weight.shape[0]))

    def columns(self, layer: tuple) -> tuple[int, int]:
        num_experts, k = layer[0].shape
        return k, num_experts

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        k, num_experts = self.columns(layer)
        return layer[0].nbytes + 2.0 * tokens * (k + num_experts), 2.0 * tokens * k * num_experts

    def arguments(self, layer: tuple, x: Tensor, seed: int) -> tuple:
        weight, _, router = layer
        return x, weight, router, router.routing(weight.shape[0])

    def plugin(self, x: Tensor, weight: Tensor, router: Router, routing: tuple) -> tuple[Tensor, ...] | None:
        made = router.run(x, weight, routing)
        return None if made is None else (*made, routing)

    def baseline(self, x: Tensor, weight: Tensor, router: Router, routing: tuple) -> tuple[Tensor, ...]:
        logits = self.product(x, weight)
        return logits, *router.route(logits, routing), routing

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the logits by the baseline's GEMM."""
        if x.device.type == "cpu":
            return torch.nn.functional.linear(x, weight)
        return unquantized_linear.COMPARISON.baseline(x, weight, None)

    def comparable(self, outputs: tuple) -> Tensor:
        """Return the logits, NaN for tokens whose weights and ids do not follow from them.

        Weights must fit the ids, and the chosen experts' scores add up to the reference's: it may break a near tie otherwise.
        """
        logits, weights, ids, routing = outputs
        topk, renormalize, *rest = routing
        _, _, scoring_func, scale, bias = rest = rest or PLAIN
        _, wanted = ops.grouped_topk.reference(logits, topk, renormalize, *rest)
        scores = logits.float().sigmoid() if scoring_func == "sigmoid" else logits.float().softmax(1)
        ids = ids.long().clamp(0, scores.shape[1] - 1)
        made = scores.gather(1, ids)
        made = scale * (made / made.sum(1, keepdim=True) if renormalize else made)
        choice = scores if bias is None else scores + bias
        sums = [choice.gather(1, chosen.long()).sum(1) for chosen in (ids, wanted)]
        follows = torch.isclose(weights, made, rtol=1e-2, atol=1e-6).all(1)
        follows &= torch.isclose(*sums, rtol=1e-4, atol=1e-6)
        return torch.where(follows[:, None], logits, torch.nan)

    def exact(self, arguments: tuple, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        tokens, weight, *_ = arguments
        return tokens[rows].float() @ weight[columns].float().t()


class AgainstTwoLaunches(RoutingGates):
    """`RoutingGates` against the plugin's own GEMM and top-k in two launches."""

    def beside(self) -> Baseline:
        return SEPARATE

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return ops.unquantized_gemm(x, weight)
        logits = ops.unquantized_gemm.run_kernels(x, weight)
        return super().product(x, weight) if logits is None else logits


COMPARISONS = RoutingGates(), AgainstTwoLaunches()
