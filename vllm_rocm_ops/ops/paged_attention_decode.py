"""Run paged split-KV decode attention, 1 to 8 query rows per request (flash decoding); kernels: csrc/attention/decode.h."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import apart_contract, describe
from vllm_rocm_ops.ops.shared import attention, decode
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.ops.shared.decode import DecodeConfig

__all__ = ["paged_attention_decode"]

SIZES = (64, 128, 192, 256)  # head sizes
STEP = 128  # keys per iteration of a block
WAVES = 4  # that divide the keys of a step
RESIDENT = 8  # waves per compute unit
GROUP = 128  # elements per scale of out_scales


def _layout(a) -> CacheLayout:
    return CacheLayout(a.key_cache, a.value_cache)


def _query(a) -> Tensor:
    return attention.heads(a.query, _layout(a).key_size)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    yield from attention.cache_contract(a.key_cache, a.value_cache)
    layout, dtype = _layout(a), a.query.dtype
    size = layout.key_size
    holds = layout.value_size == size
    yield "value_cache", f"of the key cache's head size {size}", describe(a.value_cache), holds
    wanted = f"[rows, heads, size={size}] or [rows, heads * size]"
    yield "query", wanted, describe(a.query), attention.is_heads(a.query, None, None, size)
    yield from decode.query_contract("query", a.query, a.key_cache, a.q_scale)
    yield attention.cache_dtype_contract("key_cache", a.key_cache, dtype)
    heads = _query(a).shape[1]
    wanted = f"of a multiple of {layout.heads} heads"
    yield "query", wanted, f"{heads} heads", heads % layout.heads == 0
    yield from decode.requests_contract(a, "query", a.query)
    yield from attention.scale_contract("k_scale", a.k_scale)
    yield from attention.scale_contract("v_scale", a.v_scale)
    if a.sinks is not None:
        holds = a.sinks.dtype == torch.float32 and a.sinks.shape == (heads,)
        yield "sinks", f"float32 [heads={heads}]", describe(a.sinks), holds
    yield "window", "0 or more", str(a.window), a.window >= 0
    yield decode.fixed_split_size_contract(a)
    yield from attention.scale_contract("out_scale", a.out_scale)
    yield from decode.out_contract(a, a.query, a.out_scale is not None or a.out_scales is not None)
    if a.out_scales is not None:
        yield "out_scales", "None with an out_scale", "both", a.out_scale is None
        wanted = a.query.shape[0], heads * size // GROUP
        holds = a.out_scales.dtype == torch.float32 and a.out_scales.shape == wanted and heads * size % GROUP == 0
        yield "out_scales", f"float32 {list(wanted)}, one per {GROUP} elements", describe(a.out_scales), holds
        yield apart_contract("out_scales", a.out_scales)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    layout = _layout(a)
    yield from decode.can_implement_query("query", a.query, a.q_scale, arch)
    yield f"size is one of {SIZES}", layout.key_size in SIZES
    yield from attention.can_implement_cache(layout, a.query.dtype, arch)
    yield "pages of a native cache have a multiple of 8 slots", not layout.is_native or layout.page_size % 8 == 0
    yield attention.can_implement_heads("query", _query(a))
    yield from decode.can_implement_out(a, layout.value_size, arch)
    yield f"heads have {GROUP} elements if there are out_scales", _has_groups(a, layout)
    yield from decode.can_implement_requests(a, layout, 2**15)
    yield "sinks is contiguous", a.sinks is None or a.sinks.is_contiguous()


def _has_groups(a, layout: CacheLayout) -> bool:
    """True if a head is one group, if groups have scales."""
    return a.out_scales is None or layout.value_size == GROUP


def _is_divided(layout: CacheLayout) -> bool:
    """True if two waves divide a head."""
    return layout.key_size == 256


def _waves(layout: CacheLayout) -> int:
    """Return the waves of a block."""
    return 2 * WAVES if _is_divided(layout) else WAVES


def _packed_rows(a, arch: Arch) -> int:
    """Return the packed-GQA rows of a block. NVIDIA's matrix instructions have 8 columns, for which there are kernels, too."""
    layout = _layout(a)
    rows = a.query_len * _query(a).shape[1] // layout.heads
    return 8 if arch.vendor == "nvidia" and _is_divided(layout) and rows <= 8 else decode.PACKED_ROWS


def _blocks(a) -> int:
    """Return the blocks per split."""
    layout = _layout(a)
    return a.block_table.shape[0] * layout.heads * decode.packed_row_tiles(a, _query(a), layout, decode.PACKED_ROWS)


def _configs(a, arch: Arch) -> list[DecodeConfig]:
    layout = _layout(a)
    return decode.configs(a, layout, STEP) if layout.key_size in SIZES and _has_groups(a, layout) else []


