"""Run linear layers of INT4 weights and 16-bit inputs (W4A16, symmetric) by `w4a16_gemm` where it is faster.

Checkpoints of compressed-tensors and GPTQ have these weights. On ROCm vLLM runs its Triton kernel, which serves all
other calls (base.py). The op reads weights and scales in that kernel's layout, so there is one copy of both. Left to
vLLM: zero points (AWQ), 8 bits, fp16 inputs, act-order, and layers for which vLLM would run another kernel.
"""

import types

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.quantization import UNQUANTIZED
from vllm_rocm_ops.vllm import compat, seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order

MAX_TOKENS = 32  # default token limit, before timing (kernel_selection.py)
PACK_FACTOR, MIN_GROUP = 8, 32  # output channels per int32 word, smallest group of K


def int4_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, baseline_name: str) -> Tensor:
    """Run `w4a16_gemm`, or the baseline, on x [M, K], weight [K, N / 8] and scale [groups, N]."""
    arguments = x, weight, scale, bias, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*arguments), *arguments)


def dequantize_columns(weight: Tensor, scale: Tensor, columns: Tensor) -> Tensor:
    """Return the given columns (output channels) of a weight, dequantized to float32 [K, columns]."""
    bits = weight[:, columns // PACK_FACTOR] >> (4 * (columns % PACK_FACTOR)).to(weight.dtype) & 15
    return (bits.float() - 8) * scale[:, columns].float().repeat_interleave(len(weight) // len(scale), 0)


class Int4Linear(linear_base.GroupedLinear):
    """Calls of `int4_linear` for timing. A layer is its arguments without x, followed by x's dtype."""

    op, run, limit = ops.w4a16_gemm, staticmethod(int4_linear), MAX_TOKENS
    covers = ("weight_packed", 4)

    def baseline(self, x, weight, scale, bias, baseline_name):
        kernel = linear_base.baseline_named(baseline_name)
        layer = types.SimpleNamespace(**{kernel.w_q_name: weight, kernel.w_s_name: scale})
        return kernel.apply_weights(layer, x, bias)

    def op_arguments(self, x, weight, scale, bias, baseline_name):
        return x, weight, scale, bias

    def columns(self, layer):
        k, words = layer[0].shape
        return k, PACK_FACTOR * words

    def describe(self, layer):
        weight, scale, bias, _, dtype = layer
        return self.sizes(layer, dtype, bias=bias) + f" int4 by {len(weight) // len(scale)}"

    def exact_of(self, a, rows, columns):
        product = a.x[rows].float() @ dequantize_columns(a.weight, a.scale, columns)
        return product + linear_base.bias_at(a.bias, columns)


class Table(linear_base.Table):
    """vLLM's table of `MPLinearKernel`s, which it asks by capability and by a layer's configuration."""

    chooser = "choose_mp_linear_kernel", ("config", "compute_capability")

    def all_methods(self):
        return {name: parameters for name, parameters in super().all_methods().items() if name != "is_supported"}

    def choose(self, config):
        from vllm.model_executor.kernels import linear

        return linear.choose_mp_linear_kernel(config)


COMPARISON = Int4Linear()
TABLE = Table(
    "_POSSIBLE_KERNELS",
    "mixed_precision",
    "mixed_precision.MPLinearKernel.MPLinearKernel",
    methods={"__init__": ("c", "w_q_param_name", "w_s_param_name"), "_get_weight_params": ("layer",)},
)


define(int4_linear, lambda x, weight, *_: x.new_empty((x.shape[0], PACK_FACTOR * weight.shape[1])))


def probe() -> None:
    """Raise `Unavailable` unless vLLM's `MPLinearKernel`s, and its Triton kernel among them, are as expected."""
    from vllm.model_executor.kernels.linear.mixed_precision import triton_w4a16

    TABLE.probe()
    seam.require(issubclass(triton_w4a16.TritonW4A16LinearKernel, TABLE.base_class()), "TritonW4A16LinearKernel")
    names = "a", "b_q", "scales", "qzeros", "group_size", "zp_bias"
    seam.require_parameters(triton_w4a16.triton_w4a16_gemm, *names)


def unsupported_reason(config) -> str:
    """Return why the op does not support a layer of vLLM's `MPLinearLayerConfig`, empty if it does."""
    from vllm.scalar_type import scalar_types

    k, n = config.partition_weight_shape
    group = k if config.group_size == -1 else config.group_size
    if config.zero_points or config.weight_type != scalar_types.uint4b8:
        return "supports symmetric INT4 weights only"
    if compat.reorders_columns(config):
        return "supports no columns in another order (act-order)"
    if config.act_type != torch.bfloat16 or config.out_type not in (None, torch.bfloat16):
        return "supports bfloat16 only"
    if k % group or group % MIN_GROUP or group != k and group.bit_count() != 1 or n % (2 * PACK_FACTOR):
        return f"supports groups of a power of two from {MIN_GROUP} on, or one group, and multiples of {2 * PACK_FACTOR} outputs"
    return ""


def install() -> None:
    """Insert the plugin's kernel first in vLLM's table."""
    from vllm import envs
    from vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16 import TritonW4A16LinearKernel as Triton

    class RocmOpsInt4Linear(linear_base.HasBaseline, TABLE.base_class()):
        """Choose between `w4a16_gemm` and vLLM's Triton kernel, whose weight layout both read."""

        table, comparison, quantization = TABLE, COMPARISON, UNQUANTIZED

        @classmethod
        def get_min_capability(cls):
            return 0

        @classmethod
        def can_implement(cls, c):
            if envs.VLLM_BATCH_INVARIANT:
                return cls.is_supported()
            if why := unsupported_reason(c):
                return False, why
            vllm_kernel = linear_base.vllm_kernel_for(cls, c)
            if vllm_kernel is None:
                return seam.served_platform() == "cpu", "leaves the layer to vLLM, which has no kernel for many tokens"
            is_triton = issubclass(vllm_kernel, Triton)
            return is_triton, f"leaves the layer to {vllm_kernel.__name__}, whose weights have another layout"

        def __init__(self, c, *names, **named):
            super().__init__(c, *names, **named)
            self.traits = (0 if c.group_size == -1 else c.group_size,)

        def process_weights_after_loading(self, layer):
            if self.baseline is None:
                Triton.process_weights_after_loading(self, layer)
            else:
                self.baseline.process_weights_after_loading(layer)
            weight, scale, _ = self._get_weight_params(layer)
            k, n = self.config.partition_weight_shape
            fits = (weight.dtype, weight.shape) == (torch.int32, (k, n // PACK_FACTOR)) and scale.shape[1:] == (n,)
            weight_order.note_order(self, layer, "plain" if fits and k % len(scale) == 0 else None)

        def apply_weights(self, layer, x, bias=None):
            if self.order is None or linear_base.baseline_serves(self, x):
                return self.baseline.apply_weights(layer, x, bias)
            weight, scale, _ = self._get_weight_params(layer)
            tokens = x.reshape(-1, x.shape[-1])
            if self.baseline is None:
                output = torch.ops.vllm_rocm_ops.w4a16_gemm(tokens, weight, scale, bias)
            else:
                output = COMPARISON.call(self, tokens, weight, scale, bias, self.baseline_name)
            return output.view(*x.shape[:-1], output.shape[-1])

    linear_base.register_first(RocmOpsInt4Linear, TABLE.kernels())


SEAM = TABLE.seam(COMPARISON, install=install, probe=probe, platforms=("rocm", "cpu"))
