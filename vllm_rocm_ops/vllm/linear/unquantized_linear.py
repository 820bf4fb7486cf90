"""Run bf16 and fp16 linear layers, such as lm_head, by `unquantized_gemm` where it is faster. GPUs only.

vLLM's function serves all other calls: on ROCm a torch op that chooses among kernels, on CUDA PyTorch's linear.
Compiled graphs hold the plugin's torch op in its place, unless a compiler pass of vLLM's matches vLLM's op next to a
norm. vLLM calls lm_head outside of its graphs, where host time counts. There no torch op is involved, and a layer that
the plugin never serves gets vLLM's function back.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import define
from vllm_rocm_ops.core.tensors import rows_of
from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.linear import base as linear_base
from vllm_rocm_ops.vllm.selection import kernel_selection

DECIDED = "vllm_rocm_ops_choice"
"""The attribute of a layer with its choice, once nothing is left to time."""

MAX_TOKENS = 16  # default token limit, before timing (kernel_selection.py)


def unquantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run `unquantized_gemm`, or vLLM's function, on x [..., K], weight [N, K] and bias [N] or None."""
    serves = COMPARISON.choice_of(x, weight, bias).plugin_serves(rows_of(x))
    output = ops.unquantized_gemm.run_kernels(x, weight, bias) if serves else None
    return COMPARISON.baseline(x, weight, bias) if output is None else output


class UnquantizedLinear(linear_base.Linear):
    """Describe `unquantized_linear` for timing. A layer: the arguments except x, and x's dtype."""

    op, run, limit = ops.unquantized_gemm, staticmethod(unquantized_linear), MAX_TOKENS
    covers = None

    def choice_of(self, x, weight, bias):
        calls = "unquantized", weight.shape, x.dtype, bias is None
        return self.choice(calls, "", lambda: (weight, bias, x.dtype), weight, x)

    def vllm_kernel(self, baseline_name):
        return replaced()

    def describe(self, layer):
        return self.sizes(layer, layer[0].dtype, layer[2], bias=layer[1])

    def baseline(self, x, weight, bias):
        if replaced() == "default_unquantized_gemm":
            return torch.nn.functional.linear(x, weight, bias)
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)

    def arguments(self, layer, x, seed):
        return x, *layer[:2]

    def layers_of(self, a):
        return [(a.weight, a.bias, a.x.dtype)]

    def exact_of(self, a, rows, columns):
        return a.x[rows].float() @ a.weight[columns].float().t() + linear_base.bias_at(a.bias, columns)


COMPARISON = UnquantizedLinear()


define(unquantized_linear, lambda x, weight, _: x.new_empty((*x.shape[:-1], weight.shape[0])))


def replaced() -> str:
    """Return the name of vLLM's function for such layers on this platform."""
    from vllm.platforms import current_platform

    return "default_unquantized_gemm" if current_platform.is_cuda() else "rocm_unquantized_gemm"


def probe() -> None:
    """Raise `Unavailable` unless vLLM dispatches to its function for this platform, which on ROCm is a torch op."""
    from vllm.model_executor.layers import utils

    function = getattr(utils, replaced())
    seam.require_parameters(function, "layer", "x", "weight", "bias")
    seam.require(utils.dispatch_unquantized_gemm() is function, f"{replaced()} in its dispatch")
    seam.require(hasattr(torch.ops.vllm, "rocm_unquantized_gemm"), "torch.ops.vllm.rocm_unquantized_gemm")


def is_matched() -> bool:
    """True if a pass of vLLM's matches its op next to a norm.

    These are AITER's norm with padding, AITER's all-reduce with a norm, and the indexer's projection.
    """
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    config = get_current_vllm_config_or_none()
    passes = config and config.compilation_config.pass_config
    names = "fuse_act_padding", "fuse_allreduce_rms"
    return current_platform.is_rocm() and any(getattr(passes, name, False) for name in names)


def give_back(layer: torch.nn.Module, replacement: Callable, function: Callable) -> None:
    """Give a layer that the plugin never serves vLLM's function back.

    Embedding layers look the function up at each call, so they get it when the plugin serves none of them.
    """
    from vllm.model_executor.layers import utils

    method = getattr(layer, "quant_method", None)
    if getattr(method, "_gemm_impl", None) is replacement:
        method._gemm_impl = function
    elif all(choice.baseline_always_serves for choice in _looked_up) and getattr(utils, replaced()) is replacement:
        setattr(utils, replaced(), function)


_looked_up: set[kernel_selection.Choice] = set()
"""The choices of layers that look vLLM's function up at each call."""


def install() -> None:
    """Replace the function that vLLM's dispatch finds."""
    from vllm import envs
    from vllm.model_executor.layers import utils

    name = replaced()
    function = getattr(utils, name)

    def unquantized_gemm(layer, x, weight, bias=None):
        compiles = torch.compiler.is_compiling()
        choice = None if compiles else getattr(layer, DECIDED, None)
        if choice is None:
            if envs.VLLM_BATCH_INVARIANT or not x.is_cuda or compiles and is_matched():
                return function(layer, x, weight, bias)
            if compiles:
                return torch.ops.vllm_rocm_ops.unquantized_linear(x, weight, bias)
            choice = COMPARISON.choice_of(x, weight, bias)
            if not hasattr(getattr(layer, "quant_method", None), "_gemm_impl"):
                _looked_up.add(choice)
            if choice.baseline_always_serves:
                give_back(layer, unquantized_gemm, function)
            if choice.layers is None and layer is not None:
                setattr(layer, DECIDED, choice)
        output = ops.unquantized_gemm.run_kernels(x, weight, bias) if choice.plugin_serves(rows_of(x)) else None
        return function(layer, x, weight, bias) if output is None else output

    unquantized_gemm.__wrapped__ = function
    setattr(utils, name, unquantized_gemm)


SEAM = seam.Seam(
    name="unquantized_linear",
    replaces="rocm_unquantized_gemm, on CUDA default_unquantized_gemm, of model_executor/layers/utils.py",
    probe=probe,
    install=install,
    ops=(COMPARISON.op.name,),
    comparisons=(COMPARISON,),
    platforms=("rocm", "cuda"),
)
