"""Check the arguments of an op's call, whether kernels or the reference run."""

from __future__ import annotations

import torch

from vllm_rocm_ops.core.tensors import canonical, describe, extent, row_stride


def checked(op, a):
    """Return the arguments with canonical strides, so that rules and plans depend on the signature only.

    Raises:
        ValueError: A tensor argument is not a tensor, tensors are on several devices, or the op's contract is broken.
    """
    for name, value in a._asdict().items():
        hint = op.hints[name]
        if hint in (torch.Tensor, torch.Tensor | None) and not isinstance(value, hint):
            wanted = "a tensor" if hint is torch.Tensor else "a tensor or None"
            raise ValueError(f"{op.name}: {name} must be {wanted}, got {value!r}")
        if hint == float | None and not isinstance(value, (float, int, type(None))):
            raise ValueError(f"{op.name}: {name} must be a number or None, got {value!r}")
    tensors = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{op.name}: {name} must be on {device}, got on {tensor.device}")
    a = a._replace(**{name: canonical(tensor) for name, tensor in tensors.items()})
    for argument, wanted, got, holds in op.contract(a):
        if not holds:
            raise ValueError(f"{op.name}: {argument} must be {wanted}, got {got}")
    return a


def refuse_gradients(op, args: tuple) -> None:
    """Raise ValueError for a tensor that requires grad: no op has a backward, and the gradient would be lost silently."""
    for name, value in zip(op.Arguments._fields, args):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{op.name}: {name} must not require grad in grad mode, as the op has no backward, got "
                f"{describe(value)} that does: detach it, or call the op under torch.no_grad()"
            )


def apart(op, a) -> tuple[tuple[int, int, int, int], ...]:
    """Return the pairs of arguments that must not overlap, as (place, other place, bytes, other bytes).

    An argument that is updated in place must not overlap the first one; an argument that is written must not overlap any other.
    """
    names = op.Arguments._fields
    sizes = [extent(v) * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in a]
    pairs = [(i, 0) for i in range(1, len(a)) if names[i] in op.mutates]
    pairs += [(i, j) for i, name in enumerate(names) if name in op.writes for j in range(len(a)) if j != i]
    return tuple((i, j, sizes[i], sizes[j]) for i, j in pairs if sizes[i] and sizes[j])


def refuse_overlap(op, args: tuple, updated: int, other: int, distance: int) -> None:
    """Raise ValueError unless the two arguments are different columns of the same rows."""
    written, neighbor = args[updated], args[other]
    size, step, columns = written.element_size(), row_stride(written), written.shape[-1]
    same_rows = written.dtype == neighbor.dtype and step is not None and step == row_stride(neighbor)
    if same_rows and columns <= -distance // size % step and neighbor.shape[-1] <= distance // size % step:
        return
    names = op.Arguments._fields
    raise ValueError(
        f"{op.name}: {names[updated]} must have memory of its own, got some of {names[other]}'s: "
        f"{distance} bytes after its first element"
    )
