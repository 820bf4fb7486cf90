"""Have the layers of a model record themselves (step.py) instead of computing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops.vllm.attention import rope_pre_attention
from vllm_rocm_ops.vllm.meta.step import (
    OTHER,
    Step,
    attention,
    delta_net,
    experts,
    float_gate,
    latent_attention,
    linear,
    norm,
    norms_over_all,
    norms_over_ranks,
    plain,
    rotation,
    routes,
)
from vllm_rocm_ops.vllm.moe import gate_calls, quantized_input, routing_gate, vllm_routing


def install(step: Step, model: torch.nn.Module) -> None:
    """Have the layers of a model record themselves instead of computing."""
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    def instead(module: torch.nn.Module, recorded: Callable) -> None:
        run = getattr(module, "forward_native", module.forward)
        module.forward = lambda *given, **more: recorded(step, module, run, *given, **more)

    for layer, gate in gate_calls.gates_of([model], [*quantized_input.layers_of(model)]):
        cls = getattr(layer.routed_experts.quant_method, "experts_cls", None)
        is_ours = getattr(cls, "__name__", "").startswith("RocmOps")
        is_ours = is_ours and not routing_gate.unsupported_reason(layer, gate)
        is_ours = is_ours and bool(routes(layer.routed_experts) or vllm_routing.routing_of(layer))
        if is_ours and gate.module.weight.dtype == torch.float32:
            instead(gate.module, float_gate)
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, (LinearBase, ParallelLMHead)):
            module.quant_method = Stopped(module.quant_method, step)
        elif isinstance(module, VocabParallelEmbedding):
            module.forward = lambda ids, module=module: embedding(step, module, ids)
        elif hasattr(module, "_forward_entry"):
            module._forward_entry = lambda hidden, logits, shared_input, input_ids=None, *_, module=module: (
                module._forward_impl(hidden, logits, shared_input, input_ids)  # what vLLM's opaque op runs
            )
            module._apply_quant_method = lambda *_, module=module, **given: experts(
                step, module, given["hidden_states"], given["router_logits"], given["shared_experts_input"]
            )
            module.routed_experts._ensure_moe_quant_config_init = lambda: None
        elif hasattr(module, "kv_lora_rank") and hasattr(module, "impl"):
            instead(module, latent_attention)
        elif hasattr(module, "gqa_interleaved_layout") and hasattr(module, "in_proj_qkvz"):
            instead(module, delta_net)
        elif hasattr(module, "impl") and hasattr(module, "num_kv_heads"):
            instead(module, attention)
        elif name == rope_pre_attention.JOINT_NORM:
            type(module).forward_qk = staticmethod(
                lambda q_norm, k_norm, q, k: norms_over_all(step, (q_norm, k_norm), (q, k))
            )
            if module.tp_world > 1 and rope_pre_attention.has_reduced_op():
                type(module).forward_qkv = staticmethod(
                    lambda q_norm, k_norm, qkv, *sizes: norms_over_ranks(step, (q_norm, k_norm), qkv, *sizes)
                )
        elif "Norm" in name and not list(module.children()):
            instead(module, norm)
        elif hasattr(module, "rotary_dim") and hasattr(module, "forward_native"):
            instead(module, rotation)
        elif isinstance(module, CustomOp) and not any(isinstance(one, LinearBase) for one in module.modules()):
            instead(module, plain)

    def reduced(group, x: Tensor) -> Tensor:
        if group.world_size == 1:
            return x
        made = torch.empty_like(x)
        step.add("all-reduce", OTHER, x, made, layer="all-reduce")
        return made

    def gathered(group, x: Tensor, dim: int = -1) -> Tensor:
        return torch.cat([x] * group.world_size, dim)

    GroupCoordinator.all_reduce, GroupCoordinator.all_gather = reduced, gathered
    GroupCoordinator.gather = lambda group, x, dst=0, dim=-1: gathered(group, x, dim)
    GroupCoordinator.dispatch_router_logits = lambda group, hidden, logits, *_: (hidden, logits)
    GroupCoordinator.combine = lambda group, hidden, *_: hidden


class Stopped:
    """A linear layer's method that records `apply`."""

    def __init__(self, method, step: Step):
        self.__dict__ |= vars(method) | {"method": method, "step": step}

    def __getattr__(self, name: str):
        return getattr(self.method, name)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer.quant_method = self.method
        try:
            return linear(self.step, layer, x, bias)
        finally:
            layer.quant_method = self


def embedding(step: Step, layer: torch.nn.Module, ids: Tensor) -> Tensor:
    """Record an embedding, with its all-reduce."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    made = torch.empty((*ids.shape, layer.embedding_dim), dtype=torch.get_default_dtype(), device="meta")
    step.add(layer, OTHER, ids, made, layer="embedding")
    return tensor_model_parallel_all_reduce(made)
