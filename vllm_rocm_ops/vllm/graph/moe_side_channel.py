"""Pass to the experts of an MoE layer what earlier launches computed, next to the tensors that vLLM passes.

- Quantized hidden states: vLLM calls an MoE layer with one 16-bit tensor, which the router and vLLM's experts read. The plugin's experts
  and the first GEMM of the shared experts look here for its quantized values and scales (moe/quantized_input.py) before they quantize it
  themselves.
- Routed tokens: vLLM calls the experts with the logits that the layer's gate returned. The plugin's experts look here for the weights and
  ids that the gate's launch chose by these logits (routing_gate.py) before they route.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor


class Current(threading.local):
    """The quantized input and the routed tokens of the running MoE layer, per thread: two micro-batches run at once."""

    given: tuple[Tensor, Tensor, Tensor] | None = None
    routed: tuple[Tensor, tuple, Tensor, Tensor] | None = None


current = Current()
"""`quantized` finds nothing while `given` is None, `routed` nothing while `routed` is."""


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
    return tuple(made) if is_same(x, hidden) else None


def is_same(x: Tensor, given: Tensor) -> bool:
    """True if two tensors have the same elements in memory, in the same order."""
    return x is given or (
        (x.data_ptr(), x.shape, x.stride(), x.dtype) == (given.data_ptr(), given.shape, given.stride(), given.dtype)
    )


def publish(logits: Tensor, routing: tuple, weights: Tensor, ids: Tensor) -> None:
    """Make the next `routed` find the weights and ids that were chosen by these logits and these arguments."""
    current.routed = logits, routing, weights, ids


def routed(logits: Tensor, routing: tuple) -> tuple[Tensor, Tensor] | None:
    """Return the weights and ids that were handed over, once. None if they belong to other logits or arguments."""
    if torch.compiler.is_compiling() or current.routed is None:
        return None
    (given, its_routing, *made), current.routed = current.routed, None
    return tuple(made) if is_same(logits, given) and routing[-1] is its_routing[-1] and routing == its_routing else None
