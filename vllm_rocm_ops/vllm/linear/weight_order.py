"""Recognize and change the order of a prepared weight: rows, or the fragments that some kernels read.

vLLM's kernels may reorder a weight when they prepare it. Checksums before and after tell which order they left, without
a second copy. A buffer of the layer keeps it for processes that read the prepared weight from vLLM's weight cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.ops.shared.weight_layout import FRAGMENT_BYTES, FRAGMENT_ROWS, STEP, fits, shuffle_weight

MARK = "vllm_rocm_ops_order"
"""The buffer with the order of a layer's weight. vLLM's weight cache saves buffers with the weights."""

STATES = [(order, alone) for order in (None, "plain", "fragments") for alone in (False, True)]
"""The buffer's values, by index: the order of the weight, and whether only the plugin's kernel reads it."""

PART_BYTES = 16 << 20  # chunk of a weight that is summed or reordered at a time


def rows_of(weight: Tensor) -> Tensor:
    """Return a weight as [N, K], given as such or as the transposed view [K, N] that vLLM makes for some kernels."""
    return weight if weight.stride(-1) == 1 else weight.t()


def fragments_of(weight: Tensor) -> Tensor:
    """View a weight in fragment order, given as [N, K] or [K, N], in the shape of `shuffle_weight`."""
    rows = rows_of(weight)
    (n, k), size = rows.shape, weight.element_size()
    return rows.view(
        n // FRAGMENT_ROWS, k * size // STEP, STEP // FRAGMENT_BYTES, FRAGMENT_ROWS, FRAGMENT_BYTES // size
    )


class Digest(NamedTuple):
    """The order of a weight [N, K] without a copy: its checksum in rows and, if it fits, in fragment order."""

    shape: torch.Size
    dtype: torch.dtype
    plain: Tensor
    fragments: Tensor | None

    @classmethod
    def of(cls, weight: Tensor) -> "Digest":
        rows = rows_of(weight)
        fragments = checksum(rows, shuffle_weight) if fits(rows.shape, rows.dtype) else None
        return cls(rows.shape, rows.dtype, checksum(rows), fragments)


def parts(rows: Tensor) -> tuple[Tensor, ...]:
    """Split a weight [N, K] into chunks of whole fragments, at most `PART_BYTES` each, to bound temporary memory."""
    return rows.split(max(PART_BYTES // (rows.shape[1] * rows.element_size() * FRAGMENT_ROWS), 1) * FRAGMENT_ROWS)


def checksum(rows: Tensor, reorder: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """Return a checksum of a weight in the order in which `reorder` leaves it.

    It sums, modulo 2^64, each word times a random number of its row and one of its column.
    """
    row_bytes = rows.shape[1] * rows.element_size()
    word = torch.int32 if row_bytes % 4 == 0 else torch.uint8
    generator = torch.Generator(rows.device).manual_seed(0)

    def random(count: int) -> Tensor:
        return torch.randint(1 << 62, (count,), generator=generator, dtype=torch.int64, device=rows.device)

    of_columns, total = random(row_bytes // word.itemsize), torch.zeros((), dtype=torch.int64, device=rows.device)
    for part in parts(rows):
        words = reorder(part).contiguous().flatten().view(word).view(len(part), -1)
        total += ((words * of_columns).sum(1) * random(len(part))).sum()
    return total


def order(weight: Tensor, before: Digest) -> str | None:
    """Return the order in which vLLM's kernel left a weight, given the digest before.

    Returns:
        "plain"; "fragments", as some of AITER's kernels want it; None if unknown.
    """
    rows = rows_of(weight)
    if (rows.shape, rows.dtype) != before[:2]:
        return None
    after = checksum(rows)
    if after.equal(before.plain):
        return "plain"
    return (
        "fragments" if before.fragments is not None and rows.is_contiguous() and after.equal(before.fragments) else None
    )


def in_fragments(weight: Tensor) -> Tensor:
    """Put a weight in fragment order in place, and return it as [N, K] without row padding."""
    rows = rows_of(weight)
    packed = rows.as_strided(rows.shape, (rows.shape[1], 1))  # each row ends at or before its end in `rows`
    for source, place in zip(parts(rows), parts(packed)):
        place.copy_(shuffle_weight(source).view(place.shape))
    return packed


def note_order(kernel, layer: torch.nn.Module, order: str | None) -> None:
    """Record the order of a prepared weight, in the kernel and in a buffer of the layer."""
    kernel.order = order
    state = torch.tensor(STATES.index((order, kernel.baseline is None)), dtype=torch.uint8, device="cpu")
    layer.register_buffer(MARK, state, persistent=False)


def recall_order(kernel, layer: torch.nn.Module) -> None:
    """Read the order of a weight that another process prepared from the layer's buffer, if there is one.

    Raises:
        RuntimeError: The weight is in fragment order and the kernel is vLLM's.
    """
    state = getattr(layer, MARK, None)
    if state is None:
        return
    order, alone = STATES[int(state)]
    if hasattr(kernel, "baseline"):  # the plugin's
        kernel.order, kernel.baseline = order, None if alone else kernel.baseline
    elif alone and order == "fragments":
        raise RuntimeError(
            f"the cached weight was shuffled with VLLM_ROCM_OPS_SHUFFLE=1, which {type(kernel).__name__} cannot read"
        )
