"""Call OpenAI's triton_kernels, by which vLLM runs the MXFP4 experts of gpt-oss, with the arguments of `fused_experts`.

vLLM runs two forms. Experts that vLLM routes (`OAITritonExperts`) get ids, from which launches prepare the GEMMs' lists of rows. gpt-oss's
without expert parallelism (`OAITritonMxfp4ExpertsMonolithic`) get router logits, and choose experts too. All launches are included.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

from vllm_rocm_ops.ops import fused_experts
from vllm_rocm_ops.ops.shared.experts import is_packed, scheme_of
from vllm_rocm_ops.ops.silu_and_mul_with_clamp import GPT_OSS

SWIGLU = (*GPT_OSS.values(), True)
"""The activation that vLLM's call has, as the op's last arguments."""

UNLIKELY = -1e4
"""The router logit of experts that a token does not use."""

ORDERS: dict[str, tuple[bool, dict[str, int]]] = {
    "strided": (True, {}),
    "strided, no split K": (True, {"split_k": 1}),
    "swizzled": (False, {"split_k": 1}),
}
"""The orders in which vLLM holds weights: True for the checkpoint's, and triton_kernels' constraints on tile sizes.

On MI300X vLLM keeps that order and constrains nothing. On Hopper it swizzles weights and sets `split_k`.
"""


def _experts():
    """Return vLLM's module of experts, which imports triton_kernels, its own copy if no other is installed."""
    module = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe")
    importlib.import_module("triton_kernels.swiglu")
    return module


def _held(values: torch.Tensor, scale: torch.Tensor, strided: bool) -> tuple:
    """Return values [E, N, K / 2] and scales [E, N, K / 32] as triton_kernels' tensor and the settings of its product."""
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp4")
    utils = importlib.import_module("vllm.model_executor.layers.quantization.utils.mxfp4_utils")
    if strided:
        tensor = importlib.import_module("triton_kernels.tensor")
        weight = tensor.wrap_torch_tensor(values.transpose(1, 2), dtype=tensor.FP4)
        scale = tensor.wrap_torch_tensor(scale.transpose(1, 2))
    else:
        weight, _, scale = utils._swizzle_mxfp4(values, scale)
    return weight, oracle.PrecisionConfig(**utils.mx_scale_kwargs(scale))


@functools.lru_cache(2)
def _weights(
    w1: torch.Tensor,
    w2: torch.Tensor,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    strided: bool,
) -> tuple:
    """Return both weights as triton_kernels' tensors, and vLLM's quantization config with scales and biases."""
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    (w1, of_w1), (w2, of_w2) = _held(w1, w1_scale, strided), _held(w2, w2_scale, strided)
    biases = (None if bias is None else bias.float() for bias in (w1_bias, w2_bias))
    return w1, w2, config.mxfp4_w4a16_moe_quant_config(of_w1, of_w2, *biases)


def logits_of(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Return bf16 router logits [M, experts] whose softmax over the chosen experts has these weights [M, topk], whose sum is 1."""
    logits = torch.full((len(ids), experts), UNLIKELY, dtype=torch.bfloat16, device=ids.device)
    return logits.scatter_(1, ids.long(), weights.log().to(torch.bfloat16))


def prepare(*arguments, order: str) -> tuple:
    """Return the arguments of `by_ids`. Raises ValueError for arguments that vLLM does not call triton_kernels with."""
    a = fused_experts.Arguments(*arguments)
    if not (is_packed(a.w1) and torch.uint8 in scheme_of(a.w1, a.w1_scale).scales):
        raise ValueError("it is called with MXFP4 weights only")
    if (a.swiglu_limit, a.swiglu_alpha, a.swiglu_beta, a.interleaved) != SWIGLU:
        raise ValueError("it is called with gpt-oss's activation only")
    if a.expert_map is not None or a.shared_experts or a.apply_router_weight_on_input:
        raise ValueError("it is called with all experts on one GPU, none shared, and router weights on outputs only")
    strided, constraints = ORDERS[order]
    _experts()
    weights = _weights(a.w1, a.w2, a.w1_scale, a.w2_scale, a.w1_bias, a.w2_bias, strided)
    return a.hidden, *weights, a.topk_weights, a.topk_ids, len(a.w1), constraints


def prepare_logits(*arguments, order: str) -> tuple:
    """Return the arguments of `by_logits`. Raises ValueError as `prepare`."""
    *tensors, weights, ids, experts, constraints = prepare(*arguments, order=order)
    return *tensors, logits_of(weights, ids, experts), ids.shape[1], constraints


def _constrain(constraints: dict[str, int]) -> None:
    """Set triton_kernels' constraints, which are of the process, for the next launches."""
    utils = importlib.import_module("vllm.utils.import_utils")
    package = "matmul" if utils.get_triton_kernels_version() == "3.8" else "matmul_ogs"
    flags = importlib.import_module(f"triton_kernels.{package}_details.opt_flags")
    flags.reset_opt_flags_constraints()
    flags.update_opt_flags_constraints(constraints)


def by_ids(hidden, w1, w2, config, weights, ids, experts: int, constraints: dict[str, int]) -> torch.Tensor:
    """Call vLLM's functional form with experts' ids [M, topk]."""
    module = _experts()
    _constrain(constraints)
    routing = module.make_routing_data(ids, weights, experts)
    output, topk = torch.empty_like(hidden), ids.shape[1]
    return module.triton_kernel_fused_experts(output, hidden, w1, w2, *routing, topk=topk, quant_config=config)


def by_logits(hidden, w1, w2, config, logits, topk: int, constraints: dict[str, int]) -> torch.Tensor:
    """Call vLLM's functional form with router logits [M, E]."""
    _constrain(constraints)
    forward = _experts().triton_kernel_moe_forward
    return forward(hidden, w1, w2, logits, topk, renormalize=True, quant_config=config)


def forms() -> dict[str, tuple[Callable, Callable]]:
    """Return calls and what prepares their arguments, by name. On AMD GPUs weights have one order."""
    orders = [order for order, (_, constraints) in ORDERS.items() if torch.version.hip is None or not constraints]
    kinds = {"": (by_ids, prepare), " from logits": (by_logits, prepare_logits)}
    return {
        f"vllm triton_kernels {order}{kind}": (call, functools.partial(prepared, order=order))
        for order in orders
        for kind, (call, prepared) in kinds.items()
    }
