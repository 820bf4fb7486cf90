"""Fuse o_proj's input quantization into W_UV's GEMM, in MLA layers whose graph the seam quantized_attention rewrites.

vLLM's attention op receives an e4m3 output and its scales per 128 columns. `forward_impl` then runs in 16 bits, and
W_UV (mla_absorb.py) writes both for the decode rows, where its launch was timed to be faster than two. All other rows
are quantized by vLLM's kernel, in one launch as in the original graph.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.quantization import LIMIT, OUTPUTS
from vllm_rocm_ops.ops.paged_attention_decode import GROUP
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.vllm.attention import mla_absorb, timing
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import SEPARATE, Baseline, Key

KIND = "groups"
"""The only kind of quantization, with a scale per head."""
METHOD = "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output", "output_scale", "output_block_scale"
"""The first parameters of vLLM's `MLAAttention.forward_impl`."""


@dataclass
class FusedProduct:
    """A `rocm_ops_fused` of W_UV: the product with a quantized result, where all `choices` select it.

    Attributes:
        output: The e4m3 values [tokens, heads * 128] and scales [tokens, heads] to write, None outside of such calls.
        rows: The number of rows written in this call.
    """

    choices: tuple[kernel_selection.Choice, ...] = ()
    output: tuple[Tensor, Tensor] | None = None
    rows: int = 0

    def __call__(self, x: Tensor, weights: Tensor, out: Tensor | None) -> Tensor | None:
        heads, rows, _ = x.shape
        if self.output is None or out is None or x.dtype != weights.dtype:
            return None
        if not all(choice.plugin_serves(rows) for choice in self.choices):
            return None
        values, scales = self.output
        written = values[:rows].view(rows, heads, GROUP), scales[:rows]
        if mla_absorb.run(x.transpose(0, 1), weights, *written) is None:
            return None
        self.rows = rows
        return out

    @property
    def baseline_always_serves(self) -> bool:
        return any(choice.baseline_always_serves for choice in self.choices)


def with_quantized_output(forward):
    """Wrap vLLM's `MLAAttention.forward_impl` so that it accepts an FP8 output with its scales [tokens, heads]."""

    @functools.wraps(forward)
    def forward_impl(self, *given, output, output_scale=None, output_block_scale=None, **rest):
        groups = output_block_scale
        if groups is None or output_scale is not None or rest.get("quant_group_size") is not None:  # by vLLM's own pass
            return forward(self, *given, output=output, output_scale=output_scale, output_block_scale=groups, **rest)
        q, metadata = given[0], given[4]
        if metadata is None:  # vLLM's profile run
            groups.fill_(1.0)
            return forward(self, *given, output=output, **rest)
        fused = getattr(getattr(self, "W_UV", None), "rocm_ops_fused", None) or FusedProduct()
        plain, fused.output, fused.rows = q.new_empty(output.shape), (output, groups), 0
        try:
            forward(self, *given, output=plain, **rest)
        finally:
            fused.output = None
        left = slice(fused.rows, metadata.num_actual_tokens)
        if left.start < left.stop:
            quantize(plain[left], output[left], None, groups[left])
        return output

    return forward_impl


def quantize(x: Tensor, out: Tensor, scale: Tensor | None, groups: Tensor | None) -> None:
    """Quantize rows by vLLM's kernels, on CPU by PyTorch."""
    limit = LIMIT[out.dtype]
    if x.device.type == "cpu":
        if groups is None:
            out.copy_(quantization.static(x.float(), scale, out.dtype))
            return
        values, scales = quantization.per_token(x.float().unflatten(1, (-1, GROUP)), out.dtype, None)
        out.copy_(values.flatten(1))
        groups.copy_(scales.view(groups.shape))
    elif groups is None:
        torch.ops._C.static_scaled_fp8_quant(out, x, scale, None)
    else:
        columns_first = groups.stride(0) == 1 and groups.shape[1] > 1
        torch.ops._C.per_token_group_fp8_quant(x, out, groups, GROUP, 1e-10, -limit, limit, False, columns_first, False)


