"""Helpers that the tests of linear layers and experts share."""

import importlib
from collections.abc import Callable

import pytest
import torch
from fakes import time_choices
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers import linear as linear_layers

import vllm_rocm_ops
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base

FEW, MANY = 5, 65  # tokens
CHOOSE = linear_base.vllm_kernel_for
TABLES = {
    name: importlib.import_module(seam.module_of(name)).TABLE
    for name in seam.in_folder("linear")
    if "_POSSIBLE_" in seam.load(name).replaces
}
"""The tables of vLLM's into which seams insert a kernel, by seam."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def one_rank(monkeypatch):
    """Make linear layers and parameters without a process group."""
    for module in (linear_layers, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)


def ask_for_aiter(monkeypatch) -> None:
    """Make vLLM answer that it uses AITER."""
    from vllm._aiter_ops import rocm_aiter_ops

    for kind in ("linear", "fused_moe"):
        monkeypatch.setattr(rocm_aiter_ops, f"is_{kind}_enabled", lambda: True)


def hold(monkeypatch, stand_in: type | None, base: type) -> None:
    """Make the plugin's kernels hold a stand-in on vLLM's base class, which keeps its calls in `calls`, or none.

    `--linear-backend torch` names it.
    """
    supported = classmethod(lambda cls, *_: (True, None))
    given = {"is_supported": supported, "can_implement": supported, "calls": []}
    kernel = stand_in and type(stand_in.__name__, (stand_in, base), given)
    members = linear._LINEAR_BACKEND_KERNEL_MAP
    monkeypatch.setitem(members, "torch", members["torch"] | {kernel})
    monkeypatch.setattr(linear_base, "vllm_kernel_for", lambda *_: kernel)


def close(output: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, most: float = 0.05) -> None:
    """Raise unless an output is x @ exact^T within the rounding of x, by default to e4m3."""
    wanted = x.float() @ exact.t()
    error = (output.float() - wanted).abs()
    assert output.dtype == x.dtype
    assert error.mean() < most * wanted.abs().mean(), error.mean()


def require_choice(kernel, table: dict, monkeypatch) -> None:
    """Raise unless the kernel's baseline is the first of vLLM's own kernels in its table that supports the layer."""
    monkeypatch.setitem(table, linear.current_platform._enum, [type(kernel), type(kernel.baseline)])
    monkeypatch.setattr(seam, "served_platform", lambda: "rocm")
    assert CHOOSE(type(kernel), kernel.config) is type(kernel.baseline)


def require_products(layer, kernel, exact: torch.Tensor, op: str, close: Callable[..., None]) -> None:
    """Raise unless a kernel, without one of vLLM's, runs this op for any tokens and dimensions, also with a bias."""
    n, k = exact.shape
    bias = random(n).bfloat16()
    for shape in ((FEW, k), (MANY, k), (2, 3, k)):
        x = random(*shape).bfloat16()
        output = kernel.apply_weights(layer, x, bias)
        assert output.shape == (*shape[:-1], n)
        close(output - bias, x, exact)
    assert vllm_rocm_ops.stats()[op] == {"fallback: PyTorch reference on this device": 3}


def require_sizes_won(
    layer, kernel, exact: torch.Tensor, op, fault: str | None, monkeypatch, has_bias: bool = True
) -> None:
    """Raise unless timing selects an op's kernels where they are faster, or none if they have a wrong scale or no bias, as `fault` says.

    The baseline keeps the number of tokens of each call.
    """
    n, k = exact.shape

    def plugin(*arguments):
        a = op.Arguments(*arguments)
        planted = {fault: None if fault == "bias" else 1.02 * getattr(a, fault)} if fault else {}
        return op.reference(*a._replace(**planted))

    monkeypatch.setattr(op, "run_kernels", plugin)
    bias = random(n).bfloat16() if has_bias else None
    kernel.apply_weights(layer, random(MANY, k).bfloat16(), bias)
    [choice] = time_choices()
    assert choice.state == ("off" if fault else "measured"), choice.why
    assert not fault or "relative error" in choice.why
    kernel.baseline.calls.clear()
    for tokens in (1, 17, 18, MANY):
        kernel.apply_weights(layer, random(tokens, k).bfloat16(), bias)
    assert kernel.baseline.calls == ([1, 17, 18, MANY] if fault else [18, MANY])
