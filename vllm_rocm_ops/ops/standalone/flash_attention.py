"""Run prefill attention, dense, varlen or over a paged cache (flash attention, forward)."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case, Op, case_maker
from vllm_rocm_ops.core.tensors import describe, is_wide_float
from vllm_rocm_ops.ops.shared import attention, decode
from vllm_rocm_ops.ops.shared.attention import CacheLayout
from vllm_rocm_ops.ops.shared.gemm import OUT_TYPES
from vllm_rocm_ops.ops.standalone import flash
from vllm_rocm_ops.ops.standalone.flash import Sizes

__all__ = ["flash_attention"]


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    q, k, v = a.q, a.k, a.v
    yield "layout", " or ".join(flash.LAYOUTS), str(a.layout), a.layout in flash.LAYOUTS
    holds = (is_wide_float(q) or flash.is_narrow(q.dtype)) and q.dim() == (3 if a.layout == "thd" else 4)
    yield "q", f"floating point, e4m3 or int8, in layout {a.layout}", describe(q), holds
    holds = a.out_dtype in (None, *((q.dtype,) if is_wide_float(q) else OUT_TYPES))
    yield "out_dtype", "None or, for q of 8 bits, bfloat16, float16 or float32", str(a.out_dtype), holds
    yield from _where_keys_are(a)
    kinds = (q.dtype, *((torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz) if is_wide_float(q) else ()))
    yield "k", f"of q's dtype{' or of 8 bits' if is_wide_float(q) else ''}", describe(k), k.dtype in kinds
    yield "v", f"of k's dtype {k.dtype}", describe(v), v.dtype == k.dtype
    sizes = Sizes.of(a)
    holds = sizes.size > 0 and sizes.heads > 0 and sizes.heads % sizes.kv_heads == 0
    yield "q", f"of a multiple of {sizes.kv_heads} heads, of one element or more", describe(q), holds
    if (slopes := a.alibi_slopes) is not None:
        shape = (sizes.sequences, sizes.heads)
        holds = slopes.dtype == torch.float32 and slopes.shape == shape
        yield "alibi_slopes", f"float32 {list(shape)}: sequences, heads", describe(slopes), holds
    if (bias := a.bias) is not None:
        yield "bias", "None with layout thd", describe(bias), a.layout != "thd"
        shape = (sizes.sequences, sizes.heads, sizes.rows, sizes.keys)
        holds = bias.dim() == 4 and bias.shape[0] in (1, shape[0]) and bias.shape[1:] == shape[1:]
        wanted = f"floating point of 16 bits or more, {list(shape)}: batch (or 1), heads, rows, keys"
        yield "bias", wanted, describe(bias), holds and is_wide_float(bias)
    counts = {"q_scale": sizes.heads, "k_scale": sizes.kv_heads, "v_scale": sizes.kv_heads, "p_scale": sizes.heads}
    for name, heads in counts.items():
        if (scale := getattr(a, name)) is not None:
            holds = scale.dtype == torch.float32 and scale.numel() in (1, heads)
            yield name, f"float32 with one element or {heads}", describe(scale), holds
    yield "p_scale", "None unless v is int8", "a tensor", a.p_scale is None or v.dtype == torch.int8
    yield "softcap", "0 or more", str(a.softcap), a.softcap >= 0
    yield "window", "0 or more", str(a.window), a.window >= 0
    yield "dropout", "from 0 to less than 1", str(a.dropout), 0 <= a.dropout < 1
    holds = not a.return_mask or a.layout != "thd"
    yield "return_mask", "False with layout thd", str(a.return_mask), holds


def _where_keys_are(a) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of k and v, and of the arguments that locate sequences."""
    q, k, v = a.q, a.k, a.v
    if a.layout != "thd":
        for name in ("cu_seqlens_q", "cu_seqlens_k", "block_table", "seq_lens"):
            yield name, f"None with layout {a.layout}", "a tensor", getattr(a, name) is None
    else:
        cu = a.cu_seqlens_q
        holds = cu is not None and cu.dtype == torch.int32 and cu.dim() == 1 and len(cu) > 0
        yield "cu_seqlens_q", "int32 [sequences + 1]", "None" if cu is None else describe(cu), holds
    if a.block_table is None:
        yield "seq_lens", "None without block_table", "a tensor", a.seq_lens is None
        if a.layout == "thd":
            of_keys, wanted = a.cu_seqlens_k, len(a.cu_seqlens_q)
            holds = of_keys is not None and of_keys.dtype == torch.int32 and of_keys.shape == (wanted,)
            got = "None" if of_keys is None else describe(of_keys)
            yield "cu_seqlens_k", f"int32 [sequences + 1={wanted}]", got, holds
        yield "k", f"in layout {a.layout}, as q", describe(k), k.dim() == q.dim()
        rows, keys = (flash.by_row(x, a.layout) for x in (q, k))
        holds = keys.shape[0] == rows.shape[0] and keys.shape[2] > 0 and keys.shape[3] == rows.shape[3]
        yield "k", f"of batch {rows.shape[0]}, head size {rows.shape[3]}", describe(k), holds
        holds = v.dim() == k.dim() and v.shape[:-1] == k.shape[:-1] and v.shape[-1] > 0
        yield "v", f"{list(k.shape[:-1])} of values, of one element or more", describe(v), holds
        return
    table, lens = a.block_table, a.seq_lens
    yield "cu_seqlens_k", "None with block_table", "a tensor", a.cu_seqlens_k is None
    yield from attention.cache_contract(k, v)
    size = CacheLayout(k, v).key_size
    yield "k", f"of head size {q.shape[-1]}", describe(k), size == q.shape[-1]
    sequences = len(a.cu_seqlens_q) - 1
    holds = table.dtype == torch.int32 and table.dim() == 2 and len(table) == sequences and table.shape[1] > 0
    yield "block_table", f"int32 [sequences={sequences}, pages]", describe(table), holds
    holds = lens is not None and lens.dtype == torch.int32 and lens.shape == (sequences,)
    yield "seq_lens", f"int32 [sequences={sequences}]", "None" if lens is None else describe(lens), holds


