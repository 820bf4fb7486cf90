"""Run MX-FP8 linear layers (e4m3fn with one e8m0 scale per 32 of K) by `mxfp8_scaled_mm` where it is faster.

On ROCm only gfx950 has matrix instructions for this format. There vLLM's kernel prepares the weight and serves all
other calls (base.py). A prepared weight may have one row of scales per 32 rows, which the op reads too. gfx942
multiplies bf16 inputs (mx_weights.py).

vLLM's op quantizes the input before either, where a compiled graph shows it to rewrite.py. vLLM's kernel quantizes
inside. Given `QuantizedRows`, it skips that. The activation of a shared expert with a gate, which is in no graph, hands
them to the layer.
"""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.quantization import MX, MX_BLOCK
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import mx_weights

MAX_TOKENS = 64  # default token limit, before timing (kernel_selection.py)


def has_block_scales() -> bool:
    """True if the platform has matrix instructions with block scales, as the CPU has for tests."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu() or current_platform.supports_mx()


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [M, K] quantized by vLLM: values [M, K], e4m3fn, and scales [M, K / 32], e8m0 in uint8."""
    return torch.ops.vllm.mxfp8_quantize(x, False, 0)


class QuantizedRows:
    """A quantized input, which vLLM's kernel does not quantize again: `values` [M, K] and `scale` [M, K / 32]."""

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype):
        self.values, self.scale, self.dtype = values, scale, dtype
        self.shape, self.device = values.shape, values.device

    def reshape(self, *shape: int) -> "QuantizedRows":
        """Return self: the rows are two-dimensional already."""
        return self

    def numel(self) -> int:
        return self.values.numel()


def accepting_rows(quantize: Callable) -> Callable:
    """Wrap vLLM's quantization so that it returns the values and scales of `QuantizedRows`, and quantizes tensors."""

    @functools.wraps(quantize)
    def wrapped(x, *arguments, **keywords):
        return (x.values, x.scale) if isinstance(x, QuantizedRows) else quantize(x, *arguments, **keywords)

    return wrapped


def mxfp8_linear(
    a: Tensor,
    scale_a: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    baseline_name: str,
) -> Tensor:
    """Run `mxfp8_scaled_mm`, or the baseline, on a [M, K] and weight [N, K].

    Scales are [M, K / 32] and [N, K / 32], or [N / 32, K / 32] where 32 rows share them.
    """
    arguments = a, scale_a, weight, weight_scale, bias, out_dtype, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*arguments), *arguments)


