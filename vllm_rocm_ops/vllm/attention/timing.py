"""Describe the plugin's and vLLM's decode attention for kernel_timing.py, which times them when a worker starts.

vLLM's metadata builders know their layers. They are created before the warm-up, when the caches exist and are empty. A
layer has one choice per context length of `LENGTHS`, with the number of requests as its token count. The plugin serves
a batch if it wins at every length, because a captured graph serves any.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.quantization import OUTPUTS
from vllm_rocm_ops.ops.paged_attention_decode import GROUP
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.graph import compiled_ops
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.key import Baseline, Decode

LENGTHS = (128, 1024, 8192)
"""Keys of each request. Lengths above the model's maximum are left out."""


class NotingBuilder:
    """Mix into a backend's metadata builder: choose the layers' kernels when the builder is created."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, *arguments, **keywords):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, *arguments, **keywords)
        with seam.surviving("decode attention stays on vLLM's backend, its timing failed"):
            layers = vllm_config.compilation_config.static_forward_context
            for name in layer_names:
                decoder = getattr(getattr(layers.get(name), "impl", None), "rocm_ops", None)
                if decoder is None:
                    continue
                decoder.adopt(layers[name])
                decoder.drafts_refusal = drafts_refusal(decoder, self)
                if is_measured(decoder) and decoder.has_single_scales(layers[name], decoder.has_fp8_queries):
                    choose(decoder, layers[name], self, kv_cache_spec.block_size)


def is_measured(decoder) -> bool:
    """True if a layer's decode attention is to be timed.

    Not for batch invariance, because a kernel selected by batch size breaks it. Not for decode context parallelism,
    which gathers the heads.
    """
    if decoder.is_batch_invariant or getattr(decoder.impl, "dcp_world_size", 1) > 1:
        return False
    may_serve = not decoder.unsupported_reason and decoder.config.model_config.dtype in ELEMENTS
    return may_serve and not decoder.is_forced and envs.VLLM_ROCM_OPS_MEASURE != "0"


def rows_of(config) -> int:
    """Return the rows of a request with drafts, 1 without any."""
    return 1 + (getattr(config.speculative_config, "num_speculative_tokens", None) or 0)


def most_rows(builder) -> float:
    """Return the most rows of a request that vLLM takes for a decode. One with more is a prefill."""
    return getattr(builder, "reorder_batch_threshold", None) or math.inf


def drafts_refusal(decoder, builder) -> str:
    """Return why vLLM's own code runs requests with drafts, empty if there are none or the plugin may serve them."""
    rows = rows_of(decoder.config)
    if rows == 1:
        return ""
    if rows > most_rows(builder):
        return f"requests with drafts are prefills: {rows} rows, of which it takes {most_rows(builder)} for a decode"
    return "" if decoder.supports_rows(rows) else f"{rows} rows of requests with drafts are not supported"


def choose(decoder, layer: torch.nn.Module, builder, page_size: int) -> None:
    """Make or find the choices of a layer: for single rows, and for 1 + drafts where vLLM takes these for decode rows."""
    config = decoder.config
    longest, dtype = config.model_config.max_model_len, config.model_config.dtype
    most = most_rows(builder)
    for query_len in {rows for rows in (1, rows_of(config)) if rows <= most and decoder.supports_rows(rows)}:
        choices = []
        for keys in [keys for keys in LENGTHS if keys <= longest] or [longest]:
            described = layer._k_scale, dtype, Layer(decoder, layer, builder)
            for of in (Context, *(decoder.quantized_contexts if decoder.quantized else ())):
                context, max_requests = of(decoder, page_size, query_len, keys), config.scheduler_config.max_num_seqs
                against = context.calls, context, context.beside
                choice = kernel_selection.choice_for(
                    *against, lambda layer=described: layer, layer._k_scale, max_requests
                )
                if of is Context:
                    choices.append(choice)
        decoder.choices[query_len], decoder.baseline_alone = tuple(choices), None


# Outputs


def kind(scale: Tensor | None, groups: Tensor | None) -> str:
    """Return the kind of a call with these scales, empty without quantization."""
    return "groups" if groups is not None else "static" if scale is not None else ""


@functools.cache
def measured_scale(device: torch.device) -> Tensor:
    """Return the static scale used for timing."""
    return torch.full((1,), 0.01, device=device)


