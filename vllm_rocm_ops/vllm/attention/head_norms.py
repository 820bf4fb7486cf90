"""Find and run the norms of queries and keys in attention layers: of each head, or over all heads.

MiniMax-M2 computes both norms over all heads in one method of their class, in PyTorch, so a layer that the plugin serves marks them. With
tensor parallelism vLLM sums their squares over all ranks, which is an op of its own: these norms stay vLLM's.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

SEPARATE = {"RocmOpsRMSNorm"}, {"RocmOpsGemmaRMSNorm"}
TOGETHER = "MiniMaxText01RMSNormTP"
"""vLLM's norms with a forward each, and those whose class computes both."""


def norms_of(layer: torch.nn.Module, attn: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.nn.Module, ...]:
    """Return the norms of queries and keys in a layer, or nothing where the op supports only what follows them."""
    norms = tuple(getattr(layer, name, None) for name in ("q_norm", "k_norm"))
    kinds = {type(norm).__name__ for norm in norms}
    if kinds not in SEPARATE and not (is_together(norms) and norms[0].tp_world == 1):
        return ()
    size, heads = attn.head_size, (attn.num_heads, attn.num_kv_heads)
    shapes = [tuple(norm.weight.shape) for norm in norms]
    if shapes not in ([(size,)] * 2, [(count * size,) for count in heads]):
        return ()
    for norm in norms:
        if getattr(norm, "variance_size_override", None) is not None or norm.weight.dtype != dtype:
            return ()
    return norms if norms[0].variance_epsilon == norms[1].variance_epsilon else ()


def is_together(norms: tuple) -> bool:
    """True if the norms' class computes both, in a method that the plugin knows."""
    if not norms or {type(norm).__name__ for norm in norms} != {TOGETHER}:
        return False
    computes = getattr(type(norms[0]), "forward_qk", lambda: None)
    return [*inspect.signature(computes).parameters] == ["q_norm", "k_norm", "q", "k"]


def are_over_all(norms: tuple, size: int) -> bool:
    """True if norms are over all heads of this size."""
    return any(norm.weight.shape != (size,) for norm in norms)


def refusal(norm: torch.nn.Module) -> str:
    """Return why a norm stays vLLM's, empty if there is no reason."""
    is_apart = type(norm).__name__ == TOGETHER and norm.tp_world > 1
    return "whose squares vLLM sums over ranks" if is_apart else ""


def normalized(norms: tuple, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Return the norms of heads [tokens, heads, size] by vLLM's modules, [tokens, heads * size] if they are over all heads."""
    if are_over_all(norms, q.shape[2]):
        q, k = q.flatten(1), k.flatten(1)
    if is_together(norms):
        return type(norms[0]).forward_qk(*norms, q, k)
    return tuple(norm.vllm_forward(x) for norm, x in zip(norms, (q, k)))
