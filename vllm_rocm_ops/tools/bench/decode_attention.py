"""Attention of one decode step, to be timed beside what vLLM runs: heads of public models, batches, and lengths of caches.

Of a case `ragged` the lengths are anywhere between one key and twice the mean. Pages of a request are anywhere in the cache, and its block
table has room for LONGEST keys, as in vLLM: nothing but `seq_lens` on the device says how many keys there are. Peers know the longest.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.clock import COLD_BYTES, Clock
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.ops import mla_decode, paged_attention_decode
from vllm_rocm_ops.ops.mla_decode import LATENT, ROPE
from vllm_rocm_ops.tools.bench.peers import Peer, load
from vllm_rocm_ops.tools.bench.shapes import Check, Shape

BATCHES = tuple(2**i for i in range(8))
CONTEXTS = 128, 1024, 4096, 16384, 65536, 131072
LONGEST = CONTEXTS[-1]
RAGGED = ((8, 1024), (32, 4096), (128, 1024), (64, 16384))  # requests, mean length
HEADS = {  # heads, key heads, size of a head; of MLA no more than heads
    "llama-3.1-405b tp8": (16, 1, 128),
    "deepseek-v3 tp8": (16,),
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "deepseek-v3 tp1": (128,),
}
ALL = "llama-3.1-405b tp8", "deepseek-v3 tp8"  # in the whole grid; of the others a few
FEW = ((1, 1024), (8, 4096), (64, 1024))
PAGE, MLA_PAGE = 16, 64  # as vLLM's backends have them
MOST_SPLITS = 32  # by FlashAttention 3, as vLLM allows in a captured graph
SEGMENTS = 16  # by the unified kernel in Triton, of up to UNIFIED_BLOCKS key heads of requests
UNIFIED_BLOCKS = 128
SPLIT_KEYS = 512  # at least, by the MLA kernel in Triton


@dataclass(frozen=True)
class Decode(Shape):
    """One query row of each request; `keys` of all requests."""

    keys: int = 0

    def arguments(self, device: str, fp8_dtype: torch.dtype) -> tuple:
        return self.case.make(device, torch.Generator(device).manual_seed(0), fp8_dtype)

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        """One, where the cache is larger than the processor's."""
        return [arguments] if self.bytes_moved([arguments]) > COLD_BYTES else super().sets(clock, arguments)

    def bytes_moved(self, sets: list[tuple]) -> float:
        """Those of the keys and values that are there, of queries and results."""
        a = self.op.Arguments(*sets[0])
        if self.op is mla_decode:
            of_key, rows = a.kv_cache[0, 0].nbytes, 2 * a.q_nope.nbytes + a.q_pe.nbytes
        else:
            of_key, rows = a.key_cache[0, 0].nbytes + a.value_cache[0, 0].nbytes, 2 * a.query.nbytes
        return self.keys * of_key + rows

    def flops(self, sizes: Mapping[str, int]) -> int:
        return sizes["flops"]

    def peers(self, sets: list[tuple]) -> Mapping[str, Peer]:
        return MLA_PEERS if self.op is mla_decode else PEERS

    def check(self, sets: list[tuple], device: str, peers: Mapping[str, Peer]) -> Check:
        """The error of the first and last request by their norm."""
        a = self.op.Arguments(*sets[0])
        last = len(a.seq_lens) - 1
        some = torch.tensor(sorted({0, last}), device=a.seq_lens.device)
        queries = {name: value[some] for name, value in a._asdict().items() if name in ("query", "q_nope", "q_pe")}
        of_some = a._replace(**queries, block_table=a.block_table[some], seq_lens=a.seq_lens[some])
        exact = self.op.reference(*of_some)[0].double()

        def found() -> dict[str, object]:
            results = self.op(*a)[0][some].double()
            return {"relative_error": ((results - exact).norm() / exact.norm()).item()}

        return found


# Peers: vLLM's kernels, as its backends call them. `prepare` takes the op's arguments


