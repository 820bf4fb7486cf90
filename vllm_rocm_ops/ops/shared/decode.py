"""Share code between the decode attention ops: references, rules and plans of split-KV; kernels: csrc/attention/."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.core.quantization import LIMIT
from vllm_rocm_ops.core.tensors import apart_contract, describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention
from vllm_rocm_ops.ops.shared.attention import ELEMENTS, CacheLayout
from vllm_rocm_ops.ops.shared.gemm import divisor

MAX_ROWS = 8  # per request
PACKED_ROWS = 16  # packed-GQA rows of a matrix instruction: query rows times heads of a group
FAN_IN = 16  # partial sums that a block combines
SPLIT_SIZE_MULTIPLE = 128  # a fixed split size is a multiple of it
MAX_SPLITS = 128
NOMINAL_KEYS = 4096  # of most requests, if the block table has room for more
LONG_SHARE = 0.05  # share of longer requests


@dataclass(frozen=True)
class DecodeConfig:
    """At most `num_kv_splits` splits of a request's keys, one block each.

    A split has at least `min_steps` iterations of 128 keys, or 32 in MLA.
    """

    num_kv_splits: int
    min_steps: int = 1


def exact(x: Tensor) -> torch.dtype:
    """Return the dtype that references compute in."""
    return torch.float32 if attention.is_quantized(x) else torch.promote_types(x.dtype, torch.float32)


def result_dtype(query: Tensor, out: Tensor | None) -> torch.dtype:
    """Return the dtype of results, before any quantization: query's; for e4m3 the dtype of a 16-bit `out`, else bfloat16."""
    if not attention.is_quantized(query):
        return query.dtype
    return out.dtype if out is not None and out.dtype in ELEMENTS else torch.bfloat16


# References