class Mxfp8Linear(linear_base.Linear):
    """Calls of `mxfp8_linear` for timing. A layer is its arguments without a and scale_a."""

    op, run, limit = ops.mxfp8_scaled_mm, staticmethod(mxfp8_linear), MAX_TOKENS

    def choice_of(self, a, scale_a, weight, weight_scale, bias, out_dtype, baseline_name):
        key, layer = (baseline_name, weight.shape, bias is None), (weight, weight_scale, bias, out_dtype, baseline_name)
        return self.choice(key, baseline_name, lambda: layer, weight, a)

    def baseline(self, a, scale_a, weight, weight_scale, bias, out_dtype, baseline_name):
        layer = types.SimpleNamespace(weight=weight, weight_scale=weight_scale)
        return linear_base.baseline_named(baseline_name).apply_weights(
            layer, QuantizedRows(a, scale_a, out_dtype), bias
        )

    def op_arguments(self, a, scale_a, weight, weight_scale, bias, out_dtype, baseline_name):
        return a, weight, scale_a, weight_scale, out_dtype, bias

    def describe(self, layer):
        return self.sizes(layer, layer[3], bias=layer[2])

    def arguments(self, layer, x, seed):
        return (*quantize(x), *layer)

    def exact(self, arguments, x, rows, columns):
        _, _, weight, weight_scale, bias, *_ = arguments
        rows_per_scale = len(weight) // len(weight_scale)
        scale = torch.exp2(weight_scale.view(torch.uint8)[columns // rows_per_scale].float() - 127)
        dequantized = linear_base.rows_at(weight, columns) * scale.repeat_interleave(MX_BLOCK, 1)[:, : weight.shape[1]]
        return x[rows].float() @ dequantized.t() + linear_base.bias_at(bias, columns)

    def layers_of(self, a):
        return [(a.b, a.scale_b, a.bias, a.out_dtype, None)]

    def exact_of(self, a, rows, columns):
        tokens = a.a.float() * torch.exp2(a.scale_a.view(torch.uint8).float() - 127).repeat_interleave(MX_BLOCK, 1)
        return self.exact((None, None, a.b, a.scale_b, a.bias), tokens, rows, columns)


COMPARISON = Mxfp8Linear()
TABLE = linear_base.Table(
    "_POSSIBLE_MXFP8_KERNELS", "mxfp8", "mxfp8.Mxfp8LinearKernel.Mxfp8LinearKernel", methods={"__init__": ("c",)}
)


def _fake(a, scale_a, weight, weight_scale, bias, out_dtype, baseline_name):
    return a.new_empty((a.shape[0], weight.shape[0]), dtype=out_dtype)


define(mxfp8_linear, _fake)


def probe() -> None:
    """Raise `Unavailable` unless vLLM's MX-FP8 kernels and quantization are as expected."""
    from vllm.model_executor.kernels.linear.mxfp8 import rocm_native
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    mx_weights.probe(TABLE)
    seam.require(mxfp8_utils.MXFP8_BLOCK_SIZE == MX_BLOCK, f"groups of {MX_BLOCK}")
    seam.require(hasattr(torch.ops.vllm, "mxfp8_quantize"), "torch.ops.vllm.mxfp8_quantize")
    quantize = inspect.unwrap(getattr(rocm_native, "mxfp8_e4m3_quantize", None))
    seam.require(quantize is mxfp8_utils.mxfp8_e4m3_quantize, "mxfp8_e4m3_quantize in rocm_native.py")
    seam.require_parameters(rocm_native._mxfp8_dot_scaled_linear, "x", "w", "w_scale")


def install() -> None:
    """Insert the plugin's kernels first in vLLM's table."""
    from vllm.model_executor.kernels.linear.mxfp8 import rocm_native
    from vllm.model_executor.utils import replace_parameter

    takes_rows = rocm_native.RocmDotScaledMxfp8LinearKernel
    rocm_native.mxfp8_e4m3_quantize = accepting_rows(rocm_native.mxfp8_e4m3_quantize)

    def set_input_quantization(layer: torch.nn.Module) -> None:
        """Store in a layer how its input is quantized, for the norm or activation before it."""
        layer.vllm_rocm_ops_quantize, layer.vllm_rocm_ops_is_mx = quantize, True
        layer.vllm_rocm_ops_column_major_scales = False

    class RocmOpsMxfp8Linear(linear_base.HasBaseline, TABLE.base_class()):
        """Choose between `mxfp8_scaled_mm` and vLLM's kernel."""

        table, comparison, quantization = TABLE, COMPARISON, MX
        supports_pre_processed_weights = True  # as in vLLM's kernels: preparation only rewrites parameters

        @classmethod
        def is_supported(cls, compute_capability=None):
            if not has_block_scales():
                return False, "requires matrix instructions with block scales"
            return super().is_supported(compute_capability)

        @classmethod
        def can_implement(cls, c):
            return True, None

        def __init__(self, c):
            super().__init__(c)
            self.hands_rows = isinstance(self.baseline, takes_rows)

        def process_weights_after_loading(self, layer):
            if self.baseline is not None:
                self.baseline.process_weights_after_loading(layer)
                if self.hands_rows and layer.weight.dtype == torch.float8_e4m3fn:
                    set_input_quantization(layer)
                return
            set_input_quantization(layer)
            n, k = layer.weight.shape
            replace_parameter(layer, "weight", layer.weight.data.contiguous())
            replace_parameter(layer, "weight_scale", layer.weight_scale.data[:n, : k // MX_BLOCK].contiguous())

        def apply_weights(self, layer, x, bias=None):
            # vLLM's kernel dequantizes some weights to bf16 at load, and its emulation does not quantize the input.
            serves = self.baseline is None or (self.hands_rows and layer.weight.dtype == torch.float8_e4m3fn)
            if not serves or linear_base.baseline_serves(self, x):
                return self.baseline.apply_weights(layer, x, bias)
            weight, weight_scale = layer.weight, layer.weight_scale
            a, scale_a = (x.values, x.scale) if isinstance(x, QuantizedRows) else quantize(x.reshape(-1, x.shape[-1]))
            if self.baseline is None:
                output = torch.ops.vllm_rocm_ops.mxfp8_scaled_mm(a, weight, scale_a, weight_scale, x.dtype, bias)
            else:
                output = COMPARISON.call(self, a, scale_a, weight, weight_scale, bias, x.dtype, self.baseline_name)
            return output.view(*x.shape[:-1], output.shape[-1])

    weight_only = mx_weights.kernel_class(TABLE, "RocmOpsMxfp8WeightLinear")
    for kernel in (weight_only, RocmOpsMxfp8Linear):
        linear_base.register_first(kernel, TABLE.kernels())


SEAM = TABLE.seam(
    COMPARISON,
    mx_weights.COMPARISON,
    install=install,
    probe=probe,
    ops=(COMPARISON.op.name, *mx_weights.OPS),
)
