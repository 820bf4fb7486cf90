"""Serve the two batched GEMMs of MLA's weight absorption: W_UK_T before decode attention, W_UV after it.

vLLM computes both by torch.bmm in the middle of a long method. A layer's two weights therefore get a subclass whose
torch.bmm asks the plugin first. `batched_gemm` serves where it was timed to be faster, or wherever it is supported with
VLLM_ROCM_OPS_ATTENTION=1. The weight's values, memory and other uses do not change. A weight for which the plugin is
never faster gets its class back. A fused launch (mla_v_up.py, mla_rotation.py) is asked before `batched_gemm`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.ops.shared.attention import ELEMENTS
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection.comparison import LayerComparison
from vllm_rocm_ops.vllm.selection.kernel_selection import Choice
from vllm_rocm_ops.vllm.selection.key import Baseline

WEIGHTS = "W_UK_T", "W_UV"
BMM = Baseline("bmm")
"""vLLM's kernel in a timing record."""
MAX_TOKENS = 64  # limit of the kernels


class Absorbed:
    """Mix into a weight's class.

    Attributes:
        rocm_ops_choice: The weight's `Choice`, None where the plugin is forced.
        rocm_ops_fused: Returns torch.bmm(x, weight, out=out) by a fused launch, None where that does not serve.
    """

    rocm_ops_choice: Choice | None
    rocm_ops_fused: Callable[..., Tensor | None] | None = None

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.bmm and len(arguments) == 2 and isinstance(arguments[1], Absorbed):
                output = product(*arguments, **keywords)
                if output is not None:
                    return output
            return function(*arguments, **keywords)


def adopt(layer: torch.nn.Module, is_forced: bool, max_tokens: int) -> None:
    """Give a layer's `W_UK_T` and `W_UV` [heads, K, N] the plugin's class, if `batched_gemm` may serve."""
    if not is_forced and envs.VLLM_ROCM_OPS_MEASURE == "0":
        return
    for name in WEIGHTS:
        weights = getattr(layer, name, None)
        if type(weights) not in (Parameter, Tensor) or weights.dim() != 3 or weights.dtype not in ELEMENTS:
            continue
        described, choice = (weights, weights.dtype), None
        if not is_forced:
            calls, limit = ("absorbed", COMPARISON.describe(described)), min(max_tokens, MAX_TOKENS)
            choice = kernel_selection.choice_for(calls, COMPARISON, BMM, lambda layer=described: layer, weights, limit)
        weights.rocm_ops_choice = choice
        weights.__class__ = seam.mixed(Absorbed, type(weights))


def restore_baseline(weights: Tensor) -> None:
    """Give a weight its class back."""
    weights.__class__ = seam.plain_of(weights, Absorbed)


def is_served(weights: Tensor, rows: int) -> bool:
    """True if the plugin serves a product of this many rows."""
    if not isinstance(weights, Absorbed) or not 0 < rows <= MAX_TOKENS:
        return False
    return weights.rocm_ops_choice is None or weights.rocm_ops_choice.plugin_serves(rows)


def product(x: Tensor, weights: Tensor, *, out: Tensor | None = None) -> Tensor | None:
    """Return torch.bmm's [heads, rows, N] by `batched_gemm`, or None where vLLM's torch.bmm serves."""
    choice, fused = weights.rocm_ops_choice, weights.rocm_ops_fused
    if fused is not None and (output := fused(x, weights, out)) is not None:
        return output
    if choice is not None and not choice.plugin_serves(x.shape[1]):
        if choice.baseline_always_serves and getattr(fused, "baseline_always_serves", True):
            restore_baseline(weights)
        return None
    if x.dtype != weights.dtype:
        return None
    output = run(x.transpose(0, 1), weights, None if out is None else out.transpose(0, 1))
    if output is None:
        return None
    return output.transpose(0, 1) if out is None else out


def run(*arguments) -> Tensor | None:
    """Return `Op.run_kernels`, None above `MAX_TOKENS`. On CPU run the op's reference, or the emulator."""
    op = ops.batched_gemm
    if len(arguments[0]) > MAX_TOKENS:
        return None
    return op(*arguments) if arguments[0].device.type == "cpu" else op.run_kernels(*arguments)


class MlaAbsorb(LayerComparison):
    """Calls of both GEMMs for timing. A layer is (weights [heads, K, N], dtype)."""

    op, limit, by_attention = ops.batched_gemm, MAX_TOKENS, True

    def describe(self, layer: tuple) -> str:
        heads, k, n = layer[0].shape
        order = " transposed" * (layer[0].stride(2) == 1)
        return f"{heads}x{n}x{k} {kernel_selection.types(layer[1])}{order}"

    def columns(self, layer: tuple) -> tuple[int, int]:
        heads, k, n = layer[0].shape
        return heads * k, heads * n

    def work(self, layer: tuple, tokens: int) -> tuple[float, float]:
        heads, k, n = layer[0].shape
        return 2.0 * heads * (k * n + tokens * (k + n)), 2.0 * tokens * heads * k * n

    def arguments(self, layer: tuple, x: Tensor, seed: int) -> tuple:
        return x.view(len(x), layer[0].shape[0], -1), layer[0]

    def plugin(self, x: Tensor, weights: Tensor) -> Tensor | None:
        out = x.new_empty((*x.shape[:2], weights.shape[2]))
        return None if run(x, weights, out) is None else out.flatten(1)

    def baseline(self, x: Tensor, weights: Tensor) -> Tensor:
        out = x.new_empty((*x.shape[:2], weights.shape[2]))
        with torch._C.DisableTorchFunctionSubclass():
            torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
        return out.flatten(1)

    def layers_of(self, a):
        return [(a.weights, a.x.dtype)]

    def exact_of(self, a, rows, columns):
        products = torch.bmm(a.x[rows].float().transpose(0, 1), a.weights.float())
        return products.transpose(0, 1).flatten(1)[:, columns]


COMPARISON = MlaAbsorb()
