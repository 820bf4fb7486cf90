"""Define the contest mla-decode: an MLA layer for one new token per request.

The data are a configuration with the weights, tokens [batch, 1, dim], and a dense cache [batch, 8192, 576] of bf16 rows: a latent and the
not yet rotated part of the key. The layer appends the new token's row. The outputs are the layer's [batch, 1, dim] and the whole cache.
Angles of the rotation are bf16 products, so positions above 256 are rounded.

vLLM's caches have rotated rows, as `mla_decode` needs. The plugin's solution copies the cache and rotates the copy first, which is timed.
"""

from __future__ import annotations

import math
import types

import torch
from torch.nn.functional import linear

from contests.contest import Contest, Sizes, Stage, copy, normal, problems
from vllm_rocm_ops import ops
from vllm_rocm_ops.ops.mla_decode import LATENT, ROPE
from vllm_rocm_ops.ops.shared.skinny_gemm import MAX_TOKENS

NOPE, VALUE = 128, 128  # unrotated elements of a head's key; elements of its value
HEADS, LENGTH = 128, 8192
PAGE = 64  # rows per page of the copy
THETA = 10000.0


class Config(types.SimpleNamespace):
    """A layer, under the contest's names."""

    def copy(self) -> Config:
        """Return a copy with separate weights."""
        return Config(**copy(vars(self)))


