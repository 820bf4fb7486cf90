"""Pass quantized hidden states to the experts of an MoE layer, next to the 16-bit tensor that vLLM passes.

vLLM calls an MoE layer with one tensor, which the router and vLLM's experts read. The plugin's experts and the first GEMM of the shared
experts look here for its quantized values and scales (fusion/moe_input.py) before they quantize it themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class Current(threading.local):
    """The quantized input of the running MoE layer, per thread: two micro-batches run at once."""

    given: tuple[Tensor, Tensor, Tensor] | None = None


current = Current()
"""`quantized` finds nothing while `given` is None."""


@contextlib.contextmanager
def beside(hidden: Tensor, values: Tensor, scales: Tensor) -> Iterator[None]:
    """Make `quantized` find the values and scales of hidden states while an MoE layer runs."""
    before, current.given = current.given, (hidden, values, scales)
    try:
        yield
    finally:
        current.given = before


def quantized(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the values [M, H] and scales [M, H / 128] of x, or None if x is not the MoE layer's input tensor.

    Tokens gathered from other ranks, padded tokens and tokens multiplied by router weights are other tensors.
    """
    if torch.compiler.is_compiling() or current.given is None:
        return None
    hidden, *made = current.given
    same = x is hidden or (
        (x.data_ptr(), x.shape, x.stride(), x.dtype) == (hidden.data_ptr(), hidden.shape, hidden.stride(), hidden.dtype)
    )
    return tuple(made) if same else None
