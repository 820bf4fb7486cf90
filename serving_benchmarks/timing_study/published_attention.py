"""Prefill attention of ROCm/aiter with published times: arguments and grids of fmha_v3_fwd's objects."""

from __future__ import annotations

import struct

import torch

from vllm_rocm_ops.emulator.objects import KernelObject
from vllm_rocm_ops.timing.trace import aligned

from .external_kernel import ObjectLaunch
from .published import Call, Row, laid_out, zeros

TILE = 256  # query rows of a block
SHORT, LONG = 512, 1024  # keys of the launches that run; time is linear beyond
MALL_BYTES = 256 << 20
NAMES = """R Q K V LSE scalar seq_len Seqs Ts Hs Bs gqa k_Seqs k_Hs k_Bs msk_opt lse kv_seq_len qk_head_dim v_head_dim q_head_num v_Seqs
v_Hs v_Bs r_Seqs r_Hs r_Bs ptr_qseq ptr_kseq lse_Hs ptr_qseq_padding ptr_kseq_padding"""


def call(of: Row, kernel: KernelObject) -> Call:
    """Return the launches of a row: one with `SHORT` and one with `LONG` keys, or one if there are no more.

    Raises ValueError.
    """
    heads, of_keys = int(of.extra["q_heads"]), int(of.extra["kv_heads"])
    is_causal, is_grouped = of.extra["causal"] == "1", "_group" in of.code_object
    key, _, value = of.k.partition("/")
    sizes = heads, of_keys, int(key), int(value or key)
    if is_causal and of.m != of.n:
        raise ValueError(f"causal attention must have as many queries as keys, got {of.m} and {of.n}")
    if sizes[2] == 192 and not is_grouped:
        raise ValueError("attention with heads of 192 must be in groups, the only layout that is known")

    def launch(keys: int) -> ObjectLaunch:
        return _launch(kernel, keys if is_causal else min(of.m, 4 * TILE), keys, *sizes, is_causal, is_grouped)

    grid = _grid(of.m, heads, of.batch_or_experts, sizes[2], is_causal, is_grouped)
    total = 2 * of.batch_or_experts * (heads * of.m * sizes[2] + of_keys * of.n * (sizes[2] + sizes[3]))
    short, long = (launch(min(of.n, keys)) for keys in (SHORT, LONG))
    inputs = tuple(short.args[16 * place] for place in (1, 2, 3))
    made = Call(short, grid, inputs, total > MALL_BYTES)
    return made if of.n <= SHORT else made._replace(second=long, beyond=(of.n - SHORT) / (min(of.n, LONG) - SHORT))


def _grid(queries: int, heads: int, batch: int, head: int, is_causal: bool, is_grouped: bool) -> tuple[int, int, int]:
    """Return the grid; causal blocks have one tile from the front and one from the back, except with heads of 192."""
    tiles = -(-queries // TILE)
    if is_causal and head != 192:
        tiles = -(-tiles // 2)
    return (heads, batch, tiles) if is_grouped else (tiles, heads, batch)


def _launch(
    kernel: KernelObject, queries: int, keys: int, heads: int, of_keys: int, key: int, value: int, is_causal: bool, is_grouped: bool
) -> ObjectLaunch:  # fmt: skip
    tensors = {"R": 2 * queries * heads * value, "Q": 2 * queries * heads * key, "LSE": 4 * queries * heads}
    tensors |= {"K": 2 * keys * of_keys * key, "V": 2 * keys * of_keys * value}
    values = {name: zeros(size) for name, size in tensors.items()}
    row, row_k, row_v, row_r = 2 * heads * key, 2 * of_keys * key, 2 * of_keys * value, 2 * heads * value
    values |= {"scalar": float(key**-0.5), "seq_len": queries, "Seqs": row, "Ts": TILE * row, "Hs": 2 * key}
    values |= {"Bs": queries * row, "gqa": heads // of_keys, "k_Seqs": row_k, "k_Hs": 2 * key, "k_Bs": keys * row_k}
    values |= {"msk_opt": 0 if key == 192 else 5, "lse": 0, "kv_seq_len": keys, "qk_head_dim": key, "v_head_dim": value}
    values |= {"q_head_num": heads, "v_Seqs": row_v, "v_Hs": 2 * value, "v_Bs": keys * row_v, "r_Seqs": row_r}
    values |= {"r_Hs": 2 * value, "r_Bs": queries * row_r, "lse_Hs": 4 * queries}
    if is_grouped:
        starts = {"q": _starts(queries), "k": _starts(keys)}
        values |= {f"ptr_{of}seq{of_padding}": starts[of] for of in starts for of_padding in ("", "_padding")}
    grid = _grid(queries, heads, 1, key, is_causal, is_grouped)
    return ObjectLaunch(kernel.name, grid, (kernel.max_block, 1, 1), laid_out(kernel, NAMES, values))


def _starts(length: int) -> torch.Tensor:
    """Return the start and the end of one request."""
    return aligned(torch.frombuffer(bytearray(struct.pack("<2I", 0, length) + bytes(8)), dtype=torch.uint8))
