"""The tokens of each product of fused_experts: as they are, or quantised ahead by csrc/ops/fused_experts_quantize.hip."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.families.experts import HALVES, scheme
from vllm_rocm_ops.families.gemm import BLOCK
from vllm_rocm_ops.families.rowwise import CHUNK, ELEMENTS
from vllm_rocm_ops.launch import Launch, Workspace, fields
from vllm_rocm_ops.quantization import LIMIT, MX_BLOCK

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


class Operand(NamedTuple):
    """What a product multiplies with weights: rows so many bytes apart, and their scales, if any, so many elements apart: from row
    to row, and from one run of columns to the next."""

    rows: Tensor | Workspace
    row_bytes: int
    scale: Tensor | Workspace | None = None
    scale_row: int = 0
    scale_run: int = 0


def quantize(
    x: Rows, weights: str, static: Tensor | None, arch: Arch, present: Tensor | Workspace | None = None
) -> tuple[Operand, Launch]:
    """x in e4m3 and the launch that writes it: divided by the static scale if there is one, else by scales as go with how the
    weights are scaled: float32 per 128 columns with "block", e8m0 per 32 columns with "mx", else float32 per row. `present`, an
    int32 on the device, says how many of the rows there are; the others are neither read nor written."""
    runs_of = {"block": BLOCK, "mx": MX_BLOCK}
    kind = "static" if static is not None else weights if weights in runs_of else "token"
    chunks, lanes = -(-x.columns // CHUNK), arch.wave_lanes
    most = max(ROW_THREADS, -(-chunks // ROW_CHUNKS)) if kind == "token" else THREADS
    threads = -(-min(chunks, most) // lanes) * lanes
    parts = 1 if kind == "token" else -(-chunks // threads)
    runs = -(-x.columns // runs_of.get(kind, x.columns))
    values = Workspace(x.count * x.columns)
    scale = Workspace(x.count * runs * (1 if kind == "mx" else 4)) if static is None else static
    written = scale if static is None else None
    args = {
        "x": x.buffer,
        "out": values,
        "scale": written,
        "static_scale": static,
        "count": present,
        "stride": x.stride,
        "columns": x.columns,
        "threads": threads,
    }
    symbol = f"{MODULE}_{kind}_{ELEMENTS[x.dtype]}"
    launch = Launch(MODULE, symbol, (x.count, parts, 1), (threads, 1, 1), fields("rows", args))
    return Operand(values, x.columns, scale, *((0, 0) if kind == "static" else (runs, 1))), launch


def operand(
    a, x: Rows, static: Tensor | None, arch: Arch, present: Workspace | None = None
) -> tuple[Operand, list[Launch]]:
    """x as a product of fused_experts takes it, and the launch that quantises it if the weights want that."""
    if a.w1.dtype in HALVES:
        return Operand(x.buffer, x.stride * x.dtype.itemsize), []
    quantized, launch = quantize(x, scheme(a.w1, a.w1_scale), static, arch, present)
    return quantized, [launch]


def hidden_operand(a, arch: Arch) -> tuple[Operand, list[Launch]]:
    """The same of the op's argument `hidden`."""
    x, scale = a.hidden, a.hidden_scale
    if x.dtype not in LIMIT:
        return operand(a, Rows(x, *x.shape, x.stride(0), x.dtype), scale, arch)
    row = 0 if scale.numel() == 1 else scale.shape[1]
    return Operand(x, x.stride(0), scale, row, int(scheme(a.w1, a.w1_scale) in ("block", "mx"))), []


def quantizing(a) -> int:
    """How many launches quantise the tokens of a call's two products."""
    return 0 if a.w1.dtype in HALVES else 1 + (a.hidden.dtype != a.w1.dtype)
