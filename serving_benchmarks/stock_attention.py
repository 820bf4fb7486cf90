"""What vLLM's backends run for attention of decode, as functions of the arguments of our ops: see stock.py, which chooses.

A step builds metadata once for all of its layers. So does a candidate, in its first call with arguments of a shape: lengths of
later calls must be those of the first. Caches are not quantised, a request has one row, and there are no windows and no sinks.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.bench import peers
from vllm_rocm_ops.op import Op

MOST_SPLITS = 32  # of a sequence by FlashAttention, as vLLM allows in a captured graph
SPLIT_KEYS, SPLITS_PER_UNIT = 512, 2  # of the Triton kernel for latent attention
SEGMENTS, LEAST_BLOCKS = 16, 128  # of the Triton kernel for all others


@functools.cache
def one(device: torch.device) -> Tensor:
    """The scale of a cache that is not quantised."""
    return torch.ones(1, device=device)


def _vllm_op(name: str, namespace: str = "_C") -> Callable:
    """Raises ImportError where vLLM's op is not loaded."""
    peers.load()
    found = getattr(getattr(torch.ops, namespace), name, None)
    if found is None:
        raise ImportError(f"vLLM has no {name}")
    return found


def _triton(name: str):
    """A module of vLLM's ops in Triton. Raises ImportError without Triton."""
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise ImportError("there is no Triton")
    return importlib.import_module(f"vllm.v1.attention.ops.{name}")


# Rotation and the write to a cache


def _rotate(query, key, value, positions, cos_sin, is_neox, key_cache, value_cache, slots, *_):
    _vllm_op("rotary_embedding")(positions, query, key, key_cache.shape[-1], cos_sin, is_neox)
    k, v = (rows.unflatten(1, (-1, key_cache.shape[-1])) for rows in (key, value))
    write, scale = _vllm_op("reshape_and_cache_flash", "_C_cache_ops"), one(query.device)
    write(k, v, key_cache, value_cache, slots, "auto", scale, scale)


def _rotate_latent(q_pe, k_pe, kv_c, positions, cos_sin, is_neox, kv_cache, slots, *_):
    _vllm_op("rotary_embedding")(positions, q_pe, k_pe[:, None], k_pe.shape[1], cos_sin, is_neox)
    write = _vllm_op("concat_and_cache_mla", "_C_cache_ops")
    write(kv_c, k_pe, kv_cache, slots, "auto", one(q_pe.device))


def _rotated(x: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool) -> None:
    """Rotates heads [tokens, heads, size] in place."""
    cos, sin = cos_sin[positions].float()[:, None].chunk(2, -1)
    parts = x.chunk(2, -1) if is_neox else (x[..., ::2], x[..., 1::2])
    first, second = (part.float() for part in parts)
    parts[0].copy_(first * cos - second * sin)
    parts[1].copy_(second * cos + first * sin)


