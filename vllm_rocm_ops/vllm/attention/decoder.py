"""Seam: in vLLM's attention backends our `paged_attention_decode` serves batches of decode rows where it is the faster.

A backend is replaced in place by a subclass, whose layers run our op for batches in which every row is a decode row: all requests
have the same query length, 1 to 8. Prefill, mixed batches, the cache write and metadata stay vLLM's, and so does each layer that
our op lacks something for. What decides is known on the host and constant in a captured graph: shapes, the longest query and the
layer's configuration. Rows that only pad a graph have no keys; nothing behind the batch's tokens is written.

Ours serves where it was measured to be faster at every length (timing.py), so nowhere until it was measured. With
VLLM_ROCM_OPS_ATTENTION=1 it serves wherever it fits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.ops.families.attention import ELEMENTS, CacheLayout
from vllm_rocm_ops.ops.families.decode import MOST_ROWS
from vllm_rocm_ops.ops.paged_attention_decode import SIZES
from vllm_rocm_ops.vllm.attention import backends, quantized_attention
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm.attention.backends import NO_BATCH, Backend, Batch, find, seam_of
from vllm_rocm_ops.vllm.selection import kernel_selection

PLAIN, E4M3 = ("auto", "float16", "bfloat16"), ("fp8", "fp8_e4m3")  # vLLM's names of cache dtypes

# Layers


def is_forced() -> bool:
    """Whether ours serves wherever it fits, measured or not."""
    return envs.VLLM_ROCM_OPS_ATTENTION == "1"


def run(op: Op, *arguments):
    """What `Op.run_kernels` returns; on CPU an op's reference runs, or the emulator."""
    if arguments[0].device.type != "cpu":
        return op.run_kernels(*arguments)
    found = op(*arguments)
    return True if found is None else found


class Decoder:
    """What our op is to one layer's implementation. `lacks` says why it serves none of the layer's calls; empty if it may."""

    op: Op
    never_ours: bool | None = None
    """The answer of `is_never_ours`, once it is final."""

    def __init__(self, impl, backend: Backend):
        from vllm import envs as vllm_envs
        from vllm.config import get_current_vllm_config

        self.impl, self.backend, self.config = impl, backend, get_current_vllm_config()
        self.is_forced, self.is_batch_invariant = is_forced(), bool(vllm_envs.VLLM_BATCH_INVARIANT)
        self.is_fp8 = impl.kv_cache_dtype in E4M3
        self.lacks = next((f"it has {what}" for what, has in self.unfit() if has), "")
        self.choices: dict[
            int, tuple[kernel_selection.Choice, ...]
        ] = {}  # by query length, one for each length of requests
        self.quantized = ""  # how the result is quantized in vLLM's graph: not, "static", or "groups"
        if self.is_forced and not self.lacks and getattr(impl, "supports_quant_query_input", False):
            impl.supports_quant_query_input = False  # ours takes queries of 16 bits

    def unfit(self) -> Iterator[tuple[str, bool]]:
        """What a layer may have that our op lacks, and whether this one has it."""
        dtypes = PLAIN + E4M3 if self.backend.on_gpu else PLAIN
        yield f"a cache of {self.impl.kv_cache_dtype}", self.impl.kv_cache_dtype not in dtypes

    def takes(self, query_len: int) -> bool:
        """Whether requests may have this query length. More than one is no constant of a captured graph if it holds mixed batches
        too, or if queries are cut on the device."""
        if query_len == 1:
            return True
        from vllm.config import CUDAGraphMode

        mode = self.config.compilation_config.cudagraph_mode
        mixed = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
        return 1 < query_len <= MOST_ROWS and not mixed and not self.is_cut()

    def is_cut(self) -> bool:
        """Whether query lengths are fewer on the device than on the host."""
        return getattr(self.config.speculative_config, "enable_adaptive_verification", False)

    def adopt(self, layer: torch.nn.Module) -> None:
        """What else of a layer may be ours, once its weights are loaded."""

    def is_ours(self, batch: Batch) -> bool:
        """Whether ours serves a batch of decode rows."""
        requests, query_len = batch
        if not self.takes(query_len):
            return False
        choices = self.choices.get(query_len, ())
        return self.is_forced or bool(choices) and all(choice.is_ours(requests) for choice in choices)

    def is_never_ours(self) -> bool:
        """Return whether vLLM's implementation serves every batch from now on: of each query length ours loses at some length of
        requests. Kept once nothing is left to measure, as each call that is left to vLLM asks."""
        if self.never_ours is None:
            never = all(any(choice.is_never_ours for choice in choices) for choices in self.choices.values())
            never = bool(self.lacks) or (never and not self.is_forced)
            if any(choice.layers is not None for choices in self.choices.values() for choice in choices):
                return never
            self.never_ours = never
        return self.never_ours


