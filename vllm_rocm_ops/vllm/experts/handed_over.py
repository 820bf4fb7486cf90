"""Hidden states of a layer of experts that come quantized, beside those of 16 bits, for the time of the layer's call.

vLLM hands a layer one tensor. Its router reads that, and so do experts of vLLM's. Ours, and the first product of shared experts, ask here
for the values and scales that were made with it (fusion/moe_input.py), in place of a quantization of their own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class Current(threading.local):
    """What the layer that a thread runs was handed: threads of two micro-batches run at once."""

    given: tuple[Tensor, Tensor, Tensor] | None = None


current = Current()
"""Where `given` is None, `quantized` need not be asked."""


@contextlib.contextmanager
def beside(hidden: Tensor, values: Tensor, scales: Tensor) -> Iterator[None]:
    """Have `quantized` find values and scales of hidden states while a layer runs."""
    before, current.given = current.given, (hidden, values, scales)
    try:
        yield
    finally:
        current.given = before


def quantized(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return values [M, H] and scales [M, H / 128] of the layer's hidden states, where x is these as they lie in memory. None for
    others: tokens of other ranks, padded ones, what a router's weight was multiplied with."""
    if torch.compiler.is_compiling() or current.given is None:
        return None
    hidden, *made = current.given
    same = x is hidden or (
        (x.data_ptr(), x.shape, x.stride(), x.dtype) == (hidden.data_ptr(), hidden.shape, hidden.stride(), hidden.dtype)
    )
    return tuple(made) if same else None
