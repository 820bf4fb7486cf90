"""The quantisation of rows in front of each product of fused_experts; kernels: csrc/ops/fused_experts_quantize.hip."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.launch import I64, Launch, Workspace
from vllm_rocm_ops.ops.gemm import BLOCK
from vllm_rocm_ops.ops.rows import CHUNK, ELEMENTS

MODULE = "fused_experts_quantize"
THREADS = 256  # of a block at most, but for those that have a row to themselves
ROW_THREADS, ROW_CHUNKS = 512, 4  # of these: the threads to prefer, and the most chunks that one owns
MOST_ROW_THREADS = 1024
MOST_COLUMNS = MOST_ROW_THREADS * ROW_CHUNKS * CHUNK  # with a scale per token


class Rows(NamedTuple):
    """[count, columns] elements of bf16 or fp16; 16-byte aligned rows at a stride in elements, and a multiple of 8 columns."""

    buffer: Tensor | Workspace
    count: int
    columns: int
    stride: int
    dtype: torch.dtype


class Quantized(NamedTuple):
    """The launch, and what it writes: e4m3 values [count, columns] and float32 scales; the elements from one row's scale to the
    next row's, and from one of 128 columns to the next."""

    launch: Launch
    values: Workspace
    scale: Tensor | Workspace
    scale_row: int
    scale_run: int


def quantize(
    x: Rows, per_block: bool, static: Tensor | None, arch: Arch, present: Tensor | Workspace | None = None
) -> Quantized:
    """x divided by the static scale if there is one, else by a scale per 128 columns or per row. `present`, an int32 on the
    device, says how many of the rows there are; the others are neither read nor written."""
    kind = "static" if static is not None else "block" if per_block else "token"
    chunks, lanes = -(-x.columns // CHUNK), arch.wave_lanes
    most = max(ROW_THREADS, -(-chunks // ROW_CHUNKS)) if kind == "token" else THREADS
    threads = -(-min(chunks, most) // lanes) * lanes
    parts = 1 if kind == "token" else -(-chunks // threads)
    runs = -(-x.columns // BLOCK) if kind == "block" else 1
    values = Workspace(x.count * x.columns)
    scale = Workspace(x.count * runs * 4) if static is None else static
    written = scale if static is None else None
    args = (x.buffer, values, written, static, present, I64(x.stride), x.columns, threads)
    symbol = f"{MODULE}_{kind}_{ELEMENTS[x.dtype]}"
    launch = Launch(MODULE, symbol, (x.count, parts, 1), (threads, 1, 1), args)
    return Quantized(launch, values, scale, *((0, 0) if kind == "static" else (runs, 1)))
