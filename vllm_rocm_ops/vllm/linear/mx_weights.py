"""Run linear layers of MX weights and bf16 inputs by `mx_gemm` where vLLM emulates them.

mxfp8_linear.py and mxfp4_linear.py register the kernels. On GPUs without MX instructions vLLM multiplies in bf16, by
default with a bf16 copy of MXFP8 weights, which takes twice their bytes. Here weights stay packed, and the op
dequantizes them in registers. For calls that it does not serve, `mx_dequantize` writes a bf16 copy for the one call,
and vLLM's emulation multiplies by it (base.py). The emulation fake-quantizes the inputs of W4A4 layers; the plugin
calls the same function before its op. Left to vLLM: layers for which it would run another kernel, fp16 inputs, MXFP8
weights with NaN, and layers for which the user asks for a copy at load.
"""

import functools
import importlib
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
ROW_MULTIPLE = 4  # of output channels, for the op
DEQUANT_AT_LOAD = {"mxfp8": "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "mxfp4": "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD"}
"""vLLM's variables that have its emulation dequantize weights to bf16 at load. The first is on by default."""


def mx_weight_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, baseline_name: str) -> Tensor:
    """Run `mx_gemm`, or the baseline, on x [M, K], weight [N, K] or [N, K / 2] and scale [N, K / 32]."""
    arguments = x, weight, scale, bias, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*arguments), *arguments)


def quant_dequant(x: Tensor, baseline_name: str | None) -> Tensor:
    """Return x [M, K] as vLLM's emulation multiplies it: fake-quantized in W4A4 layers, unchanged in others."""
    kernel = linear_base.baseline_named(baseline_name) if baseline_name else None
    return getattr(kernel, "quant_dequant_func", lambda x: x)(x)


def format_of(weight: Tensor) -> str:
    """Return vLLM's name of a packed weight's format: "mxfp8" of float8_e4m3fn, "mxfp4" of uint8."""
    return "mxfp8" if weight.is_floating_point() else "mxfp4"


