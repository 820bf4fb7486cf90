"""Inspect the memory layout of tensors."""

from __future__ import annotations

from torch import Tensor


def rows_of(tensor: Tensor) -> int:
    """Return the number of rows along the last dimension."""
    return tensor.numel() // tensor.shape[-1] if tensor.shape[-1] else 0


def row_stride(tensor: Tensor) -> int | None:
    """Return the elements between neighboring rows, or None if rows have no single stride."""
    stride = None
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1])):
        if size == 1:
            continue
        if stride is None:
            stride, expected = step, step * size
        elif step != expected:
            return None
        else:
            expected = step * size
    return tensor.shape[-1] if stride is None else stride


def canonical(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous strides in dimensions whose stride has no effect.

    These are dimensions of size 1, and all dimensions of a tensor without elements.
    """
    strides, step = [], 1
    for size, given in zip(reversed(tensor.shape), reversed(tensor.stride())):
        step = given if size > 1 and tensor.numel() else step
        strides.append(step)
        step *= max(size, 1)
    strides = tuple(reversed(strides))
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def aligned(tensor: Tensor | None, size: int = 16) -> bool:
    """True if every row of the tensor starts at a multiple of `size` bytes."""
    if tensor is None:
        return True
    step = row_stride(tensor)
    steps = (step,) if step is not None else tensor.stride()[:-1]
    return all(number % size == 0 for number in (tensor.data_ptr(), *(step * tensor.element_size() for step in steps)))


def is_wide_float(tensor: Tensor) -> bool:
    """True if a tensor has floating point elements of 16 bits or more."""
    return tensor.is_floating_point() and tensor.element_size() >= 2


def extent(tensor: Tensor) -> int:
    """Return the elements from a tensor's first through its last."""
    steps = (abs(step) * (size - 1) for size, step in zip(tensor.shape, tensor.stride()))
    return sum(steps) + 1 if tensor.numel() else 0


def overlaps_itself(tensor: Tensor) -> bool:
    """True if elements may overlap: a dimension's stride is within the reach of smaller strides."""
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(tensor.shape, tensor.stride()) if size > 1):
        if step < reach:
            return tensor.numel() > 0
        reach += step * (size - 1)
    return False


def apart_contract(name: str, tensor: Tensor) -> tuple[str, str, str, bool]:
    """Return the contract of an argument that is written: no element shares memory with another one."""
    return name, "without overlapping elements", describe(tensor), not overlaps_itself(tensor)


def describe(tensor: Tensor) -> str:
    """Return the dtype, shape and strides of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides {list(tensor.stride())}"
