"""Run MX-FP8 experts (e4m3fn with one e8m0 scale per 32 of K) by `fused_experts` where it is faster, see base.py.

On ROCm only gfx950 has matrix instructions for this format. There vLLM's Triton experts serve all other calls, and vLLM
routes. A layer that vLLM gives to AITER stays AITER's, which interleaves gate and up rows and shuffles scales in an
order that the op does not read.

gfx942 multiplies bf16 tokens, as vLLM's emulation does. The emulation needs bf16 weights, which vLLM dequantizes at
load or at each call. Here weights stay packed: the plugin reports the backend of vLLM's Triton experts, for which vLLM
leaves them as loaded. For calls that the op does not serve, `mx_dequantize` writes a bf16 copy, and vLLM's emulation
multiplies by it. Left to vLLM: fp16, weights with NaN, and layers for which the user asks for a copy at load
(linear/mx_weights.py).
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import mx_weights
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe.expert_support import log_unsupported

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes: for MX-FP8 tokens, and for bf16 tokens with vLLM's emulation as baseline."""

SCHEME = "kMxfp8Static", "kMxfp8Dynamic"
"""vLLM's names of the weight key and the activation key."""


def probe() -> None:
    """Raise `Unavailable` unless vLLM's selection of MX-FP8 experts and their base class are as expected."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    experts.probe(mxfp8, "select_mxfp8_moe_backend", "config")
    seam.require_parameters(mxfp8._mxfp8_backend_to_kernel_cls, "backend")
    for backend in ("TRITON_MXFP8", "AITER_MXFP8", "EMULATION"):
        seam.require(backend in fp8.Fp8MoeBackend.__members__, f"Fp8MoeBackend.{backend}")
    seam.require(all(hasattr(quant_utils, key) for key in SCHEME), " and ".join(SCHEME))


class PackedExperts(experts.Experts):
    """Calls of experts whose baseline dequantizes the weights at each call. AITER has none, so it does not change the limit."""

    def max_tokens(self):
        return self.limit


COMPARISON = PackedExperts()


def weight_only_class(oracle, backends, scheme: tuple) -> type:
    """Return the plugin's class of experts for bf16 tokens and packed weights, with vLLM's emulation as baseline."""

    class RocmOpsMxfp8WeightExperts(experts.modular("", (scheme,), oracle, backends.EMULATION)):
        weight_only, comparison = True, COMPARISON
        backend = backends.TRITON_MXFP8  # for which vLLM leaves weights as loaded
        checked_w1 = None

        def restore_baseline(self):
            """Do nothing: without `mx_dequantize` vLLM's emulation would dequantize by PyTorch's operations."""

        def op_weights(self, w1, w2):
            if self.checked_w1 is not w1:
                self.checked_w1 = w1
                if any(mx_weights.has_nan(weight.flatten(0, 1)) for weight in (w1, w2)):
                    self.refused = "MX-FP8 weights with NaN"
                    log_unsupported(self.refused)
            return w1, w2

        def baseline_weights(self, w1, w2):
            in_bf16 = mx_weights.emulation_reads_bf16("mxfp8") and not self.refused
            return tuple(map(dequantize, (w1, w2), (self.w1_scale, self.w2_scale))) if in_bf16 else (w1, w2)

        def apply(self, output, hidden_states, w1, w2, *others, **more):
            self.op_weights(w1, w2)
            apply = self.baseline.apply if self.refused and self.baseline else super().apply
            return apply(output, hidden_states, w1, w2, *others, **more)

    return RocmOpsMxfp8WeightExperts


def dequantize(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weights [E, N, K] with scales [E, N, K / 32] in bf16, or unchanged where only the emulation can."""
    copy = ops.mx_dequantize.run_kernels(weight.flatten(0, 1), scale.flatten(0, 1))
    return weight if copy is None else copy.view(weight.shape)


def unsupported(config) -> str:
    """Return what the plugin does not support of a layer that vLLM emulates, empty if it supports it."""
    if config.in_dtype != torch.bfloat16:
        return f"MX-FP8 weights with {config.in_dtype}"
    return (
        f"the copies that {mx_weights.DEQUANT_AT_LOAD['mxfp8']} asks for"
        if mx_weights.dequantizes_at_load("mxfp8")
        else ""
    )


def install() -> None:
    """Have vLLM ask the plugin's experts first."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    scheme, backend = tuple(getattr(quant_utils, key) for key in SCHEME), fp8.Fp8MoeBackend.TRITON_MXFP8
    w8a8 = experts.modular("RocmOpsMxfp8Experts", (scheme,), mxfp8, backend)
    w8a16 = weight_only_class(mxfp8, fp8.Fp8MoeBackend, scheme)
    PLUGIN_EXPERTS.extend((w8a8, w8a16))
    select = mxfp8.select_mxfp8_moe_backend

    def select_mxfp8_moe_backend(config):
        selected = experts.select([w8a8], lambda: select(config), config, *scheme)
        if selected != (fp8.Fp8MoeBackend.EMULATION, w8a16.baseline_class()):
            return selected
        if why := unsupported(config):
            log_unsupported(why)
            return selected
        return experts.select([w8a16], lambda: selected, config, *scheme)

    seam.replace_function(select.__name__, select, select_mxfp8_moe_backend)


SEAM = seam.Seam(
    name="mxfp8_experts",
    replaces="select_mxfp8_moe_backend of fused_moe/oracle/mxfp8.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
    platforms=("rocm", "cpu"),
)
