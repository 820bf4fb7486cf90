"""Serve head norms whose squares are summed over ranks, with rotation and cache write, in one launch.

MiniMax-M2 has them with tensor parallelism: vLLM's op normalizes queries and keys of a projection by two launches around an all-reduce,
or by AITER's fused one. In a compiled graph rope_and_cache.py has this op in place of vLLM's, the rotation's marker and the cache update.
It returns new queries and keys, which only attention reads, and chooses at each call by token count: one launch where all ranks timed it
to be faster (all_reduce_timing.py), else vLLM's op and one launch for rotation and cache write.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, fx

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm.attention import split
from vllm_rocm_ops.vllm.attention.rope_pre_attention import OPERANDS, REDUCED, RopePreAttention
from vllm_rocm_ops.vllm.graph import all_reduce_norm, all_reduce_timing
from vllm_rocm_ops.vllm.selection.key import Baseline, Key

NAME = "reduced_attention_front"
TORCH_OP = f"vllm_rocm_ops::{NAME}"
SEARCHED = 4096  # tokens, more than a launch supports
FRONT = "rocm_ops_front"
"""The attribute of an attention layer that holds its `Front`."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A candidate for one launch, by the shape of `RopePreAttention`."""

    shape: str

    @property
    def op(self) -> types.SimpleNamespace:
        """Return the name of the launch, as `kernel_selection.Comparison` has it."""
        return types.SimpleNamespace(name=f"{all_reduce_norm.NAME}_{ops.qk_norm_rope_and_cache.name}")

    def describe(self, _: tuple = ()) -> str:
        return self.shape

    def max_tokens(self) -> int:
        return 0


