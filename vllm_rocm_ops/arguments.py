"""What the arguments of an op's call must be, whatever runs."""

from __future__ import annotations

import torch

from vllm_rocm_ops.tensors import describe, extent, row_stride


def check(op, a) -> None:
    """Raise ValueError unless tensors are tensors, on one device, and the op's contract holds."""
    for name, value in a._asdict().items():
        hint = op.hints[name]
        if hint in (torch.Tensor, torch.Tensor | None) and not isinstance(value, hint):
            wanted = "a tensor" if hint is torch.Tensor else "a tensor or None"
            raise ValueError(f"{op.name}: {name} must be {wanted}, got {value!r}")
    tensors = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{op.name}: {name} must be on {device}, got on {tensor.device}")
    for argument, wanted, got, holds in op.contract(a):
        if not holds:
            raise ValueError(f"{op.name}: {argument} must be {wanted}, got {got}")


def refuse_gradients(op, args: tuple) -> None:
    """No op has a backward, and what a kernel writes would have no gradient without a word."""
    for name, value in zip(op.Arguments._fields, args):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{op.name}: {name} must not require grad where grad mode is on, as the op has no backward, got "
                f"{describe(value)} that does: detach it, or call the op under torch.no_grad()"
            )


def apart(op, a) -> tuple[tuple[int, int, int], ...]:
    """For each argument that is updated in place: its place, and how many bytes it must begin before the first argument or
    behind it."""
    names = op.Arguments._fields
    sizes = [extent(v) * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in a]
    return tuple((i, sizes[i], sizes[0]) for i in range(1, len(a)) if names[i] in op.mutates and sizes[i])


def refuse_overlap(op, args: tuple, updated: int, distance: int) -> None:
    """Raises unless the argument and the first are different columns of the same rows."""
    one, two = args[updated], args[0]
    size, step, columns = one.element_size(), row_stride(one), one.shape[-1]
    same_rows = one.dtype == two.dtype and step is not None and step == row_stride(two)
    if same_rows and columns <= -distance // size % step and two.shape[-1] <= distance // size % step:
        return
    names = op.Arguments._fields
    raise ValueError(
        f"{op.name}: {names[updated]} must have memory of its own, got some of {names[0]}'s: "
        f"{distance} bytes behind its first element"
    )
