"""Serve decode batches in vLLM's attention backends by `paged_attention_decode`, where it is faster.

A subclass replaces each backend in place. Its layers run the op for decode-only batches with one query length, 1 to 8.
Prefill, mixed batches, cache writes and metadata stay vLLM's, as do layers with an unsupported feature. The decision
uses what the host knows and a captured graph keeps: shapes, the longest query, the layer's configuration.
Rows that pad graphs have no keys, and nothing after the batch's tokens is written.

The op serves where it was timed to be faster at every context length (timing.py), so nowhere before timing. With
VLLM_ROCM_OPS_ATTENTION=1 it serves wherever it fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import LIMIT, static
from vllm_rocm_ops.ops.paged_attention_decode import SIZES
from vllm_rocm_ops.ops.shared.attention import ELEMENTS, CacheLayout
from vllm_rocm_ops.ops.shared.decode import MAX_ROWS
from vllm_rocm_ops.vllm.attention import backends
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm.attention.backends import NO_BATCH, Backend, Batch, find, seam_of
from vllm_rocm_ops.vllm.selection import comparison, kernel_selection

PLAIN, E4M3 = ("auto", "float16", "bfloat16"), ("fp8", "fp8_e4m3")  # vLLM's names of cache dtypes

# Layers


def is_forced() -> bool:
    """True if the op serves wherever it fits, timed or not."""
    return envs.VLLM_ROCM_OPS_ATTENTION == "1"


def run(op: Op, *arguments):
    """Return `Op.run_kernels`. On CPU run the op's reference, or the emulator."""
    if arguments[0].device.type != "cpu":
        return op.run_kernels(*arguments)
    output = op(*arguments)
    return True if output is None else output


class Decoder:
    """Serve one layer's calls by an op. `unsupported_reason` says why no call can be served, empty if calls may be."""

    op: Op
    drafts_refusal = ""
    """The reason for which vLLM's own code runs requests with drafts. It is empty if there are none, or the op may serve them."""
    baseline_alone: bool | None = None
    """The answer of `baseline_always_serves`, once final."""
    cache_scales = ("_k_scale", "_v_scale")
    """A layer's attributes with the scales of an FP8 cache."""
    quantized_contexts: tuple[type[attention_timing.Context], ...] = ()
    """Further comparisons of calls with a quantized result."""

    def __init__(self, impl, backend: Backend):
        from vllm import envs as vllm_envs
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        self.impl, self.backend, self.config = impl, backend, get_current_vllm_config()
        self.fp8_dtype = current_platform.fp8_dtype()
        self.is_forced, self.is_batch_invariant = is_forced(), bool(vllm_envs.VLLM_BATCH_INVARIANT)
        self.is_fp8 = impl.kv_cache_dtype in E4M3
        # vLLM quantizes queries to e4m3 for an FP8 cache if the implementation supports it, as Triton's and AITER's MLA do.
        self.has_fp8_queries = self.is_fp8 and bool(getattr(impl, "supports_quant_query_input", False))
        self.unsupported_reason = next(
            (f"{what} is not supported" for what, has in self.unsupported_features() if has), ""
        )
        self.choices: dict[int, tuple[kernel_selection.Choice, ...]] = {}  # by query length, one per context length
        self.quantized = ""  # output quantization in vLLM's graph: none, "static", or "groups"

    def unsupported_features(self) -> Iterator[tuple[str, bool]]:
        """Yield each unsupported feature, and whether this layer has it."""
        dtypes = PLAIN + E4M3 if self.backend.on_gpu else PLAIN
        yield f"kv_cache_dtype={self.impl.kv_cache_dtype}", self.impl.kv_cache_dtype not in dtypes

    def takes(self, query: Tensor, layer) -> bool:
        """True if the op supports a query's dtype, 16 bits or a cache's e4m3, and the scales."""
        in_fp8 = self.is_fp8 and query.dtype == self.fp8_dtype
        return (in_fp8 or query.dtype in ELEMENTS) and self.has_single_scales(layer, in_fp8)

    def has_single_scales(self, layer, fp8_queries: bool) -> bool:
        """True if a layer has one scale of each kind, not one per head."""
        names = (*self.cache_scales, "_q_scale") if fp8_queries else self.cache_scales
        return not self.is_fp8 or all(getattr(layer, name).numel() == 1 for name in names)

    def q_scale(self, query: Tensor, layer) -> Tensor | None:
        """Return the scale of an e4m3 query."""
        return layer._q_scale if query.dtype == self.fp8_dtype else None

    def queries(self, rows: Tensor, layer) -> Tensor:
        """Return random rows as queries, for timing: in e4m3 where vLLM quantizes them."""
        return static(rows.float(), layer._q_scale, self.fp8_dtype) if self.has_fp8_queries else rows

    def unquantized_output(self, query: Tensor) -> Tensor:
        """Return an unwritten 16-bit output for a query."""
        dtype = query.dtype if query.dtype in ELEMENTS else self.config.model_config.dtype
        return query.new_empty(query.shape, dtype=dtype)

    def supports_rows(self, query_len: int) -> bool:
        """True if a query length is supported.

        More than 1 is not a constant of a captured graph if the graph also serves mixed batches, or if queries are cut
        on the device.
        """
        if query_len == 1:
            return True
        from vllm.config import CUDAGraphMode

        mode = self.config.compilation_config.cudagraph_mode
        mixed = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
        return 1 < query_len <= MAX_ROWS and not mixed and not self.is_cut()

    def is_cut(self) -> bool:
        """True if query lengths may be smaller on the device than on the host."""
        return getattr(self.config.speculative_config, "enable_adaptive_verification", False)

    def adopt(self, layer: torch.nn.Module) -> None:
        """Adopt further ops of a layer, once its weights are loaded."""

    def plugin_serves(self, batch: Batch) -> bool:
        requests, query_len = batch
        if not self.supports_rows(query_len):
            return False
        choices = self.choices.get(query_len, ())
        return self.is_forced or bool(choices) and all(choice.plugin_serves(requests) for choice in choices)

    def baseline_always_serves(self) -> bool:
        """True if vLLM's implementation serves every batch from now on.

        For each query length the op loses at some context length. Cached once nothing is left to time: every call left
        to vLLM asks.
        """
        if self.baseline_alone is None:
            never = all(any(choice.baseline_always_serves for choice in choices) for choices in self.choices.values())
            never = bool(self.unsupported_reason) or (never and not self.is_forced)
            if any(choice.layers is not None for choices in self.choices.values() for choice in choices):
                return never
            self.baseline_alone = never
        return self.baseline_alone


