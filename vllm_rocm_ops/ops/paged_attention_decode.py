"""Attention of few query rows per request to a paged cache of keys and values (flash decoding); kernels: csrc/attention/decode.h."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.families import attention
from vllm_rocm_ops.families.attention import CacheLayout
from vllm_rocm_ops.families.gemm import divisor
from vllm_rocm_ops.launch import Counters, Launch, Workspace, fields
from vllm_rocm_ops.op import Case, Op
from vllm_rocm_ops.tensors import describe, is_wide_float

__all__ = ["paged_attention_decode"]

SIZES = (64, 128, 192, 256)  # of a head
MOST_ROWS = 8  # of a request
COLUMNS = 16  # rows times heads of a group that a block has
STEP = 128  # keys that a block has at a time
MOST_PARTS = 128
WAVES = 4
RESIDENT = 2  # blocks of a compute unit
# Microseconds of a model that no AMD GPU has confirmed.
BLOCK_US, SHARING_US, PART_US = 2.0, 3.0, 0.08
NOMINAL_KEYS, LONG_SHARE = (
    4096,
    0.05,
)  # keys of most requests, where the block table has room for more; the share of the others


@dataclass(frozen=True)
class DecodeConfig:
    """The keys of a request are in at most `parts` parts, each at least `least_steps` times 128 keys: a block each."""

    parts: int
    least_steps: int = 1


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _request(query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows [query_len, heads, size], scaled, attend to keys and values [length, key heads, size]. Weights are rounded to values'
    dtype; everything else has query's."""
    rows, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.unflatten(1, (kv_heads, -1))
    scores = torch.einsum("rkgd,nkd->rkgn", grouped, keys.to(query.dtype)).flatten(1, 2)
    last = torch.arange(length - rows, length, device=query.device)[:, None]
    places = torch.arange(length, device=query.device)
    seen = (places <= last) & (places > last - window) if window > 0 else places <= last
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    if sinks is not None:
        sink = sinks.to(query.dtype).expand(rows, heads)
        lse = torch.cat((scores, sink[..., None]), -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    largest = torch.full_like(lse, -math.inf) if length == 0 else scores.amax(-1)
    largest = largest.nan_to_num(neginf=0.0)[..., None]
    weights = (scores - largest).exp()
    rounded = weights.to(values.dtype).to(query.dtype).unflatten(1, (kv_heads, -1))
    out = torch.einsum("rkgn,nkd->rkgd", rounded, values.to(query.dtype)).flatten(1, 2)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sink[..., None] - largest).exp()
    return torch.where(total != 0, out / total, 0.0), lse


def _layout(a) -> CacheLayout:
    return CacheLayout(a.key_cache, a.value_cache)


def _query(a) -> Tensor:
    return attention.heads(a.query, _layout(a).key_size)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from attention.cache_contract(a.key_cache, a.value_cache)
    layout, dtype = _layout(a), a.query.dtype
    size = layout.key_size
    holds = layout.value_size == size
    yield "value_cache", f"of the key's size {size}", describe(a.value_cache), holds
    wanted = f"of 16 bits or more, [rows, heads, size={size}] or [rows, heads * size]"
    yield "query", wanted, describe(a.query), is_wide_float(a.query) and attention.is_heads(a.query, None, None, size)
    holds = a.key_cache.dtype == dtype or attention.is_quantized(a.key_cache)
    yield "key_cache", f"of dtype {dtype} or e4m3", describe(a.key_cache), holds
    heads = _query(a).shape[1]
    wanted = f"of a multiple of {layout.heads} heads"
    yield "query", wanted, f"{heads} heads", heads % layout.heads == 0
    table, lens = a.block_table, a.seq_lens
    holds = table.dtype == torch.int32 and table.dim() == 2 and table.shape[1] > 0
    yield "block_table", "int32 [requests, pages]", describe(table), holds
    requests = table.shape[0]
    holds = lens.dtype == torch.int32 and lens.shape == (requests,)
    yield "seq_lens", f"int32 [requests={requests}]", describe(lens), holds
    yield "query_len", "positive", str(a.query_len), a.query_len > 0
    rows = a.query.shape[0]
    yield "query", f"of requests * query_len = {requests * a.query_len} rows", str(rows), rows == requests * a.query_len
    yield from attention.scale_contract("k_scale", a.k_scale)
    yield from attention.scale_contract("v_scale", a.v_scale)
    if a.sinks is not None:
        holds = a.sinks.dtype == torch.float32 and a.sinks.shape == (heads,)
        yield "sinks", f"float32 [heads={heads}]", describe(a.sinks), holds
    yield "window", "0 or more", str(a.window), a.window >= 0
    holds = a.partition >= 0 and a.partition % STEP == 0
    yield "partition", f"0 or a multiple of {STEP}", str(a.partition), holds


