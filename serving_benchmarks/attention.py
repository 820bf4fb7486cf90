"""Attention of a decode step, the same for both of its paths: vLLM's kernels where they are, else plain PyTorch.

For Llama these are vLLM's rotation, its write to a paged cache and FlashAttention 3; for DeepSeek the absorbed products,
the rotation, the write and FlashMLA. All sequences have the same length, and their pages follow each other.
"""

from __future__ import annotations

import importlib
from functools import partial

import torch
from stock import REFUSALS, has, reason, require_same
from torch import Tensor

MOST_SPLITS = 32  # of a sequence by FlashAttention, as vLLM allows in a captured graph


class Pages:
    """What all layers share: where the tokens of `batch` sequences of `context` tokens lie in a cache, so many to a page, what
    vLLM's kernels take to find them, and how `size` values are rotated. A step writes the last token."""

    def __init__(self, rank, size: int, batch: int, context: int, page: int):
        each, last, device = -(-context // page), context - 1, rank.device
        self.batch, self.context, self.page, self.count = batch, context, page, batch * each
        self.table = torch.arange(self.count, dtype=torch.int32, device=device).view(batch, each)
        self.slots = self.table[:, last // page].long() * page + last % page
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device)  # of the sequences' queries
        self.positions = torch.full((batch,), last, device=device)
        self.scale = torch.ones(1, device=device)  # of a cache that is not quantised
        self.flash = self.schedule = None  # vLLM's kernel, and how it divides its work
        self.cos_sin = cos_and_sin(rank, size, context)
        self.rotation = rotation(self.cos_sin)

    def of(self, cache: Tensor) -> Tensor:
        """A cache [pages, page, ...] as [batch, context, ...]."""
        return cache.view(self.batch, -1, *cache.shape[2:])[:, : self.context]


def cos_and_sin(rank, size: int, context: int) -> Tensor:
    """[context, size]: of each position the cosines, then the sines, of half as many angles."""
    frequencies = rank.config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1).to(rank.dtype).to(rank.device)


def rotation(table: Tensor) -> Tensor:
    """[size, size]: rows times it are rotated as at the last position of the table, halves against each other."""
    cos, sin = (half.diag() for half in table[-1].chunk(2))
    return torch.cat((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)))


class GroupedAttention:
    """Of one layer: qkv [M, (heads + 2 kv_heads) * head_dim] -> [M, heads * head_dim], over caches of keys and values
    [pages, page, kv_heads, head_dim]."""

    PAGE = 16  # as in vLLM, unless told otherwise

    @staticmethod
    def rotated(config: dict) -> int:
        """How many values of a head are rotated: all."""
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def __init__(self, rank, layer: int, pages: Pages):
        of_o, of_qkv = (rank.sizes(layer, name) for name in ("o", "qkv"))
        self.pages, self.head_dim = pages, self.rotated(rank.config)
        self.heads = of_o["k"] // self.head_dim
        self.kv_heads = (of_qkv["n"] // self.head_dim - self.heads) // 2
        self.keys, self.values = (rank.values(pages.count, pages.page, self.kv_heads, self.head_dim) for _ in range(2))
        self.bytes = sum(pages.of(cache).nbytes for cache in (self.keys, self.values))

    def inputs(self, rank) -> tuple[Tensor, ...]:
        """Some, of the right shapes."""
        return (rank.values(self.pages.batch, (self.heads + 2 * self.kv_heads) * self.head_dim),)

    def pytorch(self, qkv: Tensor) -> Tensor:
        rows = qkv.unflatten(1, (-1, self.head_dim))
        rotated = torch.bmm(rows[:, : -self.kv_heads], self.pages.rotation.expand(len(qkv), -1, -1))
        keys, values = (self.pages.of(cache).transpose(1, 2) for cache in (self.keys, self.values))
        keys[:, :, -1].copy_(rotated[:, self.heads :])
        values[:, :, -1].copy_(rows[:, -self.kv_heads :])
        q = rotated[:, : self.heads].unflatten(1, (self.kv_heads, -1))  # the heads of a group are rows of one query
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values).reshape(len(qkv), -1)

    def prepare(self) -> None:
        """Finds vLLM's kernels. Raises one of REFUSALS."""
        if not (has("rotary_embedding") and has("reshape_and_cache_flash", "_C_cache_ops")):
            raise ImportError("vLLM has no rotary_embedding or reshape_and_cache_flash")
        flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
        pages, shape = self.pages, {"num_splits": MOST_SPLITS, "causal": True}
        pages.schedule = flash.get_scheduler_metadata(
            pages.batch,
            1,
            pages.context,
            self.heads,
            self.kv_heads,
            self.head_dim,
            pages.lengths,
            self.keys.dtype,
            cu_seqlens_q=pages.starts,
            page_size=pages.page,
            **shape,
        )
        pages.flash = partial(flash.flash_attn_varlen_func, fa_version=3, max_seqlen_q=1, **shape)

    def vllm(self, qkv: Tensor) -> Tensor:
        pages, kv = self.pages, self.kv_heads * self.head_dim
        q, k, v = qkv.split((self.heads * self.head_dim, kv, kv), 1)
        torch.ops._C.rotary_embedding(pages.positions, q, k, self.head_dim, pages.cos_sin, True)
        q, k, v = (rows.unflatten(1, (-1, self.head_dim)) for rows in (q, k, v))
        torch.ops._C_cache_ops.reshape_and_cache_flash(
            k, v, self.keys, self.values, pages.slots, "auto", pages.scale, pages.scale
        )
        result = pages.flash(
            q,
            self.keys,
            self.values,
            cu_seqlens_q=pages.starts,
            max_seqlen_k=pages.context,
            seqused_k=pages.lengths,
            block_table=pages.table,
            scheduler_metadata=pages.schedule,
        )
        return result.reshape(len(qkv), -1)