def dequantize_rows(weight: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """Return the given rows (output channels) of a weight, dequantized to float32 [rows, K]."""
    values = linear_base.rows_at(weight, rows) if weight.is_floating_point() else weight[rows]
    return mx_numbers(values, scale.view(torch.uint8)[rows]).float()


class MxWeightLinear(linear_base.GroupedLinear):
    """Calls of `mx_weight_linear` for timing. A layer is its arguments without x, followed by x's dtype."""

    op, run, limit = ops.mx_gemm, staticmethod(mx_weight_linear), MAX_TOKENS

    def baseline(self, x, weight, scale, bias, baseline_name):
        kernel = linear_base.baseline_named(baseline_name)
        in_bf16 = ops.mx_dequantize.run_kernels(weight, scale) if emulation_reads_bf16(format_of(weight)) else None
        layer = types.SimpleNamespace(weight=weight if in_bf16 is None else in_bf16, weight_scale=scale)
        return kernel.apply_weights(layer, x, bias)

    def op_arguments(self, x, weight, scale, bias, baseline_name):
        return quant_dequant(x, baseline_name), weight, scale, bias

    def columns(self, layer):
        weight, scale, *_ = layer
        return MX_BLOCK * scale.shape[1], weight.shape[0]

    def describe(self, layer):
        weight, _, bias, _, dtype = layer
        return self.sizes(layer, dtype, bias=bias) + f" {format_of(weight)}"

    def exact(self, arguments, x, rows, columns):
        _, weight, scale, bias, baseline_name = arguments
        tokens = quant_dequant(x[rows], baseline_name).float()
        return tokens @ dequantize_rows(weight, scale, columns).t() + linear_base.bias_at(bias, columns)

    def exact_of(self, a, rows, columns):
        return self.exact((None, *a[1:], None), a.x, rows, columns)


COMPARISON = MxWeightLinear()
OPS = "mx_gemm", "mx_dequantize"


define(mx_weight_linear, lambda x, weight, *_: x.new_empty((x.shape[0], weight.shape[0])))


def emulation_of(table: linear_base.Table) -> type:
    """Return vLLM's emulating kernel in a table."""
    name = table.quantization
    module = importlib.import_module(f"vllm.model_executor.kernels.linear.{name}.emulation")
    return getattr(module, f"Emulation{name.title()}LinearKernel")


def probe(table: linear_base.Table) -> None:
    """Raise `Unavailable` unless a table of vLLM's and the emulating kernel in it are as expected."""
    from vllm import envs

    table.probe()
    emulation = emulation_of(table)
    seam.require(issubclass(emulation, table.base_class()), emulation.__name__)
    seam.require(hasattr(envs, "is_set"), "envs.is_set")


def dequantizes_at_load(quantization: str) -> bool:
    """True if the user has set the variable with which vLLM's emulation dequantizes weights at load."""
    from vllm import envs

    name = DEQUANT_AT_LOAD[quantization]
    return name in envs.environment_variables and envs.is_set(name) and getattr(envs, name)


@functools.cache
def emulation_reads_bf16(quantization: str) -> bool:
    """True if vLLM's emulation accepts bf16 weights in place of packed ones. For MXFP4 it does not up to 0.30."""
    from vllm import envs

    return DEQUANT_AT_LOAD[quantization] in envs.environment_variables


def has_packed_weights(kernel) -> bool:
    """True if a kernel or experts of the plugin have packed MX weights, which vLLM's emulation would dequantize."""
    is_linear = getattr(kernel, "comparison", None) is COMPARISON and kernel.order is not None
    return is_linear or getattr(kernel, "weight_only", False)


def has_nan(weight: Tensor) -> bool:
    """True if an e4m3fn weight has NaN, which kernels of gfx942 and NVIDIA read as 480."""
    return any(((part & 127) == 127).any() for part in weight_order.parts(weight.view(torch.uint8)))


def kernel_class(vllm_table: linear_base.Table, name: str) -> type:
    """Return the plugin's class of kernels for a table of vLLM's, with vLLM's emulation as the baseline."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    class Kernel(linear_base.HasBaseline, vllm_table.base_class()):
        """Choose between `mx_gemm` and vLLM's emulation, over packed weights."""

        table, comparison, quantization = vllm_table, COMPARISON, UNQUANTIZED
        traits = ("fp8" if vllm_table.quantization == "mxfp8" else "fp4",)

        @classmethod
        def is_supported(cls, compute_capability=None):
            if vllm_table.quantization == "mxfp8" and not current_platform.is_cpu() and current_platform.supports_mx():
                return False, "leaves the layer to block-scaled matrix instructions"
            if dequantizes_at_load(vllm_table.quantization):
                return False, f"leaves the layer to vLLM, as {DEQUANT_AT_LOAD[vllm_table.quantization]} asks for"
            config = get_current_vllm_config_or_none()
            if config and config.model_config and config.model_config.dtype != torch.bfloat16:
                return False, "supports bfloat16 only"
            return super().is_supported(compute_capability)

        @classmethod
        def can_implement(cls, config):
            if getattr(config, "bmm_batch_size", None) is not None:
                return False, "supports no batches"
            vllm_kernel = linear_base.vllm_kernel_for(cls, config)
            if vllm_kernel is None:
                return seam.served_platform() == "cpu", "leaves the layer to vLLM, which has no kernel for many tokens"
            return issubclass(vllm_kernel, emulation_of(vllm_table)), f"leaves the layer to {vllm_kernel.__name__}"

        def process_weights_after_loading(self, layer):
            weight, scale = layer.weight.data, layer.weight_scale.data
            n, k = weight.shape[0], weight.shape[1] * (1 if weight.is_floating_point() else 2)
            holds_nan = weight.is_floating_point() and has_nan(weight)
            if self.baseline is not None and (n % ROW_MULTIPLE or scale.dtype != torch.uint8 or holds_nan):
                self.baseline.process_weights_after_loading(layer)
                return weight_order.note_order(self, layer, None)
            prepared = weight.contiguous(), scale[:n, : k // MX_BLOCK].contiguous()
            layer.weight, layer.weight_scale = (torch.nn.Parameter(one, requires_grad=False) for one in prepared)
            weight_order.note_order(self, layer, "plain")

        def apply_weights(self, layer, x, bias=None):
            if self.order is None:
                return self.baseline.apply_weights(layer, x, bias)
            arguments = x.reshape(-1, x.shape[-1]), layer.weight, layer.weight_scale, bias
            if self.baseline is None:
                output = torch.ops.vllm_rocm_ops.mx_gemm(*arguments)
            elif linear_base.baseline_serves(self, x):
                output = COMPARISON.baseline(*arguments, self.baseline_name)
            else:
                output = COMPARISON.call(self, *arguments, self.baseline_name)
            return output.view(*x.shape[:-1], output.shape[-1])

    Kernel.__name__ = Kernel.__qualname__ = name
    return Kernel
