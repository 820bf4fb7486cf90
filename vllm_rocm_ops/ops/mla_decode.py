"""Run paged split-KV decode for MLA, 1 to 8 query rows per request; kernels: csrc/attention/mla.h."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, Workspace, fields
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import describe
from vllm_rocm_ops.ops.shared import attention, decode
from vllm_rocm_ops.ops.shared.decode import DecodeConfig

__all__ = ["mla_decode"]

LATENT, ROPE = 512, 64  # elements per key
STEP, MIN_STEPS = 32, 2  # keys per iteration of a block, and the fewest iterations per split
WAVES = 8
MIN_STEPS_IN_LDS = 4  # per split of two times 64 keys
RAGGED_SHARE = 0.1  # extra time of the longest of unequal lengths over their mean
PANEL = 64  # elements per row of an LDS panel, and keys
COMBINE_BLOCKS = 2  # per compute unit, up to which the waves of a block share the splits of its elements
EVEN_COMBINE_BLOCKS = 528  # that combine even splits: all resident on 132 units
EVEN_KEYS = 128  # per iteration of even splits


@dataclass(frozen=True)
class MlaConfig(DecodeConfig):
    """Keys stream through registers, or with `in_lds` through LDS.

    LDS serves more than 32 columns on AMD, and any keys that need no conversion on NVIDIA. With `even`, `num_kv_splits` counts the splits
    of the whole batch, all of one length; a split may have keys of several requests.
    """

    in_lds: bool = False
    even: bool = False


def _layout(a) -> attention.CacheLayout:
    """Return the layout of one head whose values are the first elements of its keys."""
    rows = a.kv_cache.unsqueeze(2)
    return attention.CacheLayout(rows, rows[..., : a.q_nope.shape[2]])


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    dtype = a.q_nope.dtype
    holds = a.q_nope.dim() == 3 and 0 not in a.q_nope.shape[1:]
    yield "q_nope", "[rows, heads, latent size]", describe(a.q_nope), holds
    yield from decode.query_contract("q_nope", a.q_nope, a.kv_cache, a.q_scale)
    rows, heads, latent = a.q_nope.shape
    holds = a.q_pe.dtype == dtype and a.q_pe.dim() == 3 and a.q_pe.shape[:2] == (rows, heads) and a.q_pe.shape[2] > 0
    yield "q_pe", f"{dtype} [rows={rows}, heads={heads}, size]", describe(a.q_pe), holds
    row = latent + a.q_pe.shape[2]
    holds = a.kv_cache.dim() == 3 and a.kv_cache.shape[2] == row and 0 not in a.kv_cache.shape
    yield "kv_cache", f"[pages, N, {row}]", describe(a.kv_cache), holds
    yield attention.cache_dtype_contract("kv_cache", a.kv_cache, dtype)
    yield from decode.requests_contract(a, "q_nope", a.q_nope)
    yield from attention.scale_contract("kv_scale", a.kv_scale)
    yield decode.fixed_split_size_contract(a)
    yield from decode.out_contract(a, a.q_nope)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    layout = _layout(a)
    yield from decode.can_implement_query("q_nope", a.q_nope, a.q_scale, arch)
    sizes = (a.q_nope.shape[2], a.q_pe.shape[2])
    yield f"the latent has {LATENT} elements and the RoPE part {ROPE}", sizes == (LATENT, ROPE)
    yield from attention.can_implement_cache(layout, a.q_nope.dtype, arch)
    for name in ("q_nope", "q_pe"):
        query = getattr(a, name)
        yield attention.can_implement_heads(name, query, attention.of_16_bytes(query))
    yield from decode.can_implement_out(a, LATENT, arch)
    yield from decode.can_implement_requests(a, layout, 2**13)


def _tiles(a, arch: Arch, in_lds: bool) -> int:
    """Return the tiles of 16 columns per block."""
    return next((tiles for tiles in (1, 2) if _needed_tiles(a) <= tiles), 4 if in_lds else 2)  # as registers allow


def _needed_tiles(a) -> int:
    return -(-a.query_len * a.q_nope.shape[1] // decode.PACKED_ROWS)


def _blocks(a, arch: Arch, in_lds: bool) -> int:
    """Return the blocks per split."""
    packed_rows = decode.PACKED_ROWS * _tiles(a, arch, in_lds)
    return a.block_table.shape[0] * decode.packed_row_tiles(a, a.q_nope, _layout(a), packed_rows)


def _lds_bytes(packed_rows: int) -> int:
    """Return the LDS bytes of csrc/attention/nvidia/mla_in_lds.h: keys of two iterations, a query, and softmax state."""
    consumers = 1 if packed_rows == 64 else 2
    rows = 2 * PANEL * (LATENT + ROPE) + packed_rows * (LATENT + ROPE + consumers * PANEL)
    return 2 * rows + 16 * consumers * packed_rows + 4 * packed_rows


def _configs(a, arch: Arch) -> list[MlaConfig]:
    if (a.q_nope.shape[2], a.q_pe.shape[2]) != (LATENT, ROPE):
        return []
    # A fixed split size allows one kind of kernel, whatever else is in the batch.
    can_be_in_lds = arch.vendor == "nvidia" and not attention.is_quantized(a.kv_cache) and not a.fixed_split_size
    if arch.vendor == "amd":
        kinds = {_needed_tiles(a) > 2: MIN_STEPS}
    else:
        kinds = {False: MIN_STEPS} | ({True: MIN_STEPS_IN_LDS} if can_be_in_lds else {})
    divisions = ((decode.configs(a, _layout(a), STEP, least), in_lds) for in_lds, least in kinds.items())
    configs = [MlaConfig(**vars(config), in_lds=in_lds) for configs, in_lds in divisions for config in configs]
    blocks, keys = _blocks(a, arch, True), decode.capacity(a, _layout(a))
    if can_be_in_lds and 0 < blocks * (keys + EVEN_KEYS) < 2**31:
        splits = arch.compute_units // blocks * blocks  # with equal lengths a split has keys of one request
        configs.append(MlaConfig(splits or arch.compute_units, MIN_STEPS_IN_LDS, in_lds=True, even=True))
    return configs


def _is_counted(config: MlaConfig, tiles: int, arch: Arch) -> bool:
    """True if the last block combines the splits, False if a second launch does, where it is predicted to be faster."""
    return config.num_kv_splits * tiles <= arch.costs.decode.counted_splits and not config.even


def _cost(config: MlaConfig, a, arch: Arch) -> dict[str, float]:
    """Return the launch, rounds of blocks that stream keys at their share of HBM bandwidth, and the combine of splits.

    Sequence lengths are unknown: most are taken as nominal, a few fill the block table, and some differ, where uneven splits wait
    for the longest.
    """
    bytes_of_key = a.kv_cache.shape[2] * a.kv_cache.element_size()
    tiles = _tiles(a, arch, config.in_lds)
    blocks_of_split = _blocks(a, arch, config.in_lds)
    bandwidth, capacity, costs = arch.bandwidth_gb_s * 1e3, decode.capacity(a, _layout(a)), arch.costs.decode
    if config.in_lds:
        unit_gb_s, block_us = costs.lds_gb_s * a.kv_cache.element_size() / 2, costs.lds_block_us * tiles
    else:
        unit_gb_s, block_us = costs.latent_gb_s[tiles], costs.block_us

    def of_keys(splits: int, steps: int) -> float:
        blocks, split_bytes = blocks_of_split * splits, steps * STEP * bytes_of_key
        of_block = block_us + split_bytes / decode.rate(unit_gb_s, arch, blocks)
        return max(-(-blocks // arch.compute_units) * of_block, blocks * split_bytes / bandwidth)

    def of_length(keys: int) -> tuple[float, float]:
        most = -(-config.num_kv_splits // blocks_of_split) if config.even else config.num_kv_splits
        splits, steps = decode.divided(dataclasses.replace(config, num_kv_splits=most), keys, STEP)
        rows = blocks_of_split * splits * decode.PACKED_ROWS * tiles
        of_splits = rows * (LATENT + 2) * 8 / bandwidth  # stored and loaded
        if _is_counted(config, tiles, arch):
            sharing = costs.latent_us + costs.counted_us * tiles * splits
        else:
            sharing = attention.LAUNCH_US + costs.added_us * splits
        return of_keys(splits, steps), sharing + of_splits if splits > 1 else 0.0

    streaming, sharing = of_length(min(capacity, decode.NOMINAL_KEYS))
    terms = {"launch": attention.LAUNCH_US, "streaming": streaming, "sharing": sharing}
    if capacity > decode.NOMINAL_KEYS:
        terms["long"] = decode.LONG_SHARE * sum(of_length(capacity))
    if config.even:
        terms["even"] = costs.even_us
    elif config.in_lds and a.block_table.shape[0] > 1:
        terms["longest"] = RAGGED_SHARE * (streaming + terms.get("long", 0.0))
    return terms


def _plan(config: MlaConfig, outputs, a, arch: Arch) -> list[Launch]:
    blocks, tiles = _blocks(a, arch, config.in_lds), _tiles(a, arch, config.in_lds)
    if blocks == 0:
        return []
    packed_rows, is_counted = decode.PACKED_ROWS * tiles, _is_counted(config, tiles, arch)
    both = (a.kv_cache, a.kv_cache), (a.kv_scale, a.kv_scale)
    shared = decode.problem_arguments(config, a, a.q_nope, _layout(a), *both, outputs, packed_rows, counts=is_counted)
    combine_blocks = packed_rows * LATENT // 4 // arch.wave_lanes
    fill_gpu = arch.vendor == "amd" and blocks * combine_blocks > COMBINE_BLOCKS * arch.compute_units
    if config.num_kv_splits <= WAVES or (fill_gpu and not a.fixed_split_size):  # the order of sums changes bits
        combine_blocks //= WAVES  # each wave has its own elements, of all splits
    if config.even:
        combine_blocks = min(combine_blocks, max(EVEN_COMBINE_BLOCKS // blocks, 1))
        shared |= {"partials": Workspace(4 * (blocks + config.num_kv_splits) * packed_rows * (LATENT + 2)), "slots": 1}
    args = fields(
        "problem",
        {
            "decode": {"query": a.q_nope, "sinks": None, "window": 0, **shared},
            "query_pe": a.q_pe,
            "query_pe_stride": a.q_pe.stride(0),
            "query_pe_head_stride": a.q_pe.stride(1),
            "requests": a.block_table.shape[0],
            "blocks": config.num_kv_splits,
            "combine_blocks": combine_blocks,
        },
    )
    kind = attention.ELEMENTS[decode.result_dtype(a.q_nope, a.out)]
    fp8 = "_fp8" * attention.is_quantized(a.kv_cache) + "_query" * (config.in_lds and attention.is_quantized(a.q_nope))
    block = (WAVES * arch.wave_lanes, 1, 1)
    even, lds = "_even" * config.even, _lds_bytes(packed_rows) if config.in_lds and arch.vendor == "nvidia" else 0
    symbol = f"mla_decode_{kind}{fp8}{'_lds' * config.in_lds}{even}_{tiles}"
    splits = (config.num_kv_splits, 1, 1) if config.even else (blocks, config.num_kv_splits, 1)
    launches = [Launch("mla_decode", symbol, splits, block, args, lds)]
    if not is_counted:
        grid = (blocks, combine_blocks, 1)
        launches.append(Launch("mla_decode", f"mla_decode_combine_{kind}{even}_{tiles}", grid, block, args))
    return launches


def _allocate(a) -> tuple[Tensor, Tensor]:
    return decode.allocate(a, a.q_nope, a.q_nope.shape[1])


def _problem(a) -> dict[str, object]:
    return {
        "requests": a.block_table.shape[0],
        "query_len": a.query_len,
        "heads": a.q_nope.shape[1],
        "capacity": decode.capacity(a, _layout(a)),
    }


# Cases


def _inputs(lens, heads, given, device, generator, fp8_dtype) -> tuple:
    """Return inputs with pages in random order, garbage after them in the table, and NaN in unused slots."""
    requests, query_len = len(lens), given.get("query_len", 1)
    dtype, page, is_fp8 = given.get("dtype", torch.bfloat16), given.get("page", 16), given.get("fp8", False)
    latent, rope = given.get("sizes", (LATENT, ROPE))
    table, pages = decode.pages_of(lens, given, generator)
    cache = torch.full((pages, page * (latent + rope) + given.get("padding", 0)), math.nan)
    cache = cache.to(fp8_dtype if is_fp8 else dtype)[:, : page * (latent + rope)].unflatten(1, (page, -1))
    rows = cache.unsqueeze(2)
    decode.fill(attention.CacheLayout(rows[..., latent:], rows[..., :latent]), table, lens, given, generator)
    of_rows = requests * query_len
    q_nope = torch.randn(heads, of_rows, latent, generator=generator).mul(2).to(dtype).to(device).transpose(0, 1)
    q_pe = torch.randn(of_rows, heads, 2 * rope, generator=generator).mul(2).to(dtype).to(device)[..., rope:]
    if given.get("fp8_query"):  # as vLLM gives it
        q_nope, q_pe = torch.cat((q_nope, q_pe), -1).mul(2).to(fp8_dtype).split((latent, rope), -1)
    return (
        q_nope,
        q_pe,
        cache.to(device),
        table.to(device),
        torch.tensor(lens, dtype=torch.int32).to(device),
        given.get("scale", (latent + rope) ** -0.5),
        query_len,
        torch.tensor([1.3], device=device) if is_fp8 else None,
        given.get("fixed_split_size", 0),
        given.get("return_lse", True),
        decode.out_of(given, of_rows, heads, latent, dtype, device),
        torch.tensor([0.6], device=device) if given.get("fp8_query") else None,
    )


def _cases() -> Iterator[Case]:
    """Yield every kernel; lengths around steps, pages and splits, empty, and shorter than the query.

    More cases have heads below one tile and of several, any page size, large scores, a fixed split size, and splits that a second
    launch combines.
    """
    case = case_maker(_inputs)
    for dtype, kind in attention.ELEMENTS.items():
        for fp8 in (False, True):
            for heads in (3, 17, 64):
                if not fp8:
                    yield case(f"{kind}-even-{heads}", (140, 3), heads, dtype=dtype, wider=70)
                length, given = (35, {"wider": 0}) if fp8 else (135, {"wider": 70, "fixed_split_size": 128})
                yield case(f"{kind}{'-fp8' * fp8}-{heads}", (length,), heads, dtype=dtype, fp8=fp8, **given)
    yield case("deepseek", (120,), 16, fp8=True)
    yield case("lengths", (0, 1, 15, 16, 17, 31, 32, 33, 64, 65), 1, wider=0)
    yield case("lengths-parts", (127, 128, 129), 2, wider=0)
    yield case("rows-2", (2, 1, 0, 70), 16, query_len=2, wider=0)
    yield case("rows-4", (3, 90), 16, query_len=4, fp8=True, wider=0)
    yield case("rows-8", (40,), 3, query_len=8)
    yield case("heads-128", (40,), 128, wider=0)
    yield case("page-1", (37,), 1, page=1)
    yield case("page-64-padded", (70,), 2, page=64, padding=64)
    yield case("large-scores", (140,), 4, peak=40.0, scale=1.0)
    yield case("large-scores-64", (140,), 40, peak=40.0, scale=1.0)
    yield case("fixed-split", (300, 10, 256), 4, fixed_split_size=128)
    yield case("fixed-split-many", (290, 1), 4, fixed_split_size=128, wider=60)
    yield case("fixed-split-few", (270, 3), 40, fixed_split_size=128, wider=0)
    yield case("long", (650,), 4)
    yield case("requests", (1, 0, 130) * 45, 1, wider=0)
    fp8_query = {"fp8": True, "fp8_query": True}
    for heads, lens in ((3, (70, 1)), (17, (35,)), (64, (97, 0, 32)), (128, (140, 33))):
        yield case(f"fp8-query-{heads}", lens, heads, **fp8_query)
    yield case("fp8-query-fp16", (70, 3), 4, **fp8_query, dtype=torch.float16, out=True)
    yield case("fp8-query-fp16-64", (300,), 40, **fp8_query, dtype=torch.float16, out=True, fixed_split_size=128)
    yield case("fp8-query-rows-4", (3, 90), 16, **fp8_query, query_len=4, wider=0)
    yield case("fp8-query-large-scores", (140,), 40, **fp8_query, peak=40.0, scale=1.0)
    yield case("no-lse", (20,), 2, return_lse=False)
    yield case("out", (70, 3), 4, out=True)
    yield case("sizes-256", (20,), 2, sizes=(256, 32))
    yield case("no-requests", (), 2)


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
    writes=("out",),
)
def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    query_len: int = 1,
    kv_scale: Tensor | None = None,
    fixed_split_size: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    q_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the last query_len rows of each request to the latents in a paged MLA cache.

    All heads read the same keys; a value is the latent of its key. Kernels take latents of 512 elements and RoPE parts
    of 64.

    Args:
        q_nope: [requests * query_len, heads, latent size], bf16, fp16, or with q_scale and an e4m3 cache e4m3: queries
            after W_UK absorption; rows and heads may be strided.
        q_pe: [requests * query_len, heads, RoPE size], q_nope's dtype: the rotated part; rows and heads may be strided.
        kv_cache: [pages, N, latent size + RoPE size], as `rope_and_cache_mla` writes it; q_nope's dtype or e4m3.
        block_table: [requests, pages], int32.
        seq_lens: [requests], int32: keys of each request, including the query rows.
        scale: Factor of the scores.
        query_len: Query rows per request; kernels take 1 to 8.
        kv_scale: float32, one element: the scale of an e4m3 cache; None for 1.
        fixed_split_size: Fixed split size in keys, a multiple of 128, which makes bits independent of the batch; 0 chooses
            splits by cost.
        return_lse: Return the log-sum-exp of the scores.
        out: [rows, heads, latent size], q_nope's dtype, or with q_scale bf16 or fp16; may be strided. Written in place
            of a new tensor, which q_scale makes bf16.
        q_scale: float32, one element: the scale of an e4m3 query, else None.

    Returns:
        The pair (out [rows, heads, latent size], empty if `out` is given; natural logarithm of the softmax sums [rows,
        heads] float32, empty unless return_lse).

    Source:
        MLA decode of RadeonFlow; MLA_decode of AMD perf-kernels; the decode part of vLLM's MLA backends.
    """
    dtype = decode.result_dtype(q_nope, out)
    query = torch.cat((q_nope.to(dtype), q_pe.to(dtype)), -1)
    rows = kv_cache.unsqueeze(2)
    layout = attention.CacheLayout(rows, rows[..., : q_nope.shape[2]])
    results = decode.reference(query, layout, block_table, seq_lens, query_len, scale, (kv_scale, kv_scale, q_scale))
    return decode.returned(out, return_lse, *results)
