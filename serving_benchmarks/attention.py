"""Attention of a decode step: its caches and calls, the same for both of its paths.

A layer rotates queries and keys and writes the cache (`rotation`), attends (`attention`) and, of DeepSeek, multiplies with the
two weights that it absorbs (`absorbed`). All sequences have the same length, and their pages follow each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops


class Pages:
    """What all layers share: where the tokens of `batch` sequences of `context` tokens lie in a cache, so many to a page, and
    how `size` values are rotated. A step writes the last token."""

    def __init__(self, rank, size: int, is_neox: bool, batch: int, context: int, page: int):
        each, last, device = -(-context // page), context - 1, rank.device
        self.batch, self.context, self.page, self.count = batch, context, page, batch * each
        self.table = torch.arange(self.count, dtype=torch.int32, device=device).view(batch, each)
        self.slots = self.table[:, last // page].long() * page + last % page
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.positions = torch.full((batch,), last, device=device)
        self.cos_sin, self.is_neox = cos_and_sin(rank, size, context), is_neox
        self.rotation = rotation(self.cos_sin, is_neox)

    def of(self, cache: Tensor) -> Tensor:
        """A cache [pages, page, ...] as [batch, context, ...]."""
        return cache.view(self.batch, -1, *cache.shape[2:])[:, : self.context]


def cos_and_sin(rank, size: int, context: int) -> Tensor:
    """[context, size]: of each position the cosines, then the sines, of half as many angles."""
    frequencies = rank.config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1).to(rank.dtype).to(rank.device)


def rotation(table: Tensor, is_neox: bool) -> Tensor:
    """[size, size]: rows times it are rotated as at the last position of the table, halves against each other or neighbours."""
    cos, sin = (half.diag() for half in table[-1].chunk(2))
    of_halves = torch.cat((torch.cat((cos, sin), 1), torch.cat((-sin, cos), 1)))
    if is_neox:
        return of_halves
    places = torch.arange(len(of_halves), device=table.device)
    order = places // 2 + places % 2 * (len(places) // 2)  # of a half, where a neighbour lies
    return of_halves[order][:, order]


class GroupedAttention:
    """Of one layer: qkv [M, (heads + 2 kv_heads) * head_dim] -> [M, heads * head_dim], over caches of keys and values
    [pages, page, kv_heads, head_dim]."""

    OPS = (ops.rope_and_cache, ops.paged_attention_decode)
    PAGE = 16  # as in vLLM, unless told otherwise
    IS_NEOX = True

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

    def run(self, call: Callable, qkv: Tensor) -> Tensor:
        """`call` takes a kind, an op and its arguments."""
        pages, kv = self.pages, self.kv_heads * self.head_dim
        q, k, v = qkv.split((self.heads * self.head_dim, kv, kv), 1)
        caches, q_heads = (self.keys, self.values), q.unflatten(1, (-1, self.head_dim))
        how = pages.positions, pages.cos_sin, pages.is_neox
        call("rotation", ops.rope_and_cache, q, k, v, *how, *caches, pages.slots)
        rest = pages.table, pages.lengths, self.head_dim**-0.5
        return call("attention", ops.paged_attention_decode, q_heads, *caches, *rest).flatten(1)


class LatentAttention:
    """Of one layer: q [M, heads * (nope + rope)], normed kv [M, rank] and k_pe [M, rope] -> [M, heads * v], over a
    cache [pages, page, rank + rope]."""

    OPS = (ops.batched_gemm, ops.rope_and_cache_mla, ops.mla_decode)
    PAGE = 64  # FlashMLA's
    IS_NEOX = False

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

    def run(self, call: Callable, q: Tensor, kv: Tensor, k_pe: Tensor) -> Tensor:
        """`call` takes a kind, an op and its arguments."""
        pages, (q_nope, q_pe) = self.pages, q.unflatten(1, (len(self.w_uk), -1)).split((self.nope, self.rope), -1)
        absorbed = call("absorbed", ops.batched_gemm, q_nope, self.w_uk)
        how = pages.positions, pages.cos_sin, pages.is_neox
        call("rotation", ops.rope_and_cache_mla, q_pe, k_pe, kv, *how, self.cache, pages.slots)
        rest = pages.table, pages.lengths, self.softmax_scale
        latent = call("attention", ops.mla_decode, absorbed, q_pe, self.cache, *rest)
        return call("absorbed", ops.batched_gemm, latent, self.w_uv).flatten(1)


def family(rank) -> type:
    """The attention of a rank's layers."""
    return LatentAttention if rank.absorbed else GroupedAttention


def of_layers(rank, batch: int, context: int) -> list:
    """The attention of each layer."""
    of = family(rank)
    pages = Pages(rank, of.rotated(rank.config), of.IS_NEOX, batch, context, of.PAGE)
    return [of(rank, layer, pages) for layer in range(len(rank.layers) - 1)]