class HeadsDecoder(Decoder):
    """Serve layers that cache a key and a value per head."""

    op = ops.paged_attention_decode

    def __init__(self, impl, backend: Backend):
        super().__init__(impl, backend)
        if impl.sinks is not None and not self.unsupported_reason:
            impl.sinks.data = impl.sinks.data.float()  # the model's own parameter, before its weights are loaded

    def unsupported_features(self):
        impl = self.impl
        casts = (torch.float32, *ELEMENTS) if self.backend.casts_sinks else (torch.float32,)
        yield from super().unsupported_features()
        yield "encoder attention", getattr(impl, "attn_type", "decoder") != "decoder"
        yield f"head size {impl.head_size}", impl.head_size not in SIZES
        yield "ALiBi", impl.alibi_slopes is not None
        yield "a logits soft cap", bool(impl.logits_soft_cap)
        yield "a sink dtype other than float32", impl.sinks is not None and impl.sinks.dtype not in casts
        yield "a sliding window on CPU", self.window > 0 and not self.backend.on_gpu
        yield "chunked look-back", getattr(impl, "chunk_lookback", -1) != -1
        # The kernel for a request's rows would depend on the batch.
        yield "batch invariance", self.is_batch_invariant

    @functools.cached_property
    def window(self) -> int:
        """Return the sliding window in keys, 0 for none."""
        window = self.impl.sliding_window
        behind = window[0] if isinstance(window, tuple) else window  # keys before the row's own
        return 0 if behind in (None, -1) else behind + 1

    def serve(self, layer, query: Tensor, kv_cache: Tensor, metadata, output: Tensor, *scales: Tensor | None) -> bool:
        """Write the output of a batch and return True, or return False if vLLM serves it.

        query is [tokens, heads, size] in bf16, fp16 or e4m3. With a static scale, or scales per group of 128 to write,
        output is e4m3.
        """
        # Most calls left to vLLM fail here: this is host time of every step.
        batch = self.backend.batch(metadata)
        if self.unsupported_reason or batch == NO_BATCH or not self.plugin_serves(batch):
            return False
        if not self.takes(query, layer) or not is_causal(metadata):
            return False
        wanted = (query.dtype,) if query.dtype in ELEMENTS else ELEMENTS
        if output.dtype not in (wanted if scales == (None, None) else LIMIT):
            return False
        return self.run(batch, layer, query, kv_cache, metadata, output, *scales)

    def run(self, batch: Batch, layer, query: Tensor, kv_cache: Tensor, metadata, output: Tensor, *scales) -> bool:
        """Write the output of a batch of decode rows. Return False if unsupported."""
        (requests, query_len), caches, (scale, groups) = batch, self.caches(layer, kv_cache), scales or (None, None)
        if caches is None:
            return False
        rows, places = requests * query_len, (metadata.block_table, metadata.seq_lens)
        query, rest = query[:rows], (self.impl.scale, query_len, *self.scales(layer), self.impl.sinks, self.window)
        out = output[:rows].view(query.shape)
        groups = None if groups is None else groups[:rows]
        out = out, scale, groups, self.q_scale(query, layer)
        return run(self.op, query, *caches, *places, *rest, 0, False, *out) is not None

    def caches(self, layer, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the key and the value cache in the dtype of their elements."""
        caches = self.backend.caches(self.impl, layer, kv_cache)
        if caches is None or not self.is_fp8:
            return caches
        return caches[0].view(self.fp8_dtype), caches[1].view(self.fp8_dtype)

    def scales(self, layer) -> tuple[Tensor | None, Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)

    # For timing

    def describe(self) -> str:
        impl = self.impl
        more = f" window {self.window}" * bool(self.window) + " sinks" * (impl.sinks is not None)
        return f"{self.heads()} {impl.kv_cache_dtype}{self.of_queries()}{more}"

    def of_queries(self) -> str:
        return " e4m3 queries" * self.has_fp8_queries

    def heads(self) -> str:
        return f"{self.impl.num_heads}:{self.impl.num_kv_heads}x{self.impl.head_size}"

    def widths(self) -> tuple[int, int, int]:
        """Return the elements of a query row, of an output row, and of a token in the cache."""
        impl = self.impl
        row = impl.num_heads * impl.head_size
        return row, row, 2 * impl.num_kv_heads * impl.head_size

    def page_size(self, layer) -> int:
        if (caches := self.caches(layer, layer.kv_cache)) is None:
            raise comparison.Refused
        return CacheLayout(*caches).page_size

    def plugin(self, batch: Batch, layer, query: Tensor, metadata) -> tuple[Tensor | None, ...] | None:
        outputs = attention_timing.outputs(self.quantized, self.unquantized_output(query))
        return outputs if self.run(batch, layer, query, layer.kv_cache, metadata, *outputs) else None

    def baseline(self, layer, query: Tensor, metadata) -> tuple[Tensor | None, ...]:
        outputs = attention_timing.outputs(self.quantized, self.unquantized_output(query))
        self.impl.baseline(*outputs[1:])(layer, query, None, None, layer.kv_cache, metadata, *outputs)
        return outputs

    def exact(self, query_len: int, keys: int, layer, query: Tensor, metadata, requests: Tensor) -> Tensor:
        """Return the float32 output of some requests, from a copy of their pages."""
        layout = CacheLayout(*self.caches(layer, layer.kv_cache))
        pages, table = attention_timing.pages_of(metadata.block_table, requests, keys, layout.page_size)
        slots = torch.arange(layout.page_size, device=query.device)
        caches = layout.keys(pages[:, None], slots).float(), layout.values(pages[:, None], slots).float()
        rows = query.float().unflatten(0, (-1, query_len))[requests].flatten(0, 1)
        rest = self.impl.scale, query_len, *self.scales(layer), self.impl.sinks, self.window
        given = rows, *caches, table, metadata.seq_lens[requests], *rest
        return self.op.reference(*given, q_scale=self.q_scale(query, layer))[0]


def is_causal(metadata) -> bool:
    """True if a row sees exactly the keys up to its own."""
    others = ("mm_prefix_range_tensor", "rswa_prefix_lens", "dynamic_causal")
    return metadata.causal is True and all(getattr(metadata, name, None) is None for name in others)


class DecodeImpl:
    """Mix into a backend's implementation."""

    METHOD = (
        *("forward", "layer", "query", "key", "value", "kv_cache", "attn_metadata"),
        *("output", "output_scale", "output_block_scale"),
    )
    """The replaced method and its parameters."""

    rocm_ops_backend: Backend

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.rocm_ops = HeadsDecoder(self, self.rocm_ops_backend)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        scales = output_scale, output_block_scale
        if attn_metadata is None:  # vLLM's profile run
            self.rocm_ops.quantized = attention_timing.kind(*scales)
        elif self.rocm_ops.serve(layer, query, kv_cache, attn_metadata, output, *scales):
            return output
        elif self.rocm_ops.baseline_always_serves():
            self.forward = self.baseline(*scales)
        return self.baseline(*scales)(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def baseline(self, scale: Tensor | None, groups: Tensor | None) -> Callable:
        """Return vLLM's method for calls with these scales."""
        return super().forward


# Backends

VLLM_BACKENDS = "vllm.v1.attention.backends"
OF_IMPL = (
    *("num_heads", "num_kv_heads", "head_size", "scale", "sliding_window", "kv_cache_dtype", "alibi_slopes"),
    *("logits_soft_cap", "sinks"),
)
OF_BATCH = ("num_actual_tokens", "seq_lens", "block_table", "causal")
OF_SPLIT = ("num_decodes", "num_decode_tokens", "decode_metadata")


def _of_heads(
    module: str, stem: str, impl: str, metadata: str, more: tuple[str, ...], *rest, base: str | None = None, **given
) -> Backend:
    """Return a backend. `base` is the class that defines the implementation's attributes, its module the metadata."""
    base = f"{VLLM_BACKENDS}.{base or f'{module}.{impl}'}"
    module = f"{VLLM_BACKENDS}.{module}"
    needs = (base, OF_IMPL), (f"{base.rpartition('.')[0]}.{metadata}", (*OF_BATCH, *more))
    return Backend(f"{module}.{stem}Backend", DecodeImpl, impl, needs, *rest, **given)


_TRITON = ("max_query_len", "mm_prefix_range_tensor", "rswa_prefix_lens")
_of_all = ("max_query_len",), backends.split_rocm_cache, backends.batch_of_all
BACKENDS = {
    "ROCM_ATTN": _of_heads(
        "rocm_attn", "RocmAttention", "RocmAttentionImpl", "RocmAttentionMetadata", *_of_all, casts_sinks=True
    ),
    "ROCM_AITER_FA": _of_heads(
        *("rocm_aiter_fa", "AiterFlashAttention", "AiterFlashAttentionImpl", "AiterFlashAttentionMetadata"),
        *(OF_SPLIT, backends.packed_or_shuffled, backends.batch_of_decodes),
    ),
    "ROCM_AITER_UNIFIED_ATTN": _of_heads(
        *("rocm_aiter_unified_attn", "RocmAiterUnifiedAttention", "RocmAiterUnifiedAttentionImpl"),
        *("RocmAttentionMetadata", ("max_query_len",), backends.packed_unless_interleaved, backends.batch_of_all),
        base="rocm_attn.RocmAttentionImpl",
        casts_sinks=True,
    ),
    "TRITON_ATTN": _of_heads(
        *("triton_attn", "TritonAttention", "TritonAttentionImpl", "TritonAttentionMetadata"),
        *(_TRITON, backends.packed, backends.batch_of_all),
        casts_sinks=True,
    ),
    "CPU_ATTN": _of_heads(
        *("cpu_attn", "CPUAttention", "CPUAttentionBackendImpl", "CPUAttentionMetadata"),
        *(("max_query_len", "dynamic_causal"), backends.of_cpu, backends.batch_of_all),
        on_gpu=False,
    ),
}
PLATFORMS = {
    "rocm": ("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN"),
    "cuda": ("TRITON_ATTN",),
    "cpu": ("CPU_ATTN",),
}

SEAM = seam_of(
    "decode_attention",
    "ROCM_ATTN, ROCM_AITER_FA, ROCM_AITER_UNIFIED_ATTN and TRITON_ATTN of AttentionBackendEnum, by subclasses; on CPU CPU_ATTN",
    BACKENDS,
    PLATFORMS,
    "paged_attention_decode",
)


__getattr__ = functools.partial(find, BACKENDS, __name__)