def _problem(a) -> dict[str, object]:
    sizes = Sizes.of(a)
    return {
        "sequences": sizes.sequences,
        "rows": sizes.rows,
        "keys": sizes.keys,
        "heads": f"{sizes.heads}:{sizes.kv_heads}",
        "size": f"{sizes.size}:{sizes.value_size}",
        "causal": a.causal,
    }


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    sizes, kinds = Sizes.of(a), (torch.int8, arch.fp8_dtype)
    fp8 = f"{arch.fp8_dtype}, the FP8 dtype of {arch.name}"
    yield f"q is bfloat16, float16, int8 or {fp8}", a.q.dtype in (*attention.ELEMENTS, *kinds)
    yield "the result is bfloat16 or float16", flash.out_dtype(a) in attention.ELEMENTS
    yield f"k is of q's dtype, int8 or {fp8}", a.k.dtype in (a.q.dtype, *kinds)
    most = flash.GENERAL_SIZES[-1]
    yield f"heads have at most {most} elements", max(sizes.size, sizes.value_size) <= most
    yield "a bias is bfloat16, float16 or float32", a.bias is None or a.bias.dtype in OUT_TYPES
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seq_lens", "q_scale", "k_scale", "v_scale", "p_scale"):
        yield f"{name} is contiguous", getattr(a, name) is None or getattr(a, name).is_contiguous()
    yield "block_table's rows are contiguous", a.block_table is None or a.block_table.stride(1) == 1
    yield "there are fewer than 2^30 rows and keys", max(sizes.rows, sizes.keys) < 2**30
    yield "there are fewer than 2^30 tiles of rows", flash.tiles(a) < 2**30


def _configs(a, arch: Arch) -> list[flash.FlashConfig]:
    return flash.configs(a, arch) if all(holds for _, holds in _can_implement(a, arch)) else []


