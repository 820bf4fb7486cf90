"""Define the decode attention shapes to benchmark against vLLM's kernels: public models, batch sizes and context lengths.

In `ragged` cases lengths are uniform between 1 and twice the mean. Pages are scattered over the cache, and the block table has room for
LONGEST keys, as in vLLM: only `seq_lens` on the device holds the lengths. Peers know the longest one. Cases with rows verify drafts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.clock import COLD_BYTES, Clock
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.ops import mla_decode, paged_attention_decode
from vllm_rocm_ops.ops.mla_decode import LATENT, ROPE
from vllm_rocm_ops.tools.bench.baselines import DECODE_ATTENTION, Baseline
from vllm_rocm_ops.tools.bench.shapes import Check, Shape, relative_error

BATCHES = tuple(2**i for i in range(8))
CONTEXTS = 128, 1024, 4096, 16384, 65536, 131072
LONGEST = CONTEXTS[-1]
RAGGED = ((8, 1024), (32, 4096), (128, 1024), (64, 16384))  # requests, mean length
HEADS = {  # heads, KV heads, head size; MLA: heads only
    "llama-3.1-405b tp8": (16, 1, 128),
    "deepseek-v3 tp8": (16,),
    "llama-3.1-8b": (32, 8, 128),
    "qwen3-30b-a3b": (32, 4, 128),
    "deepseek-v3 tp1": (128,),
    "qwen3-next": (16, 2, 256),
    "gemma-3-4b": (8, 4, 256),
}
ALL = "llama-3.1-405b tp8", "deepseek-v3 tp8"  # with the whole grid
DRAFTS = tuple(
    (rows, batch, 4096) for rows in (2, 4, 8) for batch in (1, 8, 32, 64)
)  # rows per request, requests, length
FEW = ((1, 1024), (8, 4096), (64, 1024))  # for other models
MORE = {"qwen3-next": tuple((batch, context) for context in CONTEXTS[:4] for batch in (1, 8, 32, 64))}
PAGE, MLA_PAGE = 16, 64  # tokens, as in vLLM's backends
PAGES = {"qwen3-next": 544}  # as large as the states of its other layers


@dataclass(frozen=True)
class Decode(Shape):
    """Define one decode call; `keys` is the total over the requests."""

    keys: int = 0
    draws_on_device, listed = True, DECODE_ATTENTION

    def sets(self, clock: Clock, arguments: tuple) -> list[tuple]:
        """Return one set if its cache exceeds the GPU's caches."""
        return [arguments] if self.bytes_moved([arguments]) > COLD_BYTES else super().sets(clock, arguments)

    def bytes_moved(self, sets: list[tuple]) -> float:
        """Return the bytes of keys, values, queries and results."""
        a = self.op.Arguments(*sets[0])
        if self.op is mla_decode:
            of_key, rows = a.kv_cache[0, 0].nbytes, 2 * a.q_nope.nbytes + a.q_pe.nbytes
        else:
            of_key, rows = a.key_cache[0, 0].nbytes + a.value_cache[0, 0].nbytes, 2 * a.query.nbytes
        return self.keys * of_key + rows

    def check(self, sets: list[tuple], device: str, baselines: Mapping[str, Baseline]) -> Check:
        """Return a check for the relative error (norm) of the first and last request."""
        a = self.op.Arguments(*sets[0])
        last = len(a.seq_lens) - 1
        some = torch.tensor(sorted({0, last}), device=a.seq_lens.device)
        rows = torch.cat([torch.arange(a.query_len, device=some.device) + request * a.query_len for request in some])
        queries = {name: value[rows] for name, value in a._asdict().items() if name in ("query", "q_nope", "q_pe")}
        of_some = a._replace(**queries, block_table=a.block_table[some], seq_lens=a.seq_lens[some])
        exact = self.op.reference(*of_some)[0].double()
        return lambda: {"relative_error": relative_error(self.op(*a)[0][rows], exact)}


# Shapes


def _lengths(batch: int, context: int, ragged: bool) -> list[int]:
    if not ragged:
        return [context] * batch
    generator = torch.Generator().manual_seed(context)
    return torch.randint(1, 2 * context, (batch,), generator=generator).tolist()


def _make(
    heads: tuple[int, ...],
    lens: list[int],
    dtype: torch.dtype,
    device,
    generator,
    fp8_dtype,
    page: int = PAGE,
    query_len: int = 1,
) -> tuple:
    """Create the op's arguments; `page` has the tokens of a page of keys and values per head."""
    page = MLA_PAGE if len(heads) == 1 else page
    pages_each = [-(-length // page) for length in lens]
    order = torch.randperm(sum(pages_each), generator=generator, device=device).to(torch.int32)
    table = order.new_zeros(len(lens), -(-LONGEST // page))
    for row, pages in zip(table, order.split(pages_each)):
        row[: len(pages)] = pages
    of_requests = table, torch.tensor(lens, dtype=torch.int32, device=device)

    def values(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)

    rows = len(lens) * query_len
    if len(heads) == 1:
        q_nope, q_pe = (values(rows, *heads, size) for size in (LATENT, ROPE))
        return q_nope, q_pe, values(len(order), page, LATENT + ROPE), *of_requests, (LATENT + ROPE) ** -0.5, query_len
    of_query, of_key, size = heads
    caches = (values(len(order), page, of_key, size) for _ in range(2))
    return values(rows, of_query, size), *caches, *of_requests, 1 / math.sqrt(size), query_len


def decode_attention(dtype: torch.dtype = torch.bfloat16) -> Iterator[Decode]:
    """Yield the shapes. Raises ValueError for an unsupported dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the dtype of attention must be bfloat16 or float16, got {dtype}")
    grid = [(1, batch, context, False) for context in CONTEXTS for batch in BATCHES]
    grid += [(1, batch, context, True) for batch, context in RAGGED] + [(*drafts, False) for drafts in DRAFTS]
    for model, heads in HEADS.items():
        op: Op = mla_decode if len(heads) == 1 else paged_attention_decode
        few = [(1, *each, False) for each in MORE.get(model, FEW)]
        for rows, batch, context, ragged in grid if model in ALL else few:
            lens = _lengths(batch, context, ragged)
            size = (2 * LATENT + ROPE) if op is mla_decode else 2 * heads[2]
            flops = 2 * heads[0] * size * sum(lens) * rows
            sizes = {"batch": batch, "context": context, "heads": heads[0], "flops": flops}
            make = functools.partial(_make, heads, lens, dtype, page=PAGES.get(model, PAGE), query_len=rows)
            drafts = f", {rows} rows" * (rows > 1)
            case = Case(f"{model}{drafts} {batch}x{context}{' ragged' * ragged}", make)
            short = "short" if batch <= 16 and context <= 4096 else "long or many"
            yield Decode(op, case, sizes, group=short, keys=sum(lens))