class LatentAttention:
    """Of one layer: q [M, heads * (nope + rope)], normed kv [M, rank] and k_pe [M, rope] -> [M, heads * v], over a
    cache [pages, page, rank + rope]."""

    PAGE = 64  # FlashMLA's

    @staticmethod
    def rotated(config: dict) -> int:
        """How many values of a head are rotated."""
        return config["qk_rope_head_dim"]

    def __init__(self, rank, layer: int, pages: Pages):
        self.w_uk, self.w_uv = rank.absorbed[layer]
        self.nope, self.rank = self.w_uk.shape[1:]
        self.rope, self.softmax_scale, self.pages = self.rotated(rank.config), rank.softmax_scale, pages
        self.cache = rank.values(pages.count, pages.page, self.rank + self.rope)
        self.bytes = sum(read.nbytes for read in (pages.of(self.cache), self.w_uk, self.w_uv))

    def inputs(self, rank) -> tuple[Tensor, ...]:
        """Some, of the right shapes."""
        sizes = (len(self.w_uk) * (self.nope + self.rope), self.rank, self.rope)
        return tuple(rank.values(self.pages.batch, size) for size in sizes)

    def _absorbed(self, q: Tensor) -> tuple[Tensor, Tensor]:
        q_nope, q_pe = q.unflatten(1, (len(self.w_uk), -1)).split((self.nope, self.rope), -1)
        return torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1), q_pe

    def _of_values(self, latent: Tensor) -> Tensor:
        return torch.bmm(latent.transpose(0, 1), self.w_uv).transpose(0, 1).reshape(len(latent), -1)

    def pytorch(self, q: Tensor, kv: Tensor, k_pe: Tensor) -> Tensor:
        absorbed, q_pe = self._absorbed(q)
        queries = torch.cat((absorbed, torch.bmm(q_pe, self.pages.rotation.expand(len(q), -1, -1))), -1)
        cache = self.pages.of(self.cache)
        cache[:, -1, : self.rank].copy_(kv)
        cache[:, -1, self.rank :].copy_(k_pe @ self.pages.rotation)
        scores = torch.bmm(queries, cache.transpose(1, 2)) * self.softmax_scale
        return self._of_values(torch.bmm(torch.softmax(scores, -1), cache[..., : self.rank]))

    def prepare(self) -> None:
        """Finds vLLM's kernels. Raises one of REFUSALS."""
        if not (has("rotary_embedding") and has("concat_and_cache_mla", "_C_cache_ops")):
            raise ImportError("vLLM has no rotary_embedding or concat_and_cache_mla")
        mla = importlib.import_module("vllm.v1.attention.ops.flashmla")
        self.pages.schedule, _ = mla.get_mla_metadata()
        self.pages.flash = partial(mla.flash_mla_with_kvcache, causal=True)

    def vllm(self, q: Tensor, kv: Tensor, k_pe: Tensor) -> Tensor:
        pages, (absorbed, q_pe) = self.pages, self._absorbed(q)
        torch.ops._C.rotary_embedding(pages.positions, q_pe, k_pe[:, None], self.rope, pages.cos_sin, True)
        torch.ops._C_cache_ops.concat_and_cache_mla(kv, k_pe, self.cache, pages.slots, "auto", pages.scale)
        latent, _ = pages.flash(
            torch.cat((absorbed, q_pe), -1)[:, None],
            self.cache[:, :, None],
            pages.table,
            pages.lengths,
            self.rank,
            pages.schedule,
            softmax_scale=self.softmax_scale,
        )
        return self._of_values(latent[:, 0])


def of_layers(rank, batch: int, context: int) -> tuple[list, str]:
    """The attention of each layer, and whose kernels `run` is: "vllm", or "torch" and why."""
    family = LatentAttention if rank.absorbed else GroupedAttention
    pages = Pages(rank, family.rotated(rank.config), batch, context, family.PAGE)
    layers = [family(rank, layer, pages) for layer in range(len(rank.layers) - 1)]
    try:
        layers[0].prepare()
        given = layers[0].inputs(rank)
        expected = layers[0].pytorch(*(x.clone() for x in given))
        require_same(layers[0].vllm(*given), expected)
        used = "vllm"
    except REFUSALS as error:
        used = f"torch: {reason(error)}"
    for layer in layers:
        layer.run = layer.vllm if used == "vllm" else layer.pytorch
    return layers, used
