"""Describe head norms, rotation and cache write of attention layers as one op call, for the seam rope_and_cache.py.

It has what compiled_ops.py needs to time the call against vLLM's layers and their backend's cache write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.vllm.attention import backends
from vllm_rocm_ops.vllm.attention import decoder as attention
from vllm_rocm_ops.vllm.graph.compiled_ops import LayerPart
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.key import Baseline


def shape_of(heads: tuple[int, int, int], rotary: int, is_neox: bool, dtype: torch.dtype, cache: str) -> str:
    """Return the name of a layer's call for all token counts, as it is recorded.

    `heads` are query heads, key heads and their size; `rotary` elements of a head are rotated, by halves if NeoX-style.
    """
    query, key, size = heads
    pairing = "" if is_neox else " interleaved"
    return f"{query}:{key}x{size}/{rotary} {kernel_selection.types(dtype)} {cache}{pairing}"


def shapes_of(parameters: tuple, dtype: torch.dtype) -> list[str]:
    """Return the names under which a model's call may be recorded: each pairing and cache dtype."""
    *heads, rotary = parameters[:4]
    caches = attention.PLAIN + attention.E4M3
    return [shape_of(heads, rotary, is_neox, dtype, cache) for is_neox in (True, False) for cache in caches]


class RopePreAttention(LayerPart):
    """Implement the part of a layer between its projection and attention by an op, and as compiled_ops.py times it.

    Its inputs are the projection's result, positions, slots, and a cache.
    """

    def __init__(
        self, attn: torch.nn.Module, rotary: torch.nn.Module, norms: tuple, dtype: torch.dtype, baseline: Baseline
    ):
        self.attn, self.rotary, self.norms, self.dtype = attn, rotary, norms, dtype
        self.decoder: attention.HeadsDecoder = attn.impl.rocm_ops
        self.op = ops.qk_norm_rope_and_cache if norms else ops.rope_and_cache
        self.heads = attn.num_heads, attn.num_kv_heads, attn.head_size
        cache = self.decoder.impl.kv_cache_dtype
        shape = shape_of(self.heads, rotary.rotary_dim, rotary.is_neox_style, dtype, cache)
        self.name(shape, baseline)

    def parts(self, qkv: Tensor) -> list[Tensor]:
        """Split the projection's result into the heads [T, heads, size] of q, k and v."""
        query, key, size = self.heads
        return [*qkv.unflatten(1, (-1, size)).split([query, key, key], 1)]

    def weights(self) -> tuple:
        """Return the weights of both norms and their epsilon, or nothing."""
        return (*(norm.weight.data for norm in self.norms), self.norms[0].variance_epsilon) if self.norms else ()

    def run(self, call: Callable, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor):
        """Call the op, and return its result, and q and k."""
        q, k, v = self.parts(qkv)
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)] if self.norms else []
        angles = positions, self.rotary.cos_sin_cache, self.rotary.is_neox_style
        places = *self.decoder.caches(self.attn, cache), slots, *self.decoder.scales(self.attn)
        rows = (q, k) if outs else (backends.in_rows(q), backends.in_rows(k))
        return call(*rows, v, *self.weights(), *angles, *outs, *places), *(outs or (q, k))

    def cache(self, tokens: int, device: torch.device | str) -> Tensor:
        """Return an empty cache for a number of tokens, in the backend's order."""
        dtype = torch.uint8 if self.decoder.is_fp8 else self.dtype
        return backends.cache_of(self.decoder.backend, self.decoder.impl, tokens, dtype, device)

    def has_kernels(self) -> bool:
        made = functools.partial(torch.empty, device="meta")
        query, key, size = self.heads
        tokens = made(2, dtype=torch.int64)
        given = made(2, (query + 2 * key) * size, dtype=self.dtype), tokens, tokens, self.cache(2, "meta")

        def on_meta(*values) -> bool:
            return linear_base.has_kernels(self.op, *(v.to("meta") if isinstance(v, Tensor) else v for v in values))

        return self.run(on_meta, *given)[0]

    # For timing

    def take(self, plugin_serves: bool) -> None:
        """Have vLLM's graph mark the rotation, if the op serves all layers that share the rotation's module."""
        from vllm_rocm_ops.vllm.graph import markers

        taken = vars(self.rotary).setdefault("rocm_ops_taken", {})
        taken[self.pattern] = plugin_serves or self.decoder.is_forced
        marks = markers.of_rotation(self.rotary, bool(self.norms))
        self.rotary._forward_method = marks if all(taken.values()) else self.rotary.forward_native

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        query, key, size = self.heads
        return 2.0 * tokens * (query + 2 * key) * size * self.dtype.itemsize, 0.0

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (query, key, size), table = self.heads, self.rotary.cos_sin_cache
        generator = torch.Generator(table.device).manual_seed(seed)
        columns = (query + 2 * key) * size
        qkv = torch.randn(tokens, columns, generator=generator, device=table.device).to(self.dtype)
        positions = torch.randint(0, len(table), (tokens,), generator=generator, device=table.device)
        return qkv, positions, torch.arange(tokens, device=table.device), self.cache(tokens, table.device).zero_()

    def plugin(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple | None:
        """Return q, k and the cache by the op, or None where no kernel supports the call."""
        done, q, k = self.run(self.op.run_kernels, qkv, positions, slots, cache)
        return None if done is None else (q, k, cache)

    def computed(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k by vLLM's layers, as its compiler sees them."""
        q, k, _ = self.parts(qkv)
        if self.norms:
            q, k = (norm.vllm_forward(x) for norm, x in zip(self.norms, (q, k)))
        return self.rotary.forward_native(positions, q.flatten(1), k.flatten(1))

    def completed(self, rotated: tuple[Tensor, Tensor], qkv: Tensor, slots: Tensor, cache: Tensor) -> tuple:
        """Write the cache by vLLM's backend, and return q, k and the cache."""
        q, k = (x.unflatten(1, (-1, self.heads[2])) for x in rotated)
        self.attn.impl.do_kv_cache_update(self.attn, k, self.parts(qkv)[2], cache, slots)
        return q, k, cache

    def results(self, output: tuple[Tensor, Tensor, Tensor], tokens: int) -> list[Tensor]:
        q, k, cache = output
        layout = CacheLayout(*self.decoder.caches(self.attn, cache))
        slots = torch.arange(tokens, device=q.device)
        places = slots // layout.page_size, slots % layout.page_size
        scales = self.decoder.scales(self.attn) if self.decoder.is_fp8 else (1.0, 1.0)
        held = (each(*places).float() * scale for each, scale in zip((layout.keys, layout.values), scales))
        return [x.flatten(1) for x in (q, k, *held)]

    def exact(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> list[Tensor]:
        q, k, v = (x.float().clone() for x in self.parts(qkv))
        if self.norms:
            *weights, epsilon = self.weights()
            q, k = (
                x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.float()
                for x, weight in zip((q, k), weights)
            )
        for x in (q, k):
            rotation.rotate(x, positions, self.rotary.cos_sin_cache, self.rotary.is_neox_style)
        return [x.flatten(1) for x in (q, k, k, v)]
