"""Serve decode rows in vLLM's MLA backends by `mla_decode`, where it is faster, as decoder.py does for MHA and GQA.

`batched_gemm` serves the absorption GEMMs before and after it (mla_absorb.py).

vLLM puts decode rows first and calls `forward_mqa` for these alone, in mixed batches too. With VLLM_BATCH_INVARIANT=1
the split-KV size is fixed, so that a request's bits do not depend on the batch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.mla_decode import LATENT, ROPE
from vllm_rocm_ops.ops.shared.decode import MAX_ROWS
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.attention import mla_absorb
from vllm_rocm_ops.vllm.attention import timing as attention_timing
from vllm_rocm_ops.vllm.attention.backends import NO_BATCH, Backend, Batch, find, seam_of
from vllm_rocm_ops.vllm.attention.decoder import VLLM_BACKENDS, Decoder

FIXED_SPLIT_SIZE = 512
"""Keys per split with batch invariance."""


class MlaDecoder(Decoder):
    """Serve layers that cache a latent and a rotated part per token."""

    op = ops.mla_decode
    cache_scales = ("_k_scale",)
    adopters = (mla_absorb.adopt,)
    """Functions that adopt the ops of a layer. Later ones find what earlier ones adopted."""

    def unsupported_features(self):
        impl = self.impl
        yield from super().unsupported_features()
        yield f"kv_lora_rank={impl.kv_lora_rank}", impl.kv_lora_rank != LATENT
        yield f"qk_rope_head_dim={impl.qk_rope_head_dim}", impl.qk_rope_head_dim != ROPE
        yield "prefill context parallelism", getattr(impl, "pcp_world_size", 1) > 1
        yield "decode context parallelism with AITER", impl.dcp_world_size > 1 and "Aiter" in self.backend.name

    def supports_rows(self, query_len: int) -> bool:
        """True if a query length is supported.

        With decode context parallelism only 1: each GPU has a part of the last keys, so further rows would see other
        keys.
        """
        is_split = self.impl.dcp_world_size > 1
        return super().supports_rows(query_len) and not self.is_cut() and (query_len == 1 or not is_split)

    def adopt(self, layer: torch.nn.Module) -> None:
        """Adopt the absorption GEMMs, unless batch invariance is on."""
        if not self.is_batch_invariant:
            scheduler = self.config.scheduler_config
            max_tokens = max(scheduler.max_num_seqs, 1) * MAX_ROWS
            max_tokens = min(max_tokens, scheduler.max_num_batched_tokens)
            for adopt in self.adopters:
                adopt(layer, self.is_forced, max_tokens)

    def serve(self, q, kv_cache: Tensor, metadata, layer) -> tuple[Tensor, Tensor | None] | None:
        """Return the output, and its log-sum-exp with decode context parallelism. None where vLLM serves the batch.

        q is [rows, heads, 576] or its latent and rotated parts, the cache [pages, slots, 576].
        """
        if self.unsupported_reason or metadata.causal is not True:
            return None
        q = q if isinstance(q, tuple) else q.split([LATENT, ROPE], -1)
        batch = batch_of_rows(len(q[0]), metadata)
        if not self.takes(q[0], layer) or batch == NO_BATCH or not self.plugin_serves(batch):
            return None
        return self.run(batch, q, kv_cache, metadata, layer)

    def run(self, batch: Batch, q: tuple[Tensor, Tensor], kv_cache: Tensor, metadata, layer):
        places, is_split = (metadata.decode.block_table, metadata.decode.seq_lens), self.impl.dcp_world_size > 1
        rest = self.impl.scale, batch[1], self.scale(layer), FIXED_SPLIT_SIZE * self.is_batch_invariant, is_split
        out = self.unquantized_output(q[0])
        outputs = attention.run(self.op, *q, self.cache(kv_cache), *places, *rest, out, self.q_scale(q[0], layer))
        return outputs and (out, outputs[1] if is_split else None)

    def cache(self, kv_cache: Tensor) -> Tensor:
        return kv_cache.view(self.fp8_dtype) if self.is_fp8 else kv_cache

    def scale(self, layer) -> Tensor | None:
        return layer._k_scale if self.is_fp8 else None

    # For timing

    def describe(self) -> str:
        return f"{self.heads()} {self.impl.kv_cache_dtype}{self.of_queries()}"

    def heads(self) -> str:
        return f"{self.impl.num_heads}x{LATENT}+{ROPE}"

    def widths(self) -> tuple[int, int, int]:
        heads = self.impl.num_heads
        return heads * (LATENT + ROPE), heads * LATENT, LATENT + ROPE

    def page_size(self, layer) -> int:
        return layer.kv_cache.shape[1]

    def plugin(self, batch: Batch, layer, query: Tensor, metadata) -> tuple[Tensor] | None:
        outputs = self.run(batch, query.split([LATENT, ROPE], -1), layer.kv_cache, metadata, layer)
        return outputs and outputs[:1]

    def baseline(self, layer, query: Tensor, metadata) -> tuple[Tensor]:
        q, cache = tuple(query.split([LATENT, ROPE], -1)), self.cache(layer.kv_cache)
        return super(MlaImpl, self.impl).forward_mqa(q, cache, metadata, layer)[:1]

    def exact(self, query_len: int, keys: int, layer, query: Tensor, metadata, requests: Tensor) -> Tensor:
        decode = metadata.decode
        pages, table = attention_timing.pages_of(decode.block_table, requests, keys, self.page_size(layer))
        cache = self.cache(layer.kv_cache)
        held = cache.view(torch.uint8)[pages].view(cache.dtype) if self.is_fp8 else cache[pages]
        rows = query.float().unflatten(0, (-1, query_len))[requests].flatten(0, 1).split([LATENT, ROPE], -1)
        given = *rows, held.float(), table, decode.seq_lens[requests], self.impl.scale, query_len, self.scale(layer)
        return self.op.reference(*given, q_scale=self.q_scale(query, layer))[0]


def batch_of_rows(rows: int, metadata) -> Batch:
    """Return the batch of decode rows.

    Next to prefills only single rows are known to have equal lengths: each request has one or more.
    """
    requests = metadata.decode.seq_lens.shape[0]
    query_len = 1 if metadata.num_prefills else metadata.max_query_len
    return (requests, query_len) if rows == requests * query_len else NO_BATCH


class MlaImpl:
    """Mix into a backend's implementation."""

    METHOD = "forward_mqa", "q", "kv_c_and_k_pe_cache", "attn_metadata", "layer"
    rocm_ops_backend: Backend

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.rocm_ops = MlaDecoder(self, self.rocm_ops_backend)

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        given = q, kv_c_and_k_pe_cache, attn_metadata, layer
        if outputs := self.rocm_ops.serve(*given):
            return outputs
        if self.rocm_ops.baseline_always_serves():
            self.forward_mqa = super().forward_mqa
        return super().forward_mqa(*given)


