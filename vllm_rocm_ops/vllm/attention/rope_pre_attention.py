"""Run head norms, rotation and cache write of attention layers by one op, for the seam rope_and_cache.py.

compiled_ops.py times the call against vLLM's layers and their backend's cache write.

In MiniMax-M2 one PyTorch method of the norms' class computes both norms, over all heads, so a served layer marks them in the graph. With
tensor parallelism an op of vLLM's computes them, which sums squares over ranks (reduced_head_norms.py).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import NamedTuple

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

logger = logging.getLogger("vllm.vllm_rocm_ops")

OWN_KERNEL = "use_fused_qk_norm_rope_gate"
"""The attribute by which vLLM's Qwen3NextAttention calls its own kernel, on CUDA."""
SEPARATE = {"RocmOpsRMSNorm"}, {"RocmOpsGemmaRMSNorm"}
JOINT_NORM = "MiniMaxText01RMSNormTP"
"""Classes of vLLM's norms that are called one by one, and the class whose `forward_qk` computes both."""
REDUCED, OPERANDS = (
    "minimax_qk_norm_fusion",
    ["qkv", "q_weight", "k_weight", "q_size", "kv_size", "tp_rank", "tp_world", "eps", "workspace"],
)
"""The op that computes both with tensor parallelism, and its arguments."""


def shape_of(
    heads: tuple[int, int, int], rotary: int, is_neox: bool, dtype: torch.dtype, cache: str, traits: str = ""
) -> str:
    """Return the shape of a key, for all token counts.

    `heads` are query heads, key heads and head size; `rotary` elements of a head are rotated, by halves if NeoX-style. `traits` are
    of `Traits.name`.
    """
    query, key, size = heads
    pairing = "" if is_neox else " interleaved"
    return f"{query}:{key}x{size}/{rotary} {kernel_selection.types(dtype)} {cache}{pairing}{traits}"


def shapes_of(parameters: tuple, dtype: torch.dtype) -> list[str]:
    """Return the shapes of keys that may stand for a model's call: of each pairing and cache dtype."""
    *heads, rotary = parameters[:4]
    caches, traits = attention.PLAIN + attention.E4M3, Traits(*parameters[6:]).name
    return [shape_of(heads, rotary, is_neox, dtype, cache, traits) for is_neox in (True, False) for cache in caches]


class Traits(NamedTuple):
    """Traits of a layer's norms and rotation that few models have, such as Qwen3-Next and Qwen3.5.

    Attributes:
        one_plus: Whether head norms multiply by 1 + weight.
        is_gated: Whether each query head is followed by the gate of its output.
        height_pairs: Pairs of a head that rotate by the position of height.
        width_pairs: Pairs that rotate by the position of width.
        over_all: Whether a norm is over all heads together.
    """

    one_plus: bool = False
    is_gated: bool = False
    height_pairs: int = 0
    width_pairs: int = 0
    over_all: bool = False

    @property
    def sections(self) -> tuple[int, int]:
        return self.height_pairs, self.width_pairs

    @property
    def name(self) -> str:
        """The traits as a part of a shape's name."""
        by = f" sections {self.height_pairs}+{self.width_pairs}" if any(self.sections) else ""
        return f"{' one-plus' * self.one_plus}{' gate' * self.is_gated}{by}{' over-all' * self.over_all}"


def is_gate_beside(layer: torch.nn.Module) -> bool:
    """True if a layer's projection has a gate beside each query head, which multiplies the head's output."""
    return bool(getattr(layer, "attn_output_gate", False)) and hasattr(layer, "_project_qkv_gate")