def _envelope(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    layout = _layout(a)
    yield "query is bfloat16 or float16", a.query.dtype in attention.ELEMENTS
    yield f"size is one of {SIZES}", layout.key_size in SIZES
    yield f"query_len is at most {MOST_ROWS}", a.query_len <= MOST_ROWS
    yield from attention.cache_envelope(layout, a.query.dtype, arch)
    yield "pages of a native cache have a multiple of 8 slots", not layout.is_native or layout.page_size % 8 == 0
    yield attention.heads_envelope("query", _query(a))
    yield "block_table's pages lie side by side", a.block_table.stride(1) == 1
    yield "seq_lens is contiguous", a.seq_lens.is_contiguous()
    yield "sinks is contiguous", a.sinks is None or a.sinks.is_contiguous()
    yield "there is room for fewer than 2^30 keys of a request", _capacity(a) < 2**30
    yield "there are fewer than 2^31 blocks of a part", _blocks(a) < 2**31
    yield f"there are at most {2**15} parts", a.partition == 0 or -(-_capacity(a) // a.partition) <= 2**15


def _capacity(a) -> int:
    """The most keys of a request."""
    return a.block_table.shape[1] * _layout(a).page_size


def _column_tiles(a) -> int:
    return -(-a.query_len * _query(a).shape[1] // (_layout(a).heads * COLUMNS))


def _blocks(a) -> int:
    """Of a part."""
    return a.block_table.shape[0] * _layout(a).heads * _column_tiles(a)


def _configs(a, arch: Arch) -> list[DecodeConfig]:
    """Powers of two of parts; with a constant partition, as many as there may be."""
    if _layout(a).key_size not in SIZES:
        return []
    if a.partition:
        return [DecodeConfig(-(-_capacity(a) // a.partition), a.partition // STEP)]
    most = min(-(-_capacity(a) // STEP), MOST_PARTS)
    return [DecodeConfig(1 << i) for i in range(most.bit_length())]


def _cost(config: DecodeConfig, a, arch: Arch) -> dict[str, float]:
    """A launch; rounds of blocks that stream their keys and values at their share of the bandwidth; the sum of parts. Lengths are not
    known: most are nominal, a few fill the block table."""
    layout = _layout(a)
    bytes_of_key = 2 * layout.key_size * layout.key.element_size()
    bandwidth, capacity = arch.bandwidth_gb_s * 1e3, _capacity(a)

    def of_length(keys: int) -> tuple[float, float]:
        steps = -(-keys // STEP)
        steps_per_part = max(-(-steps // config.parts), config.least_steps)
        parts = -(-steps // steps_per_part)
        part_bytes, blocks = steps_per_part * STEP * bytes_of_key, _blocks(a) * parts
        rounds = -(-blocks // (RESIDENT * arch.compute_units))
        of_block = BLOCK_US + part_bytes / (bandwidth / arch.compute_units)
        sharing = SHARING_US + PART_US * parts * layout.key_size / 128 if parts > 1 else 0.0
        return max(rounds * of_block, blocks * part_bytes / bandwidth), sharing

    streaming, sharing = of_length(min(capacity, NOMINAL_KEYS))
    terms = {"launch": attention.LAUNCH_US, "streaming": streaming, "sharing": sharing}
    if capacity > NOMINAL_KEYS:
        terms["long"] = LONG_SHARE * sum(of_length(capacity))
    return terms


def _plan(config: DecodeConfig, outputs, a, arch: Arch) -> list[Launch]:
    query, layout, (out, lse) = _query(a), _layout(a), outputs
    blocks, parts, tiles = _blocks(a), config.parts, _column_tiles(a)
    if blocks == 0:
        return []
    heads, group = query.shape[1], query.shape[1] // layout.heads
    is_fp8 = attention.is_quantized(layout.key)

    def of_cache(cache: Tensor, scale: Tensor | None, strides) -> dict:
        return {"data": cache, "scale": scale, "offset": 0, **vars(strides)}

    args = {
        "query": a.query,
        "out": out,
        "lse": lse if a.return_lse else None,
        "key_cache": of_cache(a.key_cache, a.k_scale, layout.key_strides()),
        "value_cache": of_cache(a.value_cache, a.v_scale, layout.value_strides()),
        "block_table": a.block_table,
        "seq_lens": a.seq_lens,
        "sinks": a.sinks,
        "partials": Workspace(4 * blocks * parts * COLUMNS * (layout.key_size + 2)) if parts > 1 else None,
        "counters": Counters(blocks) if parts > 1 else None,
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "table_stride": a.block_table.stride(0),
        "scale": a.scale / math.log(2.0),
        "query_len": a.query_len,
        "query_heads": heads,
        "kv_heads": layout.heads,
        "group": group,
        "column_tiles": tiles,
        "page_size": layout.page_size,
        "parts": parts,
        "least_steps": config.least_steps,
        "window": a.window,
        "page_divisor": divisor(layout.page_size),
        "parts_divisor": divisor(parts),
        "group_divisor": divisor(group),
        "tiles_divisor": divisor(tiles),
        "heads_divisor": divisor(layout.heads),
    }
    kind = attention.ELEMENTS[query.dtype] + "_fp8" * is_fp8
    symbol = f"paged_attention_decode_{kind}_{layout.key_size}_{'native' if layout.is_native else 'packed'}"
    threads = WAVES * arch.wave_lanes
    return [Launch("paged_attention_decode", symbol, (blocks, parts, 1), (threads, 1, 1), fields("problem", args))]


def _allocate(a) -> tuple[Tensor, Tensor]:
    out = a.query.new_empty(a.query.shape)
    shape = (a.query.shape[0], _query(a).shape[1]) if a.return_lse else (0, 0)
    return out, a.query.new_empty(shape, dtype=_exact(a.query))


def _problem(a) -> dict[str, object]:
    layout = _layout(a)
    return {
        "requests": a.block_table.shape[0],
        "query_len": a.query_len,
        "heads": f"{_query(a).shape[1]}:{layout.heads}",
        "size": layout.key_size,
        "capacity": _capacity(a),
    }


# Cases


def _inputs(lens, heads, size, given, device, generator, fp8_dtype) -> tuple:
    """Pages in any order; garbage behind them in the table, NaN in slots that are not used."""
    (query_heads, kv_heads), requests, query_len = heads, len(lens), given.get("query_len", 1)
    dtype, page, layout = given.get("dtype", torch.bfloat16), given.get("page", 16), given.get("layout", "packed")
    is_fp8 = given.get("fp8", False)
    kind, x = (fp8_dtype, 16) if is_fp8 else (dtype, 8)
    width = max(-(-max(lens, default=0) // page), 1) + given.get("wider", 2)
    pages = requests * width + 2
    order = torch.randperm(pages, generator=generator).to(torch.int32)[: requests * width].view(requests, width)
    if layout == "packed":
        both = torch.full((pages, kv_heads, page, 2 * size), math.nan).to(kind)
        caches = both.transpose(1, 2).split(size, -1)
    else:
        of_value = (pages, kv_heads, size, page) if layout == "native" else (pages, kv_heads, page // x, size, x)
        caches = [torch.full(shape, math.nan).to(kind) for shape in ((pages, kv_heads, size // x, page, x), of_value)]
    written = CacheLayout(*caches)
    for row, length in zip(order, lens):
        places = torch.arange(length)
        new = [torch.randn(length, kv_heads, size, generator=generator) for _ in range(2)]
        new[0][length // 2 : length // 2 + 1] *= given.get("peak", 1.0)
        parts = [part.to(kind) for part in new]
        written.write(row[places // page].long(), places % page, *parts)
        row[-(-length // page) :] = 2**30
    query = torch.randn(requests * query_len, query_heads * size + 64, generator=generator).mul(2).to(dtype)
    scales = [torch.tensor([s], device=device) if is_fp8 else None for s in (0.7, 1.9)]
    sinks = torch.randn(query_heads, generator=generator).to(device) if given.get("sinks") else None
    if layout == "packed":
        caches = both.to(device).transpose(1, 2).split(size, -1)
    return (
        query.to(device)[:, : query_heads * size].unflatten(1, (-1, size)),
        *(cache.to(device) if layout != "packed" else cache for cache in caches),
        order.to(device),
        torch.tensor(lens, dtype=torch.int32).to(device),
        given.get("scale", size**-0.5),
        query_len,
        *scales,
        sinks,
        given.get("window", 0),
        given.get("partition", 0),
        given.get("return_lse", True),
    )


def _cases() -> Iterator[Case]:
    """Every kernel; lengths around steps, pages and parts, empty ones and shorter than the query; groups that fill no tile and several;
    pages of any size, windows, sinks, large scores, a constant partition."""

    def case(name: str, lens: tuple[int, ...], heads: tuple[int, int], size: int, **given) -> Case:
        return Case(name, functools.partial(_inputs, lens, heads, size, given))

    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for size in SIZES:
                for layout in ("packed", "native"):
                    name = f"{kind}{'-fp8' * fp8}-{size}-{layout}"
                    yield case(name, (133,), (3, 1), size, dtype=dtype, fp8=fp8, layout=layout, wider=0)
    yield case("llama", (150,), (16, 1), 128, layout="native", wider=0)
    yield case("heads-6-of-2", (40, 3), (6, 2), 128, fp8=True)
    yield case("lengths", (0, 1, 15, 16, 17, 32, 33, 127, 128), (2, 1), 64, wider=0)
    yield case("lengths-native", (0, 1, 8, 31, 63, 65, 128), (2, 1), 64, layout="native", wider=0)
    yield case("lengths-parts", (129, 255, 256, 257), (2, 1), 64, wider=0)
    yield case("interleaved", (40, 129), (3, 1), 64, layout="interleaved")
    yield case("interleaved-fp8", (40, 129), (3, 1), 64, layout="interleaved", fp8=True)
    yield case("rows-3", (2, 1, 0, 70), (5, 1), 64, query_len=3)
    yield case("rows-8", (3, 140), (12, 2), 64, query_len=8, layout="native", fp8=True)
    yield case("heads-40", (70,), (40, 1), 64)
    yield case("page-5", (33, 12), (2, 1), 64, page=5)
    yield case("page-1", (37,), (1, 1), 64, page=1)
    yield case("page-64", (120,), (2, 2), 64, page=64, layout="native")
    yield case("window", (200, 20), (4, 1), 64, window=70)
    yield case("window-rows", (200, 20, 3), (4, 1), 64, window=33, query_len=4, layout="native")
    yield case("sinks", (150, 0), (4, 1), 64, sinks=True)
    yield case("large-scores", (140,), (4, 1), 64, peak=40.0, scale=1.0)
    yield case("partition", (300, 10, 256), (4, 1), 64, partition=128)
    yield case("long", (650,), (4, 1), 64)
    yield case("no-lse", (20,), (2, 1), 64, return_lse=False)
    yield case("size-80", (20,), (2, 1), 80)
    yield case("no-requests", (), (2, 1), 64)


def _op(reference) -> Op:
    return Op(
        reference,
        allocate=_allocate,
        contract=_contract,
        envelope=_envelope,
        configs=_configs,
        cost=_cost,
        plan=_plan,
        problem=_problem,
        cases=_cases,
        sums=True,
    )


@_op
def paged_attention_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int = 1,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    window: int = 0,
    partition: int = 0,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the last query_len rows of each request to its keys and values in a paged cache.

    query [requests * query_len, heads, size] bf16 or fp16; caches as `rope_and_cache` writes them, of this dtype or e4m3 with scales
    (float32, one element, default 1); block_table int32 [requests, pages], seq_lens int32 [requests] with the query's
    rows, of which row t sees keys up to seq_len - query_len + t, with a window that many of them. sinks [heads] float32 add
    exp(sink) to a row's sum. Heads share a key head in groups of neighbours. Nothing behind seq_len is read or used. With partition
    a request's keys are added in parts of that many, so that its bits do not depend on the batch.
    Returns out like query, 0 without keys, and the natural logarithm of the sums [rows, heads] float32, empty unless return_lse.
    """
    layout = CacheLayout(key_cache, value_cache)
    exact, page_size = _exact(query), layout.page_size
    rows = attention.heads(query, layout.key_size)
    factor = scale if k_scale is None else scale * k_scale.to(exact)
    requests = rows.to(exact).mul(factor).unflatten(0, (-1, query_len)) if len(seq_lens) else ()
    out = torch.empty(rows.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(rows.shape[:2], dtype=exact, device=query.device)
    for r, (of_request, length) in enumerate(zip(requests, seq_lens.tolist())):
        places = torch.arange(max(length, 0), device=query.device)
        pages, slots = block_table[r, places // page_size].long(), places % page_size
        keys, values = layout.keys(pages, slots), layout.values(pages, slots)
        if attention.is_quantized(values):
            values = values.to(query.dtype)
        found, sums = _request(of_request, keys, values, window, sinks)
        at = slice(r * query_len, (r + 1) * query_len)
        out[at] = (found if v_scale is None else found * v_scale.to(exact)).to(query.dtype)
        lse[at] = sums
    return out.view(query.shape), lse if return_lse else lse.new_empty((0, 0))