class HeadsDecoder(Decoder):
    """Of layers that keep a key and a value of each head."""

    op = ops.paged_attention_decode
    rope: Op | None = None
    """Our op that rotates and writes the cache. The seam rope_and_cache sets it, and the next one."""
    norm_rope: Op | None = None
    """Our op that normalizes each head first."""

    def unfit(self):
        impl = self.impl
        yield from super().unfit()
        yield "keys of an encoder", getattr(impl, "attn_type", "decoder") != "decoder"
        yield f"heads of {impl.head_size}", impl.head_size not in SIZES
        yield "ALiBi", impl.alibi_slopes is not None
        yield "a soft cap", bool(impl.logits_soft_cap)
        yield "sinks that are not float32", impl.sinks is not None and impl.sinks.dtype != torch.float32
        yield "a window", self.window > 0 and not self.backend.on_gpu
        yield "a look back by chunks", getattr(impl, "chunk_lookback", -1) != -1
        # A request's rows would be ours in one batch and vLLM's in another.
        yield "rows that must not depend on the batch", self.is_batch_invariant

    @functools.cached_property
    def window(self) -> int:
        """Keys that a row sees; 0 for all."""
        found = self.impl.sliding_window
        behind = found[0] if isinstance(found, tuple) else found  # in front of the row's own
        return 0 if behind in (None, -1) else behind + 1

    def serve(self, layer, query: Tensor, kv_cache: Tensor, metadata, output: Tensor, *scales: Tensor | None) -> bool:
        """Write the output of a batch, if ours serves it; with a scale, or scales of groups to write, that of e4m3."""
        # First what most calls that are left to vLLM fail for: this is the host's time.
        batch = self.backend.batch(metadata)
        if self.lacks or batch == NO_BATCH or not self.is_ours(batch):
            return False
        fits = output.dtype == query.dtype if scales == (None, None) else output.dtype in LIMIT
        if query.dtype not in ELEMENTS or not fits or not is_causal(metadata):
            return False
        return self.run(batch, layer, query, kv_cache, metadata, output, *scales)

    def run(
        self,
        batch: Batch,
        layer,
        query: Tensor,
        kv_cache: Tensor,
        metadata,
        output: Tensor,
        scale: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> bool:
        """Write the output of a batch of decode rows, unless our kernels do not take it."""
        (requests, query_len), caches = batch, self.caches(layer, kv_cache)
        if caches is None:
            return False
        rows, places = requests * query_len, (metadata.block_table, metadata.seq_lens)
        query, rest = query[:rows], (self.impl.scale, query_len, *self.scales(layer), self.impl.sinks, self.window)
        out = output[:rows].view(query.shape)
        groups = None if groups is None else groups[:rows]
        return run(self.op, query, *caches, *places, *rest, 0, False, out, scale, groups) is not None

    def caches(self, layer, kv_cache: Tensor) -> tuple[Tensor, Tensor] | None:
        """The caches of keys and values, in the dtype that they hold."""
        found = self.backend.caches(self.impl, layer, kv_cache)
        if found is None or not self.is_fp8:
            return found
        from vllm.platforms import current_platform

        return found[0].view(current_platform.fp8_dtype()), found[1].view(current_platform.fp8_dtype())

    def scales(self, layer) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values."""
        return (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)

    def may_rotate(self, op: Op | None) -> bool:
        """Whether our op rotates for the layer and writes its cache. This is not measured."""
        takes_cache = (
            self.impl.kv_cache_dtype in PLAIN + E4M3 and getattr(self.impl, "attn_type", "decoder") == "decoder"
        )
        return op is not None and self.is_forced and takes_cache

    def rotate(self, layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, slot_mapping) -> bool:
        """Rotate queries and keys, and write the cache, unless our kernels do not take it."""
        caches = self.may_rotate(self.rope) and self.caches(layer, kv_cache)
        if not caches:
            return False
        rows = backends.in_rows(query), backends.in_rows(key), value
        given = *rows, positions, cos_sin_cache, is_neox, *caches, slot_mapping, *self.scales(layer)
        return run(self.rope, *given) is not None

    def heads_of(self, qkv: Tensor) -> list[Tensor]:
        """Return queries, keys and values [tokens, heads, size] of rows that hold all three."""
        impl, rows = self.impl, qkv.unflatten(1, (-1, self.impl.head_size))
        return [*rows.split([impl.num_heads, impl.num_kv_heads, impl.num_kv_heads], 1)]

    def normalize_and_rotate(self, layer, qkv, q_out, k_out, positions, q_weight, k_weight, epsilon, *rest) -> bool:
        """Write queries and keys, normalized and rotated, and the cache, unless our kernels do not take it."""
        *angles, kv_cache, slots = rest
        caches = self.may_rotate(self.norm_rope) and self.caches(layer, kv_cache)
        if not caches:
            return False
        norm = q_weight, k_weight, epsilon
        given = *self.heads_of(qkv), *norm, positions, *angles, q_out, k_out, *caches, slots, *self.scales(layer)
        return run(self.norm_rope, *given) is not None

    # When it is measured

    def describe(self) -> str:
        impl = self.impl
        more = f" window {self.window}" * bool(self.window) + " sinks" * (impl.sinks is not None)
        return f"{impl.num_heads}:{impl.num_kv_heads}x{impl.head_size} {impl.kv_cache_dtype}{more}"

    def widths(self) -> tuple[int, int, int]:
        """Elements of a row of queries, of output, and of a token in the cache."""
        impl = self.impl
        row = impl.num_heads * impl.head_size
        return row, row, 2 * impl.num_kv_heads * impl.head_size

    def page_size(self, layer) -> int:
        return CacheLayout(*self.caches(layer, layer.kv_cache)).page_size

    def ours(self, batch: Batch, layer, query: Tensor, metadata) -> tuple[Tensor | None, ...] | None:
        """The output of a batch and its scales, by our op."""
        outputs = quantized_attention.outputs(self.quantized, query)
        return outputs if self.run(batch, layer, query, layer.kv_cache, metadata, *outputs) else None

    def theirs(self, layer, query: Tensor, metadata) -> tuple[Tensor | None, ...]:
        """The same by vLLM's implementation."""
        outputs = quantized_attention.outputs(self.quantized, query)
        self.impl.quantized_forward(layer, query, None, None, layer.kv_cache, metadata, *outputs)
        return outputs

    def exact(self, query_len: int, keys: int, layer, query: Tensor, metadata, requests: Tensor) -> Tensor:
        """The output of some requests in float32, of a copy of their pages."""
        layout = CacheLayout(*self.caches(layer, layer.kv_cache))
        pages, table = attention_timing.pages_of(metadata.block_table, requests, keys, layout.page_size)
        slots = torch.arange(layout.page_size, device=query.device)
        caches = layout.keys(pages[:, None], slots).float(), layout.values(pages[:, None], slots).float()
        rows = query.unflatten(0, (-1, query_len))[requests].flatten(0, 1).float()
        rest = self.impl.scale, query_len, *self.scales(layer), self.impl.sinks, self.window
        return self.op.reference(rows, *caches, table, metadata.seq_lens[requests], *rest)[0]


def is_causal(metadata) -> bool:
    """Whether a row sees all keys before it, and only these."""
    others = ("mm_prefix_range_tensor", "rswa_prefix_lens", "dynamic_causal")
    return metadata.causal is True and all(getattr(metadata, name, None) is None for name in others)


class DecodeImpl:
    """In front of a backend's implementation."""

    METHOD = (
        *("forward", "layer", "query", "key", "value", "kv_cache", "attn_metadata"),
        *("output", "output_scale", "output_block_scale"),
    )
    """The name and the parameters of what is replaced."""

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
            self.rocm_ops.quantized = quantized_attention.kind(*scales)
        elif self.rocm_ops.serve(layer, query, kv_cache, attn_metadata, output, *scales):
            return output
        elif self.rocm_ops.is_never_ours():
            self.forward = self.quantized_forward if self.lacks_quantization(*scales) else super().forward
        return self.quantized_forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)

    def lacks_quantization(self, scale: Tensor | None, groups: Tensor | None) -> bool:
        """Return whether vLLM's implementation takes no call with these scales."""
        static = scale is not None and not super().fused_output_quant_supported(quantized_attention.static_key())
        return groups is not None or static

    def quantized_forward(self, *given, output_scale=None, output_block_scale=None):
        """Run vLLM's implementation, and a quantization behind it where that has none."""
        *given, output, scale, groups = given if len(given) == 9 else (*given, output_scale, output_block_scale)
        if self.lacks_quantization(scale, groups):
            return quantized_attention.behind(super().forward, self.rocm_ops, given, output, scale, groups)
        return super().forward(*given, output, scale, groups)

    def fused_output_quant_supported(self, quant_key):
        ours = quant_key == quantized_attention.static_key() and quantized_attention.may_fuse(self.rocm_ops, "static")
        return super().fused_output_quant_supported(quant_key) or ours

    def fused_rope_kvcache_supported(self):
        return super().fused_rope_kvcache_supported() or self.rocm_ops.may_rotate(self.rocm_ops.rope)

    def do_rope_and_kv_cache_update(
        self, layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping
    ):
        given = layer, query, key, value, positions, cos_sin_cache, is_neox, kv_cache, layer_slot_mapping
        if self.rocm_ops.rotate(*given):
            return
        if super().fused_rope_kvcache_supported():
            super().do_rope_and_kv_cache_update(*given)
            return
        from vllm import _custom_ops

        _custom_ops.rotary_embedding(positions, query, key, self.head_size, cos_sin_cache, is_neox)
        self.do_kv_cache_update(layer, key, value, kv_cache, layer_slot_mapping)

    def fused_qk_norm_rope_kvcache_supported(self):
        # The pass names an op of AITER's, which need not be used.
        may_pass = hasattr(torch.ops.vllm, "rocm_aiter_per_tensor_quant")
        ours = may_pass and self.rocm_ops.may_rotate(self.rocm_ops.norm_rope)
        return super().fused_qk_norm_rope_kvcache_supported() or ours

    def set_interleaved_v_cache(self):
        """Leave the order of values, which vLLM's pass changes for AITER's op, unless that op is there."""
        if super().fused_qk_norm_rope_kvcache_supported():
            super().set_interleaved_v_cache()

    def do_qk_norm_rope_kvcache_update(self, layer, qkv, *given):
        if self.rocm_ops.normalize_and_rotate(layer, qkv, *given):
            return
        if super().fused_qk_norm_rope_kvcache_supported():
            super().do_qk_norm_rope_kvcache_update(layer, qkv, *given)
            return
        import vllm.ir.ops

        q_out, k_out, positions, q_weight, k_weight, epsilon, *places = given
        *both, value = self.rocm_ops.heads_of(qkv)
        for x, weight, out in zip(both, (q_weight, k_weight), (q_out, k_out)):
            out.copy_(vllm.ir.ops.rms_norm(x, weight, epsilon))
        self.do_rope_and_kv_cache_update(layer, q_out, k_out, value, positions, *places)