def _rotate_by_torch(query, key, value, positions, cos_sin, is_neox, key_cache, value_cache, slots, *_):
    q, k, v = (rows.unflatten(1, (-1, key_cache.shape[-1])) for rows in (query, key, value))
    page = key_cache.shape[1]
    for rows in (q, k):
        _rotated(rows, positions, cos_sin, is_neox)
    for cache, rows in ((key_cache, k), (value_cache, v)):
        cache[slots // page, slots % page] = rows


def _rotate_latent_by_torch(q_pe, k_pe, kv_c, positions, cos_sin, is_neox, kv_cache, slots, *_):
    for rows in (q_pe, k_pe[:, None]):
        _rotated(rows, positions, cos_sin, is_neox)
    page = kv_cache.shape[1]
    kv_cache[slots // page, slots % page] = torch.cat((kv_c, k_pe), -1)


# Attention


class Planned:
    """A candidate that plans a step's work in its first call of a shape: `plan` says what all layers share."""

    plan: Callable[..., dict[str, object]]

    def __init__(self):
        self.plans: dict[tuple, dict[str, object]] = {}

    def planned(self, *arguments: Tensor) -> dict[str, object]:
        key = tuple(tuple(value.shape) for value in arguments)
        if key not in self.plans:
            self.plans[key] = self.plan(*arguments)
        return self.plans[key]


def _starts(lengths: Tensor) -> Tensor:
    """Of the sequences' rows."""
    return torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)


class FlashAttention(Planned):
    """FLASH_ATTN with FlashAttention 3."""

    def plan(self, query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> dict[str, object]:
        flash = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
        (batch, heads, _), (_, page, kv_heads, value_size) = query.shape, values.shape
        sizes = batch, 1, int(lengths.max()), heads, kv_heads, keys.shape[3]
        how = {"cu_seqlens_q": _starts(lengths), "num_splits": MOST_SPLITS, "causal": True}
        schedule = flash.get_scheduler_metadata(
            *sizes, lengths, keys.dtype, headdim_v=value_size, page_size=page, **how
        )
        how |= {"max_seqlen_q": 1, "max_seqlen_k": sizes[2], "scheduler_metadata": schedule, "fa_version": 3}
        return {"call": functools.partial(flash.flash_attn_varlen_func, **how)}

    def __call__(self, query, key_cache, value_cache, block_table, seq_lens, scale, *_, **of_latent):
        call = self.planned(query, key_cache, value_cache, seq_lens)["call"]
        shared = {"seqused_k": seq_lens, "block_table": block_table, "softmax_scale": scale}
        return call(query, key_cache, value_cache, **shared, **of_latent)


class FlashAttentionMla(FlashAttention):
    """FLASH_ATTN_MLA, which vLLM takes on Hopper: the rotated parts are keys, and latents values."""

    def __call__(self, q_nope, q_pe, kv_cache, *rest):
        values, keys = kv_cache.unsqueeze(2).split((q_nope.shape[2], q_pe.shape[2]), -1)
        return super().__call__(q_pe, keys, values, *rest, q_v=q_nope)


class Unified(Planned):
    """TRITON_ATTN."""

    def plan(self, query: Tensor, lengths: Tensor, keys: Tensor) -> dict[str, object]:
        attend = _triton("triton_unified_attention").unified_attention
        (_, heads, size), most = query.shape, LEAST_BLOCKS // keys.shape[2]
        padded = 1 << (size - 1).bit_length()
        of_segments = {"dtype": torch.float32, "device": query.device}
        maxima, sums = (torch.empty(most, heads, SEGMENTS, **of_segments) for _ in range(2))
        return {
            "call": functools.partial(
                attend,
                cu_seqlens_q=_starts(lengths),
                max_seqlen_q=1,
                max_seqlen_k=int(lengths.max()),
                causal=True,
                window_size=(-1, -1),
                softcap=0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                seq_threshold_3D=most,
                num_par_softmax_segments=SEGMENTS,
                softmax_segm_output=torch.empty(most, heads, SEGMENTS, padded, **of_segments),
                softmax_segm_max=maxima,
                softmax_segm_expsum=sums,
            )
        }

    def __call__(self, query, key_cache, value_cache, block_table, seq_lens, scale, *_):
        out, call = torch.empty_like(query), self.planned(query, seq_lens, key_cache)["call"]
        call(query, key_cache, value_cache, out, seqused_k=seq_lens, softmax_scale=scale, block_table=block_table)
        return out


def _attend_by_torch(query, key_cache, value_cache, block_table, seq_lens, scale, *_):
    (batch, heads, _), kv_heads = query.shape, key_cache.shape[2]
    keys, values = (cache[block_table.long()].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
    seen = (torch.arange(keys.shape[2], device=query.device) < seq_lens[:, None])[:, None, None]
    q = query.unflatten(1, (kv_heads, -1))  # the heads of a group are rows of one query
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, keys, values, seen, scale=scale).reshape(batch, heads, -1)


class FlashMla(Planned):
    """FLASHMLA."""

    def plan(self, query: Tensor, lengths: Tensor) -> dict[str, object]:
        mla = importlib.import_module("vllm.v1.attention.ops.flashmla")
        call = functools.partial(mla.flash_mla_with_kvcache, causal=True)
        return {"call": call, "schedule": mla.get_mla_metadata()[0]}

    def __call__(self, q_nope, q_pe, kv_cache, block_table, seq_lens, scale, *_):
        plan = self.planned(q_nope, seq_lens)
        q, cache = torch.cat((q_nope, q_pe), -1)[:, None], kv_cache[:, :, None]
        found, _ = plan["call"](q, cache, block_table, seq_lens, q_nope.shape[2], plan["schedule"], softmax_scale=scale)
        return found[:, 0]


class TritonMla(Planned):
    """TRITON_MLA."""

    def plan(self, query: Tensor, lengths: Tensor) -> dict[str, object]:
        attend = _triton("triton_decode_attention").decode_attention_fwd
        most = max(int(lengths.max()) // SPLIT_KEYS, 1)
        units = torch.cuda.get_device_properties(query.device).multi_processor_count
        splits = min(1 << (most - 1).bit_length(), SPLITS_PER_UNIT * units)
        partials = torch.empty(*query.shape[:2], splits, query.shape[2] + 1, device=query.device)
        return {"call": attend, "splits": splits, "partials": partials}

    def __call__(self, q_nope, q_pe, kv_cache, block_table, seq_lens, scale, *_):
        plan, unit = self.planned(q_nope, seq_lens), one(q_nope.device)
        q, rows = torch.cat((q_nope, q_pe), -1), kv_cache.unsqueeze(2)
        out, lse = torch.zeros_like(q[..., : q_nope.shape[2]]), q.new_zeros(q.shape[:2])  # as vLLM does
        split, values = (plan["partials"], plan["splits"]), rows[..., : q_nope.shape[2]]
        places, page = (block_table, seq_lens), kv_cache.shape[1]
        plan["call"](q, rows, values, out, lse, *places, *split, scale, page, k_scale=unit, v_scale=unit, is_mla=True)
        return out


def _attend_latent_by_torch(q_nope, q_pe, kv_cache, block_table, seq_lens, scale, *_):
    rows = kv_cache[block_table.long()].flatten(1, 2)
    scores = torch.bmm(torch.cat((q_nope, q_pe), -1), rows.transpose(1, 2)) * scale
    seen = torch.arange(rows.shape[1], device=rows.device) < seq_lens[:, None]
    weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), -1)
    return torch.bmm(weights, rows[..., : q_nope.shape[2]])


KINDS: dict[str, dict[str, Callable[[], Callable]]] = {  # by op and name, what makes a function of the op's arguments
    "rope_and_cache": {
        "vllm rotary_embedding + reshape_and_cache_flash": lambda: _rotate,
        "torch": lambda: _rotate_by_torch,
    },
    "rope_and_cache_mla": {
        "vllm rotary_embedding + concat_and_cache_mla": lambda: _rotate_latent,
        "torch": lambda: _rotate_latent_by_torch,
    },
    "paged_attention_decode": {
        "vllm FlashAttention 3": FlashAttention,
        "vllm Triton unified_attention": Unified,
        "torch": lambda: _attend_by_torch,
    },
    "mla_decode": {
        "vllm FlashAttention 3": FlashAttentionMla,
        "vllm FlashMLA": FlashMla,
        "vllm Triton MLA": TritonMla,
        "torch": lambda: _attend_latent_by_torch,
    },
}


def candidates(op: Op) -> Iterator[tuple[str, Callable]]:
    """Functions that compute an op of attention, by name, the first choice first."""
    for name, make in KINDS[op.name].items():
        yield name, make() if op.mutates else functools.partial(_as_op, make())


def _as_op(attend: Callable, *arguments) -> tuple[Tensor, Tensor]:
    """The rows, and no logarithms."""
    out = attend(*arguments)
    return out, out.new_empty((0, 0), dtype=torch.float32)