def outputs(quantized: str, plain: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return an output, its static scale and its scales per group, all unwritten; without quantization `plain`."""
    if not quantized:
        return plain, None, None
    from vllm.platforms import current_platform

    output = torch.empty_like(plain, dtype=current_platform.fp8_dtype())
    if quantized == "static":
        return output, measured_scale(plain.device), None
    return output, None, plain.new_empty(len(plain), plain[0].numel() // GROUP, dtype=torch.float32)


def dequantized(output: Tensor, scale: Tensor | None = None, groups: Tensor | None = None) -> Tensor:
    """Return `outputs` as rows, dequantized."""
    rows, scale = output.flatten(1), scale if groups is None else groups
    return rows if scale is None else compiled_ops.dequantized(rows, scale)


# What is timed


class Layer:
    """A layer and what calls it. The first `filled` pages of its cache have random values."""

    def __init__(self, decoder, module: torch.nn.Module, builder):
        self.decoder, self.module, self.builder, self.filled = decoder, module, builder, 0

    @property
    def cache(self) -> Tensor:
        return self.module.kv_cache

    def fill(self, pages: int) -> None:
        """Write random values to the first pages of the cache."""
        part, self.filled = self.cache[self.filled : pages], max(self.filled, pages)
        if part.element_size() > 1:
            part.normal_()
            return
        part = part.view(torch.uint8)
        part.random_(0, 256).bitwise_and_(0xBF)  # magnitudes below 2
        part.masked_fill_(part == 0x80, 0)  # NaN of e4m3fnuz


class Context(LayerComparison):
    """Decode attention for requests of one query length and one context length.

    A layer of it: a tensor of the layer, the dtype of its queries, and a `Layer`.
    """

    sampled_rows = 4
    beside: Baseline | None = None
    """The timed baseline: vLLM's backend, unless a subclass sets it."""

    def __init__(self, decoder, page_size: int, query_len: int, keys: int):
        self.op, self.query_len, self.keys = decoder.op, query_len, keys
        self.beside = self.beside or Baseline(decoder.backend.name)
        quantized = OUTPUTS.get(decoder.quantized, "")
        longest = decoder.config.model_config.max_model_len
        self.decode = Decode(decoder.heads(), quantized, page_size, query_len, keys, longest)
        self.calls = "attention", self.beside, decoder.describe(), self.decode

    def describe(self, layer: tuple) -> str:
        return layer[-1].decoder.describe()

    def columns(self, layer: tuple) -> tuple[int, int]:
        of_query, of_output, _ = layer[-1].decoder.widths()
        return self.query_len * of_query, self.query_len * of_output

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        of_query, of_output, of_key = layer[-1].decoder.widths()
        moved = tokens * self.keys * of_key * layer[-1].cache.element_size()
        return moved, 2.0 * tokens * self.query_len * self.keys * (of_query + of_output)

    def arguments(self, layer: tuple, x: Tensor, seed: int) -> tuple:
        attention_layer, requests = layer[-1], len(x)
        metadata = attention_layer.builder.build(
            0, common_metadata(attention_layer, requests, self.query_len, self.keys)
        )
        rows = x.view(requests * self.query_len, attention_layer.decoder.impl.num_heads, -1)
        query = attention_layer.decoder.queries(rows, attention_layer.module)
        return query, attention_layer, metadata

    def plugin(self, query: Tensor, layer: Layer, metadata) -> tuple[Tensor | None, ...] | None:
        requests = len(query) // self.query_len
        return layer.decoder.plugin((requests, self.query_len), layer.module, query, metadata)

    def baseline(self, query: Tensor, layer: Layer, metadata) -> tuple[Tensor | None, ...]:
        return layer.decoder.baseline(layer.module, query, metadata)

    def comparable(self, outputs: tuple[Tensor | None, ...]) -> Tensor:
        """Return a row per request, dequantized."""
        rows = dequantized(*outputs)
        return rows.reshape(len(rows) // self.query_len, -1)

    def exact(self, arguments: tuple, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        query, layer, metadata = arguments
        outputs = layer.decoder.exact(self.query_len, self.keys, layer.module, query, metadata, rows)
        return outputs.reshape(len(rows), -1)[:, columns]


def common_metadata(layer: Layer, requests: int, query_len: int, keys: int):
    """Return vLLM's description of a batch of decode rows, as a captured graph has it.

    Requests share pages where the cache has too few.
    """
    from vllm.v1.attention.backend import CommonAttentionMetadata

    config, device, page_size = layer.decoder.config, layer.cache.device, layer.decoder.page_size(layer.module)
    longest, used, pages = config.model_config.max_model_len, -(-keys // page_size), layer.cache.shape[0]
    table = torch.zeros(requests, -(-longest // page_size), dtype=torch.int32)
    table[:, :used] = (torch.arange(requests * used) % (pages - 1) + 1).view(requests, used)
    layer.fill(min(requests * used + 1, pages))
    starts = torch.arange(0, (requests + 1) * query_len, query_len, dtype=torch.int32)
    lens, mode = torch.full((requests,), keys, dtype=torch.int32), config.compilation_config.cudagraph_mode
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device),
        num_reqs=requests,
        num_actual_tokens=requests * query_len,
        max_query_len=query_len,
        max_seq_len=longest if mode is not None and mode.has_full_cudagraphs() else keys,
        block_table_tensor=table.to(device),
        slot_mapping=torch.full((requests * query_len,), -1, dtype=torch.int64, device=device),
        seq_lens_cpu_upper_bound=lens,
    )


def pages_of(block_table: Tensor, requests: Tensor, keys: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Return the pages of some requests, concatenated, and the block table for a cache of these pages."""
    table = block_table[requests, : -(-keys // page_size)]
    places = torch.arange(table.numel(), dtype=torch.int32, device=table.device)
    return table.flatten().long(), places.view(table.shape)
