"""Helpers that the tests of linear layers and experts share."""

from collections.abc import Callable

import torch

import vllm_rocm_ops

FEW, MANY = 5, 65  # tokens


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def ask_for_aiter(monkeypatch) -> None:
    """Switch AITER on, with its library present."""
    from vllm import _aiter_ops

    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "1")
    monkeypatch.setattr(_aiter_ops, "IS_AITER_FOUND", True)


def require_products(layer, kernel, exact: torch.Tensor, op: str, close: Callable[..., None]) -> None:
    """Raise unless a kernel, without one of vLLM's, serves any number of tokens and dimensions, with a bias.

    It runs this op, and its outputs without the bias are `close` to x @ exact^T.
    """
    n, k = exact.shape
    bias = random(n).bfloat16()
    for shape in ((FEW, k), (MANY, k), (2, 3, k)):
        x = random(*shape).bfloat16()
        output = kernel.apply_weights(layer, x, bias)
        assert output.shape == (*shape[:-1], n)
        close(output - bias, x, exact)
    assert vllm_rocm_ops.stats()[op] == {"fallback: PyTorch reference on this device": 3}
