"""Run MX-FP8 experts (e4m3fn with one e8m0 scale per 32 of K) by `fused_experts` where it is faster, see base.py.

On ROCm only gfx950 has matrix instructions for this format. There vLLM's Triton experts serve all other calls. A layer that
vLLM gives to AITER stays AITER's: it shuffles rows of gate and up into each other, and the scales, which the op does not
read. vLLM routes the tokens.

gfx942 multiplies bf16 tokens, as vLLM's emulation does, for which vLLM copies weights to bf16, some at loading and others at
each call. Here they stay packed: vLLM is told the backend of its Triton experts, which reads them as loaded. At a call that the
op does not serve, `mx_dequantize` makes the layer's copy, and vLLM's emulation multiplies by it. Left to vLLM: fp16, weights with
NaN, and layers whose copies the user asks for (linear/mx_weights.py).
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import mx_weights
from vllm_rocm_ops.vllm.moe import base as experts
from vllm_rocm_ops.vllm.moe.expert_support import say_refused

PLUGIN_EXPERTS: list[type] = []
"""The plugin's classes: for quantized tokens, and around vLLM's emulation."""

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
    """Calls of experts whose baseline copies the weights at each call, also beside AITER, which has none for them."""

    def max_tokens(self):
        return self.limit


COMPARISON = PackedExperts()


def around_emulation(oracle, backends, scheme: tuple) -> type:
    """Return the plugin's experts for bf16 tokens and packed weights."""

    class RocmOpsMxfp8WeightExperts(experts.modular("", (scheme,), oracle, backends.EMULATION)):
        weight_only, comparison = True, COMPARISON
        seen = None

        def leave(self):
            """Stay: vLLM's emulation alone would copy packed weights by PyTorch's operations."""

        def readable(self, w1, w2):
            if self.seen is not w1:
                self.seen = w1
                if any(mx_weights.has_nan(weight.flatten(0, 1)) for weight in (w1, w2)):
                    self.refused = "MX-FP8 weights with NaN"
                    say_refused(self.refused)
            return w1, w2

        def held(self, w1, w2):
            given = (w1, w2), (self.w1_scale, self.w2_scale)
            copies = mx_weights.emulation_reads_bf16("mxfp8") and not self.refused
            return tuple(map(copied, *given)) if copies else given[0]

        def apply(self, output, hidden_states, w1, w2, *others, **more):
            self.readable(w1, w2)
            apply = self.baseline.apply if self.refused and self.baseline else super().apply
            return apply(output, hidden_states, w1, w2, *others, **more)

    made = experts.finished(
        RocmOpsMxfp8WeightExperts, RocmOpsMxfp8WeightExperts.__name__, (scheme,), oracle, backends.EMULATION
    )
    made.backend = backends.TRITON_MXFP8  # for which vLLM leaves weights as loaded
    return made


def copied(weight: Tensor, scale: Tensor) -> Tensor:
    """Return weights [E, N, K] in bf16, or as they are where no kernel copies them: vLLM's emulation then does."""
    copy = ops.mx_dequantize.run_kernels(weight.flatten(0, 1), scale.flatten(0, 1))
    return weight if copy is None else copy.view(weight.shape)


def unsupported(config) -> str:
    """Return why a layer that vLLM emulates stays vLLM's, empty if it does not."""
    if config.in_dtype != torch.bfloat16:
        return f"MX-FP8 weights with {config.in_dtype}"
    return f"the copies that {mx_weights.DEQUANT_AT_LOAD['mxfp8']} asks for" if mx_weights.dequantizes_at_load("mxfp8") else ""


def install() -> None:
    """Have vLLM ask the plugin's experts first."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8, mxfp8
    from vllm.model_executor.layers.quantization.utils import quant_utils

    scheme, backend = tuple(getattr(quant_utils, key) for key in SCHEME), fp8.Fp8MoeBackend.TRITON_MXFP8
    of_tokens, of_weights = made = (
        experts.modular("RocmOpsMxfp8Experts", (scheme,), mxfp8, backend),
        around_emulation(mxfp8, fp8.Fp8MoeBackend, scheme),
    )
    PLUGIN_EXPERTS.extend(made)
    select = mxfp8.select_mxfp8_moe_backend

    def select_mxfp8_moe_backend(config):
        selected = experts.select([of_tokens], lambda: select(config), config, *scheme)
        if selected != (fp8.Fp8MoeBackend.EMULATION, of_weights.baseline_class()):
            return selected
        if why := unsupported(config):
            say_refused(why)
            return selected
        return experts.select([of_weights], lambda: selected, config, *scheme)

    experts.replace(select, select_mxfp8_moe_backend)


SEAM = seam.Seam(
    name="mxfp8_experts",
    replaces="select_mxfp8_moe_backend of fused_moe/oracle/mxfp8.py",
    probe=probe,
    install=install,
    ops=("fused_experts",),
    platforms=("rocm", "cpu"),
)
