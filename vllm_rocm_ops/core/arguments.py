"""What the arguments of an op's call must be, whatever runs."""

from __future__ import annotations

import torch

from vllm_rocm_ops.core.tensors import canonical, describe, extent, row_stride


def checked(op, a):
    """Return the arguments with canonical strides, so that rules and plans see nothing that a signature leaves out. Raise
    ValueError unless tensors are tensors, on one device, and the op's contract holds."""
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
    a = a._replace(**{name: canonical(tensor) for name, tensor in tensors.items()})
    for argument, wanted, got, holds in op.contract(a):
        if not holds:
            raise ValueError(f"{op.name}: {argument} must be {wanted}, got {got}")
    return a


def refuse_gradients(op, args: tuple) -> None:
    """No op has a backward, and what a kernel writes would have no gradient without a word."""
    for name, value in zip(op.Arguments._fields, args):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(
                f"{op.name}: {name} must not require grad where grad mode is on, as the op has no backward, got "
                f"{describe(value)} that does: detach it, or call the op under torch.no_grad()"
            )


def apart(op, a) -> tuple[tuple[int, int, int, int], ...]:
    """The places of each argument that is updated in place and the first one, and of each that is written and any other; and how many
    bytes the one must begin before the other or behind it."""
    names = op.Arguments._fields
    sizes = [extent(v) * v.element_size() if isinstance(v, torch.Tensor) else 0 for v in a]
    pairs = [(i, 0) for i in range(1, len(a)) if names[i] in op.mutates]
    pairs += [(i, j) for i, name in enumerate(names) if name in op.writes for j in range(len(a)) if j != i]
    return tuple((i, j, sizes[i], sizes[j]) for i, j in pairs if sizes[i] and sizes[j])


def refuse_overlap(op, args: tuple, updated: int, other: int, distance: int) -> None:
    """Raises unless the two arguments are different columns of the same rows."""
    one, two = args[updated], args[other]
    size, step, columns = one.element_size(), row_stride(one), one.shape[-1]
    same_rows = one.dtype == two.dtype and step is not None and step == row_stride(two)
    if same_rows and columns <= -distance // size % step and two.shape[-1] <= distance // size % step:
        return
    names = op.Arguments._fields
    raise ValueError(
        f"{op.name}: {names[updated]} must have memory of its own, got some of {names[other]}'s: "
        f"{distance} bytes behind its first element"
    )