def _starts(lens: Tensor) -> Tensor:
    return torch.arange(len(lens) + 1, dtype=torch.int32, device=lens.device)


def _flash(a, q: Tensor, k: Tensor, v: Tensor, **more) -> tuple:
    """FlashAttention 3, which divides its work ahead; `more` is of MLA."""
    load()
    flash = importlib.import_module("vllm.vllm_flash_attn")
    longest, starts = int(a.seq_lens.max()), _starts(a.seq_lens)
    of_rows = {"max_seqlen_q": 1, "max_seqlen_k": longest, "cu_seqlens_q": starts, "causal": True}
    schedule = flash.get_scheduler_metadata(
        batch_size=len(a.seq_lens),
        num_heads_q=q.shape[1],
        num_heads_kv=k.shape[2],
        headdim=q.shape[2],
        headdim_v=v.shape[3],
        cache_seqlens=a.seq_lens,
        qkv_dtype=q.dtype,
        page_size=k.shape[1],
        num_splits=MOST_SPLITS,
        **of_rows,
    )
    how = {"seqused_k": a.seq_lens, "block_table": a.block_table, "softmax_scale": a.scale, "fa_version": 3}
    how |= {"scheduler_metadata": schedule, "num_splits": MOST_SPLITS}
    return (functools.partial(flash.flash_attn_varlen_func, q=q, k=k, v=v, **of_rows, **how, **more),)


def _flash_paged(*arguments) -> tuple:
    a = paged_attention_decode.Arguments(*arguments)
    return _flash(a, a.query, a.key_cache, a.value_cache)


def _flash_latent(*arguments) -> tuple:
    a = mla_decode.Arguments(*arguments)
    cache = a.kv_cache.unsqueeze(2)
    return _flash(a, a.q_pe, cache[..., LATENT:], cache[..., :LATENT], q_v=a.q_nope)


def _unified(*arguments) -> tuple:
    """The kernel of TRITON_ATTN, with a launch that adds segments where there are few requests."""
    a = paged_attention_decode.Arguments(*arguments)
    attend = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    rows, heads, size = a.query.shape
    kept = [a.query.new_empty(rows, heads, SEGMENTS, *of, dtype=torch.float32) for of in ((size,), (), ())]
    how = {
        "q": a.query,
        "k": a.key_cache,
        "v": a.value_cache,
        "out": torch.empty_like(a.query),
        "cu_seqlens_q": _starts(a.seq_lens),
        "max_seqlen_q": 1,
        "seqused_k": a.seq_lens,
        "max_seqlen_k": int(a.seq_lens.max()),
        "softmax_scale": a.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": a.block_table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": torch.ones(rows, a.key_cache.shape[2], device=a.query.device),
        "v_descale": torch.ones(rows, a.key_cache.shape[2], device=a.query.device),
        "seq_threshold_3D": UNIFIED_BLOCKS // a.key_cache.shape[2],
        "num_par_softmax_segments": SEGMENTS,
        **dict(zip(("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"), kept)),
    }
    return (functools.partial(attend, **how),)


def _flash_mla(*arguments) -> tuple:
    """FlashMLA takes a query in one tensor, which is made here: its time is not counted."""
    a = mla_decode.Arguments(*arguments)
    ops = importlib.import_module("vllm.v1.attention.ops.flashmla")
    query, schedule = torch.cat((a.q_nope, a.q_pe), -1).unsqueeze(1), ops.get_mla_metadata()[0]
    given = query, a.kv_cache.unsqueeze(2), a.block_table, a.seq_lens, LATENT, schedule
    return (functools.partial(ops.flash_mla_with_kvcache, *given, softmax_scale=a.scale, causal=True),)


