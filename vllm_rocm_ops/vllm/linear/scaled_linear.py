"""Run FP8 linear layers with scales per tensor, token or output channel by `scaled_mm` where it is faster.

vLLM's kernel, if there is one, serves all other calls (base.py) and prepares the weight. The op reads both
layouts that it may leave: rows of K, on ROCm often padded, or the order of AITER's tuned kernels, which is the fragment
order. With `VLLM_ROCM_OPS_SHUFFLE=1` a weight is put in fragment order at load, if the op won at every token count in
an earlier start, or nothing else serves. vLLM's kernel does not read that order, so the op then serves any token count.

`gated_linear` fuses such a linear with SwiGLU and static quantization. rewrite.py puts it in place of the three. It is
one launch for token counts at which that was timed to be faster than two.
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.quantization import LIMIT, STATIC, TENSOR, TOKEN
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_ROWS, plain_weight
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.linear import weight_order
from vllm_rocm_ops.vllm.selection import kernel_selection

MAX_TOKENS = 64  # default token limit, before timing (kernel_selection.py)
BESIDE_CUTLASS = 32  # the same on NVIDIA: 64 took 1.04x the baseline's time (Llama-3.1-405B step, 4x H200)


def scaled_linear(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    in_fragments: bool,
    baseline_name: str,
) -> Tensor:
    """Run `scaled_mm`, or the baseline on the same arguments; b is [K, N] as the baseline prepared it, or its fragments."""
    given = a, b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name
    return COMPARISON.serve(COMPARISON.choice_of(*given), *given)


def _weight(b: Tensor, in_fragments: bool) -> Tensor:
    """Return a weight in the form of `scaled_mm`."""
    if in_fragments:
        return weight_order.fragments_of(b)
    return b.t() if b.stride(-1) == 1 else b


class ScaledLinear(linear_base.Linear):
    """Describe `scaled_linear` for timing. A layer: the arguments except a and its scale, a static scale, K."""

    op, run, limit = ops.scaled_mm, staticmethod(scaled_linear), MAX_TOKENS

    def max_tokens(self):
        limit = super().max_tokens()
        return limit if torch.version.cuda is None else min(limit, BESIDE_CUTLASS)

    def choice_of(self, a, b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name):
        def layer() -> tuple:
            static = scale_a if linear_base.baseline_named(baseline_name).quant_fp8.static else None
            return b, scale_b, bias, out_dtype, in_fragments, baseline_name, static, a.shape[1]

        key = self.op, baseline_name, b.shape, in_fragments, bias is None
        return self.choice(key, baseline_name, layer, b, a)

    def baseline(self, a, b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name):
        shape = [a.shape[0], b.numel() // a.shape[1]]
        return linear_base.baseline_named(baseline_name).apply_scaled_mm(
            A=a, B=b, out_dtype=out_dtype, As=scale_a, Bs=scale_b, bias=bias, output_shape=shape
        )

    def op_arguments(self, a, b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name):
        return a, _weight(b, in_fragments), scale_a, scale_b, out_dtype, bias

    def columns(self, layer):
        return layer[-1], layer[0].numel() // layer[-1]

    def describe(self, layer):
        b, scale_b, bias, out_dtype, in_fragments, _, static, _ = layer
        types = kernel_selection.types(b.dtype, out_dtype)
        parts = ["{1}x{0}".format(*self.columns(layer)), types, f"{scale_b.numel()} scales"]
        parts += [name for name, holds in (("static", static is not None), ("bias", bias is not None)) if holds]
        return " ".join(parts + ["fragments"] * in_fragments)

    def arguments(self, layer, x, seed):
        b, scale_b, bias, out_dtype, in_fragments, baseline_name, static, _ = layer
        a, scale_a = linear_base.baseline_named(baseline_name).quant_fp8.forward_native(x, static)  # compiles nothing
        scale_a = scale_a if scale_a.numel() == 1 else scale_a[: len(x)]  # some of vLLM's kernels pad the tokens
        return a[: len(x)], b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name

    def layers_of(self, a):
        static, k = a.scale_a if a.scale_a.numel() == 1 else None, a.a.shape[1]
        return [(a.b, a.scale_b, a.bias, a.out_dtype, fragments, None, static, k) for fragments in (False, True)]

    def exact_of(self, a, rows, columns):
        if a.b.dim() > 2:  # fragments
            values = plain_weight(linear_base.rows_at(a.b, columns[::FRAGMENT_ROWS] // FRAGMENT_ROWS))
        else:
            values = linear_base.rows_at(a.b.t(), columns)
        tokens = linear_base.rows_at(a.a, rows) * linear_base.scales_at(a.scale_a, rows)
        product = tokens @ (values * linear_base.scales_at(a.scale_b, columns)).t()
        return product + linear_base.bias_at(getattr(a, "bias", None), columns)


COMPARISON = ScaledLinear()


def gated_linear(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    scale: Tensor,
    out_dtype: torch.dtype,
    in_fragments: bool,
    baseline_name: str,
) -> Tensor:
    """Run `scaled_mm_silu_and_mul_quant`, or `scaled_linear` and `silu_and_mul_quant`.

    As `scaled_linear`, where b is [gate | up] and `scale` is the result's.
    """
    given = a, b, scale_a, scale_b, scale, out_dtype, in_fragments, baseline_name
    return GATED.serve(GATED.choice_of(*given), *given)


class GatedLinear(ScaledLinear):
    """Describe `gated_linear` for timing. A layer: the arguments except a and its scale, a static scale, K."""

    op, run = ops.scaled_mm_silu_and_mul_quant, staticmethod(gated_linear)

    def serve(self, choice, *arguments):
        """Run a call by its choice, if the plugin also serves the linear alone.

        The fused launch was timed against the plugin's linear, not vLLM's.
        """
        a, b, scale_a, scale_b, _, *rest = arguments
        tokens = a.shape[0]
        wins = choice.plugin_serves(tokens)
        if wins:
            wins = COMPARISON.choice_of(a, b, scale_a, scale_b, None, *rest).plugin_serves(tokens)
        return super().serve(choice, *arguments) if wins else self.baseline(*arguments)

    def baseline(self, a, b, scale_a, scale_b, scale, out_dtype, in_fragments, baseline_name):
        both = scaled_linear(a, b, scale_a, scale_b, None, out_dtype, in_fragments, baseline_name)
        return ops.silu_and_mul_quant.call(both, scale, a.dtype)

    def op_arguments(self, a, b, scale_a, scale_b, scale, out_dtype, in_fragments, baseline_name):
        return a, _weight(b, in_fragments), scale_a, scale_b, scale, out_dtype

    def columns(self, layer):
        k, n = super().columns(layer)
        return k, n // 2

    def work(self, layer, tokens):
        k, n = self.columns(layer)
        return layer[0].nbytes + tokens * (k + n), 4.0 * tokens * n * k

    def describe(self, layer):
        return super().describe((*layer[:2], None, *layer[3:]))

    def arguments(self, layer, x, seed):
        a, b, scale_a, scale_b, _, *rest = super().arguments((*layer[:2], None, *layer[3:]), x, seed)
        return a, b, scale_a, scale_b, layer[2], *rest

    def layers_of(self, a):
        k = a.a.shape[1]
        return [(a.b, a.scale_b, a.scale, a.dtype, fragments, None, a.scale_a, k) for fragments in (False, True)]

    def exact_of(self, a, rows, columns):
        half, limit = a.b.numel() // a.a.shape[1] // 2, LIMIT[a.a.dtype]
        gate, up = (super(GatedLinear, self).exact_of(a, rows, places) for places in (columns, columns + half))
        return (torch.nn.functional.silu(gate) * up / a.scale).clamp(-limit, limit)


GATED = GatedLinear()
TABLE = linear_base.Table(
    "_POSSIBLE_FP8_KERNELS",
    "fp8_w8a8",
    "scaled_mm.ScaledMMLinearKernel.FP8ScaledMMLinearKernel",
    methods={"apply_scaled_mm": ("A", "B", "out_dtype", "As", "Bs", "bias", "output_shape")},
)


def _fake(a, b, scale_a, scale_b, bias, out_dtype, in_fragments, baseline_name):
    return a.new_empty((a.shape[0], b.numel() // a.shape[1]), dtype=out_dtype)


def _gated_fake(a, b, scale_a, scale_b, scale, out_dtype, in_fragments, baseline_name):
    return a.new_empty((a.shape[0], b.numel() // a.shape[1] // 2))


define(scaled_linear, _fake)
define(gated_linear, _gated_fake)


def install() -> None:
    """Insert the plugin's kernel first in vLLM's table."""
    from vllm.model_executor.utils import replace_parameter

    class RocmOpsScaledLinear(linear_base.HasBaseline, TABLE.base_class()):
        """Choose between `scaled_mm` and vLLM's kernel."""

        table, comparison = TABLE, COMPARISON

        @classmethod
        def can_implement(cls, c):
            if c.activation_quant_key.scale.group_shape.is_per_group():
                return False, "does not support group scales"
            return cls.can_keep_baseline(c)

        def __init__(self, c, layer_param_names):
            super().__init__(c, layer_param_names)
            scale = c.activation_quant_key.scale
            self.quantization = STATIC if scale.static else TENSOR if scale.group_shape.is_per_tensor() else TOKEN
            self.traits = (self.quantization == TOKEN,)

        def process_weights_after_loading(self, layer):
            name, order = self.layer_param_names[0], "plain"
            if self.baseline is not None:
                before = weight_order.Digest.of(getattr(layer, name).data)
                self.baseline.process_weights_after_loading(layer)
                order = weight_order.order(getattr(layer, name).data, before)
            super().process_weights_after_loading(layer)
            weight = getattr(layer, name).data
            scale, out_dtype = self._get_layer_params(layer)[1].data, self.config.out_dtype
            static = weight if self.quant_fp8.static else None
            bias, k = getattr(layer, "bias", None), weight_order.rows_of(weight).shape[1]
            described = weight, scale, bias, out_dtype, False, self.baseline_name, static, k
            fragments = layer, weight, COMPARISON, self.baseline, described, scale, out_dtype
            if order == "plain" and linear_base.wants_fragments(*fragments):
                replace_parameter(layer, name, weight_order.in_fragments(weight).t())
                order, self.baseline = "fragments", None
            weight_order.note_order(self, layer, order)

        def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):
            in_fragments = self.order == "fragments"
            if self.order is None or linear_base.baseline_serves(self, A):
                arguments = {"A": A, "B": B, "As": As, "Bs": Bs, "bias": bias, "output_shape": output_shape}
                output = self.baseline.apply_scaled_mm(out_dtype=out_dtype, **arguments)
            elif self.baseline is None:
                weight = _weight(B, in_fragments)
                output = torch.ops.vllm_rocm_ops.scaled_mm(A, weight, As, Bs, out_dtype, bias)
            else:
                output = COMPARISON.call(self, A, B, As, Bs, bias, out_dtype, in_fragments, self.baseline_name)
            return output if len(output_shape) == 2 else output.view(*output_shape[:-1], output.shape[-1])

    linear_base.register_first(RocmOpsScaledLinear, TABLE.kernels())


SEAM = TABLE.seam(COMPARISON, GATED, install=install)
