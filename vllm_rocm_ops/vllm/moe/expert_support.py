"""Answer vLLM which MoE layers the plugin's experts support."""

import copy
import dataclasses
import functools
import logging

import torch
from torch import Tensor

from vllm_rocm_ops.ops.shared import weight_layout
from vllm_rocm_ops.ops.shared.gemm import HALVES
from vllm_rocm_ops.vllm import compat
from vllm_rocm_ops.vllm.linear import base as linear_base

ACTIVATIONS = "SILU", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE"

logger = logging.getLogger("vllm.vllm_rocm_ops")


def unsupported_parallelism(config) -> str:
    """Return the unsupported all-to-all or parallelism of vLLM's `FusedMoEParallelConfig`, empty if all is supported."""
    backend = config.all2all_backend
    if config.use_batched_activation_format:
        return f"the batched activation format of {backend}"
    if getattr(config, "use_passthrough_all2all", False):
        return "experts with their own all-to-all"
    if config.use_all2all_kernels and not (config.use_ag_rs_all2all_kernels or config.use_mori_kernels):
        return f"all2all_backend={backend}"
    return "prefill context parallelism" if config.pcp_size != 1 else ""


def unsupported(config, is_shuffled: bool, is_mx: bool) -> str:
    """Return what the op or its baseline do not support of vLLM's `FusedMoEConfig`, empty if they support it."""
    name, limit = config.activation.name, config.swiglu_limit
    fuses_shared = "shared experts that AITER fuses, "
    rules = (
        (config.in_dtype not in HALVES, str(config.in_dtype)),
        (config.has_bias and is_shuffled, "biases beside AITER's experts, which ignore them"),
        (limit is not None and limit <= 0, f"swiglu_limit={limit}"),
        (
            name == "SILU" and (config.swiglu_alpha or 1.0, config.swiglu_beta or 0.0) != (1.0, 0.0),
            "swiglu_alpha and swiglu_beta with SILU, which vLLM's experts ignore or not by backend",
        ),
        (name == "SWIGLUOAI_UNINTERLEAVE" and limit is None, f"{name} without swiglu_limit"),
        (name == "SWIGLUOAI" and is_shuffled, "alternating gate and up rows beside AITER's experts"),
        (name == "SWIGLUOAI" and is_mx, "alternating gate and up rows in MX-FP8, which vLLM's kernels read as halves"),
        (
            config.aiter_fmoe_shared_expert_enabled and not (is_shuffled or is_mx),
            f"{fuses_shared}without AITER's experts",
        ),
        (
            config.aiter_fmoe_shared_expert_enabled and config.moe_parallel_config.use_ep,
            f"{fuses_shared}with expert parallelism: each rank adds them for its part of the tokens only",
        ),
    )
    return next((what for holds, what in rules if holds), "")


def swiglu_of(experts, activation) -> tuple[float | None, float, float, bool]:
    """Return an activation as arguments of the op: limit, alpha, beta, and whether gate and up rows alternate."""
    if isinstance(activation, tuple):  # of a call of the op
        return activation
    if activation.name == "SWIGLUOAI":  # the constants of vLLM's swigluoai_and_mul
        return 7.0, 1.702, 1.0, True
    limit, alpha, beta = compat.clamped_swiglu(experts)
    return (limit, 1.0, 0.0, False) if activation.name == "SILU" else (limit, alpha, beta, False)


def epilogue_traits(experts, activation) -> str:
    """Return the part of a layer's key for biases and activation, empty for plain SwiGLU without biases."""
    limit, alpha, beta, interleaved = swiglu_of(experts, activation)
    text = " bias" * any(bias is not None for bias in (experts.w1_bias, experts.w2_bias))
    text += f" swiglu {limit} {alpha} {beta}" * ((limit, alpha, beta) != (None, 1.0, 0.0))
    return text + " interleaved" * interleaved


@functools.cache
def log_unsupported(why: str, what: str = "MoE experts") -> None:
    """Log, once per reason, why experts or gates stay vLLM's."""
    logger.info("vllm-rocm-ops: %s stay on vLLM's kernels, because the plugin does not support %s", what, why)


def copy_of(quant_config):
    """Copy a quantization configuration, so that the plugin's has scales, which vLLM's MX-FP8 experts remove from theirs."""
    return dataclasses.replace(quant_config, _w1=copy.copy(quant_config._w1), _w2=copy.copy(quant_config._w2))


def mask_spare_rows(ids: Tensor, meta) -> Tensor:
    """Return expert ids [rows, topk] with -1 for rows of an all-to-all's buffer that hold no token."""
    is_token = torch.arange(len(ids), device=ids.device) < meta.expert_num_tokens
    return torch.where(is_token[:, None], ids, -1)


