"""Quantize the result of decode attention with a key and a value per head, in layers of the seam quantized_attention.

Such a layer's implementation gets a subclass. Calls that no kernel of the plugin supports run vLLM's implementation:
with the scale where it supports one, else followed by vLLM's quantization, as in the original graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops.core.quantization import LIMIT, OUTPUTS
from vllm_rocm_ops.ops.paged_attention_decode import GROUP
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.vllm.attention import timing
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import SEPARATE, Baseline

# Calls


@functools.cache
def static_key():
    """Return vLLM's key of a static per-tensor scale."""
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    return kFp8StaticTensorSym


class QuantizingImpl:
    """Mix into the class of a layer's `DecodeImpl`."""

    rocm_ops_kinds: frozenset[str] = frozenset()
    """The kinds of quantization that the layer may fuse."""

    def baseline(self, scale: Tensor | None, groups: Tensor | None) -> Callable:
        """Return vLLM's method, followed by a separate quantization where it fuses none."""
        forward = super().baseline(scale, groups)
        supports = groups is None and (scale is None or super().fused_output_quant_supported(static_key()))
        return forward if supports else functools.partial(self.unfused, forward)

    def unfused(
        self, forward, layer, query, key, value, kv_cache, metadata, output, output_scale=None, output_block_scale=None
    ):
        """Run the unfused path: attention in 16 bits, then vLLM's quantization."""
        given = layer, query, key, value, kv_cache, metadata
        if metadata is None:  # vLLM's profile run: forward fills the output
            if output_block_scale is not None:
                output_block_scale.fill_(1.0)
            return forward(*given, output)
        dtype = query.dtype if query.dtype in ELEMENTS else self.rocm_ops.config.model_config.dtype  # it may be FP8
        plain = output.new_empty(output.shape, dtype=dtype)
        forward(*given, plain)
        quantize(plain.flatten(1), output.flatten(1), output_scale, output_block_scale)
        return output

    def fused_output_quant_supported(self, quant_key):
        fuses = quant_key == static_key() and "static" in self.rocm_ops_kinds
        return super().fused_output_quant_supported(quant_key) or fuses


@functools.cache
def quantizing(plain: type) -> type:
    """Return the subclass of an implementation's class."""
    return type(plain.__name__, (QuantizingImpl, plain), {"__module__": plain.__module__})


def quantize(x: Tensor, out: Tensor, scale: Tensor | None, groups: Tensor | None) -> None:
    """Quantize rows by vLLM's kernels, on CPU by PyTorch."""
    limit = LIMIT[out.dtype]
    if x.device.type == "cpu":
        from vllm_rocm_ops.core import quantization

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


# Decisions


def wins(decoder, quantized: str, decided: kernel_selection.Decided, beside: Baseline) -> bool | None:
    """True if the plugin won against a baseline at some batch size at every context length. None if it was not timed."""
    layer, longest = (decoder.op.name, decoder.describe(), beside), decoder.config.model_config.max_model_len
    tables = [
        served
        for (*call, decode), served in decided.shapes.items()
        if (*call,) == layer and (decode.quantized, decode.longest) == (OUTPUTS.get(quantized, ""), longest)
    ]
    return kernel_selection.at_some_size(tables) if tables else None


def may_quantize(decoder, quantized: str, decided: kernel_selection.Decided) -> bool:
    """True if a layer's attention fuses this kind of quantization."""
    if decoder.unsupported_reason or (quantized == "groups" and decoder.impl.head_size != GROUP):
        return False
    if decoder.is_forced or decoder.op.name in decided.off:
        return decoder.is_forced
    if wins(decoder, quantized, decided, SEPARATE) is False:
        return False
    measured = wins(decoder, quantized, decided, Baseline(decoder.backend.name))
    return bool(wins(decoder, "", decided, Baseline(decoder.backend.name)) if measured is None else measured)


def kinds(decoder, layer: torch.nn.Module, decided: kernel_selection.Decided) -> frozenset[str]:
    """Return the kinds of output quantization that a layer's attention fuses, from the recorded decisions.

    Prepares the layer for them.
    """
    found = frozenset(quantized for quantized in OUTPUTS if may_quantize(decoder, quantized, decided))
    impl, decoder.quantized_contexts = decoder.impl, (AgainstTwoLaunches,)
    if found and not isinstance(impl, QuantizingImpl):
        impl.__class__ = quantizing(type(impl))
    if isinstance(impl, QuantizingImpl):
        impl.rocm_ops_kinds = found
    return found


# For timing


class AgainstTwoLaunches(timing.Context):
    """Time fused output quantization against the plugin's attention followed by vLLM's quantization."""

    beside = SEPARATE

    def baseline(self, query: Tensor, layer: timing.Layer, metadata) -> tuple[Tensor | None, ...]:
        output, *scales = timing.outputs(layer.decoder.quantized, query)
        plain, batch = torch.empty_like(query), (len(query) // self.query_len, self.query_len)
        layer.decoder.run(batch, layer.module, query, layer.cache, metadata, plain)
        quantize(plain.flatten(1), output.flatten(1), *scales)
        return output, *scales
