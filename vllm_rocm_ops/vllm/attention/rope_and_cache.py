"""Serve head norms, rotation and cache write before attention in one launch, in models that vLLM compiles.

`rope_and_cache` rotates queries and keys and writes the cache. `qk_norm_rope_and_cache` normalizes the heads first, as
in Qwen3, GLM and Gemma. It reads Qwen3-Next's queries between the gates of attention's output, which stay in place: what reshapes
a gate moves behind attention. Norms may be over all heads, as MiniMax-M2's, and over ranks (reduced_head_norms.py). Others stay vLLM's.

vLLM splits a compiled model at each cache update, so the rotation and the update are in two pieces, and a pass on a
piece sees only one. This seam changes the whole graph before vLLM splits it. There a rotation is a marker
(graph/markers.py). One op takes the place of the marker, of the norms before it and of the cache update after it. It
has the layer's name, with which it finds the cache and the slots as the update does, and vLLM splits at it, too. A
marker in any other place becomes what vLLM would have traced.

Selected once for all token counts, before vLLM compiles (compiled_ops.py): where the op was timed to be faster than
vLLM's compiled norms and rotation and its cache write, or wherever it fits with VLLM_ROCM_OPS_ATTENTION=1.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, fx

from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.shared import rotation
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.attention import backends, decoder, reduced_head_norms, split
from vllm_rocm_ops.vllm.attention.rope_pre_attention import OWN_KERNEL, RopePreAttention, norms_of
from vllm_rocm_ops.vllm.graph import all_reduce_timing, compilation, compiled_ops

logger = logging.getLogger("vllm.vllm_rocm_ops")

NORM = "vllm_ir::rms_norm"
UPDATE, NAME = "vllm::unified_kv_cache_update", "attention_front"
TORCH_OP = f"vllm_rocm_ops::{NAME}"
"""The ops at which vLLM splits a compiled model: vLLM's cache update, and the op that replaces it."""
SPLITS = "split", "split_with_sizes", torch.functional.split
VIEWS = "view", "reshape", "flatten", "unflatten"
"""Methods whose result is a view."""
PASSES = "fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache", "enable_qk_norm_rope_fusion"
"""vLLM's passes that match the rotation."""
OF_LAYER = (
    *("impl", "attn_backend", "attn_type", "use_direct_call", "kv_sharing_target_layer_name", "query_quant"),
    *("num_heads", "num_kv_heads", "head_size", "head_size_v"),
)
OF_ROTATION = "head_size", "rotary_dim", "is_neox_style", "cos_sin_cache"

# The op


def attention_front(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    is_neox: bool,
    q_out: Tensor | None,
    k_out: Tensor | None,
    one_plus: bool,
    height_pairs: int,
    width_pairs: int,
    layer_name,
) -> None:
    """Run the op with the step's cache and slots of a layer.

    Without weights q and k are rotated in place.
    """
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    _, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    served = getattr(layer.impl, "rocm_ops", None)
    if slots is None or cache.numel() == 0:  # vLLM's profile run
        slots = positions.new_empty(0)
        cache = served and backends.cache_of(served.backend, served.impl, 1, q.dtype, q.device)
        caches = served and served.backend.caches(served.impl, layer, cache)
    else:
        slots, caches = slots.flatten()[: len(q)], served and served.caches(layer, cache)
    angles, norm = (positions, cos_sin_cache, is_neox), (q_weight, k_weight, epsilon)
    if not caches:  # a layer that shares the rotation, as a draft model's, in a backend that the plugin does not cover
        whole = (*norm, one_plus), (*angles, height_pairs, width_pairs)
        by_vllm(layer, (q, k, v), *whole, (q_out, k_out), cache, slots)
        return
    places = *caches, slots, *served.scales(layer)
    if q_out is None:
        ops.rope_and_cache.call(backends.in_rows(q), backends.in_rows(k), v, *angles, *places)
    else:
        more = one_plus, height_pairs, width_pairs
        ops.qk_norm_rope_and_cache.call(q, k, v, *norm, *angles, q_out, k_out, *places, *more)


def by_vllm(layer, heads: tuple, norm: tuple, angles: tuple, outs: tuple, cache: Tensor, slots: Tensor) -> None:
    """Normalize and rotate in PyTorch, and write the cache by vLLM's backend."""
    (q, k, v), (*weights, epsilon, one_plus) = heads, norm
    if outs[0] is not None:
        for x, weight, out in zip((q, k), weights, outs):
            x = x if weight.shape == x.shape[2:] else x.flatten(1)
            out.copy_(ops.rms_norm.reference(x, weight, epsilon, one_plus).view(out.shape))
        q, k = outs
    for x in (q, k):
        rotation.rotate(x, *angles)
    if len(slots):
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)


# The layers


