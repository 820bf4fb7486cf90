"""Run the gate of an MoE layer and the routing of its tokens in one launch, in layers with the plugin's experts.

vLLM's MoE layer calls its gate, then the experts with the gate's logits. The gate gets a subclass. For the token counts at which one launch
was timed to be faster than two, its `forward` runs `router_gemm_topk`, and hands weights and ids over (moe_side_channel.py) next to the logits
that it returns. The experts find them by the logits and the routing arguments, and route themselves otherwise; where vLLM routes, as beside
AITER's experts, its router finds them (vllm_routing.py). A gate whose choices never select the op gets its class back.

The code of MiniMax-M2, GLM-4.x and others calls the gate, and passes the logits to the layer (gate_calls.py). There the gate is a part of
the compiled graph, which holds the op `routed_gate`: it chooses at each call. It finds the gate by its weight.

The tokens are bf16, the weight bf16 or float32, the logits of the weight's dtype. Other gates stay: with a bias, other dtypes, a quantized
weight, a LoRA adapter, fused with the gate of the shared experts; in layers whose tokens move between ranks; in vLLM's batch-invariant mode.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.ops.router_gemm_topk import MAX_TOKENS
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.graph import compiled_ops, moe_side_channel
from vllm_rocm_ops.vllm.linear import unquantized_linear
from vllm_rocm_ops.vllm.moe import expert_support, gate_calls, quantized_input, routing_experts, vllm_routing
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.key import SEPARATE, Baseline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_rocm_ops.vllm.moe.vllm_routing import VllmRouting
    from vllm_rocm_ops.vllm.selection.kernel_selection import Choice

OP = ops.router_gemm_topk
PLAIN = 1, 1, "softmax", 1.0, None
"""The further arguments of a router that routes as `topk_softmax`."""


class ExpertsRouting:
    """The routing of a layer by the plugin's experts. `method`, `topk` and `groups` are as `routing_experts.route` gets them."""

    beside = ""

    def __init__(self, experts, routed_experts: torch.nn.Module):
        self.experts, self.routed_experts, self.method, self.topk = (
            experts,
            routed_experts,
            experts.method,
            experts.topk,
        )

    @property
    def groups(self) -> tuple:
        """The layer's groups, the best of them, its bias and its scale."""
        layer, scale = self.routed_experts, self.routed_experts.routed_scaling_factor
        groups = layer.num_expert_group, layer.topk_group, layer.e_score_correction_bias
        return *groups, 1.0 if scale is None else scale

    @property
    def masks(self) -> bool:
        """True if padding goes to no expert, as by vLLM's routers without groups."""
        return not self.routed_experts.num_expert_group and self.experts.baseline is not None

    def route(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        has_baseline = self.experts.baseline is not None
        return routing_experts.route(self.method, self.topk, logits, *self.groups, has_baseline=has_baseline)

    def adopt(self) -> None:
        """Do nothing: these experts look for what a gate has chosen."""


class Router:
    """The choices of a gate, which must all win, and its layer's routing."""

    choices: tuple[Choice, ...] = ()

    def __init__(self, routing: ExpertsRouting | VllmRouting, gate: gate_calls.Gate):
        self.of_layer, self.gate, self.is_widened = routing, gate.module, gate.is_widened

    def routing(self, num_experts: int) -> tuple:
        """Return `arguments_after_logits` as the layer's routing gets them."""
        layer = self.of_layer
        return routing_experts.arguments_after_logits(layer.method, layer.topk, num_experts, *layer.groups)

    def run(self, x: Tensor, weight: Tensor, routing: tuple) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return logits, weights and ids, or None if no kernel supports the call. On CPU run the reference, or the emulator."""
        padding = routing_experts.is_padding(len(x)) if self.of_layer.masks else None
        arguments = x, weight, *routing, *(PLAIN if routing_experts.is_plain(routing) else ()), padding
        return OP(*arguments) if x.device.type == "cpu" else OP.run_kernels(*arguments)

    def product(self, x: Tensor) -> Tensor:
        plain = next(one for one in type(self.gate).__mro__ if one in compat.gate_classes())
        made = plain.forward(self.gate, x.to(self.gate.weight.dtype) if self.is_widened else x)
        return made[0] if isinstance(made, tuple) else made

    def logits(self, x: Tensor) -> Tensor | None:
        """Return the logits of an op that also routed, whose choice it hands over; None where vLLM's gate serves."""
        is_read = x.dtype == torch.bfloat16 and x.dim() == 2
        if not is_read or not all(choice.plugin_serves(x.shape[0]) for choice in self.choices):
            return None
        weight = self.gate.weight
        routing = self.routing(weight.shape[0])
        if (made := self.run(x, weight, routing)) is None:
            return None
        logits, *chosen = made
        moe_side_channel.publish(logits, routing, *chosen)
        return logits


class RoutingGate:
    """Mix into a gate's class."""

    rocm_ops_router: Router
    rocm_ops_in_model = rocm_ops_is_widened = False

    def forward(self, x: Tensor):
        """Return the logits as vLLM's gate does, and hand the routed tokens over if the op made them."""
        compiles, given = torch.compiler.is_compiling(), x
        if self.rocm_ops_is_widened and x.dtype == torch.float32:
            given = x.to(torch.bfloat16)  # the model's code has converted them from this
        if compiles:
            if not self.rocm_ops_in_model:
                return super().forward(x)
            logits = torch.ops.vllm_rocm_ops.routed_gate(given, self.weight)
        else:
            router = self.rocm_ops_router
            if (logits := router.logits(given)) is None:
                forward = super().forward  # found before the class changes
                if any(choice.baseline_always_serves for choice in router.choices):
                    restore_baseline(self)
                return forward(x)
        return (logits, None) if getattr(self, "return_bias", False) else logits


IN_GRAPHS = "gates of MoE layers"
"""The part of a compile cache's key that graphs with `routed_gate` add."""
in_models: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
"""The gates that models' code calls, by the address of their weight."""


def routed_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of tokens [..., K] and a gate's weight [E, K], in its dtype, and hand the routed tokens over if the op made them."""
    if (gate := in_models.get(weight.data_ptr())) is None:  # vLLM has moved the weight
        return torch.nn.functional.linear(x.to(weight.dtype), weight)
    made = gate.rocm_ops_router.logits(x)
    return gate.rocm_ops_router.product(x) if made is None else made


def _fake(x, weight):
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=weight.dtype)


