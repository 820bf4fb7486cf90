"""Run FP8 linear layers with 128x128 block scales by `block_scaled_mm` where it is faster.

vLLM's kernel, if there is one, serves all other calls (base.py), prepares the weight and defines the
quantization of the input. With `VLLM_ROCM_OPS_SHUFFLE=1` the op may serve any token count, see scaled_linear.py.
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.quantization import BLOCKS
from vllm_rocm_ops.ops.shared.gemm import BLOCK
from vllm_rocm_ops.vllm import compat
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order

MAX_TOKENS = 64  # default token limit, before timing (kernel_selection.py)


def block_scaled_linear(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, baseline_name: str
) -> Tensor:
    """Run `block_scaled_mm`, or the baseline on the same arguments."""
    given = a, b, scale_a, scale_b, out_dtype, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*given), *given)


def takes_rows(kernel) -> bool:
    """True if a kernel supports float32 scales per 128 columns, contiguous per row, as the plugin's does for any baseline."""
    quant, either = kernel.quant_fp8, getattr(kernel, "takes_either_order", False)
    is_rounded = quant.use_ue8m0 or getattr(quant, "tma_aligned_scales", False)
    return not is_rounded and (either or not quant.column_major_scales)


def in_order(kernel, scale: Tensor) -> Tensor:
    """Return scales [M, K / 128] in the order that a kernel of vLLM's reads. The op reads either."""
    is_other = kernel.quant_fp8.column_major_scales and scale.shape[0] > 1 and scale.stride(0) != 1
    return scale.t().contiguous().t() if is_other else scale


class BlockScaledLinear(linear_base.Linear):
    """Describe `block_scaled_linear` for timing. A layer: the arguments except a and its scale."""

    op, run, limit = ops.block_scaled_mm, staticmethod(block_scaled_linear), MAX_TOKENS

    def choice_of(self, a, b, scale_a, scale_b, out_dtype, baseline_name):
        return self.choice(
            (baseline_name, b.shape), baseline_name, lambda: (b, scale_b, out_dtype, baseline_name), b, a
        )

    def baseline(self, a, b, scale_a, scale_b, out_dtype, baseline_name):
        kernel = linear_base.baseline_named(baseline_name)
        return kernel.apply_block_scaled_mm(A=a, B=b, As=in_order(kernel, scale_a), Bs=scale_b)

    def op_arguments(self, a, b, scale_a, scale_b, out_dtype, baseline_name):
        return a, b, scale_a, scale_b, out_dtype

    def describe(self, layer):
        return self.sizes(layer, layer[0].dtype, layer[2])

    def arguments(self, layer, x, seed):
        b, scale_b, out_dtype, baseline_name = layer
        a, scale_a = linear_base.baseline_named(baseline_name).quant_fp8.forward_native(x)  # compiles nothing
        return a, b, scale_a, scale_b, out_dtype, baseline_name

    def layers_of(self, a):
        return [(a.b, a.scale_b, a.out_dtype, None)]

    def exact_of(self, a, rows, columns):
        def scaled(values, scale):
            return values * scale.repeat_interleave(BLOCK, 1)[:, : values.shape[1]]

        tokens = scaled(linear_base.rows_at(a.a, rows), a.scale_a[rows])
        return tokens @ scaled(linear_base.rows_at(a.b, columns), a.scale_b[columns // BLOCK]).t()


COMPARISON = BlockScaledLinear()
TABLE = linear_base.Table(
    "_POSSIBLE_FP8_BLOCK_KERNELS",
    "fp8_block_w8a8",
    "scaled_mm.BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel",
    "config",
    {"__init__": ("config",), "apply_block_scaled_mm": ("A", "B", "As", "Bs")},
)


define(
    block_scaled_linear,
    lambda a, b, scale_a, scale_b, out_dtype, baseline_name: a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype),
)


def install() -> None:
    """Insert the plugin's kernel first in vLLM's table."""
    from vllm.model_executor.utils import replace_parameter

    class RocmOpsBlockScaledLinear(linear_base.HasBaseline, TABLE.base_class()):
        """Choose between `block_scaled_mm` and vLLM's kernel."""

        table, comparison, quantization, takes_either_order = TABLE, COMPARISON, BLOCKS, True

        @classmethod
        def can_implement(cls, config):
            weight, activation = (
                key.scale.group_shape for key in (config.weight_quant_key, config.activation_quant_key)
            )
            if (*weight, *activation) != (BLOCK, BLOCK, 1, BLOCK):
                return False, f"supports weight blocks of {BLOCK}x{BLOCK} and activation groups of {BLOCK} only"
            possible, why = super().can_implement(config)
            return cls.can_keep_baseline(config) if possible else (False, why)

        def __init__(self, config):
            super().__init__(config)
            if self.baseline is not None:
                self.quant_fp8, self.use_triton = self.baseline.quant_fp8, self.baseline.use_triton

        def process_weights_after_loading(self, layer):
            prepare = super() if self.baseline is None else self.baseline
            prepare.process_weights_after_loading(layer)
            layer.vllm_rocm_ops_takes_rows = takes_rows(self)  # the baseline, which prepared the layer, may not
            order, params = "plain", self._get_layer_params(layer)
            name = compat.block_scale_attr(params)
            if getattr(layer, name).dtype == torch.float8_e8m0fnu:  # the op needs float32, as inputs' scales are
                replace_parameter(layer, name, getattr(layer, name).data.float())
            scale = getattr(layer, name).data
            described = params.weight, scale, self.config.out_dtype, None
            fragments = layer, params.weight, COMPARISON, self.baseline, described, scale, self.config.out_dtype
            if linear_base.wants_fragments(*fragments):
                replace_parameter(layer, params.WEIGHT, weight_order.in_fragments(params.weight.data))
                order, self.baseline = "fragments", None
            weight_order.note_order(self, layer, order)

        def apply_block_scaled_mm(self, A, B, As, Bs):
            out_dtype = self.config.out_dtype
            if self.order is None or linear_base.baseline_serves(self, A):
                if As.stride(0) != 1 and self.quant_fp8.column_major_scales:
                    As = in_order(self, As)
                return self.baseline.apply_block_scaled_mm(A=A, B=B, As=As, Bs=Bs)
            if self.baseline is None:
                weight = weight_order.fragments_of(B) if self.order == "fragments" else B
                return torch.ops.vllm_rocm_ops.block_scaled_mm(A, weight, As, Bs, out_dtype)
            return COMPARISON.call(self, A, B, As, Bs, out_dtype, self.baseline_name)

    linear_base.register_first(RocmOpsBlockScaledLinear, TABLE.kernels())


SEAM = TABLE.seam(COMPARISON, install=install)