_COMMON = "vllm.model_executor.layers.attention.mla_attention"
_NEEDS = (
    (
        f"{_COMMON}.MLACommonBaseImpl",
        ("num_heads", "scale", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dtype"),
    ),
    (f"{_COMMON}.MLACommonMetadata", ("max_query_len", "num_prefills", "causal", "decode")),
    (f"{_COMMON}.MLACommonDecodeMetadata", ("block_table", "seq_lens")),
)


def _of_latent(module: str, stem: str, **given) -> Backend:
    return Backend(f"{VLLM_BACKENDS}.mla.{module}.{stem}Backend", MlaImpl, f"{stem}Impl", _NEEDS, **given)


BACKENDS = {
    "TRITON_MLA": _of_latent("triton_mla", "TritonMLA"),
    "ROCM_AITER_MLA": _of_latent("rocm_aiter_mla", "AiterMLA"),
    "CPU_MLA": _of_latent("cpu_mla", "CPUMLA", on_gpu=False),
}
PLATFORMS = {"rocm": ("TRITON_MLA", "ROCM_AITER_MLA"), "cuda": ("TRITON_MLA",), "cpu": ("CPU_MLA",)}

SEAM = seam_of(
    "mla_attention",
    "TRITON_MLA and ROCM_AITER_MLA of AttentionBackendEnum, by subclasses; on CPU CPU_MLA; torch.bmm with their W_UK_T and W_UV",
    BACKENDS,
    PLATFORMS,
    "mla_decode",
)

__getattr__ = functools.partial(find, BACKENDS, __name__)
