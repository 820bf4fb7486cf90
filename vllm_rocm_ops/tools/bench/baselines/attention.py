"""Prepare attention calls of other libraries: PyTorch, and vLLM's kernels as its backends call them.

Each function turns the op's arguments into a call. A backend's preparation before a step is not timed. Caches are 16-bit: `one_scale`.
"""

import functools
import importlib

import torch
from torch import Tensor

from vllm_rocm_ops.ops import mla_decode, paged_attention_decode
from vllm_rocm_ops.ops.mla_decode import LATENT
from vllm_rocm_ops.tools.bench.baselines.installed import load

MAX_SPLITS = 32  # in FlashAttention 3, as vLLM allows in a captured graph
SEGMENTS = 16  # in the unified Triton kernel, up to UNIFIED_BLOCKS requests x KV heads
UNIFIED_BLOCKS = 128
SPLIT_KEYS = 512  # minimum per split in the Triton MLA kernel


def one_scale(like: Tensor, *shape: int) -> Tensor:
    """Return the scale of an unquantized cache.

    vLLM's layers have it, and Triton's kernels multiply by it. FlashAttention and FlashMLA use scales for FP8 caches only.
    """
    return torch.ones(shape, device=like.device)


def torch_dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Run PyTorch's scaled_dot_product_attention."""
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError("causal rows are aligned to the first key")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def flash_dense(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple:
    """Prepare a FlashAttention 3 call as vLLM makes it."""
    load()
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    begins = {
        f"cu_seqlens_{name}": torch.arange(len(x) + 1, dtype=torch.int32, device=x.device) * x.shape[1]
        for name, x in (("q", q), ("k", k))
    }
    lengths = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    options = {"softmax_scale": scale, "causal": causal, "fa_version": 3}
    return (functools.partial(attend, *(x.flatten(0, 1) for x in (q, k, v)), **begins, **lengths, **options),)


def _starts(a) -> Tensor:
    """Return the first row of each request, and the end."""
    return torch.arange(len(a.seq_lens) + 1, dtype=torch.int32, device=a.seq_lens.device) * a.query_len


def _flash(a, q: Tensor, k: Tensor, v: Tensor, **more) -> tuple:
    """Prepare a FlashAttention 3 decode call with its scheduler metadata; `more` has the MLA arguments."""
    load()
    flash = importlib.import_module("vllm.vllm_flash_attn")
    longest, starts = int(a.seq_lens.max()), _starts(a)
    of_rows = {"max_seqlen_q": a.query_len, "max_seqlen_k": longest, "cu_seqlens_q": starts, "causal": True}
    schedule = flash.get_scheduler_metadata(
        batch_size=len(a.seq_lens),
        num_heads_q=q.shape[1],
        num_heads_kv=k.shape[2],
        headdim=q.shape[2],
        headdim_v=v.shape[3],
        cache_seqlens=a.seq_lens,
        qkv_dtype=q.dtype,
        page_size=k.shape[1],
        num_splits=MAX_SPLITS,
        **of_rows,
    )
    options = {"seqused_k": a.seq_lens, "block_table": a.block_table, "softmax_scale": a.scale, "fa_version": 3}
    options |= {"scheduler_metadata": schedule, "num_splits": MAX_SPLITS}
    return (functools.partial(flash.flash_attn_varlen_func, q=q, k=k, v=v, **of_rows, **options, **more),)


def flash_paged(*arguments) -> tuple:
    """Prepare a FlashAttention 3 call for paged decode."""
    a = paged_attention_decode.Arguments(*arguments)
    return _flash(a, a.query, a.key_cache, a.value_cache)


def flash_latent(*arguments) -> tuple:
    """Prepare a FlashAttention 3 call for MLA decode."""
    a = mla_decode.Arguments(*arguments)
    cache = a.kv_cache.unsqueeze(2)
    return _flash(a, a.q_pe, cache[..., LATENT:], cache[..., :LATENT], q_v=a.q_nope)


def unified(*arguments) -> tuple:
    """Prepare a call of TRITON_ATTN's kernel, which adds a segment-reduction launch for few requests."""
    a = paged_attention_decode.Arguments(*arguments)
    attend = importlib.import_module("vllm.v1.attention.ops.triton_unified_attention").unified_attention
    rows, heads, size = a.query.shape
    kept = [a.query.new_empty(rows, heads, SEGMENTS, *shape, dtype=torch.float32) for shape in ((size,), (), ())]
    keywords = {
        "q": a.query,
        "k": a.key_cache,
        "v": a.value_cache,
        "out": torch.empty_like(a.query),
        "cu_seqlens_q": _starts(a),
        "max_seqlen_q": a.query_len,
        "seqused_k": a.seq_lens,
        "max_seqlen_k": int(a.seq_lens.max()),
        "softmax_scale": a.scale,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": a.block_table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": one_scale(a.query, len(a.seq_lens), a.key_cache.shape[2]),
        "v_descale": one_scale(a.query, len(a.seq_lens), a.key_cache.shape[2]),
        "seq_threshold_3D": UNIFIED_BLOCKS // a.key_cache.shape[2],
        "num_par_softmax_segments": SEGMENTS,
        **dict(zip(("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"), kept)),
    }
    return (functools.partial(attend, **keywords),)


def flash_mla(*arguments) -> tuple:
    """Prepare a FlashMLA call; its concatenated query is created here and not timed."""
    a = mla_decode.Arguments(*arguments)
    ops = importlib.import_module("vllm.v1.attention.ops.flashmla")
    query, schedule = torch.cat((a.q_nope, a.q_pe), -1).unflatten(0, (-1, a.query_len)), ops.get_mla_metadata()[0]
    given = query, a.kv_cache.unsqueeze(2), a.block_table, a.seq_lens, LATENT, schedule
    return (functools.partial(ops.flash_mla_with_kvcache, *given, softmax_scale=a.scale, causal=True),)


def triton_mla(*arguments) -> tuple:
    """Prepare a call as TRITON_MLA makes it, which also concatenates the query, and repeats requests for each of their rows."""
    a = mla_decode.Arguments(*arguments)
    attend = importlib.import_module("vllm.v1.attention.ops.triton_decode_attention").decode_attention_fwd
    rows, heads, _ = a.q_nope.shape
    multiprocessors = torch.cuda.get_device_properties(a.q_nope.device).multi_processor_count
    wanted = 1 << (max(int(a.seq_lens.max()) // SPLIT_KEYS, 1) - 1).bit_length()
    splits = min(wanted, 2 * multiprocessors)
    logits = a.q_nope.new_empty(rows, heads, splits, LATENT + 1, dtype=torch.float32)
    cache, unit_scale = a.kv_cache.unsqueeze(2), one_scale(a.q_nope, 1)

    def call() -> Tensor:
        query = torch.cat((a.q_nope, a.q_pe), -1)
        out = torch.zeros_like(a.q_nope, memory_format=torch.contiguous_format)
        lse = query.new_zeros(rows, heads)
        table, lens = a.block_table, a.seq_lens
        if a.query_len > 1:
            table = table.repeat_interleave(a.query_len, dim=0)
            behind = torch.arange(1 - a.query_len, 1, device=lens.device, dtype=lens.dtype)
            lens = (lens.unsqueeze(1) + behind).flatten().clamp(min=0)
        given = query, cache, cache[..., :LATENT], out, lse, table, lens, logits, splits, a.scale
        attend(*given, cache.shape[1], k_scale=unit_scale, v_scale=unit_scale, is_mla=True)
        return out

    return (call,)