def unsupported_features(attn: torch.nn.Module, rotary: torch.nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """Yield the features of a layer that the op does not support."""
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

    from vllm_rocm_ops.vllm.graph import markers

    impl, baselines = attn.impl, {cls.forward_native for cls in (RotaryEmbedding, MRotaryEmbedding)}
    served = getattr(impl, "rocm_ops", None)
    if served is None or served.op is not ops.paged_attention_decode:
        yield "an unsupported backend"
        return
    known = getattr(type(rotary), "forward_native", None) in baselines
    forward = getattr(getattr(rotary, "_forward_method", None), "__name__", "")
    if not known or forward not in ("forward_native", "marked") or rotary.head_size != attn.head_size:
        yield "another rotation than RotaryEmbedding's or MRotaryEmbedding's, or by a custom op"
    elif getattr(rotary, "mrope_section", None) and not (
        all(hasattr(rotary, name) for name in markers.OF_SECTIONS)
        and (len(rotary.mrope_section), rotary.mrope_interleaved) == (3, True)
    ):
        yield "sections of a head that are not interleaved"
    elif rotary.cos_sin_cache.dtype != dtype or rotary.cos_sin_cache.dim() != 2:
        yield "a table of another dtype"
    if attn.attn_type != "decoder" or attn.kv_sharing_target_layer_name is not None or attn.use_direct_call:
        yield "a cache written elsewhere"
    if attn.attn_backend.forward_includes_kv_cache_update:
        yield "a cache written by attention"
    if attn.query_quant is not None and getattr(impl, "supports_quant_query_input", False):
        yield "queries in FP8"
    if attn.head_size_v != attn.head_size or impl.kv_cache_dtype not in decoder.PLAIN + decoder.E4M3:
        yield f"kv_cache_dtype={impl.kv_cache_dtype}, or values of another size"
    elif served.backend.caches(impl, attn, backends.cache_of(served.backend, impl, 1, dtype, "meta")) is None:
        yield "a cache in another order"
    if served.is_batch_invariant:
        yield "batch invariance"


def sections_of(rotary: torch.nn.Module, config) -> tuple[int, int]:
    """Return the pairs of a head that a model rotates by positions of height and width."""
    uses = getattr(config.model_config, "uses_mrope", False)
    return tuple((getattr(rotary, "mrope_section", None) or (0, 0, 0))[1:]) if uses else (0, 0)


def pre_attentions(model: torch.nn.Module, compiles: bool) -> Iterator[RopePreAttention]:
    """Yield the parts of a model's layers that one rank may serve."""
    for layer in model.modules():  # vLLM keeps rotations for the process's next model
        if vars(layer).pop("rocm_ops_taken", None):
            layer._forward_method = layer.forward_native
    yield from served_parts(model, compiles)


def reduced(config, model: torch.nn.Module, group, reduce) -> Iterator[reduced_head_norms.Comparison]:
    """Yield the comparisons of norms over a group's ranks."""
    parts = served_parts(model, compilation.is_compiled(config, model), True)
    yield from reduced_head_norms.comparisons(parts, group, reduce)


def served_parts(model: torch.nn.Module, compiles: bool, over_ranks: bool = False) -> Iterator[RopePreAttention]:
    """Yield the parts of a model's layers that an op may serve. A rotation that layers share is served in all or none."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    config = get_current_vllm_config()
    settings = config.compilation_config
    splits = UPDATE in (settings.splitting_ops or ()) and not settings.use_inductor_graph_partition
    if not (compiles and splits) or any(getattr(settings.pass_config, name, False) for name in PASSES):
        return
    baseline, dtype = compilation.baseline_of(config, model)(True, has_pass=False), config.model_config.dtype
    by_rotary: dict[torch.nn.Module, list[RopePreAttention | None]] = {}
    for layer in model.modules():
        rotary, attn = getattr(layer, "rotary_emb", None), getattr(layer, "attn", None)
        if not isinstance(rotary, torch.nn.Module) or not isinstance(attn, Attention):
            continue
        part = None
        if not any(unsupported_features(attn, rotary, dtype)):
            norms, sections = norms_of(layer, attn, dtype, over_ranks), sections_of(rotary, config)
            own_kernel = getattr(layer, OWN_KERNEL, False)  # with the norms
            if norms or not (any(sections) or own_kernel):  # only the op with norms rotates by sections
                part = RopePreAttention(layer, norms, sections, dtype, baseline)
        by_rotary.setdefault(rotary, []).append(part if part and part.has_kernels() else None)
    for of_rotary in by_rotary.values():
        if None not in of_rotary and len({(bool(part.norms), part.ranks) for part in of_rotary}) == 1:
            split.before(rewrite)
            for part in of_rotary:
                part.peers = tuple(of_rotary)
            yield from of_rotary


# The graph


class Place(NamedTuple):
    """The nodes around a marker: what it rotates, the norms' weights and epsilon, and what the op replaces.

    `views` are q and k as attention reads them. `one_plus` tells whether the norms multiply by 1 + weight.
    """

    sources: tuple[fx.Node, fx.Node]
    norm: tuple[fx.Node | None, fx.Node | None, float]
    one_plus: bool
    views: tuple[fx.Node, fx.Node]
    update: fx.Node
    attention: fx.Node


def is_view(node: fx.Node) -> bool:
    """True if a node is a view of another."""
    return split.calls_method(node, *VIEWS)


def only_view(node: fx.Node) -> fx.Node:
    """Return the last of the views of a node, each the only reader of the one before."""
    while len(node.users) == 1 and is_view(user := next(iter(node.users))):
        node = user
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the readers of a node's values."""
    return [user for user in node.users if not split.calls_method(user, "size")]


def is_own(node: fx.Node) -> bool:
    """True if nothing else reads a node's memory: a result, or a part of a split one, through views or copies."""
    while len(readers(node)) == 1:
        if split.calls_method(node, *split.MAY_ALIAS):
            node = node.args[0]
        elif node.target is operator.getitem and node.args[0].target in SPLITS:
            parts = node.args[0]
            if len({part.args[1:] for part in parts.users}) != len(parts.users):
                return False
            node = parts.args[0]
        else:
            return split.makes_memory(node.args[0] if node.target is operator.getitem else node)
    return False


def normed(node: fx.Node) -> tuple[fx.Node, fx.Node, float, bool] | None:
    """Return what a node is the norm of, the norm's weight and epsilon, and whether it is 1 + weight; None if it is no norm."""
    from vllm_rocm_ops.vllm.graph.markers import BOTH_NORMS

    while is_view(node):
        node = node.args[0]
    if node.target is operator.getitem and node.args[0].target is BOTH_NORMS:
        both, of = node.args
        return both.args[of], both.args[2 + of], both.args[4], False
    if node.target is operator.getitem and reduced_head_norms.is_vllms(node.args[0]):
        both, of = node.args
        return both.args[0], both.args[1 + of], both.args[7], False
    is_whole = split.op_of(node) == NORM and not any(size is not None for size in node.args[3:])
    if not is_whole or len(node.args) < 3 or node.kwargs:
        return None
    source, weight, epsilon = node.args[:3]
    inner = weight.args[0] if isinstance(weight, fx.Node) and weight.target is operator.add else None
    one_plus = split.calls_method(inner, "float") and weight.args[1:] == (1.0,)
    return source, inner.args[0] if one_plus else weight, epsilon, one_plus


def by_head(source: fx.Node, view: fx.Node) -> fx.Node | None:
    """Return the first of the nodes that a source views or copies that has its heads, which may be apart; None if none has.

    `view` is the source as attention reads it.
    """
    found, shape = None, view.args[2:]
    while is_view(source):
        source = source.args[0]
        value = source.meta.get("example_value")
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[1:] == shape and value.stride(2) == 1:
            found = source
    return found


def move_gates(place: Place) -> None:
    """Move what reshapes a gate behind attention: it reads the gate where the projection wrote it, and copies nothing before.

    A gate is another part of the tensor of heads that queries are a part of.
    """
    chunk = place.sources[0].args[0] if place.sources[0].target is operator.getitem else None
    for part in list(chunk.users) if isinstance(chunk, fx.Node) and chunk.target in (torch.chunk, *SPLITS) else ():
        for node in part.users:
            is_late = all(place.attention < user for user in node.users)
            if split.calls_method(node, "reshape") and node < place.attention and is_late:
                place.attention.append(node)


def place_of(marker: fx.Node) -> Place | None:
    """Return the nodes around a marker, or None where the op cannot replace it."""
    _, q, k, *_, norms = marker.args
    parts = {user.args[1]: user for user in marker.users if user.target is operator.getitem}
    if parts.keys() != {0, 1} or len(marker.users) != 2:
        return None
    views = q_view, k_view = tuple(only_view(parts[i]) for i in (0, 1))
    update = next((user for user in k_view.users if split.op_of(user) == UPDATE), None)
    attention = next((user for user in q_view.users if split.op_of(user) == split.ATTENTION), None)
    if update is None or attention is None:
        return None
    is_usual = (
        len(q_view.users) == 1
        and len(attention.args) > 4
        and len(update.args) == 3
        and set(k_view.users) == {update, attention}
        and set(update.users) == {attention}
        and attention.args[:3] == (q_view, k_view, update.args[1])
        and attention.args[4] == update.args[2]
        and all(view.target == "view" and len(view.args) == 4 and view.args[1] == -1 for view in views)
    )
    if not is_usual:
        return None
    if not norms:
        return Place((q, k), (None, None, 0.0), False, views, update, attention) if is_own(q) and is_own(k) else None
    before = normed(q), normed(k)
    if None in before or before[0][2:] != before[1][2:]:
        return None
    (q, q_weight, epsilon, one_plus), (k, k_weight, *_) = before
    sources = tuple(by_head(source, view) or source for source, view in zip((q, k), views))
    return Place(sources, (q_weight, k_weight, epsilon), one_plus, views, update, attention)


def rewrite(graph: fx.Graph, splitting_ops: list[str]) -> int:
    """Replace each marker, with what is around it, by the op where that is possible. Return how often."""
    from vllm_rocm_ops.vllm.graph.markers import ROTATION

    if TORCH_OP not in splitting_ops:
        return 0
    candidates = {marker: place_of(marker) for marker in graph.find_nodes(op="call_function", target=ROTATION)}
    places = {marker: place for marker, place in candidates.items() if place is not None}
    for marker, place in places.items():
        positions, q, k, table, sizes, is_neox, norms = marker.args
        update, attention = place.update, place.attention
        if place.sources[0] is place.sources[1]:  # a projection
            reduced_head_norms.place(graph, place, positions)
            erase([update, *place.views, marker, q, k])
            continue
        with graph.inserting_before(update):
            heads = [
                graph.call_method("view", (source, *view.args[1:])) for source, view in zip(place.sources, place.views)
            ]
            contiguous = {"memory_format": torch.contiguous_format}
            outs = [graph.call_function(torch.empty_like, (x,), contiguous) for x in heads] if norms else [None, None]
            for made, view in zip([*heads, *outs], place.views * 2):
                if made is not None:
                    made.meta = dict(view.meta)
            angles = positions, table, is_neox
            sections = tuple(sizes[3:]) or (0, 0)
            given = *heads, update.args[1], *place.norm, *angles, *outs, place.one_plus, *sections, update.args[2]
            graph.call_function(getattr(torch.ops.vllm_rocm_ops, NAME).default, given)
        attention.args = *(outs if norms else heads), *attention.args[2:]
        attention.kwargs = {**attention.kwargs, "kv_cache_dummy_dep": None}
        erase([update, *place.views, marker, q, k])
        move_gates(place)
    if places:
        text = (
            "vllm-rocm-ops: rotation and cache write are one launch in %d layers (VLLM_ROCM_OPS_SEAMS=-%s disables it)"
        )
        logger.info(text, len(places), SEAM.name)
    if left := len(candidates) - len(places):
        logger.info("vllm-rocm-ops: %d rotations stay vLLM's, as something else reads them or their inputs", left)
    return len(places)


def erase(nodes: list[fx.Node]) -> None:
    """Erase nodes without readers, and what only they read of views, norms and parts."""
    pending = list(nodes)
    while pending:
        node = pending.pop(0)
        is_pure = node.op == "call_function" or split.calls_method(node, *VIEWS, "size")
        if is_pure and not node.users and not node._erased:
            pending += node.all_input_nodes
            node.graph.erase_node(node)


def probe() -> None:
    """Raise `Unavailable` unless the split, the ops and the rotation are as expected."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention import attention as vllm_attention
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    split.probe()
    names = "positions", "query", "key", "head_size", "rotary_dim", "cos_sin_cache", "is_neox_style"
    seam.require_parameters(RotaryEmbedding.forward_static, *names)
    backends.require_attributes(f"{vllm_attention.__name__}.Attention", *OF_LAYER)
    backends.require_attributes(f"{RotaryEmbedding.__module__}.RotaryEmbeddingBase", *OF_ROTATION)
    backends.require_attributes(f"{CustomOp.__module__}.CustomOp", "_forward_method")
    seam.require_parameters(vllm_attention.unified_kv_cache_update, "key", "value", "layer_name")
    split.probe_layer_ops()


def install() -> None:
    """Define the op, and have vLLM split compiled models at it. `fronts` has graphs changed."""
    split.define(attention_front, "q", "k", "q_out", "k_out")
    split.define(reduced_head_norms.reduced_attention_front, fake=reduced_head_norms.fake)
    for name in (TORCH_OP, reduced_head_norms.TORCH_OP):
        split.also_at(name, UPDATE)
    compiled_ops.pattern_finders.append(pre_attentions)
    all_reduce_timing.finders.append(reduced)


SEAM = seam.Seam(
    name="rope_and_cache",
    replaces="unified_kv_cache_update with the rotation and norms before it, in the graph that vllm.compilation.backends.split_graph "
    "splits; CompilationConfig.set_splitting_ops_for_v1",
    probe=probe,
    install=install,
    ops=("rope_and_cache", "qk_norm_rope_and_cache"),
    requires=("decode_attention", "fusion"),
    after=("norm",),
)