# Cases


def _narrow(x: Tensor, kind: str | None, fp8_dtype: torch.dtype) -> Tensor:
    """Convert normal numbers to int8 or FP8, if a kind is given."""
    if kind is None:
        return x
    return x.float().mul(40).round().clamp(-127, 127).to(torch.int8) if kind == "int8" else x.to(fp8_dtype)


def _cache(k: Tensor, v: Tensor, lens, given: dict, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return the key and value caches of sequences of these lengths, and their block table."""
    x, heads = 16 // k.element_size(), k.shape[1]
    table, pages = decode.pages_of(lens, given, generator)
    page, size, value_size = given.get("page", 16), k.shape[2], v.shape[2]
    if given["cache"] == "packed":
        both = torch.full((pages, heads, page, size + value_size), math.nan).to(k.dtype)
        caches = both.transpose(1, 2).split((size, value_size), -1)
    else:
        shapes = (pages, heads, size // x, page, x), (pages, heads, value_size, page)
        caches = tuple(torch.full(shape, math.nan).to(k.dtype) for shape in shapes)
    cache, begin = CacheLayout(*caches), 0
    for row, length in zip(table, lens):
        places = torch.arange(length)
        span = slice(begin, begin + length)
        cache.write(row[places // page].long(), places % page, k[span], v[span])
        row[-(-length // page) :] = 2**30
        begin += length
    return *caches, table


def _inputs(rows, keys, heads, size, given, device, generator, fp8_dtype) -> tuple:
    """Return inputs with rows and keys per sequence, (query heads, key heads), and sizes of a key and a value."""
    dtype, layout, batch = given.get("dtype", torch.bfloat16), given.get("layout", "bshd"), given.get("batch", 1)
    (query_heads, kv_heads), (size, value_size) = heads, size if isinstance(size, tuple) else (size, size)
    a, lens = {}, keys

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def narrow(of_heads: int) -> Tensor:
        return torch.rand(given.get("scales", 1) * of_heads or 1, generator=generator).add(0.5).div(40).to(device)

    if layout == "thd":
        for name, dimensions in (("cu_seqlens_q", rows), ("cu_seqlens_k", keys)):
            a[name] = torch.tensor([0, *dimensions]).cumsum(0).to(torch.int32).to(device)
        rows, keys = sum(rows), sum(keys)
    lead = () if layout == "thd" else (batch,)
    q, k, v = (
        rand(*lead, *dimensions).to(dtype)
        for dimensions in ((rows, query_heads, size), (keys, kv_heads, size), (keys, kv_heads, value_size))
    )
    if given.get("packed"):
        q, k, v = torch.cat((q, k, v), -1).split(size, -1)
    q.mul_(given.get("peak", 2.0))
    q = _narrow(q, given.get("q"), fp8_dtype)
    k, v = (_narrow(x, given.get("kv"), fp8_dtype) for x in (k, v))
    if given.get("q"):
        a |= {"q_scale": narrow(query_heads), "out_dtype": dtype}
    if given.get("kv"):
        a |= {"k_scale": narrow(kv_heads), "v_scale": narrow(kv_heads)}
    if given.get("cache"):
        k, v, table = _cache(k, v, lens, given, generator)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        a |= {"cu_seqlens_k": None, "block_table": table.to(device), "seq_lens": seq_lens.to(device)}
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    if given.get("transposed"):
        v = v.transpose(-1, -2).contiguous().transpose(-1, -2)
    sequences = len(lens) if layout == "thd" else batch
    if given.get("alibi"):
        a["alibi_slopes"] = rand(sequences, query_heads).exp().div(4).to(device)
    if given.get("bias"):
        a["bias"] = rand(batch, query_heads, rows, keys).to(given["bias"]).to(device)
    if given.get("p_scale"):
        a["p_scale"] = torch.full((query_heads,), 127.0, device=device)
    for name in ("softcap", "causal", "window", "dropout", "seed", "return_mask"):
        if name in given:
            a[name] = given[name]
    a |= {"layout": layout, "return_lse": given.get("return_lse", True)}
    return flash_attention.Arguments(q.to(device), k.to(device), v.to(device), given.get("scale", size**-0.5), **a)


def _cases() -> Iterator[Case]:
    """Yield every kernel; rows and keys around tiles, none of either, rows without keys; groups, layouts, windows, varlen."""
    case = case_maker(_inputs)
    for dtype, kind in attention.ELEMENTS.items():
        for size in flash.PLAIN_SIZES:
            yield case(f"{kind}-{size[0]}", 33, 70, (2, 1), size, dtype=dtype, causal=True)
    yield case("full", 20, 65, (1, 1), 64)
    yield case("tiles", 130, 193, (2, 2), 64, causal=True)
    yield case("one-of-one", 1, 1, (1, 1), 64, causal=True)
    yield case("rows-without-keys", 140, 9, (1, 1), 64, causal=True)
    yield case("no-keys", 3, 0, (1, 1), 64)
    yield case("no-rows", 0, 3, (1, 1), 64)
    yield case("batch", 5, 40, (6, 2), 64, batch=3)
    yield case("bhsd", 17, 33, (4, 2), 64, batch=2, layout="bhsd", causal=True)
    yield case("packed", 20, 20, (2, 2), 128, packed=True, causal=True)
    yield case("window", 70, 200, (1, 1), 64, window=40, causal=True)
    yield case("window-over-tiles", 32, 280, (1, 1), 64, window=200, causal=True)
    yield case("window-full", 3, 80, (1, 1), 64, window=65)
    yield case("large-scores", 20, 130, (2, 1), 64, peak=30.0, scale=1.0)
    yield case("persistent", 130, 70, (8, 2), 64, causal=True)
    yield case("lengths", (1, 0, 7, 130, 2), (3, 5, 7, 66, 0), (4, 2), 64, layout="thd")
    yield case("lengths-causal", (1, 7, 128, 30), (1, 70, 100, 20), (2, 1), 64, layout="thd", causal=True)
    yield case("lengths-many", (1,) * 70, (2,) * 70, (1, 1), 64, layout="thd", causal=True)
    yield case("no-lse", 4, 20, (1, 1), 64, return_lse=False)
    yield case("sizes-33-5", 20, 37, (2, 1), (33, 5), causal=True)
    for dtype, kind in attention.ELEMENTS.items():
        yield case(f"{kind}-sizes-256-200", 20, 37, (1, 1), (256, 200), dtype=dtype)
    yield case("size-80", 20, 70, (1, 1), 80, causal=True)
    yield case("transposed", 20, 80, (2, 1), 64, transposed=True, layout="bhsd")
    yield case("transposed-any", 20, 37, (2, 1), 64, transposed=True)
    yield case("softcap", 20, 70, (2, 1), 64, softcap=5.0, causal=True)
    yield case("alibi", 20, 70, (4, 2), 64, batch=2, alibi=True)
    yield case("alibi-lengths", (20, 3), (20, 40), (2, 1), 64, layout="thd", alibi=True, causal=True)
    yield case("bias", 20, 70, (2, 1), 64, bias=torch.bfloat16, batch=3)
    yield case("bias-causal", 20, 20, (2, 1), 64, bias=torch.float32, causal=True, dtype=torch.float16)
    yield case("int8", 20, 70, (2, 1), 64, q="int8", kv="int8", dtype=torch.float16)
    yield case("int8-weights", 20, 150, (2, 1), 64, q="int8", kv="int8", p_scale=True, dtype=torch.float16)
    yield case("int8-keys", 20, 70, (4, 2), 64, kv="int8", causal=True)
    yield case("int8-one-scale", 20, 70, (2, 2), 64, kv="int8", scales=0, transposed=True)
    yield case("fp8", 20, 70, (2, 1), 128, q="fp8", kv="fp8")
    yield case("fp8-keys", 20, 70, (2, 1), 64, kv="fp8", causal=True, dtype=torch.float16)
    yield case("fp8-transposed", 20, 64, (2, 1), 64, q="fp8", kv="fp8", transposed=True, layout="bhsd")
    yield case("cache", (20, 1, 0, 3), (40, 70, 5, 3), (4, 2), 64, layout="thd", cache="packed", causal=True)
    yield case("cache-native", (20, 3), (50, 33), (4, 2), 64, layout="thd", cache="native", causal=True)
    yield case("cache-fp8", (20, 3), (50, 33), (2, 1), 128, layout="thd", cache="packed", kv="fp8", causal=True)
    yield case("cache-page-5", (9,), (23,), (2, 1), 64, layout="thd", cache="packed", page=5, window=9)
    yield case("dropout", 20, 70, (2, 1), 64, dropout=0.3, seed=2**40 + 5, return_mask=True, batch=2)
    yield case("dropout-lengths", (5, 20), (30, 20), (1, 1), 64, layout="thd", dropout=0.5, causal=True)
    yield case("fp32", 5, 20, (1, 1), 64, dtype=torch.float32)


@functools.partial(
    Op,
    contract=_contract,
    can_implement=_can_implement,
    allocate=flash.allocate,
    configs=_configs,
    default=lambda a, arch: flash.FlashConfig("each"),
    plan=flash.launches,
    problem=_problem,
    cases=_cases,
    sums=True,
)
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    layout: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    block_table: Tensor | None = None,
    seq_lens: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    window: int = 0,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    p_scale: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax(scale * q @ k^T) @ v per head; groups of neighboring query heads share a key head (GQA).

    Args:
        q: [batch, rows, heads, size] (bshd), [batch, heads, rows, size] (bhsd) or [total rows, heads, size] (thd,
            varlen); bf16, fp16, e4m3 or int8; any strides.
        k: As q, q's dtype, e4m3 or int8; with block_table a cache as of `paged_attention_decode`.
        v: As k, with its own head size; may be a transposed view.
        scale: Factor of the scores.
        causal: The last row sees all keys, each row before it one less.
        layout: "bshd", "bhsd" or "thd".
        cu_seqlens_q: [sequences + 1], int32: where the rows of each sequence begin (thd).
        cu_seqlens_k: [sequences + 1], int32: where the keys of each sequence begin (thd without block_table).
        block_table: [sequences, pages], int32: keys are in a paged cache (thd, chunked prefill).
        seq_lens: [sequences], int32: keys of each sequence in the cache, including the new ones.
        alibi_slopes: [sequences, heads], float32: scores lose slope * |key - last key of a causal row|.
        bias: [batch or 1, heads, rows, keys], added to the scores.
        softcap: Scores s become softcap * tanh(s / softcap); 0 for none.
        window: Keys that a row sees, counted back from the last key of a causal row; 0 for all.
        q_scale: float32, one element or one per head: scale of an 8-bit q.
        k_scale: float32, one element or one per key head: scale of 8-bit keys.
        v_scale: float32, one element or one per key head: scale of 8-bit values.
        p_scale: float32, one element or one per head: weights times p_scale are rounded to int8 (int8 v only).
        dropout: Probability of a zero weight; the others are divided by 1 - dropout.
        seed: Seed of dropout (Philox), with the same mask on every GPU.
        out_dtype: Result dtype for an 8-bit q; float16 by default.
        return_lse: Return the log-sum-exp of the scores.
        return_mask: Return the dropout mask.

    Returns:
        The triple (out like q with v's size, zero for rows without keys; natural logarithm of the softmax sums, float32
        [batch, heads, rows] or [heads, rows] (thd), inf for rows without keys, empty unless return_lse; dropout mask,
        bool [batch, heads, rows, keys], empty unless return_mask).

    Source:
        flash-attention.py and 06-fused-attention-transV.py of AMD perf-kernels.
    """
    names = locals()
    return flash.reference(flash_attention.Arguments(**names))
