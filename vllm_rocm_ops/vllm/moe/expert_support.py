"""Answer vLLM which MoE layers the plugin's experts support."""

import functools
import logging

import torch
from torch import Tensor

from vllm_rocm_ops.ops.shared import weight_layout
from vllm_rocm_ops.ops.shared.gemm import HALVES
from vllm_rocm_ops.vllm.linear import base as linear_base

logger = logging.getLogger("vllm.vllm_rocm_ops")


def refusal(config) -> str:
    """Return the unsupported way of moving tokens between ranks, empty if it is supported."""
    backend = config.all2all_backend
    if config.use_batched_activation_format:
        return f"the batched activation format of {backend}"
    if getattr(config, "use_passthrough_all2all", False):
        return "experts with their own all-to-all"
    if config.use_all2all_kernels and not (config.use_ag_rs_all2all_kernels or config.use_mori_kernels):
        return f"all2all_backend={backend}"
    return "prefill context parallelism" if config.pcp_size != 1 else ""


@functools.cache
def say_refused(why: str) -> None:
    """Log, once per reason, why experts stay vLLM's."""
    logger.info("vllm-rocm-ops: MoE experts stay on vLLM's kernels, because the plugin does not support %s", why)


class Predicates:
    """Answer vLLM's questions about the plugin's experts.

    `schemes` are pairs of weight and activation key. `baseline_class()` returns vLLM's class for unsupported calls.
    """

    @property
    def expects_unquantized_inputs(self):
        return True

    @property
    def named(self) -> str:
        """The option by which the user named the backend of the kept experts, empty if none does."""
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
        if why := refusal(moe_config.moe_parallel_config):
            return False, f"{experts_class.__name__} does not support {why}"
        supported, why = FusedMoEExperts.is_supported_config(experts_class, *asked)
        if not supported:
            return supported, why
        extras = ["has_bias", "swiglu_limit", "swiglu_alpha", "swiglu_beta"]
        if moe_config.moe_parallel_config.use_ep or not experts_class.shuffled:
            extras.append("aiter_fmoe_shared_expert_enabled")
        extra = next((name for name in extras if getattr(moe_config, name)), None)
        if extra or moe_config.in_dtype not in HALVES:
            return False, f"{experts_class.__name__} does not support {extra or moe_config.in_dtype}"
        is_named = moe_config.moe_backend != "auto"  # then `backend` is what vLLM selects for it
        asks = experts_class.shuffled if is_named else linear_base.asks_for_aiter("fused_moe")
        if asks and experts_class.beside_aiter:
            return False, f"{experts_class.__name__} leaves the layer to AITER (VLLM_ROCM_USE_AITER_MOE)"
        if experts_class.shuffled:
            h, inner = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
            dtype = moe_config.in_dtype if weight_key is None else weight_key.dtype
            if not asks:
                return False, f"{experts_class.__name__} needs VLLM_ROCM_USE_AITER=1"
            if not all(weight_layout.fits(shape, dtype) for shape in ((2 * inner, h), (h, inner))):
                return False, f"{experts_class.__name__} does not support {h} and {inner} columns"
        baseline = experts_class.baseline_class()
        return (True, None) if baseline is None else baseline.is_supported_config(baseline, *asked)

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
        return activation.name == "SILU"

    @staticmethod
    def _supports_parallel_config(config):
        return not refusal(config)

    def leave(self) -> None:
        """Hand all later calls to vLLM's experts. Experts that route keep theirs."""

    def map_of_baseline(self, expert_map: Tensor | None) -> Tensor | None:
        """Return vLLM's form of the map from all experts to this rank's.

        AITER's experts want a mask of this rank's experts, with a final 0.
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


def held_by(layer: torch.nn.Module) -> Predicates | None:
    """Return the plugin's experts that a layer holds, None if it has others or none."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return experts if isinstance(experts, Predicates) else None
