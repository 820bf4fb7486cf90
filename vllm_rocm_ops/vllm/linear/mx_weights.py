"""Run linear layers of MX weights that vLLM emulates by `mx_gemm`, on the packed weights, for mxfp8_linear.py and mxfp4_linear.py.

GPUs without MX instructions run these layers in bf16, beside a copy of MXFP8 weights of twice their bytes. Here the weights stay
packed, as vLLM's emulation leaves them on request. At a call whose size the op does not serve, `mx_dequantize` makes that layer's copy,
and vLLM's emulation multiplies by it (base.py). It rounds the inputs of W4A4 layers to their format, and so does the plugin, by the same function. Left to vLLM: layers for
which it would run another kernel, fp16 inputs, MXFP8 weights with NaN, and layers whose copies the user asks for.
"""

import functools
import types

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.quantization import MX_BLOCK, UNQUANTIZED, mx_numbers
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order

MAX_TOKENS = 64  # default token limit, before timing (kernel_selection.py)
ROWS = 4  # the op's multiple of output channels
COPIES = {"mxfp8": "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "mxfp4": "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD"}
"""vLLM's variables that have its emulation copy weights to bf16. The first is set by default."""


def mx_weight_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, baseline_name: str) -> Tensor:
    """Run `mx_gemm`, or the baseline, on x [M, K], weight [N, K] or [N, K / 2] and scale [N, K / 32]."""
    given = x, weight, scale, bias, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*given), *given)


def rounded(x: Tensor, baseline_name: str | None) -> Tensor:
    """Return the input as vLLM's emulation rounds it for this layer."""
    kernel = linear_base.baseline_named(baseline_name) if baseline_name else None
    return getattr(kernel, "quant_dequant_func", lambda x: x)(x)


def kind_of(weight: Tensor) -> str:
    """Return vLLM's name of a packed weight's format."""
    return "mxfp8" if weight.is_floating_point() else "mxfp4"