# Backends

STOCK = "vllm.v1.attention.backends"
OF_IMPL = (
    *("num_heads", "num_kv_heads", "head_size", "scale", "sliding_window", "kv_cache_dtype", "alibi_slopes"),
    *("logits_soft_cap", "sinks"),
)
OF_BATCH = ("num_actual_tokens", "seq_lens", "block_table", "causal")
OF_SPLIT = ("num_decodes", "num_decode_tokens", "decode_metadata")


def _of_heads(
    module: str, stem: str, impl: str, metadata: str, more: tuple[str, ...], *rest, base: str | None = None, **given
) -> Backend:
    """`base` is the class that an implementation has its attributes from, and whose module has the metadata."""
    base = f"{STOCK}.{base or f'{module}.{impl}'}"
    module = f"{STOCK}.{module}"
    needs = (base, OF_IMPL), (f"{base.rpartition('.')[0]}.{metadata}", (*OF_BATCH, *more))
    return Backend(f"{module}.{stem}Backend", DecodeImpl, impl, needs, *rest, **given)


_TRITON = ("max_query_len", "mm_prefix_range_tensor", "rswa_prefix_lens")
_of_all = ("max_query_len",), backends.native, backends.batch_of_all
BACKENDS = {
    "ROCM_ATTN": _of_heads("rocm_attn", "RocmAttention", "RocmAttentionImpl", "RocmAttentionMetadata", *_of_all),
    "ROCM_AITER_FA": _of_heads(
        *("rocm_aiter_fa", "AiterFlashAttention", "AiterFlashAttentionImpl", "AiterFlashAttentionMetadata"),
        *(OF_SPLIT, backends.packed_unless_shuffled, backends.batch_of_decodes),
    ),
    "ROCM_AITER_UNIFIED_ATTN": _of_heads(
        *("rocm_aiter_unified_attn", "RocmAiterUnifiedAttention", "RocmAiterUnifiedAttentionImpl"),
        *("RocmAttentionMetadata", ("max_query_len",), backends.packed_unless_interleaved, backends.batch_of_all),
        base="rocm_attn.RocmAttentionImpl",
    ),
    "TRITON_ATTN": _of_heads(
        *("triton_attn", "TritonAttention", "TritonAttentionImpl", "TritonAttentionMetadata"),
        *(_TRITON, backends.packed, backends.batch_of_all),
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
