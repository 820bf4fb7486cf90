"""Calls of an op that differ from a case in one thing, to compare what is chosen for both.

Nothing is computed: tensors are on the meta device, which allows any strides, or are unwritten.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from marks import few_of

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    *(torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.int32, torch.int64),
)
LARGE = (40, 384, 1025, 2**17, 2**30, 2**31)
FAR = (2**16, 2**24, 2**29, 2**31, 2**35)  # elements; a multiple of any vector


@functools.cache
def cases(the_op, fp8: torch.dtype) -> dict[str, tuple]:
    """Return the arguments of an op's cases without values, by name."""
    found = {}
    for case in the_op.cases():
        made = the_op.Arguments(*case.make("meta", torch.Generator().manual_seed(1), fp8))  # with all defaults
        found[case.name] = tuple(v.to("meta") if isinstance(v, torch.Tensor) else v for v in made)
    return found


def few_cases(the_op, fp8: torch.dtype) -> list[tuple]:
    """Return by default the arguments of few cases, which have each kind of each argument."""

    def kind(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.dim(), value.is_contiguous(), 1 in value.shape
        return type(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    return few_of(cases(the_op, fp8).values(), lambda case: frozenset(enumerate(map(kind, case))))


def laid(tensor: torch.Tensor, strides, shape=None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor without values at these strides."""
    return torch.empty_strided(
        tensor.shape if shape is None else shape, strides, dtype=dtype or tensor.dtype, device="meta"
    )


def resized(tensor: torch.Tensor, shape, dtype: torch.dtype | None = None, room: int = 1) -> torch.Tensor:
    """Return a tensor of another shape, with the same order of dimensions in memory.

    Rows begin at multiples of `room` elements.
    """
    strides, step, order = [0] * len(shape), 1, range(len(shape))[::-1]
    if len(shape) == tensor.dim():
        order = sorted(order, key=lambda d: (tensor.stride(d), -d))
    for place, d in enumerate(order):
        strides[d] = step
        step *= max(shape[d], 1)
        step = step if place else -(-step // room) * room
    return laid(tensor, strides, shape, dtype)


def unit_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with odd strides, far beyond the kernels' limits, in its dimensions of size 1."""
    return tensor.as_strided(
        tensor.shape, [2**40 + 1 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride())]
    )


def roomy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with padding after each row of each dimension but the last."""
    strides, step = [], 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step = -(-step * size // 16) * 32
    return laid(tensor, strides)


def strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor with another stride in one dimension of several elements."""
    for d, size in enumerate(tensor.shape):
        step = tensor.stride(d)
        for other in (step + 1, step + 4, step + 16, 2 * step, 0, *FAR) if size > 1 else ():
            yield laid(tensor, (*tensor.stride()[:d], other, *tensor.stride()[d + 1 :]))


def shaped(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor with one dimension of another size, with one more, and with one less."""
    for d, size in enumerate(tensor.shape):
        for other in sorted({0, 1, size - 1, size + 1, size + 4, 2 * size} - {size, -1}):
            yield resized(tensor, (*tensor.shape[:d], other, *tensor.shape[d + 1 :]))
    yield tensor[None]
    if tensor.dim():
        yield resized(tensor, tensor.shape[1:])
        yield resized(tensor, ())


def moved(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor with its first element off a vector's boundary."""
    storage = torch.empty(tensor.untyped_storage().nbytes() + 32, dtype=torch.uint8)
    for start in (tensor.element_size(), 8):
        if storage.numel() < 2**24:
            yield (
                storage[start : start + storage.numel() - 32]
                .view(tensor.dtype)
                .as_strided(tensor.shape, tensor.stride())
            )


def values(value) -> Iterator:
    """Yield other values of an argument that is not a tensor."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from {0, -1, value + 1, 2 * value, 2**31} - {value}
    elif isinstance(value, float):
        yield from (-1.0, 0.0, value + 1.0, math.nan, math.inf)
    elif isinstance(value, torch.dtype):
        yield from (dtype for dtype in (*DTYPES, torch.float64) if dtype != value)
    elif isinstance(value, str):
        yield ""


def variants(value) -> Iterator:
    """Yield other values of one argument."""
    if not isinstance(value, torch.Tensor):
        yield from values(value)
        return
    yield from strided(value)
    yield from shaped(value)
    yield from (laid(value, value.stride(), dtype=dtype) for dtype in DTYPES if dtype != value.dtype)
    yield None


def together(arguments: tuple) -> Iterator[tuple]:
    """Yield arguments with one size, or twice it, replaced wherever tensors have it, and with one dtype replaced."""
    tensors = [v for v in arguments if isinstance(v, torch.Tensor)]

    def each(change) -> tuple:
        return tuple(change(v) if isinstance(v, torch.Tensor) else v for v in arguments)

    for size in sorted({size for tensor in tensors for size in tensor.shape} - {0}):
        for other in sorted({0, 1, size - 1, size + 1, size + 4, 2 * size, *LARGE} - {size}):
            for sizes in ({size: other}, {size: other, 2 * size: 2 * other}):
                shapes = {id(v): tuple(sizes.get(n, n) for n in v.shape) for v in tensors}
                if max(map(math.prod, shapes.values())) < 2**60:
                    yield each(lambda v, shapes=shapes: resized(v, shapes[id(v)]))
    for dtype in {tensor.dtype for tensor in tensors}:
        for other in (*DTYPES, torch.float64):
            yield tuple(
                (resized(v, v.shape, other) if v.dtype == dtype else v)
                if isinstance(v, torch.Tensor)
                else other
                if v == dtype
                else v
                for v in arguments
            )


def grown(arguments: tuple) -> Iterator[tuple]:
    """Yield arguments with one size replaced by a large one wherever tensors have it."""
    tensors = [v for v in arguments if isinstance(v, torch.Tensor)]
    for size in sorted({n for v in tensors for n in v.shape} - {0}):
        for other in (2**16, 2**20, 2**24, 2**26, 2**27, 2**29):
            shapes = {id(v): tuple(other if n == size else n for n in v.shape) for v in tensors}
            if max(map(math.prod, shapes.values())) < 2**58:
                yield tuple(resized(v, shapes[id(v)]) if isinstance(v, torch.Tensor) else v for v in arguments)


def donors(the_op, fp8: torch.dtype) -> dict[str, tuple[torch.Tensor]]:
    """Return a tensor for each argument from one of the op's cases."""
    found: dict[str, tuple[torch.Tensor]] = {}
    for arguments in cases(the_op, fp8).values():
        for name, value in zip(the_op.Arguments._fields, arguments):
            if isinstance(value, torch.Tensor):
                found.setdefault(name, (value,))
    return found


def on_cpu(arguments: tuple) -> tuple:
    """Return the arguments in CPU memory that is not written."""
    return tuple(
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) if isinstance(v, torch.Tensor) else v for v in arguments
    )