def _cost(config: DecodeConfig, a, arch: Arch) -> dict[str, float]:
    """Return the launch, rounds of blocks that stream keys and values at their share of HBM bandwidth, and the combine of splits.

    Sequence lengths are unknown: most are taken as nominal, a few fill the block table.
    """
    layout = _layout(a)
    bytes_of_key = 2 * layout.key_size * layout.key.element_size()
    bandwidth, capacity, costs = arch.bandwidth_gb_s * 1e3, decode.capacity(a, layout), arch.costs.decode
    most_added = decode.FAN_IN * (2 if _is_divided(layout) else 1)

    def of_keys(blocks: int, keys: int) -> float:
        rounds = -(-blocks // (RESIDENT // _waves(layout) * arch.compute_units))
        split_bytes = decode.divided(config, keys, STEP)[1] * STEP * bytes_of_key
        of_block = costs.block_us + split_bytes / decode.rate(costs.unit_gb_s, arch, blocks)
        return max(rounds * of_block, blocks * split_bytes / bandwidth)

    def of_length(keys: int) -> tuple[float, float]:
        splits = decode.divided(config, keys, STEP)[0]
        return of_keys(_blocks(a) * splits, keys), costs.sharing_us * (len(decode.tree(splits, most_added)) - 1)

    streaming, sharing = of_length(min(capacity, decode.NOMINAL_KEYS))
    terms = {"launch": attention.LAUNCH_US, "streaming": streaming, "sharing": sharing}
    if capacity > decode.NOMINAL_KEYS:
        terms["long"] = decode.LONG_SHARE * sum(of_length(capacity))
    return terms


def _plan(config: DecodeConfig, outputs, a, arch: Arch) -> list[Launch]:
    query, layout, blocks, packed_rows = _query(a), _layout(a), _blocks(a), _packed_rows(a, arch)
    if blocks == 0:
        return []
    caches, scales = (a.key_cache, a.value_cache), (a.k_scale, a.v_scale)
    shared = decode.problem_arguments(config, a, query, layout, caches, scales, outputs, packed_rows)
    args = {"query": a.query, "sinks": a.sinks, "window": a.window, **shared}
    if a.out_scales is not None:
        row, head = a.out_scales.stride()
        args |= {"out_scales": a.out_scales, "out_scales_stride": row, "out_scales_head_stride": head}
    is_fp8 = attention.is_quantized(layout.key)
    kind = attention.ELEMENTS[decode.result_dtype(query, a.out)] + "_fp8" * is_fp8
    symbol = f"paged_attention_decode_{kind}_{layout.key_size}_{'native' if layout.is_native else 'packed'}"
    symbol += "_8" * (packed_rows == 8) + "_grouped" * (a.out_scales is not None)
    grid, block = (blocks, config.num_kv_splits, 1), (_waves(layout) * arch.wave_lanes, 1, 1)
    return [Launch("paged_attention_decode", symbol, grid, block, fields("problem", args))]


def _allocate(a) -> tuple[Tensor, Tensor]:
    return decode.allocate(a, a.query, _query(a).shape[1])


def _problem(a) -> dict[str, object]:
    layout = _layout(a)
    return {
        "requests": a.block_table.shape[0],
        "query_len": a.query_len,
        "heads": f"{_query(a).shape[1]}:{layout.heads}",
        "size": layout.key_size,
        "capacity": decode.capacity(a, layout),
    }


# Cases


def _inputs(lens, heads, size, given, device, generator, fp8_dtype) -> tuple:
    """Return inputs with pages in random order, garbage after them in the table, and NaN in unused slots."""
    (query_heads, kv_heads), requests, query_len = heads, len(lens), given.get("query_len", 1)
    dtype, page, layout = given.get("dtype", torch.bfloat16), given.get("page", 16), given.get("layout", "packed")
    is_fp8 = given.get("fp8", False)
    of_out, groups = {"out_dtype": fp8_dtype} if given.get("out_fp8") else {}, None
    if given.get("out_fp8") == "grouped":
        shape = (requests * query_len, query_heads * size // GROUP)
        groups = torch.full(shape[::-1] if given.get("columns_first") else shape, math.nan, device=device)
        groups = groups.T if given.get("columns_first") else groups
    kind, x = (fp8_dtype, 16) if is_fp8 else (dtype, 8)
    order, pages = decode.pages_of(lens, given, generator)
    if layout == "packed":
        both = torch.full((pages, kv_heads, page, 2 * size), math.nan).to(kind)
        caches = both.transpose(1, 2).split(size, -1)
    else:
        of_value = (pages, kv_heads, size, page) if layout == "native" else (pages, kv_heads, page // x, size, x)
        caches = [torch.full(shape, math.nan).to(kind) for shape in ((pages, kv_heads, size // x, page, x), of_value)]
    decode.fill(CacheLayout(*caches), order, lens, given, generator)
    query = torch.randn(requests * query_len, query_heads * size + 64, generator=generator).mul(2).to(dtype)
    if given.get("fp8_query"):
        query = query.mul(2).to(fp8_dtype)
    scales = [torch.tensor([s], device=device) if is_fp8 else None for s in (0.7, 1.9)]
    sinks = None
    if given.get("sinks"):
        sinks = torch.randn(query_heads, generator=generator).to(device)
        if given["sinks"] == "far":
            sinks = torch.tensor([6.0, 30.0, 120.0, -120.0], device=device)[:query_heads]
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
        given.get("fixed_split_size", 0),
        given.get("return_lse", True),
        decode.out_of(given | of_out, requests * query_len, query_heads, size, dtype, device),
        torch.tensor([0.013], device=device) if of_out and groups is None else None,
        groups,
        torch.tensor([0.6], device=device) if given.get("fp8_query") else None,
    )


def _cases() -> Iterator[Case]:
    """Yield every kernel; lengths around steps, pages and splits, empty, and shorter than the query.

    More cases have groups below one tile and of several, heads that two waves divide, any page size, windows, sinks near
    scores and far from them, large scores, a fixed split size, and more splits than a block combines.
    """
    case = case_maker(_inputs)
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for size in SIZES:
                for layout in ("packed", "native"):
                    name = f"{kind}{'-fp8' * fp8}-{size}-{layout}"
                    given = {"dtype": dtype, "fp8": fp8, "layout": layout}
                    yield case(name, (133,), (3, 1), size, **given, wider=0)
                    if size == 256:
                        yield case(f"{name}-rows-12", (160, 3), (12, 1), size, **given)
    yield case("llama", (150,), (16, 1), 128, layout="native", wider=0)
    yield case("heads-6-of-2", (40, 3), (6, 2), 128, fp8=True)
    yield case("lengths", (0, 1, 15, 16, 17, 32, 33, 127, 128), (2, 1), 64, wider=0)
    yield case("lengths-native", (0, 1, 8, 31, 63, 65, 128), (2, 1), 64, layout="native", wider=0)
    yield case("lengths-parts", (129, 255, 256, 257), (2, 1), 64, wider=0)
    yield case("interleaved", (40, 129), (6, 2), 64, layout="interleaved")
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
    yield case("sinks-far", (150, 0), (4, 1), 64, sinks="far")
    yield case("large-scores", (140,), (4, 1), 64, peak=40.0, scale=1.0)
    yield case("fixed-split", (300, 10, 256), (4, 1), 64, fixed_split_size=128)
    yield case("tree", (2190, 140), (2, 1), 64, fixed_split_size=128)
    yield case("long", (650,), (4, 1), 64)
    yield case("no-lse", (20,), (2, 1), 64, return_lse=False)
    yield case("out", (40, 129), (3, 1), 64, out=True)
    yield case("out-fp8", (40, 129), (3, 1), 64, out=True, out_fp8=True)
    yield case("out-fp8-of-fp8", (20, 0), (2, 2), 128, out=True, out_fp8=True, fp8=True, dtype=torch.float16, wider=0)
    grouped, fp16 = {"out": True, "out_fp8": "grouped", "apart": 16}, {"dtype": torch.float16}
    yield case("groups", (150, 0, 40), (3, 1), 128, **grouped, wider=0)
    yield case("groups-native", (150, 20), (4, 2), 128, **grouped, layout="native", columns_first=True)
    yield case("groups-of-fp8", (20, 3), (3, 1), 128, **grouped, fp8=True, query_len=3)
    yield case("groups-native-of-fp8", (133,), (16, 1), 128, **grouped, fp8=True, layout="native", wider=0)
    yield case("groups-fp16", (140,), (2, 1), 128, **grouped, **fp16, sinks=True)
    yield case("groups-native-fp16", (40,), (20, 1), 128, **grouped, **fp16, layout="native", columns_first=True)
    yield case("groups-fp16-of-fp8", (260,), (2, 1), 128, **grouped, **fp16, fp8=True, fixed_split_size=128)
    yield case("groups-native-fp16-of-fp8", (40,), (2, 1), 128, **grouped, **fp16, fp8=True, layout="native")
    yield case("groups-of-64", (20,), (4, 2), 64, **grouped)
    yield case("out-fp8-parts", (300, 129), (16, 1), 128, out=True, out_fp8=True, fixed_split_size=128)
    yield case("out-fp8-native-192", (40,), (2, 1), 192, out=True, out_fp8=True, layout="native", **fp16)
    yield case("divided", (530, 0, 33), (3, 1), 256, sinks=True)
    yield case("divided-page-544", (600, 20), (16, 2), 256, page=544, fp8=True, wider=0)
    yield case("divided-window-rows", (200, 20, 3), (5, 1), 256, window=33, query_len=4, layout="native", fp8=True)
    yield case("divided-out-fp8", (300, 1), (4, 1), 256, out=True, out_fp8=True, fixed_split_size=128)
    yield case("divided-tree", (4230, 2190), (1, 1), 256, fixed_split_size=128)
    fp8_query = {"fp8": True, "fp8_query": True}
    for size in SIZES:
        yield case(f"fp8-query-{size}", (133, 0), (3, 1), size, **fp8_query)
        yield case(f"fp8-query-{size}-native", (140, 3), (20, 1), size, **fp8_query, layout="native", wider=0)
    yield case("fp8-query-fp16", (150, 20), (6, 2), 128, **fp8_query, **fp16, out=True, query_len=3)
    yield case("fp8-query-out-fp8", (40, 129), (3, 1), 128, **fp8_query, out=True, out_fp8=True)
    yield case("fp8-query-groups", (150, 20), (4, 2), 128, **fp8_query, **grouped)
    yield case("fp8-query-large-scores", (140,), (4, 1), 64, **fp8_query, peak=40.0, scale=1.0)
    yield case("size-80", (20,), (2, 1), 80)
    yield case("no-requests", (), (2, 1), 64)
    yield case("nine-parts", (1030, 140), (2, 1), 128, fixed_split_size=128)


@functools.partial(
    Op,
    allocate=_allocate,
    contract=_contract,
    can_implement=_can_implement,
    configs=_configs,
    cost=_cost,
    plan=_plan,
    problem=_problem,
    cases=_cases,
    sums=True,
    writes=("out", "out_scales"),
)
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
    fixed_split_size: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_scales: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the last query_len rows of each request to its keys and values in a paged cache.

    Query row t of a request sees keys up to seq_len - query_len + t. Groups of neighboring query heads share a key head
    (GQA). Nothing after seq_len is read.

    Args:
        query: [requests * query_len, heads, size] or [rows, heads * size], bf16, fp16, or with q_scale and caches of it
            e4m3; rows and heads may be strided.
        key_cache: As `rope_and_cache` writes it, query's dtype or e4m3. Unpaged keys [requests, N, heads, size] have
            one page per request, with the block table arange(requests).
        value_cache: As key_cache, with its dtype.
        block_table: [requests, pages], int32.
        seq_lens: [requests], int32: keys of each request, including the query rows.
        scale: Factor of the scores, usually size^-0.5.
        query_len: Query rows per request; kernels take 1 to 8.
        k_scale: float32, one element: the scale of e4m3 keys; None for 1.
        v_scale: float32, one element: the scale of e4m3 values; None for 1.
        sinks: [heads], float32: adds exp(sink) to a row's softmax sum; or None.
        window: Keys that a row sees, counted back from its own position; 0 for all.
        fixed_split_size: Fixed split size in keys, a multiple of 128, which makes bits independent of the batch; 0 chooses
            splits by cost.
        return_lse: Return the log-sum-exp of the scores.
        out: Like query, with q_scale bf16 or fp16, or of an e4m3 dtype with out_scale or out_scales; may be strided.
            Written in place of a new tensor, which q_scale makes bf16.
        out_scale: float32, one element: the static scale of an e4m3 out.
        out_scales: [rows, heads * size / 128], float32, any strides: receives a dynamic scale per 128 elements of an
            e4m3 out.
        q_scale: float32, one element: the scale of an e4m3 query, else None.

    Returns:
        The pair (out like query, zero for rows without keys, and empty if `out` is given; natural logarithm of the
        softmax sums [rows, heads] float32, empty unless return_lse).

    Source:
        06-attention-decode.py and paged attention of AMD perf-kernels; the decode part of vLLM's attention backends.
    """
    layout = CacheLayout(key_cache, value_cache)
    rows = attention.heads(query, layout.key_size).to(decode.result_dtype(query, out))
    scales = k_scale, v_scale, q_scale
    result, lse = decode.reference(rows, layout, block_table, seq_lens, query_len, scale, scales, window, sinks)
    wide = result.to(decode.exact(result))
    if out_scale is not None:
        result = quantization.static(wide, out_scale, out.dtype)
    elif out_scales is not None:
        result, dynamic = quantization.per_token(wide.flatten(1).unflatten(1, (-1, GROUP)), out.dtype, None)
        out_scales.copy_(dynamic.view(out_scales.shape))
    return decode.returned(out, return_lse, result.view(query.shape), lse)