@functools.cache
def install() -> None:
    """Wrap vLLM's method."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    MLAAttention.forward_impl = with_quantized_output(MLAAttention.forward_impl)


# Decisions


def kinds(decoder, layer: torch.nn.Module, decided: kernel_selection.Decided) -> frozenset[str]:
    """Return the kinds of output quantization that a layer fuses, from the recorded decisions of its W_UV.

    Prepares the layer for them, and wraps vLLM's method for the first such layer.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    vars(decoder).pop("adopters", None)
    fits = isinstance(layer, MLAAttention) and (*inspect.signature(layer.forward_impl).parameters,)[:8] == METHOD
    if not fits or not may_quantize(decoder, getattr(layer, "W_UV", None), decided):
        return frozenset()
    install()
    decoder.adopters = (*decoder.adopters, adopt)
    return frozenset((KIND,))


def may_quantize(decoder, weights: Tensor | None, decided: kernel_selection.Decided) -> bool:
    """True if a layer's W_UV quantizes its result.

    As in attention: where the plugin's plain GEMM won, until the fused one was timed.
    """
    if weights is None or weights.dim() != 3 or weights.dtype not in ELEMENTS or weights.shape[2] != GROUP:
        return False
    name = mla_absorb.COMPARISON.op.name
    if decoder.is_batch_invariant or getattr(decoder.impl, "dcp_world_size", 1) > 1 or weights.stride(1) != 1:
        return False
    if decoder.is_forced or name in decided.off:
        return decoder.is_forced

    def wins(kernels: mla_absorb.MlaAbsorb, beside: Baseline) -> bool | None:
        served = decided.shapes.get(Key(name, kernels.describe((weights, weights.dtype)), beside))
        return None if served is None else any(served)

    fused = COMPARISONS[0]
    if wins(fused, SEPARATE) is False:
        return False
    measured = wins(fused, mla_absorb.BMM)
    return bool(wins(mla_absorb.COMPARISON, mla_absorb.BMM) if measured is None else measured)


# For timing


class Quantized(mla_absorb.MlaAbsorb):
    """W_UV's GEMM with quantization, against torch.bmm and vLLM's quantization."""

    beside = mla_absorb.BMM

    def describe(self, layer: tuple) -> str:
        return super().describe(layer) + OUTPUTS[KIND]

    def outputs(self, x: Tensor, weights: Tensor) -> tuple[Tensor, None, Tensor]:
        values, _, groups = timing.outputs(KIND, x.new_empty((*x.shape[:2], GROUP)))
        return values, None, groups

    def plugin(self, x: Tensor, weights: Tensor) -> tuple[Tensor, None, Tensor] | None:
        outputs = values, _, groups = self.outputs(x, weights)
        return None if mla_absorb.run(x, weights, values, groups) is None else outputs

    def baseline(self, x: Tensor, weights: Tensor) -> tuple[Tensor, None, Tensor]:
        outputs = values, _, groups = self.outputs(x, weights)
        quantize(self.plain(x, weights), values.flatten(1), None, groups)
        return outputs

    def plain(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the result in 16 bits."""
        return super().baseline(x, weights)

    def comparable(self, outputs: tuple[Tensor, None, Tensor]) -> Tensor:
        return timing.dequantized(*outputs)


class AgainstTwoLaunches(Quantized):
    """W_UV's GEMM with quantization, against the plugin's GEMM followed by vLLM's quantization."""

    beside = SEPARATE

    def plain(self, x: Tensor, weights: Tensor) -> Tensor:
        return mla_absorb.COMPARISON.plugin(x, weights)


def adopt(layer: torch.nn.Module, is_forced: bool, max_tokens: int) -> None:
    """Have an adopted W_UV quantize its result: for batches where all choices win, or wherever it fits if forced."""
    weights = layer.W_UV
    if not isinstance(weights, mla_absorb.Absorbed):
        return
    described, choices = (weights, weights.dtype), []
    for kernels in () if is_forced else COMPARISONS:
        calls = "absorbed", kernels.beside, kernels.describe(described)
        limit = min(max_tokens, mla_absorb.MAX_TOKENS)
        choices.append(kernel_selection.choice_for(calls, kernels, kernels.beside, lambda: described, weights, limit))
    weights.rocm_ops_fused = FusedProduct(tuple(choices))


COMPARISONS = Quantized(), AgainstTwoLaunches()