class Predicates:
    """Answer vLLM's questions about the plugin's experts.

    `schemes` are pairs of weight and activation key. `baseline_class()` returns vLLM's class for unsupported calls.
    """

    refused = ""
    """The reason, found at the first call, for which vLLM's experts serve all calls of the layer."""
    weight_only = False
    """True if 8-bit weights multiply 16-bit tokens."""
    comparison = None
    """The comparison with the baseline, by default base.py's."""

    @property
    def expects_unquantized_inputs(self):
        return True

    @property
    def named(self) -> str:
        """The option by which the user named the baseline's backend, empty if none does."""
        backend = self.moe_config.moe_backend
        return "" if backend == "auto" else f"--moe-backend {backend}"

    @staticmethod
    def activation_format():
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

        return FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(experts_class, moe_config, weight_key, activation_key, activation_format):
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts

        asked = moe_config, weight_key, activation_key, activation_format
        if why := unsupported_parallelism(moe_config.moe_parallel_config):
            return False, f"{experts_class.__name__} does not support {why}"
        supported, why = FusedMoEExperts.is_supported_config(experts_class, *asked)
        if not supported:
            return supported, why
        is_mx = experts_class.backend.name == "TRITON_MXFP8"
        if why := unsupported(moe_config, experts_class.shuffled, is_mx):
            return False, f"{experts_class.__name__} does not support {why}"
        is_named = moe_config.moe_backend != "auto"  # then `backend` is what vLLM selects for it
        asks = experts_class.shuffled if is_named else linear_base.asks_for_aiter("fused_moe")
        if asks and experts_class.beside_aiter:
            return False, f"{experts_class.__name__} leaves the layer to AITER (VLLM_ROCM_USE_AITER_MOE)"
        if is_mx and not is_named and experts_class.aiter_takes(*asked):
            return (
                False,
                f"{experts_class.__name__} leaves the layer to AITER: the op does not read its order of MX-FP8 weights",
            )
        if experts_class.shuffled:
            h, inner = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
            dtype = moe_config.in_dtype if weight_key is None else weight_key.dtype
            if not asks:
                return False, f"{experts_class.__name__} needs VLLM_ROCM_USE_AITER=1"
            if not all(weight_layout.fits(shape, dtype) for shape in ((2 * inner, h), (h, inner))):
                return False, f"{experts_class.__name__} does not support {h} and {inner} columns"
        baseline = experts_class.baseline_class()
        return (True, None) if baseline is None else baseline.is_supported_config(baseline, *asked)

    @classmethod
    def aiter_takes(cls, *asked) -> bool:
        """True if vLLM would give a layer of MX-FP8 weights to AITER, which prepares them in an order of its own."""
        [aiter] = cls.oracle._mxfp8_backend_to_kernel_cls(type(cls.backend).AITER_MXFP8)
        return aiter.is_supported_config(aiter, *asked)[0]

    @staticmethod
    def _supports_current_device():
        return True

    @staticmethod
    def _supports_no_act_and_mul():
        return False

    @classmethod
    def _supports_quant_scheme(cls, weight_key, activation_key):
        return (weight_key, activation_key) in cls.schemes

    @staticmethod
    def _supports_activation(activation):
        return activation.name in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(config):
        return not unsupported_parallelism(config)

    def op_weights(self, w1, w2) -> tuple[Tensor, Tensor]:
        """Return the weights [E, N, K] that the op reads, given vLLM's parameters of the layer."""
        return w1, w2

    def baseline_weights(self, w1: Tensor, w2: Tensor) -> tuple:
        """Return the weights that the baseline reads, given the op's."""
        return w1, w2

    def refresh(self) -> None:
        """Update copies of scales and biases in place after new weights are loaded, as captured graphs read the copies."""

    def restore_baseline(self) -> None:
        """Hand all later calls to the baseline. No-op for experts that also route."""

    def baseline_expert_map(self, expert_map: Tensor | None) -> Tensor | None:
        """Return the expert map that the baseline reads: `expert_map` [all experts], local ids or -1.

        For AITER's experts it is a mask of this rank's experts, with a final 0.
        """
        baseline = getattr(self.baseline, "fused_experts", self.baseline)
        if expert_map is None or not getattr(baseline, "consumes_expert_mask", False):
            return expert_map
        known, mask = getattr(self, "_mask", (None, None))
        if known is not expert_map:
            mask = torch.zeros(len(expert_map) + 1, dtype=torch.int32, device=expert_map.device)
            mask[:-1] = expert_map >= 0
            self._mask = expert_map, mask
        return mask


def first_weight(layer: torch.nn.Module) -> Tensor | None:
    """Return the first weight of a layer of experts, by the names that vLLM's quantizations give it; None of another layer.

    triton_kernels' is a view with the columns last.
    """
    names = "w13_weight", "w13_weight_packed", "w13_qweight"
    weight = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    return weight if weight is None or isinstance(weight, Tensor) else weight.storage.data.transpose(1, 2)


def experts_of(layer: torch.nn.Module) -> Predicates | None:
    """Return the plugin's experts of a layer, None if it has vLLM's or none."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if isinstance(experts, Predicates) else None


def serving_experts(layer: torch.nn.Module) -> Predicates | None:
    """Return the plugin's experts of a layer unless they handed it to vLLM's at the first call; None without any."""
    experts = experts_of(layer)
    return None if experts is None or experts.refused else experts