define(routed_gate, _fake)


def restore_baseline(gate: torch.nn.Module) -> None:
    """Give a gate its class back."""
    gate.__class__ = seam.plain_of(gate, RoutingGate)


def routing_of(layer: torch.nn.Module) -> ExpertsRouting | VllmRouting | None:
    """Return the routing of an MoE layer with the plugin's experts, None if it has others or a router that the op does not know."""
    experts = expert_support.serving_experts(layer.routed_experts)
    if hasattr(experts, "method"):
        return ExpertsRouting(experts, layer.routed_experts)
    return None if experts is None else vllm_routing.routing_of(layer)


def unsupported_reason(layer: torch.nn.Module, gate: gate_calls.Gate) -> str:
    """Return why the op does not compute an MoE layer's gate, empty if it does. The experts must be the plugin's."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    module, config = gate.module, layer.moe_config
    if type(module) not in compat.gate_classes() or getattr(layer, "_fse_fuse_gate", False):
        return "gates of other classes, with the shared experts', or whose logits the model's code also reads"
    if quantized_input.moves_tokens(config):
        return "gates whose tokens move between ranks"
    weight, out_dtype = getattr(module, "weight", None), getattr(module, "out_dtype", None)
    method = getattr(module, "quant_method", None)
    if not (method is None or isinstance(method, UnquantizedLinearMethod)) or weight.dim() != 2:
        return "quantized gates"
    if getattr(module, "bias", None) is not None:
        return "gates with a bias"
    if weight.shape[0] != config.num_experts:
        return f"gates of {weight.shape[0]} experts in layers of {config.num_experts}"
    is_read = weight.dtype in (torch.bfloat16, torch.float32) and config.in_dtype == torch.bfloat16
    if not is_read or out_dtype not in (None, weight.dtype):
        return f"gates of {weight.dtype} with {config.in_dtype} tokens and logits of {out_dtype or weight.dtype}"
    # Shared experts on a stream of their own delay one launch more than two: the last of its blocks routes. It takes 8.1 us
    # alone and 17.9 us there, its two launches 8.3 and 9.7 us: Qwen3-Next, 8 tokens, H200, b0471149.
    stream = getattr(getattr(layer, "shared_experts", None), "_stream", None)
    if weight.dtype == torch.bfloat16 and stream is not None:
        return "16-bit gates with shared experts beside them on another stream"
    return ""


def adopt(models: Iterable[torch.nn.Module]) -> None:
    """Give the gates of loaded models the plugin's class, and note their shapes for timing."""
    from vllm import envs as vllm_envs

    if "routing_experts" not in seam.active() or envs.VLLM_ROCM_OPS_MEASURE == "0" or vllm_envs.VLLM_BATCH_INVARIANT:
        return
    models = list(models)
    layers = [layer for model in models for layer in quantized_input.layers_of(model)]
    for layer, gate in gate_calls.gates_of(models, layers):
        if expert_support.serving_experts(layer.routed_experts) is None:
            continue
        routing = routing_of(layer)
        why = (
            unsupported_reason(layer, gate) if routing else "gates of layers whose router is another than vLLM's top-k"
        )
        if why:
            expert_support.log_unsupported(why, "gates of MoE layers")
        else:
            adopt_gate(gate, routing)


