"""Compute flash attention (forward) in plain PyTorch, and plan its launches; flash_attention.py has the rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Launch, fields
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.ops.shared import attention
from vllm_rocm_ops.ops.shared.attention import CacheLayout, CacheStrides, of_16_bytes, on_vectors
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES, divisor

LAYOUTS = ("bshd", "bhsd", "thd")
SCORES_AT_ONCE = 2**24  # scores that the reference holds at a time
WORD = 2**32


def is_narrow(dtype: torch.dtype) -> bool:
    """True if a dtype is int8 or e4m3, whose elements have a scale."""
    return dtype == torch.int8 or dtype in LIMIT


def out_dtype(a) -> torch.dtype:
    """Return the dtype of the result."""
    return a.out_dtype or (torch.float16 if is_narrow(a.q.dtype) else a.q.dtype)


def by_row(x: Tensor, layout: str) -> Tensor:
    """Return a view [batch, rows, heads, size] of a tensor in this layout."""
    return x.unsqueeze(0) if layout == "thd" else x.transpose(1, 2) if layout == "bhsd" else x


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call. In varlen batches rows and keys count all sequences; keys of a cache count its slots."""

    sequences: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    value_size: int

    @staticmethod
    def of(a) -> Sizes:
        """Return the sizes of a call's arguments."""
        q = by_row(a.q, a.layout)
        if a.block_table is not None:
            cache = CacheLayout(a.k, a.v)
            keys = a.block_table.shape[1] * cache.page_size
            kv_heads, value_size, sequences = cache.heads, cache.value_size, len(a.block_table)
        else:
            k, v = by_row(a.k, a.layout), by_row(a.v, a.layout)
            keys, kv_heads, value_size = k.shape[1], k.shape[2], v.shape[3]
            sequences = len(q) if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1
        return Sizes(sequences, q.shape[1], keys, q.shape[2], kv_heads, q.shape[3], value_size)


