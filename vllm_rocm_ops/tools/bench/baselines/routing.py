"""Call what routes tokens to experts, and gates shared ones, as vLLM runs it, with the ops' arguments."""

import importlib
from collections.abc import Callable

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op


def linear_and_topk(x, weight, *options):
    """Multiply by a router's weight in its dtype, as vLLM's gates do, and choose experts by the plugin's top-k."""
    logits = torch.nn.functional.linear(x.to(weight.dtype), weight)
    return logits, *ops.grouped_topk(logits, *options[:-1])


def four_launches(activation: Op) -> Callable[..., object]:
    """Return a shared expert's activation and gate as vLLM runs them, with the plugin's kernels of the activation and of the GEMM."""

    def call(input, tokens, expert_gate, *options) -> object:
        made = activation(input, *options)
        return made, torch.sigmoid(ops.unquantized_gemm(tokens, expert_gate)) * tokens  # as wide as down_proj's result

    return call


def vllm_grouped_topk(gating_output, *options):
    """Call vLLM's grouped top-k router."""
    router = importlib.import_module("vllm.model_executor.layers.fused_moe.router.grouped_topk_router")
    return router.grouped_topk(gating_output, gating_output, *options)