class RopePreAttention(LayerPart):
    """The pre-attention of a layer by one op, and its comparison with vLLM's layers and cache write.

    Inputs are qkv [T, columns], positions [T] or [T, 3], slots [T], and a cache.
    """

    peers: tuple[RopePreAttention, ...] = ()
    """The parts of all layers that share the rotation's module."""

    def __init__(
        self,
        layer: torch.nn.Module,
        norms: tuple,
        sections: tuple[int, int],
        dtype: torch.dtype,
        baseline: Baseline,
    ):
        self.layer, self.attn, self.rotary, self.norms, self.dtype = layer, layer.attn, layer.rotary_emb, norms, dtype
        attn, rotary = self.attn, self.rotary
        self.decoder: attention.HeadsDecoder = attn.impl.rocm_ops
        self.op = ops.qk_norm_rope_and_cache if norms else ops.rope_and_cache
        self.heads = attn.num_heads, attn.num_kv_heads, attn.head_size
        one_plus, is_gated = any(getattr(norm, "one_plus_weight", False) for norm in norms), is_gate_beside(layer)
        self.traits = Traits(one_plus, is_gated, *sections, are_over_all(norms, attn.head_size))
        self.has_own_kernel = bool(getattr(layer, OWN_KERNEL, False))
        cache = self.decoder.impl.kv_cache_dtype
        shape = shape_of(self.heads, rotary.rotary_dim, rotary.is_neox_style, dtype, cache, self.traits.name)
        self.name(shape, baseline)

    @property
    def ranks(self) -> int:
        """The ranks that a norm is over."""
        return self.norms[0].tp_world if are_joint(self.norms) else 1

    @property
    def columns(self) -> int:
        query, key, size = self.heads
        return ((1 + self.traits.is_gated) * query + 2 * key) * size

    def parts(self, qkv: Tensor) -> list[Tensor]:
        """Split the projection's result into the heads [T, heads, size] of q, k and v."""
        query, key, size = self.heads
        if self.traits.is_gated:
            both, k, v = qkv.split([2 * query * size, key * size, key * size], 1)
            return [both.unflatten(1, (query, 2 * size))[..., :size], *(x.unflatten(1, (key, size)) for x in (k, v))]
        return [*qkv.unflatten(1, (-1, size)).split([query, key, key], 1)]

    def weights(self) -> tuple:
        """Return (q weight, k weight, epsilon), () without norms."""
        return (*(norm.weight.data for norm in self.norms), self.norms[0].variance_epsilon) if self.norms else ()

    def run(self, call: Callable, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor):
        """Return the result of `call` on the op's arguments, then q and k [T, heads, size]."""
        q, k, v = self.parts(qkv)
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k)] if self.norms else []
        angles = self.model_positions(positions), self.rotary.cos_sin_cache, self.rotary.is_neox_style
        places = *self.decoder.caches(self.attn, cache), slots, *self.decoder.scales(self.attn)
        rows = (q, k) if outs else (backends.in_rows(q), backends.in_rows(k))
        more = (self.traits.one_plus, *self.traits.sections) if outs else ()
        return call(*rows, v, *self.weights(), *angles, *outs, *places, *more), *(outs or (q, k))

    def model_positions(self, positions: Tensor) -> Tensor:
        """Return the model's positions [T] or [3, T], given a comparison's [T] or [T, 3]."""
        return positions.t() if any(self.traits.sections) else positions

    def cache(self, tokens: int, device: torch.device | str) -> Tensor:
        """Return an empty cache for a number of tokens, in the backend's order."""
        dtype = torch.uint8 if self.decoder.is_fp8 else self.dtype
        return backends.cache_of(self.decoder.backend, self.decoder.impl, tokens, dtype, device)

    def has_kernels(self) -> bool:
        empty = functools.partial(torch.empty, device="meta")
        tokens = empty(2, dtype=torch.int64)
        positions = empty(3, 2, dtype=torch.int64).t() if any(self.traits.sections) else tokens
        given = empty(2, self.columns, dtype=self.dtype), positions, tokens, self.cache(2, "meta")
        return self.run(functools.partial(linear_base.has_kernels, self.op), *given)[0]

    # For timing

    def apply_decision(self, plugin_serves: bool) -> None:
        """Have vLLM's graph mark the rotation, if the op serves all layers that share the rotation's module.

        Layers with a kernel of their own for norms and rotation, as Qwen3-Next's on CUDA, then call their modules instead.
        """
        taken = vars(self.rotary).setdefault("rocm_ops_taken", {})
        taken[self.pattern] = plugin_serves or self.decoder.is_forced
        self.mark(all(taken.values()))

    def mark(self, serves: bool) -> None:
        """Have vLLM's graph mark the rotation, or not."""
        from vllm_rocm_ops.vllm.graph import markers

        marks = markers.of_rotation(self.rotary, bool(self.norms))
        self.rotary._forward_method = marks if serves else self.rotary.forward_native
        for part in self.peers:
            if are_joint(part.norms):
                markers.of_norms(part.norms, serves)
            if part.has_own_kernel:
                setattr(part.layer, OWN_KERNEL, not serves)

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        query, key, size = self.heads
        return 2.0 * tokens * (query + 2 * key) * size * self.dtype.itemsize, 0.0

    def inputs(self, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        table = self.rotary.cos_sin_cache
        generator = torch.Generator(table.device).manual_seed(seed)
        qkv = torch.randn(tokens, self.columns, generator=generator, device=table.device).to(self.dtype)
        shape = (3, tokens) if any(self.traits.sections) else (tokens,)
        positions = torch.randint(0, len(table), shape, generator=generator, device=table.device)
        positions = positions.t() if positions.dim() == 2 else positions
        return qkv, positions, torch.arange(tokens, device=table.device), self.cache(tokens, table.device).zero_()

    def plugin(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple | None:
        done, q, k = self.run(self.op.run_kernels, qkv, positions, slots, cache)
        return None if done is None else (q, k, cache)

    def graph_outputs(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return q and k by vLLM's layers, as its compiler sees them, and a copy of the gate if there is one."""
        positions = self.model_positions(positions)
        if self.has_own_kernel:
            q, k, _, gate = self.layer._project_qkv_gate(qkv, positions)
            return q, k, gate
        q, k, _ = self.parts(qkv)
        if self.norms:
            q, k = normalized(self.norms, q, k)
        rotated = self.rotary.forward_native(positions, q.flatten(1), k.flatten(1))
        if not self.traits.is_gated:
            return rotated
        query, _, size = self.heads
        return *rotated, qkv[:, : 2 * query * size].unflatten(1, (query, -1))[..., size:].flatten(1)

    def baseline_outputs(self, rotated: tuple[Tensor, ...], qkv: Tensor, slots: Tensor, cache: Tensor) -> tuple:
        q, k = (x.unflatten(1, (-1, self.heads[2])) for x in rotated[:2])
        self.attn.impl.do_kv_cache_update(self.attn, k, self.parts(qkv)[2], cache, slots)
        return q, k, cache

    def results(self, output: tuple[Tensor, Tensor, Tensor], tokens: int) -> list[Tensor]:
        q, k, cache = output
        layout = CacheLayout(*self.decoder.caches(self.attn, cache))
        slots = torch.arange(tokens, device=q.device)
        places = slots // layout.page_size, slots % layout.page_size
        scales = self.decoder.scales(self.attn) if self.decoder.is_fp8 else (1.0, 1.0)
        cached = (read(*places).float() * scale for read, scale in zip((layout.keys, layout.values), scales))
        return [x.flatten(1) for x in (q, k, *cached)]

    def mean_squares(self, qkv: Tensor) -> list[Tensor]:
        """Return what the norms of queries and keys divide by, squared, in float32."""
        axes = (1, 2) if self.traits.over_all else 2
        return [x.float().square().mean(axes, keepdim=True) for x in self.parts(qkv)[:2]]

    def exact(
        self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, means: list[Tensor] | None = None
    ) -> list[Tensor]:
        q, k, v = (x.float().clone() for x in self.parts(qkv))
        if self.norms:
            *weights, epsilon = self.weights()
            q, k = (
                x * torch.rsqrt(mean + epsilon) * (weight.float() + self.traits.one_plus).unflatten(0, (-1, x.shape[2]))
                for x, mean, weight in zip((q, k), means or self.mean_squares(qkv), weights)
            )
        angles = (
            self.model_positions(positions),
            self.rotary.cos_sin_cache,
            self.rotary.is_neox_style,
            *self.traits.sections,
        )
        for x in (q, k):
            rotation.rotate(x, *angles)
        return [x.flatten(1) for x in (q, k, k, v)]


# Norms of queries and keys


def norms_of(
    layer: torch.nn.Module, attn: torch.nn.Module, dtype: torch.dtype, over_ranks: bool = False
) -> tuple[torch.nn.Module, ...]:
    """Return the norms of queries and keys in a layer, or nothing where the op supports only what follows them.

    With `over_ranks`, they may be over the ranks of a group.
    """
    norms = tuple(getattr(layer, name, None) for name in ("q_norm", "k_norm"))
    kinds = {type(norm).__name__ for norm in norms}
    if kinds not in SEPARATE and not (are_joint(norms) and (norms[0].tp_world == 1 or over_ranks and has_reduced_op())):
        return ()
    size, heads = attn.head_size, (attn.num_heads, attn.num_kv_heads)
    shapes = [tuple(norm.weight.shape) for norm in norms]
    if shapes not in ([(size,)] * 2, [(count * size,) for count in heads]):
        return ()
    for norm in norms:
        if getattr(norm, "variance_size_override", None) is not None or norm.weight.dtype != dtype:
            return ()
    return norms if norms[0].variance_epsilon == norms[1].variance_epsilon else ()


def are_joint(norms: tuple) -> bool:
    """True if the norms' class computes both in a `forward_qk` with the expected parameters."""
    if not norms or {type(norm).__name__ for norm in norms} != {JOINT_NORM}:
        return False
    computes = getattr(type(norms[0]), "forward_qk", lambda: None)
    return [*inspect.signature(computes).parameters] == ["q_norm", "k_norm", "q", "k"]


@functools.cache
def has_reduced_op() -> bool:
    """True if vLLM has the op of norms over ranks, with the expected arguments. Says once if it has others."""
    op = getattr(torch.ops.vllm, REDUCED, None)
    found = OPERANDS if op is None else [argument.name for argument in op.default._schema.arguments]
    if found != OPERANDS:
        logger.warning("vllm-rocm-ops: head norms over ranks stay vLLM's, whose %s now takes %s", REDUCED, found)
    return op is not None and found == OPERANDS


def are_over_all(norms: tuple, size: int) -> bool:
    """True if norms are over all heads of this size."""
    return any(norm.weight.shape != (size,) for norm in norms)


def norm_refusal(norm: torch.nn.Module) -> str:
    """Return why a norm stays vLLM's, empty if the plugin may serve it."""
    sums_over_ranks = type(norm).__name__ == JOINT_NORM and norm.tp_world > 1
    return "whose squares vLLM sums over ranks, unless they time one launch to be faster" if sums_over_ranks else ""


def normalized(norms: tuple, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Return the norms of heads [tokens, heads, size] by vLLM's modules, [tokens, heads * size] if they are over all heads."""
    if are_over_all(norms, q.shape[2]):
        q, k = q.flatten(1), k.flatten(1)
    if are_joint(norms):
        return type(norms[0]).forward_qk(*norms, q, k)
    return tuple(norm.vllm_forward(x) for norm, x in zip(norms, (q, k)))