class KVCache:
    """A dense cache [batch, length, 576] with `seq_len` filled rows, under the contest's names."""

    def __init__(self, data: torch.Tensor, seq_len: int = 0):
        self.data, self.seq_len, self.filled = data, seq_len, seq_len

    def __call__(self, c_kv: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Append rows [batch, rows, 576], and return all filled ones and their number."""
        end = self.seq_len + c_kv.shape[1]
        if end > self.data.shape[1]:
            raise ValueError(f"the cache holds {self.data.shape[1]} rows, got {end}")
        self.data[:, self.seq_len : end] = c_kv
        self.seq_len = end
        return self.data[:, :end], end

    def get_data(self) -> torch.Tensor:
        """Return the whole cache."""
        return self.data

    def copy(self) -> KVCache:
        """Return a copy in separate memory."""
        return KVCache(self.data.clone(), self.seq_len)


Data = tuple[Config, torch.Tensor, KVCache]


def _make(sizes: Sizes, seed: int, device: str, fp8_dtype: torch.dtype) -> Data:
    batch, dim, rank, prefill = (sizes[name] for name in ("batchsize", "dim", "dq", "prefill"))
    heads, length = sizes.get("heads", HEADS), sizes.get("length", LENGTH)
    drawn = normal(seed, device, torch.bfloat16)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return drawn(outputs, inputs) / math.sqrt(inputs)

    weights = {
        "Q_proj_down_weight": weight(rank, dim),
        "KV_proj_down_weight": weight(LATENT + ROPE, dim),
        "Q_proj_up_weight": weight((NOPE + ROPE) * heads, rank),
        "KV_proj_up_weight": weight((NOPE + VALUE) * heads, LATENT),
        "wo_weight": weight(dim, VALUE * heads),
    }
    shape = (batch, length, LATENT + ROPE)
    ranks = {"q_lora_rank": rank, "kv_lora_rank": LATENT, "n_heads": heads}
    widths = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
    lengths = {"seq_len": 1, "max_seq_len": length, "kv_cache_shape": shape}
    config = Config(batch_size=batch, dim=dim, **ranks, **widths, **lengths, **weights)
    x = drawn(batch, 1, dim)
    data = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    data[:, :prefill] = drawn(batch, prefill, LATENT + ROPE)
    return config, x, KVCache(data, prefill)


def _again(data: Data) -> None:
    cache = data[2]
    cache.seq_len = cache.filled


def _cos_sin(positions: int, device: torch.device) -> torch.Tensor:
    """Return cosines, then sines of each position's angles, [positions, 64] bf16."""
    places = torch.arange(ROPE // 2, dtype=torch.bfloat16, device=device) / (ROPE // 2)
    angles = torch.arange(positions, device=device).bfloat16()[:, None] * THETA**-places
    return torch.cat((angles.cos(), angles.sin()), -1)


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., rows, 64] by the angles of its rows [rows, 64], in bf16."""
    cos, sin = (torch.cat((part, part), -1) for part in cos_sin.chunk(2, -1))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _reference(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute request by request: the keys and values of all heads take 100 times the memory of the cache."""
    config, x, cache = data
    rows, length = cache(linear(x, config.KV_proj_down_weight))
    queries = linear(linear(x, config.Q_proj_down_weight), config.Q_proj_up_weight)
    queries = queries.view(config.batch_size, 1, config.n_heads, NOPE + ROPE).transpose(1, 2)
    cos_sin = _cos_sin(length, x.device)
    outputs = []
    for query, row in zip(queries, rows):
        heads = linear(row[:, :LATENT], config.KV_proj_up_weight).view(length, config.n_heads, NOPE + VALUE)
        key, value = heads.transpose(0, 1).split((NOPE, VALUE), -1)
        rotated = _rotated(row[:, LATENT:], cos_sin).expand(config.n_heads, -1, -1)
        query = torch.cat((query[..., :NOPE], _rotated(query[..., NOPE:], cos_sin[-1:])), -1)
        scores = query @ torch.cat((key, rotated), -1).transpose(-1, -2) / math.sqrt(NOPE + ROPE)
        outputs.append((scores.softmax(-1) @ value).view(1, -1))
    return linear(torch.stack(outputs), config.wo_weight), cache.get_data()


def _linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Use the plugin's kernel if it supports this number of rows."""
    return ops.unquantized_gemm(x, weight) if len(x) <= MAX_TOKENS else linear(x, weight)


def _ours(data: Data, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    config, x, cache = data
    batch, heads, prefill = config.batch_size, config.n_heads, cache.seq_len
    tokens, length = x.squeeze(1), cache.seq_len + 1
    up = config.KV_proj_up_weight.view(heads, NOPE + VALUE, LATENT)
    with stage("projections"):
        new = _linear(tokens, config.KV_proj_down_weight)
        query = _linear(_linear(tokens, config.Q_proj_down_weight), config.Q_proj_up_weight)
        query = query.view(batch, heads, NOPE + ROPE)
        query_latent = (query[..., :NOPE].transpose(0, 1) @ up[:, :NOPE]).transpose(0, 1)
    with stage("copy and rotate the cache"):
        pages = -(-length // PAGE)
        copy = x.new_empty(batch, pages * PAGE, LATENT + ROPE)
        copy[:, :prefill].copy_(cache.data[:, :prefill])
        paged = copy.view(batch * pages, PAGE, LATENT + ROPE)
        cos_sin, positions = _cos_sin(length, x.device), torch.arange(prefill, device=x.device)
        no_rows = x.new_zeros(prefill, LATENT + ROPE)
        keys = copy[:, :prefill, LATENT:].transpose(0, 1)  # a position's requests replace a token's heads
        _rotate(keys, no_rows, positions, cos_sin, paged.new_empty(1, 1, LATENT + ROPE), positions[:0])
    with stage("rotate and append"):
        cache(new[:, None])
        slots = torch.arange(batch, device=x.device) * (pages * PAGE) + prefill
        query_rope = query[..., NOPE:]
        _rotate(query_rope, new, torch.full_like(slots, prefill), cos_sin, paged, slots)
    with stage("attention"):
        table = torch.arange(batch * pages, dtype=torch.int32, device=x.device).view(batch, pages)
        lengths = table.new_full((batch,), length)
        scale = (NOPE + ROPE) ** -0.5
        latent, _ = ops.mla_decode(query_latent, query_rope, paged, table, lengths, scale)
    with stage("output projections"):
        value = (latent.transpose(0, 1) @ up[:, NOPE:].transpose(1, 2)).transpose(0, 1)
        return _linear(value.flatten(1), config.wo_weight).unsqueeze(1), cache.get_data()


def _rotate(query: torch.Tensor, rows: torch.Tensor, positions, cos_sin, cache: torch.Tensor, slots) -> None:
    """Rotate query [tokens, heads, 64] in place, and write rows [tokens, 576] to slots of a cache, their last 64 elements rotated."""
    key = rows[:, LATENT:].clone()
    ops.rope_and_cache_mla(query, key, rows[:, :LATENT], positions, cos_sin, True, cache, slots)


def _flops(sizes: Sizes) -> float:
    """Count the GEMMs of heads and latents. GEMMs of keys and values would take more."""
    heads, rank, dim = sizes.get("heads", HEADS), sizes["dq"], sizes["dim"]
    projections = dim * rank + dim * (LATENT + ROPE) + rank * heads * (NOPE + ROPE) + heads * VALUE * dim
    absorbed = heads * LATENT * (NOPE + VALUE)
    attention = heads * (sizes["prefill"] + 1) * (LATENT + ROPE + LATENT)
    return 2.0 * sizes["batchsize"] * (projections + absorbed + attention)


NAMES = "batchsize dim dq prefill seed"
TESTS = "128 7168 1536 128 9247, 128 7168 1536 512 2197, 128 7168 1536 1024 9107, 128 7168 1536 2048 5291"
BENCHMARKS = "128 7168 1536 4096 9817, 128 7168 1536 6144 5291"
REDUCED = "3 256 64 65 9247 4 96, 1 128 96 128 5291 17 192"

CONTEST = Contest(
    name="mla",
    make=_make,
    reference=_reference,
    ours=_ours,
    flops=_flops,
    tests=problems(NAMES, TESTS),
    benchmarks=problems(NAMES, BENCHMARKS),
    reduced=problems(f"{NAMES} heads length", REDUCED),
    rtol=2e-2,
    atol=8e-3,
    outputs=("the layer's output", "the cache"),
    error=0.01,
    floors={0: 210.75, 1: 280.87},
    again=_again,
)