def _request(query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attend from scaled rows [query_len, heads, size] to keys and values [length, key heads, size].

    Weights are rounded to values' dtype; everything else is in query's.
    """
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


def reference(
    query: Tensor,
    layout: CacheLayout,
    block_table: Tensor,
    seq_lens: Tensor,
    query_len: int,
    scale: float,
    scales: tuple[Tensor | None, Tensor | None, Tensor | None],
    window: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the result [rows, heads, value size] in query's dtype, and the log-sum-exp [rows, heads].

    Scales are of keys, values and the query.
    """
    wide, (k_scale, v_scale, q_scale) = exact(query), scales
    factor = scale if k_scale is None else scale * k_scale.to(wide)
    factor = factor if q_scale is None else factor * q_scale.to(wide)
    requests = query.to(wide).mul(factor).unflatten(0, (-1, query_len)) if len(seq_lens) else ()
    out = query.new_zeros((*query.shape[:2], layout.value_size))
    lse = query.new_empty(query.shape[:2], dtype=wide)
    for r, (of_request, length) in enumerate(zip(requests, seq_lens.tolist())):
        places = torch.arange(max(length, 0), device=query.device)
        pages, slots = block_table[r, places // layout.page_size].long(), places % layout.page_size
        keys, values = layout.keys(pages, slots), layout.values(pages, slots)
        if attention.is_quantized(values):
            values = values.to(query.dtype)
        attended, sums = _request(of_request, keys, values, window, sinks)
        rows = slice(r * query_len, (r + 1) * query_len)
        out[rows] = (attended if v_scale is None else attended * v_scale.to(wide)).to(query.dtype)
        lse[rows] = sums
    return out, lse


def returned(out: Tensor | None, return_lse: bool, result: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an op's results, with empty tensors in place of a result written to `out` and an unwanted log-sum-exp."""
    if out is not None:
        result = out.copy_(result).new_empty(0)
    return result, lse if return_lse else lse.new_empty((0, 0))


def allocate(a, query: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the same tensors as `returned`, unwritten."""
    out = query.new_empty(query.shape, dtype=result_dtype(query, a.out)) if a.out is None else a.out.new_empty(0)
    shape = (query.shape[0], heads) if a.return_lse else (0, 0)
    return out, query.new_empty(shape, dtype=exact(query))


# Rules


def requests_contract(a, name: str, query: Tensor) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of the block table and lengths, and of the query's rows."""
    table, lens = a.block_table, a.seq_lens
    holds = table.dtype == torch.int32 and table.dim() == 2 and table.shape[1] > 0
    yield "block_table", "int32 [requests, pages]", describe(table), holds
    requests = table.shape[0]
    holds = lens.dtype == torch.int32 and lens.shape == (requests,)
    yield "seq_lens", f"int32 [requests={requests}]", describe(lens), holds
    yield "query_len", "positive", str(a.query_len), a.query_len > 0
    rows = query.shape[0]
    yield name, f"of requests * query_len = {requests * a.query_len} rows", str(rows), rows == requests * a.query_len


def query_contract(name: str, query: Tensor, cache: Tensor, q_scale: Tensor | None) -> Iterator[tuple]:
    """Yield the contract of a query's dtype and scale: e4m3 with a scale, and a cache of it, or wider floating point."""
    if attention.is_quantized(query):
        yield name, f"of the cache's dtype {cache.dtype}, if e4m3", describe(query), query.dtype == cache.dtype
        yield "q_scale", f"a tensor with {name} in e4m3", "None", q_scale is not None
    else:
        yield name, "floating point of 16 bits or more, or e4m3", describe(query), is_wide_float(query)
    yield from attention.scale_contract("q_scale", q_scale)


def can_implement_query(name: str, query: Tensor, q_scale: Tensor | None, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for a query's dtype and scale."""
    kinds = *ELEMENTS, arch.fp8_dtype
    yield f"{name} is bfloat16, float16 or {arch.fp8_dtype}, the FP8 dtype of {arch.name}", query.dtype in kinds
    yield "q_scale is None without e4m3", q_scale is None or attention.is_quantized(query)


def out_contract(a, query: Tensor, quantizes: bool = False) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of `out`, an e4m3 tensor if the op quantizes."""
    if quantizes:
        yield "out", "a tensor with an out_scale or out_scales", "None", a.out is not None
    if a.out is not None:
        of_result = result_dtype(query, a.out)
        dtype, holds = ("e4m3", a.out.dtype in LIMIT) if quantizes else (of_result, a.out.dtype == of_result)
        yield "out", f"{dtype} {list(query.shape)}", describe(a.out), holds and a.out.shape == query.shape
        yield apart_contract("out", a.out)


def can_implement_out(a, size: int, arch: Arch) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for `out`."""
    if a.out is not None:
        kinds = (*ELEMENTS, arch.fp8_dtype)
        yield f"out has 16 bits or is {arch.fp8_dtype}, the FP8 dtype of {arch.name}", a.out.dtype in kinds
        yield attention.can_implement_heads("out", attention.heads(a.out, size))


def fixed_split_size_contract(a) -> tuple[str, str, str, bool]:
    """Return the contract of the fixed split size."""
    holds = a.fixed_split_size >= 0 and a.fixed_split_size % SPLIT_SIZE_MULTIPLE == 0
    return "fixed_split_size", f"0 or a multiple of {SPLIT_SIZE_MULTIPLE}", str(a.fixed_split_size), holds


def can_implement_requests(a, layout: CacheLayout, limit: int) -> Iterator[tuple[str, bool]]:
    """Yield the kernels' rules for requests, with a limit of splits."""
    yield f"query_len is at most {MAX_ROWS}", a.query_len <= MAX_ROWS
    yield "block_table's rows are contiguous", a.block_table.stride(1) == 1
    yield "seq_lens is contiguous", a.seq_lens.is_contiguous()
    keys = capacity(a, layout)
    yield "block_table has room for fewer than 2^30 keys per request", keys < 2**30
    yield "the caches span fewer than 2^35 elements", _span(layout.key) < 2**35 and _span(layout.value) < 2**35
    yield f"there are at most {limit} splits", a.fixed_split_size == 0 or -(-keys // a.fixed_split_size) <= limit


def _span(x: Tensor) -> int:
    """Return the elements from the first to the last."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1


def capacity(a, layout: CacheLayout) -> int:
    """Return the most keys that a request may have."""
    return a.block_table.shape[1] * layout.page_size


# Plans


def configs(a, layout: CacheLayout, step: int, min_steps: int = 1) -> list[DecodeConfig]:
    """Return powers of two of splits; with a fixed split size, the most splits that fit the block table."""
    keys = capacity(a, layout)
    if a.fixed_split_size:
        return [DecodeConfig(-(-keys // a.fixed_split_size), a.fixed_split_size // step)]
    most = min(-(-keys // (step * min_steps)), MAX_SPLITS)
    return [DecodeConfig(1 << i, min_steps) for i in range(most.bit_length())]


def divided(config: DecodeConfig, keys: int, step: int) -> tuple[int, int]:
    """Return the splits of `keys` keys, and the most iterations of a split."""
    steps = -(-keys // step)
    splits = max(min(config.num_kv_splits, -(-steps // config.min_steps)), 1)
    return splits, -(-steps // splits)


def tree(splits: int, most_added: int = FAN_IN) -> list[int]:
    """Return the partial sums per level of the combine: splits, groups of FAN_IN splits, and so on.

    Up to `most_added` have no second level.
    """
    counts = [splits]
    while counts[-1] > 1:
        counts.append(1 if counts[-1] <= most_added else -(-counts[-1] // FAN_IN))
    return counts


def problem_arguments(
    config: DecodeConfig,
    a,
    query: Tensor,
    layout: CacheLayout,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    packed_rows: int,
    *,
    counts: bool = True,
) -> dict[str, object]:
    """Return DecodeProblem of csrc/attention/problem.h without query, sinks and window.

    A block has `columns` columns. With `counts`, the last block of a request to finish combines the splits.
    """
    heads, group = query.shape[1], query.shape[1] // layout.heads
    out = outputs[0] if a.out is None else a.out
    of_out = attention.heads(out, layout.value_size).stride()
    tiles = packed_row_tiles(a, query, layout, packed_rows)
    blocks, sums = a.block_table.shape[0] * layout.heads * tiles, tree(config.num_kv_splits)
    shared, slots, groups = config.num_kv_splits > 1, sum(sums[:-1]), sum(sums[1:])

    def of_cache(cache: Tensor, scale: Tensor | None, strides) -> dict:
        return {"data": cache, "scale": scale, "offset": 0, **vars(strides)}

    return {
        "out": out,
        "out_scale": getattr(a, "out_scale", None),
        "lse": outputs[1] if a.return_lse else None,
        "key_cache": of_cache(caches[0], scales[0], layout.key_strides()),
        "value_cache": of_cache(caches[1], scales[1], layout.value_strides()),
        "block_table": a.block_table,
        "seq_lens": a.seq_lens,
        "partials": Workspace(4 * blocks * slots * packed_rows * (layout.value_size + 2)) if shared else None,
        "counters": Counters(blocks * groups) if shared and counts else None,
        "query_scale": a.q_scale,
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "out_stride": of_out[0],
        "out_head_stride": of_out[1],
        "table_stride": a.block_table.stride(0),
        "scale": a.scale / math.log(2.0),
        "query_len": a.query_len,
        "query_heads": heads,
        "kv_heads": layout.heads,
        "group": group,
        "packed_row_tiles": tiles,
        "page_size": layout.page_size,
        "table_pages": a.block_table.shape[1],
        "num_kv_splits": config.num_kv_splits,
        "min_steps": config.min_steps,
        "slots": slots,
        "groups": groups,
        "page_divisor": divisor(layout.page_size),
        "min_divisor": divisor(config.min_steps),
        "group_divisor": divisor(group),
        "tiles_divisor": divisor(tiles),
        "heads_divisor": divisor(layout.heads),
    }


def packed_row_tiles(a, query: Tensor, layout: CacheLayout, packed_rows: int) -> int:
    """Return the blocks for a request's rows and the heads of a group."""
    return -(-a.query_len * query.shape[1] // (layout.heads * packed_rows))


def rate(max_gb_s: float | None, arch: Arch, blocks: int) -> float:
    """Return the bytes per microsecond of a compute unit, limited to this rate, while `blocks` blocks run."""
    if max_gb_s is None:
        return arch.bandwidth_gb_s * 1e3 / arch.compute_units
    return 1e3 * min(max_gb_s, arch.bandwidth_gb_s / max(min(blocks, arch.compute_units), 1))


# Cases


def pages_of(lens, given: dict, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return a block table with pages in random order, and the number of pages."""
    page = given.get("page", 16)
    width = max(-(-max(lens, default=0) // page), 1) + given.get("wider", 2)
    pages = len(lens) * width + 2
    order = torch.randperm(pages, generator=generator).to(torch.int32)[: len(lens) * width]
    return order.view(len(lens), width), pages


def out_of(given: dict, rows: int, heads: int, size: int, dtype: torch.dtype, device: str) -> Tensor | None:
    """Return an `out` with strided rows and heads, if the case asks for one."""
    if not given.get("out"):
        return None
    shape = (rows, heads + 1, size + given.get("apart", 8))
    return torch.full(shape, math.nan).to(given.get("out_dtype", dtype)).to(device)[:, 1:, :size]


def fill(layout: CacheLayout, table: Tensor, lens, given: dict, generator: torch.Generator) -> None:
    """Write keys and values, and garbage after their pages in the table; unused slots stay."""
    for row, length in zip(table, lens):
        places = torch.arange(length)
        sizes = layout.key_size, layout.value_size
        new = [torch.randn(length, layout.heads, size, generator=generator) for size in sizes]
        new[0][length // 2 : length // 2 + 1] *= given.get("peak", 1.0)
        parts = [part.to(layout.key.dtype) for part in new]
        layout.write(row[places // layout.page_size].long(), places % layout.page_size, *parts)
        row[-(-length // layout.page_size) :] = 2**30