class Comparison:
    """One launch on all ranks, and vLLM's op followed by the plugin's rotation and cache write, for layers of one shape.

    Inputs are the projection's result [T, columns], which differs per rank, positions [T], slots [T], and a cache.
    """

    is_equal_on_ranks = False

    def __init__(self, parts: list[RopePreAttention], group, reduce: Callable):
        self.parts, self.part, self.group, self.reduce = parts, parts[0], group, reduce
        self.call = Call(self.part.key.shape)
        name = f"{group.world_size}-ranks" + f"-{all_reduce_timing.AITER}" * has_aiters()
        self.key = Key(self.call.op.name, self.call.shape, Baseline(name))

    def token_counts(self) -> list[int]:
        """Return the token counts to time: powers of two, and the largest that a launch supports."""
        largest = bisect.bisect_left(range(1, SEARCHED), True, key=lambda tokens: not self.supports(tokens))
        return sorted(({1 << power for power in range(largest.bit_length())} | {largest}) - {0})

    def supports(self, tokens: int) -> bool:
        """True if a launch supports this many tokens."""

        def unsupported(*args) -> str:
            given = (value.to("meta") if isinstance(value, Tensor) else value for value in args)
            return self.reduce.unsupported(self.part.op, *given)

        empty = functools.partial(torch.empty, device="meta")
        ids, qkv = empty(tokens, dtype=torch.int64), empty(tokens, self.part.columns, dtype=self.part.dtype)
        return not self.part.run(unsupported, qkv, ids, ids, self.part.cache(1, "meta"))[0]

    def inputs(self, tokens: int, seed: int) -> tuple[list[Tensor], tuple]:
        """Return the projection's result of all ranks, and the further arguments."""
        of_ranks = [
            self.part.inputs(tokens, self.group.world_size * seed + rank) for rank in range(self.group.world_size)
        ]
        return [qkv for qkv, *_ in of_ranks], of_ranks[0][1:]

    def plugin(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [T, heads, size] by the plugin's launch, and the cache."""
        _, q, k = self.part.run(functools.partial(self.reduce, self.part.op), qkv, positions, slots, cache)
        return q, k, cache

    def baseline(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same by vLLM's op, and by one launch for rotation and cache write."""
        return *by_vllm(self.part, qkv, positions, slots, cache), cache

    def results(self, outputs: tuple, args: list) -> list[Tensor]:
        return self.part.results(outputs, len(outputs[0]))

    def with_fp8(self, every: list[Tensor], args: tuple) -> None:
        """Return None: a launch sends sums of squares as they are."""

    def exact(self, every: list[Tensor], args: tuple) -> list[Tensor]:
        """Return the reference result in float32, in the order of `results`."""
        means = [sum(of_ranks) / len(every) for of_ranks in zip(*map(self.part.mean_squares, every))]
        return self.part.exact(every[self.group.rank_in_group], *args, means=means)

    def apply(self, shared: all_reduce_norm.GroupAllReduce, communicator) -> None:
        """Have the layers' rotation marked in vLLM's graph, with the norms, if the launch serves some token count."""
        if shared.wins(self.call, everywhere=False):
            for part in self.parts:
                setattr(part.attn, FRONT, Front(part, shared, self.call))
                part.mark(True)


def has_aiters() -> bool:
    """True if vLLM's op may run AITER's fused launch."""
    from vllm._aiter_ops import rocm_aiter_ops

    return getattr(rocm_aiter_ops, "get_aiter_allreduce", lambda: None)() is not None


def by_vllm(
    part: RopePreAttention, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q and k [T, heads, size], normalized by vLLM's op and rotated, and write the cache."""
    query, key, size = part.heads
    q_norm, k_norm = part.norms
    weights, sizes = (q_norm.weight, k_norm.weight), (query * size, key * size)
    of_rank = q_norm.tp_rank, q_norm.tp_world, q_norm.variance_epsilon, q_norm.workspace
    normed = getattr(torch.ops.vllm, REDUCED)(qkv, *weights, *sizes, *of_rank)
    q, k = (x.unflatten(1, (-1, size)) for x in normed)
    angles = part.model_positions(positions), part.rotary.cos_sin_cache, part.rotary.is_neox_style
    places = *part.decoder.caches(part.attn, cache), slots, *part.decoder.scales(part.attn)
    ops.rope_and_cache.call(q, k, part.parts(qkv)[2], *angles, *places)
    return q, k


def comparisons(parts: Iterable[RopePreAttention], group, reduce: Callable) -> Iterator[Comparison]:
    """Yield a comparison for each shape of layers whose norms are over this group's ranks."""
    by_shape: dict[str, list[RopePreAttention]] = {}
    for part in parts:
        if part.ranks == group.world_size:
            by_shape.setdefault(part.key.shape, []).append(part)
    for alike in by_shape.values():
        yield Comparison(alike, group, reduce)


# The op


@dataclasses.dataclass(frozen=True)
class Front:
    """A layer's part, and where the ranks of its group agreed on one launch."""

    part: RopePreAttention
    shared: all_reduce_norm.GroupAllReduce
    call: Call


def reduced_attention_front(
    qkv: Tensor, positions: Tensor, heads: int, kv_heads: int, size: int, layer_name
) -> tuple[Tensor, Tensor]:
    """Return a layer's queries and keys [T, heads, size], normalized and rotated, and write the step's cache."""
    from vllm.model_executor.layers.attention.attention import get_attention_context
    from vllm.utils.torch_utils import _resolve_layer_name

    _, layer, cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    front = getattr(layer, FRONT)
    part = front.part
    if slots is None or cache.numel() == 0:  # vLLM's profile run
        slots, cache = positions.new_empty(0), part.cache(1, qkv.device)
    given = qkv, positions, slots.flatten()[: len(qkv)], cache
    if not front.shared.serves(front.call, len(qkv)):
        return by_vllm(part, *given)
    return part.run(functools.partial(front.shared.reduce, part.op), *given)[1:]


def fake(qkv: Tensor, positions: Tensor, heads: int, kv_heads: int, size: int, layer_name) -> tuple[Tensor, Tensor]:
    """Return the results without their values."""
    return qkv.new_empty(len(qkv), heads, size), qkv.new_empty(len(qkv), kv_heads, size)


def is_vllms(node: fx.Node) -> bool:
    """True if a node calls vLLM's op."""
    return split.op_of(node) == f"vllm::{REDUCED}" and len(node.args) == len(OPERANDS)


def place(graph: fx.Graph, found, positions: fx.Node) -> None:
    """Have attention read the results of the op, at a `rope_and_cache.Place`."""
    op = getattr(torch.ops.vllm_rocm_ops, NAME).default
    (heads, size), (kv_heads, _) = (view.args[2:] for view in found.views)
    with graph.inserting_before(found.update):
        both = graph.call_function(op, (found.sources[0], positions, heads, kv_heads, size, found.update.args[2]))
        outs = [graph.call_function(operator.getitem, (both, of)) for of in range(2)]
    both.meta["example_value"] = tuple(view.meta.get("example_value") for view in found.views)
    for out, view in zip(outs, found.views):
        out.meta = dict(view.meta)
    attention = found.attention
    attention.args, attention.kwargs = (*outs, *attention.args[2:]), {**attention.kwargs, "kv_cache_dummy_dep": None}