def allocate(a) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, unwritten."""
    sizes = Sizes.of(a)
    out = a.q.new_empty((*a.q.shape[:-1], sizes.value_size), dtype=out_dtype(a))
    dense = (len(a.q), sizes.heads, sizes.rows)
    of_lse = (0,) * (2 if a.layout == "thd" else 3)
    if a.return_lse:
        of_lse = (sizes.heads, sizes.rows) if a.layout == "thd" else dense
    lse = a.q.new_empty(of_lse, dtype=torch.promote_types(out.dtype, torch.float32))
    mask = a.q.new_empty((*dense, sizes.keys) if a.return_mask else (0,) * 4, dtype=torch.bool)
    return out, lse, mask


# Dropout: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with counter (key / 4, row, head,
# sequence); a key has word key % 4. A weight is kept if its word is at least the threshold.


def threshold(dropout: float) -> int:
    """Return the smallest word that keeps a weight."""
    return min(round(dropout * WORD), WORD - 1)


def _product(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower word of a product."""
    low, high = constant * (x & 0xFFFF), constant * (x >> 16)
    return (high + (low >> 16)) >> 16, (low + ((high & 0xFFFF) << 16)) & (WORD - 1)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of each counter."""
    x, y, z, w = counter
    low, high = seed % WORD, seed // WORD % WORD
    for _ in range(10):
        (first_high, first_low), (second_high, second_low) = _product(0xD2511F53, x), _product(0xCD9E8D57, z)
        x, y, z, w = second_high ^ y ^ low, second_low, first_high ^ w ^ high, first_low
        low, high = (low + 0x9E3779B9) % WORD, (high + 0xBB67AE85) % WORD
    return x, y, z, w


def kept(a, sequence: int, rows: Tensor, heads: int, keys: int) -> Tensor:
    """Return the dropout mask [rows, heads, keys]: True for weights that are kept."""
    device = rows.device
    groups = torch.arange(-(-keys // 4), device=device)
    parts = torch.broadcast_tensors(
        groups[None, None], rows[:, None, None], torch.arange(heads, device=device)[None, :, None]
    )
    words = torch.stack(philox((*parts, torch.full_like(parts[0], sequence)), a.seed), -1)
    return words.flatten(-2)[..., :keys] >= threshold(a.dropout)


# The reference


def _by_head(scale: Tensor | None, heads: int, exact: torch.dtype, device) -> Tensor:
    if scale is None:
        return torch.ones(heads, dtype=exact, device=device)
    return scale.reshape(-1).to(exact).expand(heads)


def _attend(a, sequence: int, first: int, length: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend from rows q [rows, heads, size] to all keys k [keys, key heads, size] and values of a sequence.

    The rows begin at row `first` of the sequence's `length`. Returns [rows, heads, value size] and the log-sum-exp [rows, heads].
    """
    exact, device = torch.promote_types(out_dtype(a), torch.float32), q.device
    (heads, _), (keys, kv_heads, _) = q.shape[1:], k.shape
    group = heads // kv_heads
    of_key, of_value = (_by_head(s, kv_heads, exact, device).repeat_interleave(group) for s in (a.k_scale, a.v_scale))
    factor = a.scale * _by_head(a.q_scale, heads, exact, device) * of_key
    scores = torch.einsum("rkgd,nkd->rkgn", q.to(exact).unflatten(1, (kv_heads, group)), k.to(exact)).flatten(1, 2)
    scores = scores * factor[:, None]
    if a.softcap > 0:
        scores = a.softcap * torch.tanh(scores / a.softcap)
    rows, places = torch.arange(first, first + len(q), device=device), torch.arange(keys, device=device)
    last = (rows + keys - length)[:, None]  # last key that a causal row sees
    if a.alibi_slopes is not None:
        scores = scores - a.alibi_slopes[sequence].to(exact)[:, None] * (last - places).abs()[:, None]
    if a.bias is not None:
        bias = a.bias[sequence if len(a.bias) > 1 else 0, :, first : first + len(q), :keys]
        scores = scores + bias.to(exact).transpose(0, 1)
    seen = (places <= last) if a.causal else torch.ones_like(places <= last)
    if a.window > 0:
        seen &= places > last - a.window
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    largest = scores.amax(-1, keepdim=True) if keys else scores.new_full((*scores.shape[:2], 1), -math.inf)
    weights = (scores - largest.nan_to_num(neginf=0.0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (largest + total.log())[..., 0]
    if a.dropout > 0:
        weights = weights * kept(a, sequence, rows, heads, keys)
    weights = _rounded(a, weights)
    values = torch.einsum("rkgn,nkd->rkgd", weights.unflatten(1, (kv_heads, group)), v.to(exact)).flatten(1, 2)
    values = values * (of_value / (1.0 - a.dropout))[:, None]
    return torch.where(total > 0, values / total, 0.0), lse.where(total[..., 0] > 0, math.inf)


def _rounded(a, weights: Tensor) -> Tensor:
    """Round the softmax weights as the second GEMM reads them; float64 weights stay."""
    if weights.dtype == torch.float64:
        return weights
    if a.p_scale is None:
        return weights.to(out_dtype(a)).to(weights.dtype)
    scale = _by_head(a.p_scale, weights.shape[1], weights.dtype, weights.device)[:, None]
    return (weights * scale).round().clamp(max=127.0) / scale


def _sequences(a) -> Iterator[tuple[tuple[int, slice], Tensor, Tensor, Tensor]]:
    """Yield each sequence's (batch index, slice of rows), and its rows, keys and values."""
    q = by_row(a.q, a.layout)
    if a.cu_seqlens_q is None:
        k, v = by_row(a.k, a.layout), by_row(a.v, a.layout)
        for b in range(len(q)):
            yield (b, slice(None)), q[b], k[b], v[b]
        return
    begins = a.cu_seqlens_q.tolist()
    if a.block_table is not None:
        cache, lens = CacheLayout(a.k, a.v), a.seq_lens.tolist()
    else:
        of_keys = a.cu_seqlens_k.tolist()
    for r, (begin, end) in enumerate(itertools.pairwise(begins)):
        if a.block_table is not None:
            places = torch.arange(max(lens[r], 0), device=q.device)
            slots = a.block_table[r, places // cache.page_size].long(), places % cache.page_size
            k, v = cache.keys(*slots), cache.values(*slots)
        else:
            k, v = (x[of_keys[r] : of_keys[r + 1]] for x in (a.k, a.v))
        yield (0, slice(begin, end)), q[0, begin:end], k, v


def reference(a) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of a call, computed in plain PyTorch."""
    outputs = allocate(a)
    out, sizes = by_row(outputs[0], a.layout), Sizes.of(a)
    lse = torch.empty((*out.shape[:3],), dtype=outputs[1].dtype, device=out.device)
    for r, ((b, span), q, k, v) in enumerate(_sequences(a)):
        step = max(SCORES_AT_ONCE // max(len(k) * sizes.heads, 1), 1)
        for first in range(0, len(q), step):
            attended = _attend(a, r, first, len(q), q[first : first + step], k, v)
            rows = slice(first, first + step)
            for target, values in zip((out[b, span], lse[b, span]), attended):
                target[rows] = values.to(target.dtype)
        if a.return_mask:
            outputs[2][b] = kept(a, r, torch.arange(len(q), device=q.device), sizes.heads, len(k)).transpose(0, 1)
    if a.return_lse:
        outputs[1].copy_((lse[0] if a.layout == "thd" else lse).transpose(-1, -2))
    return outputs


# Plans

TILE_ROWS = 128
THREADS = 256
RESIDENT = 2  # blocks per compute unit
KINDS = {torch.int8: 2, torch.float8_e4m3fn: 1, torch.float8_e4m3fnuz: 1}  # element kinds; 0 is the dtype of the GEMM
BY_ELEMENT, BY_KEY, ANY_ORDER = range(3)  # FlashOrder of csrc/ops/standalone/flash_problem.h
PLAIN_SIZES = ((64, 64), (128, 128), (192, 128), (256, 256))  # head sizes of keys and values
GENERAL_SIZES = (128, 256)  # limits of both head sizes


@dataclass(frozen=True)
class FlashConfig:
    """Schedule of the tiles of 128 rows of a head.

    "each": one tile per block. "fixed": persistent blocks, each with a fixed share. "dynamic": persistent blocks that fetch the next
    tile when they finish one.
    """

    tiles: str


def row_tiles(a) -> int:
    """Return the row tiles of a sequence; in varlen batches an upper bound for all sequences."""
    sizes = Sizes.of(a)
    return sizes.rows // TILE_ROWS + sizes.sequences if a.layout == "thd" else -(-sizes.rows // TILE_ROWS)


def tiles(a) -> int:
    """Return the tiles of a call."""
    sizes = Sizes.of(a)
    return row_tiles(a) * sizes.heads * (1 if a.layout == "thd" else sizes.sequences)


def configs(a, arch: Arch) -> list[FlashConfig]:
    """Return one tile per block and, if tiles exceed the resident blocks, the persistent schedules."""
    persistent = ("fixed", "dynamic") if tiles(a) > RESIDENT * arch.compute_units else ()
    return [FlashConfig(schedule) for schedule in ("each", *persistent)]


def strides(a) -> tuple[CacheStrides, CacheStrides]:
    """Return the strides of keys and values, with a sequence as one page."""
    if a.block_table is not None:
        cache = CacheLayout(a.k, a.v)
        return cache.key_strides(), cache.value_strides()
    of_both = []
    for x in (a.k, a.v):
        batch, row, head, element = by_row(x, a.layout).stride()
        vec = of_16_bytes(x)
        of_both.append(CacheStrides(0 if a.layout == "thd" else batch, head, row * vec, row, element * vec, element))
    return tuple(of_both)


def _steps(cache: CacheStrides) -> tuple[int, ...]:
    """Return all strides except the element stride."""
    return cache.block_stride, cache.head_stride, cache.group_stride, cache.slot_stride, cache.chunk_stride


def orders(a) -> tuple[int, int, int]:
    """Return the order of q, k and v: contiguous elements, contiguous keys, or any."""
    sizes, (of_key, of_value), q = Sizes.of(a), strides(a), by_row(a.q, a.layout)
    is_together = q.stride(3) == 1 and sizes.size % 8 == 0 and on_vectors(a.q, *q.stride()[:3])
    of_q = BY_ELEMENT if is_together else ANY_ORDER
    is_together = of_key.element_stride == 1 and sizes.size % 8 == 0 and on_vectors(a.k, *_steps(of_key))
    of_k = BY_ELEMENT if is_together else ANY_ORDER
    is_together = (
        of_value.element_stride == 1 and sizes.value_size % 4 == 0 and on_vectors(a.v, *_steps(of_value), elements=4)
    )
    if is_together:
        return of_q, of_k, BY_ELEMENT
    steps = (of_value.block_stride, of_value.head_stride, of_value.group_stride, of_value.chunk_stride)
    is_together = of_value.slot_stride == 1 and a.cu_seqlens_k is None and page_size(a) % 8 == 0
    is_together = is_together and on_vectors(a.v, *steps, of_value.element_stride)
    return of_q, of_k, BY_KEY if is_together else ANY_ORDER


def page_size(a) -> int:
    """Return the page size of a cache; without one, a multiple of every vector size."""
    return 2**20 if a.block_table is None else CacheLayout(a.k, a.v).page_size


def is_plain(a) -> bool:
    """True if the plain kernels support a call. The general kernels, which are slower, support more."""
    sizes, (of_key, of_value) = Sizes.of(a), strides(a)
    extras = (a.block_table, a.alibi_slopes, a.bias, a.q_scale, a.k_scale, a.v_scale)
    return (
        a.k.dtype == a.q.dtype == out_dtype(a)
        and (sizes.size, sizes.value_size) in PLAIN_SIZES
        and all(extra is None for extra in extras)
        and a.softcap == a.dropout == 0
        and a.scale > 0
        and orders(a) == (BY_ELEMENT, BY_ELEMENT, BY_ELEMENT)
        and max(of_key.slot_stride, of_value.slot_stride) < 2**24
        and on_vectors(a.v, *_steps(of_value))
    )


def _extras(a) -> dict[str, object]:
    """Return FlashExtras of csrc/ops/standalone/flash_problem.h."""
    sizes, q = Sizes.of(a), by_row(a.q, a.layout)
    by_head = {"query": a.q_scale, "key": a.k_scale, "value": a.v_scale, "weight": a.p_scale}
    bias, slopes = (tuple(x.stride()) if x is not None else (0,) * 4 for x in (a.bias, a.alibi_slopes))
    return {
        "block_table": a.block_table,
        "slopes": a.alibi_slopes,
        "query_scale": a.q_scale,
        "weight_scale": a.p_scale,
        "bias": a.bias,
        "query_element_stride": q.stride(3),
        "table_stride": 0 if a.block_table is None else a.block_table.stride(0),
        "slopes_stride": slopes[0],
        "slopes_head_stride": slopes[1],
        "bias_batch_stride": bias[0] if a.bias is not None and len(a.bias) > 1 else 0,
        **dict(zip(("bias_head_stride", "bias_row_stride", "bias_key_stride"), bias[1:])),
        "softcap": float(a.softcap),
        "factor": 1.0 / (1.0 - a.dropout),
        "size": sizes.size,
        "value_size": sizes.value_size,
        "page_size": page_size(a),
        "query_type": KINDS.get(a.q.dtype, 0),
        "key_type": KINDS.get(a.k.dtype, 0),
        **dict(zip(("query_order", "key_order", "value_order"), orders(a))),
        "bias_type": 0 if a.bias is None else OUT_TYPES[a.bias.dtype],
        **{f"{name}_scale_stride": int(scale is not None and scale.numel() > 1) for name, scale in by_head.items()},
        "threshold": threshold(a.dropout) if a.dropout > 0 else 0,
        "seed_low": a.seed % WORD,
        "seed_high": a.seed // WORD % WORD,
        "page_divisor": divisor(page_size(a)),
    }


def _mask_launch(mask: Tensor, a) -> Launch:
    sizes = Sizes.of(a)
    args = {
        "mask": mask,
        "keys": sizes.keys,
        "threshold": threshold(a.dropout),
        "seed_low": a.seed % WORD,
        "seed_high": a.seed // WORD % WORD,
        "rows_divisor": divisor(sizes.rows),
        "heads_divisor": divisor(sizes.heads),
        "rows": sizes.rows,
        "heads": sizes.heads,
    }
    grid = (sizes.sequences * sizes.heads * sizes.rows, 1, 1)
    return Launch("flash_attention", "flash_attention_mask", grid, (THREADS, 1, 1), fields("problem", args))


def launches(config: FlashConfig, outputs: tuple[Tensor, Tensor, Tensor], a, arch: Arch) -> list[Launch]:
    """Return the launches of a call."""
    sizes, (out, lse, mask), count = Sizes.of(a), outputs, tiles(a)
    if count == 0:
        return []
    blocks = count if config.tiles == "each" else min(count, RESIDENT * arch.compute_units)
    q, rows_of_out, is_dense = by_row(a.q, a.layout), by_row(out, a.layout), a.layout != "thd"
    of_key, of_value = strides(a)
    args = {
        "query": a.q,
        "out": out,
        "lse": lse if a.return_lse else None,
        "key": {"data": a.k, "scale": a.k_scale, "offset": 0, **vars(of_key)},
        "value": {"data": a.v, "scale": a.v_scale, "offset": 0, **vars(of_value)},
        "row_begins": a.cu_seqlens_q,
        "key_begins": a.cu_seqlens_k,
        "seq_lens": a.seq_lens,
        "counter": Counters(1) if config.tiles == "dynamic" else None,
        "query_batch_stride": q.stride(0) if is_dense else 0,
        "query_row_stride": q.stride(1),
        "query_head_stride": q.stride(2),
        "out_batch_stride": rows_of_out.stride(0) if is_dense else 0,
        "out_row_stride": rows_of_out.stride(1),
        "out_head_stride": rows_of_out.stride(2),
        "lse_batch_stride": sizes.heads * sizes.rows if is_dense else 0,
        "lse_head_stride": sizes.rows,
        "scale": float(a.scale),
        "rows": sizes.rows,
        "keys": sizes.keys,
        "sequences": sizes.sequences,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "group": sizes.heads // sizes.kv_heads,
        "tiles": count,
        "row_tiles": row_tiles(a),
        "blocks": blocks,
        "causal": int(a.causal),
        "window": min(a.window, 2**30),
        "heads_divisor": divisor(sizes.heads),
        "kv_heads_divisor": divisor(sizes.kv_heads),
        "sequences_divisor": divisor(max(sizes.sequences, 1)),
    }
    kind, args = attention.ELEMENTS[out.dtype], fields("problem", args)
    size = sizes.size
    if not is_plain(a):
        size = f"general_{next(most for most in GENERAL_SIZES if max(sizes.size, sizes.value_size) <= most)}"
        args |= fields("extras", _extras(a))
    planned = [Launch("flash_attention", f"flash_attention_{kind}_{size}", (blocks, 1, 1), (THREADS, 1, 1), args)]
    return [*planned, _mask_launch(mask, a)] if mask.numel() else planned
