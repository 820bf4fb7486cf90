"""Seam: MX-FP8 linear layers (e4m3fn with one e8m0 scale per 32 of K) run our `mxfp8_scaled_mm` where it is the faster.

On ROCm only gfx950 has matrix instructions for this format. There vLLM's native kernel serves all other calls (native_kernel.py)
and prepares the weight. The prepared weight may have one scale for 32 rows, which our op reads too.
"""

import types

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import native_kernel, seam

MOST_TOKENS = 64  # that ours takes where it was not measured (kernel_selection.py)
GROUP = 32


def mxfp8_linear(x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, native: str) -> Tensor:
    """`mxfp8_scaled_mm` of x [M, K], which is quantized first, and weight [N, K], or the kernel that is kept by the name
    `native`, on x."""

    given = x, weight, weight_scale, bias, native
    return KERNELS.serve(KERNELS.choice_of(*given), *given)


class Mxfp8Linear(native_kernel.Linear):
    """`mxfp8_linear` as it is measured. A layer: the arguments but x, and its type."""

    op, run = ops.mxfp8_scaled_mm, staticmethod(mxfp8_linear)

    def limit(self):
        return MOST_TOKENS

    def choice_of(self, x, weight, weight_scale, bias, native):
        key = native, weight.shape, bias is None
        return self.choice(key, native, lambda: (weight, weight_scale, bias, native, x.dtype), weight, x.shape[0])

    def theirs(self, x, weight, weight_scale, bias, native):
        layer = types.SimpleNamespace(weight=weight, weight_scale=weight_scale)
        return native_kernel.kept(native).apply_weights(layer, x, bias)

    def taken(self, x, weight, weight_scale, bias, native):
        a, scale_a = torch.ops.vllm.mxfp8_quantize(x, False, 0)
        return a, weight, scale_a, weight_scale, x.dtype, bias

    def describe(self, layer):
        return self.sizes(layer, layer[-1], bias=layer[2])

    def arguments(self, layer, x, seed):
        return (x, *layer[:-1])

    def exact(self, arguments, x, rows, columns):
        _, weight, weight_scale, bias, _ = arguments
        shared = len(weight) // len(weight_scale)
        scale = torch.exp2(weight_scale.view(torch.uint8)[columns // shared].float() - 127)
        exact = native_kernel.rows_at(weight, columns) * scale.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
        return x[rows].float() @ exact.t() + native_kernel.bias_at(bias, columns)


KERNELS = Mxfp8Linear()


def _fake(x, weight, weight_scale, bias, native):
    return x.new_empty((x.shape[0], weight.shape[0]))


native_kernel.define(mxfp8_linear, _fake)


def probe() -> None:
    """vLLM's table of MX-FP8 kernels, the function that chooses one, their base class and the quantization op are as expected."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    seam.require(isinstance(getattr(linear, "_POSSIBLE_MXFP8_KERNELS", None), dict), "_POSSIBLE_MXFP8_KERNELS")
    seam.require_parameters(linear.choose_scaled_mm_linear_kernel, "config", "possible_kernels")
    seam.require_parameters(Mxfp8LinearKernel.__init__, "c")
    seam.require_parameters(Mxfp8LinearKernel.is_supported, "compute_capability")
    seam.require_parameters(Mxfp8LinearKernel.can_implement, "c")
    seam.require_parameters(Mxfp8LinearKernel.process_weights_after_loading, "layer")
    seam.require_parameters(Mxfp8LinearKernel.apply_weights, "layer", "x", "bias")
    seam.require(mxfp8_utils.MXFP8_BLOCK_SIZE == GROUP, f"groups of {GROUP}")
    seam.require(hasattr(torch.ops.vllm, "mxfp8_quantize"), "torch.ops.vllm.mxfp8_quantize")


def install() -> None:
    """Put our kernel first in vLLM's table. `register_linear_kernel` would append it, behind a kernel that takes everything."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearKernel
    from vllm.model_executor.utils import replace_parameter
    from vllm.platforms import current_platform

    table = linear._POSSIBLE_MXFP8_KERNELS

    class RocmOpsMxfp8Linear(Mxfp8LinearKernel):
        """`mxfp8_scaled_mm` and the native kernel of a layer."""

        supports_pre_processed_weights = True  # as in the native kernels: preparation only rewrites parameters

        @classmethod
        def is_supported(cls, compute_capability=None):
            if not (current_platform.is_cpu() or current_platform.supports_mx()):
                return False, "needs matrix instructions that take block scales"
            return native_kernel.is_supported()

        @classmethod
        def can_implement(cls, c):
            return True, None

        def __init__(self, c):
            super().__init__(c)
            native = native_kernel.choose(type(self), c, table, "mxfp8")
            self.native = native and native(c)
            self.native_name = native and native_kernel.keep(self.native)

        def process_weights_after_loading(self, layer):
            if self.native is not None:
                self.native.process_weights_after_loading(layer)
                return
            n, k = layer.weight.shape
            replace_parameter(layer, "weight", layer.weight.data.contiguous())
            replace_parameter(layer, "weight_scale", layer.weight_scale.data[:n, : k // GROUP].contiguous())

        def apply_weights(self, layer, x, bias=None):
            # The native kernel keeps some weights in bf16.
            kept = self.native is not None and layer.weight.dtype != torch.float8_e4m3fn
            if kept or native_kernel.leaves(self, x):
                return self.native.apply_weights(layer, x, bias)
            tokens, weight, weight_scale = x.reshape(-1, x.shape[-1]), layer.weight, layer.weight_scale
            if self.native is None:
                a, scale_a = torch.ops.vllm.mxfp8_quantize(tokens, False, 0)
                output = torch.ops.vllm_rocm_ops.mxfp8_scaled_mm(a, weight, scale_a, weight_scale, x.dtype, bias)
            else:
                output = KERNELS.call(self, tokens, weight, weight_scale, bias, self.native_name)
            return output.view(*x.shape[:-1], output.shape[-1])

    native_kernel.register_first(RocmOpsMxfp8Linear, table, "mxfp8")


SEAM = seam.Seam(
    name="mxfp8_linear",
    replaces="the first row of _POSSIBLE_MXFP8_KERNELS",
    probe=probe,
    install=install,
    ops=("mxfp8_scaled_mm",),
    platforms=("rocm", "cpu"),
)
