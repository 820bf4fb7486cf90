"""Prepare the tokens of each GEMM of fused_experts: unquantized, or quantized to e4m3 or int8 by a launch of its own.

Kernels: csrc/ops/fused_experts_quantize.hip.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch, Workspace, fields
from vllm_rocm_ops.ops.shared.experts import Scheme, activation_dtype, scheme_of
from vllm_rocm_ops.ops.shared.rowwise import ELEMENTS, VECTOR

MODULE = "fused_experts_quantize"
THREADS = 256  # per block at most, except for one block per row
ROW_THREADS, ROW_VECTORS = 512, 4  # with one block per row: preferred threads, and most vectors per thread
MAX_ROW_THREADS = 1024
MAX_COLUMNS = MAX_ROW_THREADS * ROW_VECTORS * VECTOR  # with a scale per token


class UnquantizedRows(NamedTuple):
    """[count, columns] in bf16 or fp16, with 16-byte aligned rows, a stride in elements, and a multiple of 8 columns."""

    buffer: Tensor | Workspace
    count: int
    columns: int
    stride: int
    dtype: torch.dtype


class Activations(NamedTuple):
    """The activations of a GEMM.

    `row_bytes` is the stride of rows in bytes; `scale_row` and `scale_k` are the strides of scales in elements, between rows and
    between groups of columns.
    """

    rows: Tensor | Workspace
    row_bytes: int
    scale: Tensor | Workspace | None = None
    scale_row: int = 0
    scale_k: int = 0


def quantize(
    x: UnquantizedRows,
    weights: Scheme,
    static: Tensor | None,
    arch: Arch,
    num_rows: Tensor | Workspace | None = None,
    to_int8: bool = False,
) -> tuple[Activations, Launch]:
    """Return x quantized to e4m3 or int8, and the launch that writes it.

    A static scale divides x if given. Otherwise scales follow the weights' scheme, per row or per group of columns. `num_rows`, an
    int32 on the device, is the number of valid rows; others are neither read nor written.
    """
    kind, groups = ("static", 1) if static is not None else (weights.infix("token"), weights.groups(x.columns))
    vectors, lanes = -(-x.columns // VECTOR), arch.wave_lanes
    owns_row = static is None and not weights.group or to_int8
    most = max(ROW_THREADS, -(-vectors // ROW_VECTORS)) if owns_row else THREADS
    threads = -(-min(vectors, most) // lanes) * lanes
    blocks_per_row = 1 if owns_row else -(-vectors // threads)
    values = Workspace(x.count * x.columns)
    scale = Workspace(x.count * groups * weights.scales[0].itemsize) if static is None else static
    written = scale if static is None else None
    args = {
        "x": x.buffer,
        "out": values,
        "scale": written,
        "static_scale": static,
        "count": num_rows,
        "stride": x.stride,
        "columns": x.columns,
        "threads": threads,
    }
    symbol = f"{MODULE}_{'int8_' if to_int8 else ''}{kind}_{ELEMENTS[x.dtype]}"
    launch = Launch(MODULE, symbol, (x.count, blocks_per_row, 1), (threads, 1, 1), fields("problem", args))
    return Activations(values, x.columns, scale, *((groups, 1) if static is None else (0, 0))), launch


def operand(
    a, x: UnquantizedRows, static: Tensor | None, arch: Arch, num_rows: Workspace | None = None
) -> tuple[Activations, list[Launch]]:
    """Return x as a GEMM of fused_experts reads it, and the launch that quantizes it, if the weights need one."""
    dtype = activation_dtype(a)
    if dtype is None:
        return Activations(x.buffer, x.stride * x.dtype.itemsize), []
    quantized, launch = quantize(x, scheme_of(a.w1, a.w1_scale), static, arch, num_rows, dtype == torch.int8)
    return quantized, [launch]


def hidden_operand(a, arch: Arch) -> tuple[Activations, list[Launch]]:
    """Return the same for the op's argument `hidden`."""
    x, scale = a.hidden, a.hidden_scale
    if x.dtype in ELEMENTS:
        return operand(a, UnquantizedRows(x, *x.shape, x.stride(0), x.dtype), scale, arch)
    row = 0 if scale.numel() == 1 else scale.shape[1]
    return Activations(x, x.stride(0), scale, row, int(scheme_of(a.w1, a.w1_scale).group > 0)), []


def quantizing(a) -> int:
    """Return the launches that quantize the tokens of a call's two GEMMs."""
    dtype = activation_dtype(a)
    return 0 if dtype is None else 1 + (a.hidden.dtype != dtype)