def numbers(weight: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Return the float32 numbers [rows, K] of output channels."""
    values = linear_base.rows_at(weight, rows) if weight.is_floating_point() else weight[rows]
    return mx_numbers(values, scale.view(torch.uint8)[rows]).float()


class MxWeightLinear(linear_base.GroupedLinear):
    """Describe `mx_weight_linear` for timing. A layer: the arguments except x, and x's dtype."""

    op, run, limit = ops.mx_gemm, staticmethod(mx_weight_linear), MAX_TOKENS

    def baseline(self, x, weight, scale, bias, baseline_name):
        kernel = linear_base.baseline_named(baseline_name)
        dense = ops.mx_dequantize.run_kernels(weight, scale) if multiplies_copies(kind_of(weight)) else None
        layer = types.SimpleNamespace(weight=weight if dense is None else dense, weight_scale=scale)
        return kernel.apply_weights(layer, x, bias)

    def op_arguments(self, x, weight, scale, bias, baseline_name):
        return rounded(x, baseline_name), weight, scale, bias

    def columns(self, layer):
        weight, scale, *_ = layer
        return MX_BLOCK * scale.shape[1], weight.shape[0]

    def describe(self, layer):
        weight, _, bias, _, dtype = layer
        return self.sizes(layer, dtype, bias=bias) + f" {kind_of(weight)}"

    def exact(self, arguments, x, rows, columns):
        _, weight, scale, bias, baseline_name = arguments
        tokens = rounded(x[rows], baseline_name).float()
        return tokens @ numbers(weight, scale, columns).t() + linear_base.bias_at(bias, columns)

    def exact_of(self, a, rows, columns):
        return self.exact((None, *a[1:], None), a.x, rows, columns)


COMPARISON = MxWeightLinear()
OPS = "mx_gemm", "mx_dequantize"


def _fake(x, weight, scale, bias, baseline_name):
    return x.new_empty((x.shape[0], weight.shape[0]))


define(mx_weight_linear, _fake)


def probe(emulation: type, table: linear_base.Table) -> None:
    """Raise `Unavailable` unless one of vLLM's tables, and its emulating kernel, are as expected."""
    from vllm import envs

    table.probe()
    seam.require(issubclass(emulation, table.base_class()), emulation.__name__)
    seam.require(hasattr(envs, "is_set"), "envs.is_set")


def copies(quantization: str) -> bool:
    """True if the user asks for vLLM's copy of weights in bf16."""
    from vllm import envs

    name = COPIES[quantization]
    return name in envs.environment_variables and envs.is_set(name) and getattr(envs, name)


@functools.cache
def multiplies_copies(quantization: str) -> bool:
    """True if vLLM's emulation multiplies by weights that are bf16 already. Up to 0.30 MXFP4's does not."""
    from vllm import envs

    return COPIES[quantization] in envs.environment_variables


def keeps_packed(kernel) -> bool:
    """True if a kernel, or experts, of the plugin have packed MX weights of which vLLM's emulation multiplies copies."""
    of_linear = getattr(kernel, "comparison", None) is COMPARISON and kernel.order is not None
    return of_linear or getattr(kernel, "weight_only", False)


def has_nan(weight: Tensor) -> bool:
    """True if an e4m3fn weight has NaN, which gfx942's kernels read as 480."""
    return any(((part & 127) == 127).any() for part in weight_order.parts(weight.view(torch.uint8)))


def kernel_around(emulation: type, of: linear_base.Table, name: str) -> type:
    """Return the plugin's kernel for one of vLLM's tables, which holds vLLM's emulating one."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    class Kernel(linear_base.HasBaseline, of.base_class()):
        """Choose between `mx_gemm` and vLLM's emulation, over packed weights."""

        table, comparison, quantization = of, COMPARISON, UNQUANTIZED
        traits = ("fp8" if of.quantization == "mxfp8" else "fp4",)

        @classmethod
        def is_supported(cls, compute_capability=None):
            if of.quantization == "mxfp8" and not current_platform.is_cpu() and current_platform.supports_mx():
                return False, "leaves the layer to block-scaled matrix instructions"
            if copies(of.quantization):
                return False, f"leaves the layer to vLLM, as {COPIES[of.quantization]} asks for"
            config = get_current_vllm_config_or_none()
            if config and config.model_config and config.model_config.dtype != torch.bfloat16:
                return False, "supports bfloat16 only"
            return super().is_supported(compute_capability)

        @classmethod
        def can_implement(cls, config):
            if getattr(config, "bmm_batch_size", None) is not None:
                return False, "supports no batches"
            kept = linear_base.vllm_kernel_for(cls, config)
            if kept is None:
                return seam.served_platform() == "cpu", "leaves the layer to vLLM, which has no kernel for many tokens"
            return issubclass(kept, emulation), f"leaves the layer to {kept.__name__}"

        def __init__(self, config):
            super().__init__(config)
            self.keep_baseline(config)

        def process_weights_after_loading(self, layer):
            weight, scale = layer.weight.data, layer.weight_scale.data
            n, k = weight.shape[0], weight.shape[1] * (1 if weight.is_floating_point() else 2)
            with_nan = weight.is_floating_point() and has_nan(weight)
            if self.baseline is not None and (n % ROWS or scale.dtype != torch.uint8 or with_nan):
                self.baseline.process_weights_after_loading(layer)
                return weight_order.note_order(self, layer, None)
            prepared = weight.contiguous(), scale[:n, : k // MX_BLOCK].contiguous()
            layer.weight, layer.weight_scale = (torch.nn.Parameter(one, requires_grad=False) for one in prepared)
            weight_order.note_order(self, layer, "plain")

        def apply_weights(self, layer, x, bias=None):
            if self.order is None:
                return self.baseline.apply_weights(layer, x, bias)
            given = x.reshape(-1, x.shape[-1]), layer.weight, layer.weight_scale, bias
            if self.baseline is None:
                output = torch.ops.vllm_rocm_ops.mx_gemm(*given)
            elif linear_base.baseline_serves(self, x):
                output = COMPARISON.baseline(*given, self.baseline_name)
            else:
                output = COMPARISON.call(self, *given, self.baseline_name)
            return output.view(*x.shape[:-1], output.shape[-1])

    Kernel.__name__ = Kernel.__qualname__ = name
    return Kernel
