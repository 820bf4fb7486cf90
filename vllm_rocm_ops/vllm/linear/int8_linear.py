"""Run INT8 linear layers (W8A8, symmetric) by `gemm` where it was timed to be faster.

Weights have one scale, or one per output channel. vLLM's op quantizes activations, with one static scale or one scale
per token. vLLM's kernel serves all other calls (base.py) and prepares the weight. Before timing on a GPU it
serves all. Layers whose activations have a zero point are left to vLLM.
"""

import types

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order

MAX_TOKENS = 0  # default token limit, before timing (kernel_selection.py)


def int8_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None, bias: Tensor | None, baseline_name: str
) -> Tensor:
    """Run `gemm` on quantized x, or the baseline on x [M, K]. The weight is [K, N]; without an input scale tokens have their own."""
    given = x, weight, weight_scale, input_scale, bias, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*given), *given)


def quantized(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x as int8 and its scale, by vLLM's op."""
    from vllm import _custom_ops

    return _custom_ops.scaled_int8_quant(x.contiguous(), input_scale)[:2]


class Int8Linear(linear_base.Linear):
    """Describe `int8_linear` for timing. A layer: the arguments except x, and x's dtype."""

    op, run, limit = ops.gemm, staticmethod(int8_linear), MAX_TOKENS

    def choice_of(self, x, weight, weight_scale, input_scale, bias, baseline_name):
        def layer() -> tuple:
            return weight, weight_scale, input_scale, bias, baseline_name, x.dtype

        return self.choice((baseline_name, weight.shape, bias is None), baseline_name, layer, weight, x)

    def baseline(self, x, weight, weight_scale, input_scale, bias, baseline_name):
        kernel = linear_base.baseline_named(baseline_name)
        values = weight, weight_scale, input_scale, None, None
        return kernel.apply_weights(types.SimpleNamespace(**dict(zip(kernel.layer_param_names, values))), x, bias)

    def op_arguments(self, x, weight, weight_scale, input_scale, bias, baseline_name):
        a, scale_a = quantized(x, input_scale)
        return a, weight, x.dtype, scale_a, weight_scale, bias

    def columns(self, layer):
        return layer[0].shape

    def describe(self, layer):
        weight, weight_scale, input_scale, bias, _, dtype = layer
        scales = f" {weight_scale.numel()} scales" + " static" * (input_scale is not None)
        return self.sizes(layer, weight.dtype, dtype, bias=bias) + scales

    def arguments(self, layer, x, seed):
        return (x, *layer[:-1])

    def layers_of(self, a):
        static = a.scale_a if a.scale_a.numel() == 1 else None
        return [(a.b, a.scale_b, static, a.bias, None, a.out_dtype)]

    def exact_of(self, a, rows, columns):
        tokens = a.a[rows].float() * linear_base.scales_at(a.scale_a, rows)
        weight = a.b.t()[columns].float() * linear_base.scales_at(a.scale_b, columns)
        return tokens @ weight.t() + linear_base.bias_at(a.bias, columns)


COMPARISON = Int8Linear()
TABLE = linear_base.Table(
    "_POSSIBLE_INT8_KERNELS",
    "int8_w8a8",
    "scaled_mm.cutlass.CutlassInt8ScaledMMLinearKernel",
    methods={"__init__": ("c", "layer_param_names"), "_get_layer_params": ("layer",)},
)


define(int8_linear, lambda x, weight, *_: x.new_empty((x.shape[0], weight.shape[1])))


def probe() -> None:
    """Raise `Unavailable` unless vLLM's INT8 kernels and its quantization op are as expected."""
    from vllm import _custom_ops

    TABLE.probe()
    seam.require_parameters(_custom_ops.scaled_int8_quant, "input", "scale", "azp", "symmetric")


def install() -> None:
    """Insert the plugin's kernel first in vLLM's table."""

    class RocmOpsInt8Linear(linear_base.HasBaseline, TABLE.base_class()):
        """Choose between `gemm` and vLLM's kernel. Without one, weights are prepared as for CUTLASS and Triton."""

        table, comparison = TABLE, COMPARISON

        @classmethod
        def can_implement(cls, c):
            if not c.input_symmetric:
                return False, "supports symmetric activations only"
            return True, None

        def __init__(self, c, layer_param_names):
            super().__init__(c, layer_param_names)
            self.traits = (not c.is_static_input_scheme,)
            self.quantization = "int8 static" if c.is_static_input_scheme else "int8"

        def process_weights_after_loading(self, layer):
            if self.baseline is None:
                super().process_weights_after_loading(layer)
                weight_order.note_order(self, layer, "plain")
                return
            name = self.layer_param_names[0]
            shape, before = getattr(layer, name).shape, weight_order.checksum(getattr(layer, name).data)
            self.baseline.process_weights_after_loading(layer)
            weight = getattr(layer, name)
            is_plain = weight is not None and (weight.dtype, weight.t().shape) == (torch.int8, shape)
            is_plain = is_plain and weight_order.checksum(weight.data.t()).equal(before)
            weight_order.note_order(self, layer, "plain" if is_plain else None)

        def apply_weights(self, layer, x, bias=None):
            if self.order is None or linear_base.baseline_serves(self, x):
                return self.baseline.apply_weights(layer, x, bias)
            weight, weight_scale, input_scale = self._get_layer_params(layer)[:3]
            tokens = x.reshape(-1, x.shape[-1])
            if self.baseline is None:
                a, scale_a = quantized(tokens, input_scale)
                output = torch.ops.vllm_rocm_ops.gemm(a, weight, x.dtype, scale_a, weight_scale, bias)
            else:
                arguments = tokens, weight, weight_scale, input_scale, bias, self.baseline_name
                output = COMPARISON.call(self, *arguments)
            return output.view(*x.shape[:-1], output.shape[-1])

    linear_base.register_first(RocmOpsInt8Linear, TABLE.kernels())


SEAM = TABLE.seam(COMPARISON, install=install, probe=probe)
