"""What the products of activations with a weight share, whatever kernel computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.core.tensors import describe, row_stride, rows_of
from vllm_rocm_ops.ops.families.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP

E5M2 = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e4m3fnuz: torch.float8_e5m2fnuz}
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
BLOCK = 128  # of K and of N per block scale
PANEL = 2 * STEP  # bytes of K of what LDS holds at a time


class Operand(NamedTuple):
    """An argument of a product as rows along K. `k` and `stride`, from row to row, count bytes; the stride is None where
    no single number says it, and 0 in fragment order."""

    tensor: Tensor
    rows: int
    k: int
    stride: int | None

    @property
    def is_shuffled(self) -> bool:
        return self.tensor.dim() == 5


def activations(a: Tensor) -> Operand:
    """a [..., K]."""
    size, stride = a.element_size(), row_stride(a)
    return Operand(a, rows_of(a), a.shape[-1] * size, None if stride is None or a.stride(-1) != 1 else stride * size)


def weight(b: Tensor, transposed: bool = False) -> Operand:
    """b [N, K], or [K, N] if transposed, or in fragment order."""
    if b.dim() == 5:
        tiles, steps, vectors, rows, in_vector = b.shape
        return Operand(b, tiles * rows, steps * vectors * in_vector * b.element_size(), 0)
    return activations(b.t() if transposed else b)._replace(tensor=b)


def is_weight(b: Tensor, k: int, transposed: bool = False) -> bool:
    """Whether a tensor is a weight of so many elements along K, in either layout."""
    if b.dim() == 2:
        return b.shape[0 if transposed else 1] == k
    fragment = (STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, FRAGMENT_BYTES // b.element_size())
    return b.dim() == 5 and b.shape[2:] == fragment and weight(b).k == k * b.element_size()


def bias_contract(bias: Tensor | None, n: int, dtype: torch.dtype) -> Iterator[tuple[str, str, str, bool]]:
    """What a bias must be, where there is one."""
    if bias is not None:
        yield "bias", f"{dtype} [N={n}]", describe(bias), bias.shape == (n,) and bias.dtype == dtype


def problem(a: Operand, b: Operand) -> dict[str, int]:
    """What a tuned row is keyed by."""
    return {"m": a.rows, "n": b.rows, "k": a.k // a.tensor.element_size()}


def envelope(a: Operand, b: Operand) -> Iterator[tuple[str, bool]]:
    """What all kernels need."""
    yield "N is at least 1 and below 2^30", 0 < b.rows < 2**30
    yield "rows are at least 1 long and below 32 MB, N of them below 64 GB", 0 < a.k < 2**25 and b.rows * a.k < 2**36
    yield "rows are a multiple of 16 bytes long", a.k % 16 == 0
    for name, operand in (("a", a), ("b", b)):
        yield f"{name} is 16-byte aligned", operand.tensor.data_ptr() % 16 == 0
        if operand.is_shuffled:
            yield f"{name} in fragment order is contiguous", operand.tensor.is_contiguous()
        else:
            yield f"{name}'s rows lie at one stride, a multiple of 16 bytes below 32 MB", _is_stride(operand.stride)


def _is_stride(stride: int | None) -> bool:
    return stride is not None and stride % 16 == 0 and 0 <= stride < 2**25


def padded(rows: Tensor, padding: int) -> Tensor:
    """A copy whose rows have so many zeros more behind them: what cases cut views with a row stride from."""
    return torch.nn.functional.pad(rows, (0, padding))


class Product(NamedTuple):
    """out [M, N] = a @ b^T with scales and a bias, where there are any. Scales come with the elements between them: from row to row
    of a (0 for one scale) and from block to block of its K; from row to row of b, or block of rows."""

    out: Tensor
    a: Operand
    b: Operand
    scale_a: tuple[Tensor | Workspace | None, int, int] = (None, 0, 0)
    scale_b: tuple[Tensor | Workspace | None, int] = (None, 0)
    bias: Tensor | None = None
    rounds_to: torch.dtype | None = None  # before what the epilogue computes, by default `out`'s dtype

    def arguments(self, tiles: int, partial_bytes: int) -> dict:
        """What the problems of the skinny and of the tiled kernels both have. Without partial sums no block shares a tile."""
        return {
            "a": self.a.tensor,
            "b": self.b.tensor,
            "out": self.out,
            "partials": Workspace(partial_bytes) if partial_bytes else None,
            "counters": Counters(tiles) if partial_bytes else None,
            "scale_a": self.scale_a[0],
            "scale_b": self.scale_b[0],
            "bias": self.bias,
            "a_stride": self.a.stride,
            "m": self.a.rows,
            "n": self.b.rows,
            "k": self.a.k,
            "scale_a_row": self.scale_a[1],
            "scale_a_k": self.scale_a[2],
            "scale_b_row": self.scale_b[1],
            "out_type": OUT_TYPES[self.rounds_to or self.out.dtype],
        }


def divisor(value: int) -> dict[str, int]:
    """A Divisor of csrc/device/divisor.h, by which kernels divide whole numbers below 2^31."""
    shift = (value - 1).bit_length()
    return {"inverse": -(-(1 << 31 + shift) // value), "shift": shift}