def _triton_mla(*arguments) -> tuple:
    """As TRITON_MLA calls it, which also puts the parts of a query together."""
    a = mla_decode.Arguments(*arguments)
    attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    rows, heads, _ = a.q_nope.shape
    multiprocessors = torch.cuda.get_device_properties(a.q_nope.device).multi_processor_count
    wanted = 1 << (max(int(a.seq_lens.max()) // SPLIT_KEYS, 1) - 1).bit_length()
    splits = min(wanted, 2 * multiprocessors)
    logits = a.q_nope.new_empty(rows, heads, splits, LATENT + 1, dtype=torch.float32)
    cache, one = a.kv_cache.unsqueeze(2), torch.ones(1, device=a.q_nope.device)

    def call() -> Tensor:
        query = torch.cat((a.q_nope, a.q_pe), -1)
        out = torch.zeros_like(a.q_nope, memory_format=torch.contiguous_format)
        lse = query.new_zeros(rows, heads)
        of = query, cache, cache[..., :LATENT], out, lse, a.block_table, a.seq_lens, logits, splits, a.scale
        attend(*of, cache.shape[1], k_scale=one, v_scale=one, is_mla=True)
        return out

    return (call,)


def _run(call):
    return call()


PEERS = {"flash-attn 3": Peer(_run, _flash_paged), "vllm triton": Peer(_run, _unified)}
MLA_PEERS = {
    "flash-attn 3": Peer(_run, _flash_latent),
    "flashmla": Peer(_run, _flash_mla),
    "vllm triton": Peer(_run, _triton_mla),
}


# Shapes


def _lengths(batch: int, context: int, ragged: bool) -> list[int]:
    if not ragged:
        return [context] * batch
    generator = torch.Generator().manual_seed(context)
    return torch.randint(1, 2 * context, (batch,), generator=generator).tolist()


def _make(heads: tuple[int, ...], lens: list[int], dtype: torch.dtype, device, generator, fp8_dtype) -> tuple:
    """Arguments of the op for these heads."""
    page = MLA_PAGE if len(heads) == 1 else PAGE
    pages_each = [-(-length // page) for length in lens]
    order = torch.randperm(sum(pages_each), generator=generator, device=device).to(torch.int32)
    table = order.new_zeros(len(lens), LONGEST // page)
    for row, pages in zip(table, order.split(pages_each)):
        row[: len(pages)] = pages
    of_requests = table, torch.tensor(lens, dtype=torch.int32, device=device)

    def values(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    if len(heads) == 1:
        q_nope, q_pe = (values(len(lens), *heads, size) for size in (LATENT, ROPE))
        return q_nope, q_pe, values(len(order), page, LATENT + ROPE), *of_requests, (LATENT + ROPE) ** -0.5
    of_query, of_key, size = heads
    caches = (values(len(order), page, of_key, size) for _ in range(2))
    return values(len(lens), of_query, size), *caches, *of_requests, 1 / math.sqrt(size)


def decode_attention(dtype: torch.dtype = torch.bfloat16) -> Iterator[Decode]:
    """The shapes. Raises ValueError for a dtype that kernels do not take."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the dtype of attention must be bfloat16 or float16, got {dtype}")
    grid = [(batch, context, False) for context in CONTEXTS for batch in BATCHES]
    grid += [(batch, context, True) for batch, context in RAGGED]
    for model, heads in HEADS.items():
        op: Op = mla_decode if len(heads) == 1 else paged_attention_decode
        for batch, context, ragged in grid if model in ALL else [(*few, False) for few in FEW]:
            lens = _lengths(batch, context, ragged)
            size = (2 * LATENT + ROPE) if op is mla_decode else 2 * heads[2]
            flops = 2 * heads[0] * size * sum(lens)
            sizes = {"batch": batch, "context": context, "heads": heads[0], "flops": flops}
            case = Case(f"{model} {batch}x{context}{' ragged' * ragged}", functools.partial(_make, heads, lens, dtype))
            short = "short" if batch <= 16 and context <= 4096 else "long or many"
            yield Decode(op, case, sizes, group=short, keys=sum(lens))