def adopt_gate(gate: gate_calls.Gate, of_layer: ExpertsRouting | VllmRouting) -> None:
    """Give the gate of an MoE layer the plugin's class, and its router one that finds what the gate chose."""
    module, router = gate.module, Router(of_layer, gate)
    of_layer.adopt()
    described, choices = (module.weight, torch.bfloat16, router), []
    for kernels in FLOAT_COMPARISONS if module.weight.dtype == torch.float32 else COMPARISONS:
        beside = kernels.beside
        beside = beside._replace(name="_".join(filter(None, (beside.name, of_layer.beside))))
        calls = "router", beside, kernels.describe(described)
        made = kernel_selection.choice_for(calls, kernels, beside, lambda: described, module.weight, MAX_TOKENS)
        choices.append(made)
    router.choices = tuple(choices)
    module.rocm_ops_router, module.rocm_ops_in_model, module.rocm_ops_is_widened = router, *gate[1:]
    if gate.in_model:
        in_models[module.weight.data_ptr()] = module
        compiled_ops.choices.others = (*dict.fromkeys((*compiled_ops.choices.others, IN_GRAPHS)),)
    module.__class__ = seam.mixed(RoutingGate, type(module))


# For timing


def shape_of(experts_and_k: tuple[int, int], dtype: torch.dtype, routing: tuple) -> str:
    """Return the description of a gate with a weight of this dtype. `routing` may have another value in place of the bias."""
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
    """Return the description of a model's call: the GEMM's sizes, its weight's dtype if not `dtype`, and what follows the logits."""
    sizes, routing = parameters[:2], parameters[2:]
    if isinstance(routing[0], str):
        dtype, routing = getattr(torch, routing[0]), routing[1:]
    is_plain = (*routing[2:-1], routing[-1] or None) == PLAIN
    return [shape_of(sizes, dtype, routing[:2] if is_plain else routing)]


class RoutingGates(LayerComparison):
    """One launch against vLLM's GEMM and the layer's routing. A layer: the weight, the tokens' dtype, and its `Router`."""

    op, limit = OP, 0

    @property
    def beside(self) -> Baseline:
        return Baseline(unquantized_linear.replaced())

    def describe(self, layer: tuple) -> str:
        weight, _, router = layer
        return shape_of(tuple(weight.shape), weight.dtype, router.routing(weight.shape[0]))

    def columns(self, layer: tuple) -> tuple[int, int]:
        num_experts, k = layer[0].shape
        return k, num_experts

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        k, num_experts = self.columns(layer)
        of_logits = layer[0].element_size() * num_experts
        return layer[0].nbytes + tokens * (2.0 * k + of_logits), 2.0 * tokens * k * num_experts

    def arguments(self, layer: tuple, x: Tensor, seed: int) -> tuple:
        weight, _, router = layer
        return x, weight, router, router.routing(weight.shape[0])

    def plugin(self, x: Tensor, weight: Tensor, router: Router, routing: tuple) -> tuple[Tensor, ...] | None:
        made = router.run(x, weight, routing)
        return None if made is None else (*made, routing)

    def baseline(self, x: Tensor, weight: Tensor, router: Router, routing: tuple) -> tuple[Tensor, ...]:
        logits = self.product(x, weight, router)
        return logits, *router.of_layer.route(x, logits), routing

    def product(self, x: Tensor, weight: Tensor, router: Router) -> Tensor:
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
    """`RoutingGates` against the plugin's own GEMM and the layer's routing."""

    beside = SEPARATE

    def product(self, x: Tensor, weight: Tensor, router: Router) -> Tensor:
        if x.device.type == "cpu":
            return ops.unquantized_gemm(x, weight)
        logits = ops.unquantized_gemm.run_kernels(x, weight)
        return super().product(x, weight, router) if logits is None else logits


class AgainstFloatGate(RoutingGates):
    """`RoutingGates` against vLLM's gate with a float32 weight, with its conversion of the tokens, and the layer's routing."""

    beside = Baseline("float32_gate")

    def product(self, x: Tensor, weight: Tensor, router: Router) -> Tensor:
        return router.product(x)


COMPARISONS = RoutingGates(), AgainstTwoLaunches()
FLOAT_COMPARISONS = (AgainstFloatGate(),)
