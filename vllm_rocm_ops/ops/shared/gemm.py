"""Share code between the GEMMs of activations and weights: operands, rules and kernel arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.core.tensors import describe, row_stride, rows_of
from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP

E5M2 = {torch.float8_e4m3fn: torch.float8_e5m2, torch.float8_e4m3fnuz: torch.float8_e5m2fnuz}
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
OUT_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
BLOCK = 128  # along K and N, per block scale
PANEL = 2 * STEP  # bytes along K of an LDS panel


class Operand(NamedTuple):
    """An operand of a GEMM as rows along K.

    `k` and the row stride `stride` are in bytes. The stride is None if rows have no single stride, and 0 for shuffled weights.
    """

    tensor: Tensor
    rows: int
    k: int
    stride: int | None

    @property
    def is_shuffled(self) -> bool:
        """True if the operand is in fragment order."""
        return self.tensor.dim() == 5


def activations(a: Tensor) -> Operand:
    """Return a [..., K] as an operand."""
    size, stride = a.element_size(), row_stride(a)
    return Operand(a, rows_of(a), a.shape[-1] * size, None if stride is None or a.stride(-1) != 1 else stride * size)


def weight(b: Tensor, transposed: bool = False) -> Operand:
    """Return b as an operand: [N, K], [K, N] if transposed, or in fragment order."""
    if b.dim() == 5:
        tiles, steps, vectors, rows, in_vector = b.shape
        return Operand(b, tiles * rows, steps * vectors * in_vector * b.element_size(), 0)
    return activations(b.t() if transposed else b)._replace(tensor=b)


def is_weight(b: Tensor, k: int, transposed: bool = False) -> bool:
    """True if a tensor is a weight with `k` elements along K, in either layout."""
    if b.dim() == 2:
        return b.shape[0 if transposed else 1] == k
    fragment = (STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, FRAGMENT_BYTES // b.element_size())
    return b.dim() == 5 and b.shape[2:] == fragment and weight(b).k == k * b.element_size()


def bias_contract(bias: Tensor | None, n: int, dtype: torch.dtype) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of an optional bias."""
    if bias is not None:
        yield "bias", f"{dtype} [N={n}]", describe(bias), bias.shape == (n,) and bias.dtype == dtype


def problem(a: Operand, b: Operand) -> dict[str, int]:
    """Return the key of a tuned row."""
    return {"m": a.rows, "n": b.rows, "k": a.k // a.tensor.element_size()}


def can_implement(a: Operand, b: Operand) -> Iterator[tuple[str, bool]]:
    """Yield the rules of all kernels."""
    yield "N is at least 1 and below 2^30", 0 < b.rows < 2**30
    yield "K is at least 1, rows along K are below 32 MB, N rows below 64 GB", 0 < a.k < 2**25 and b.rows * a.k < 2**36
    yield "rows along K are multiples of 16 bytes", a.k % 16 == 0
    for name, operand in (("a", a), ("b", b)):
        yield f"{name} is 16-byte aligned", operand.tensor.data_ptr() % 16 == 0
        if operand.is_shuffled:
            yield f"shuffled {name} is contiguous", operand.tensor.is_contiguous()
        else:
            yield f"{name}'s rows have one stride, a multiple of 16 bytes below 32 MB", is_stride(operand.stride)


def is_stride(stride: int | None) -> bool:
    """True if rows may be this many bytes apart."""
    return stride is not None and stride % 16 == 0 and 0 <= stride < 2**25


def with_spikes(values: Tensor) -> Tensor:
    """Return small values, with three large ones along K."""
    values, k = values * 0.01, values.shape[-1]
    values[..., [0, k // 2, k - 1]] = torch.tensor([100.0, -100.0, 50.0])
    return values


def padded(rows: Tensor, padding: int) -> Tensor:
    """Return a copy with `padding` zeros after each row, from which cases cut strided views."""
    return torch.nn.functional.pad(rows, (0, padding))


class Product(NamedTuple):
    """out [M, N] = a @ b^T with optional scales and bias.

    Scales come with their strides in elements: scale_a between rows of a (0 for one scale) and between blocks of K, scale_b between
    rows of b or blocks of rows.
    """

    out: Tensor
    a: Operand
    b: Operand
    scale_a: tuple[Tensor | Workspace | None, int, int] = (None, 0, 0)
    scale_b: tuple[Tensor | Workspace | None, int] = (None, 0)
    bias: Tensor | None = None
    rounds_to: torch.dtype | None = None  # before the epilogue's activation; `out`'s dtype by default

    def arguments(self, tiles: int, partial_bytes: int) -> dict:
        """Return the arguments of both skinny and tiled kernels. Without partial sums no block shares a tile."""
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
    """Return a Divisor of csrc/device/divisor.h, by which kernels divide integers below 2^31."""
    shift = (value - 1).bit_length()
    return {"inverse": -(-(1 << 31 + shift) // value), "shift": shift}
