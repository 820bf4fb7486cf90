"""Releases of vLLM that the plugin serves, and where older ones differ from the newest.

Each function names the last release that needs it. No other file compares releases.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

RELEASES = ("0.27", "0.33")
"""The release in AMD's newest image, and the newest one: each between them is tested."""


def input_quant_key_getter() -> Callable[[torch.nn.Module], QuantKey | None]:
    """Return a function of a linear layer: the key of the quantized input that it accepts. Up to 0.29 vLLM has none."""
    from vllm.model_executor.layers.fusion import quant_activation

    return getattr(quant_activation, "get_input_quant_key", lambda layer: getattr(layer, "input_quant_key", None))


def block_scale_attr(params) -> str:
    """Return the name of a block-scaled layer's parameter with its weight's scales, from vLLM's record of its parameters.

    Up to 0.29 the record does not say it.
    """
    name = getattr(params, "block_scale_attr", None)
    return name or (params.WEIGHT_SCALE if params.weight_scale_inv is None else params.WEIGHT_SCALE_INV)


def choose_linear_kernel(config, table: dict, quantization: str) -> type:
    """Return vLLM's choice among a table's kernels for a layer. Up to 0.29 it does not ask for the kind of quantization."""
    from vllm.model_executor.kernels.linear import choose_scaled_mm_linear_kernel as choose

    asks = "quantization" in inspect.signature(choose).parameters
    return choose(config, table, **({"quantization": quantization} if asks else {}))


def reorders_columns(config) -> bool:
    """True if a layer of few-bit weights has its columns in another order. From 0.30 on vLLM has no such layers."""
    return getattr(config, "has_g_idx", False)


def linear_backend(quantization: str) -> tuple[str, str]:
    """Return the option that names the backend of a kind of linear layers, and its value. Up to 0.29 one is for all kinds."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    overrides = config and getattr(config.kernel_config, "linear_backend_per_quant", None)
    if overrides and quantization in overrides:
        return "linear_backend_per_quant", overrides[quantization]
    return "--linear-backend", config.kernel_config.linear_backend if config else "auto"


def fused_act_quants() -> dict:
    """Return vLLM's table of activations that quantize their result. Up to 0.29 it has none."""
    try:
        from vllm.model_executor.layers.fusion import fused_act_quant
    except ImportError:
        return {}
    return fused_act_quant._FUSED_ACT_QUANT


def is_weights_pre_processed() -> bool:
    """True if weights come prepared from vLLM's weight cache. Up to 0.29 it has none."""
    from vllm.model_executor import utils

    return getattr(utils, "is_weights_pre_processed", bool)()


def clamped_swiglu(experts: FusedMoEExperts) -> tuple[float | None, float, float]:
    """Return the limit, alpha and beta of experts' SwiGLU. Up to 0.27 only their quantization has them."""
    if (config := getattr(experts, "activation_config", None)) is not None:
        return config.clamp_limit, config.alpha, config.beta
    quant = experts.quant_config
    alpha, beta = quant.gemm1_alpha, quant.gemm1_beta
    return quant.gemm1_clamp_limit, 1.0 if alpha is None else alpha, 0.0 if beta is None else beta


def mx_scale(precision):
    """Return the scales of MXFP4 weights in triton_kernels' configuration of a product. Up to 0.30 vLLM knows one name only."""
    from vllm.model_executor.layers.quantization.utils import mxfp4_utils

    find = getattr(mxfp4_utils, "weight_mx_scale", None)
    return precision.weight_scale if find is None else find(precision)


@functools.cache
def gate_classes() -> tuple[type, ...]:
    """Return the classes of vLLM's gates. Up to 0.30 GLM-4.x's is PyTorch's, whose tokens its code converts to float32."""
    from torch.nn import Linear
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return GateLinear, ReplicatedLinear, Linear


def returns_routed_experts(config: VllmConfig) -> bool:
    """True if vLLM returns the experts that served a request. Up to 0.30 the model's configuration says so."""
    return getattr(getattr(config, "aux_output_config", config.model_config), "enable_return_routed_experts", False)
