"""Seam, GPUs only: linear layers in bf16 and fp16, as lm_head is, run our `unquantized_gemm` where it is the faster.

vLLM's own function serves all other calls: on ROCm a torch op that chooses among kernels, on CUDA PyTorch's linear. vLLM's
compiler passes for AITER that look for this torch op beside a norm find it only with the patch for it, see patches/. While the
seam norm is on, these passes find no norm of vLLM's either.
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.tensors import rows_of
from vllm_rocm_ops.vllm import kernel_selection, native_kernel, seam

MOST_TOKENS = 16  # that ours takes where it was not measured (kernel_selection.py)


def unquantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`unquantized_gemm`, or vLLM's own function on the same arguments."""

    def theirs() -> Tensor:
        if replaced() == "default_unquantized_gemm":
            return torch.nn.functional.linear(x, weight, bias)
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)

    layer = weight, bias, x.dtype
    choice = _choice(layer)
    if choice.layers is not None:
        choice.note(weight, rows_of(x), lambda: layer)
    return native_kernel.run_or_native(theirs, ops.unquantized_gemm, choice, x, weight, bias)


def _choice(layer: tuple, native: str = "") -> kernel_selection.Choice:
    """The choice for layers of this shape beside vLLM's function, or one that a name tells apart."""
    weight, bias, dtype = layer
    key = "unquantized", weight.shape, dtype, bias is None
    return kernel_selection.choice(key) or kernel_selection.choose(key, KERNELS, native or replaced(), layer)


class UnquantizedLinear(native_kernel.Linear):
    """`unquantized_linear` as it is measured. A layer: the arguments but x, and its type."""

    op, run = ops.unquantized_gemm, staticmethod(unquantized_linear)

    def limit(self):
        return MOST_TOKENS

    def describe(self, layer):
        return self.sizes(layer, layer[0].dtype, layer[2], bias=layer[1])

    def arguments(self, layer, x, seed):
        return x, *layer[:2]

    def exact(self, arguments, x, rows, columns):
        _, weight, bias = arguments
        return x[rows].float() @ weight[columns].float().t() + native_kernel.bias_at(bias, columns)


KERNELS = UnquantizedLinear()


def _fake(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


native_kernel.define(unquantized_linear, _fake)


def few_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`unquantized_gemm`, or None for what it leaves to vLLM's own."""
    choice = _choice((weight, bias, x.dtype), "within vLLM's op")  # which is not measured: it has no call without ours
    return native_kernel.run_or_native(lambda: None, ops.unquantized_gemm, choice, x, weight, bias)


def replaced() -> str:
    """The name of vLLM's function for such layers on this platform."""
    from vllm.platforms import current_platform

    return "default_unquantized_gemm" if current_platform.is_cuda() else "rocm_unquantized_gemm"


def probe() -> None:
    """vLLM's dispatch returns its function for this platform, and the function for ROCm calls a torch op."""
    from vllm.model_executor.layers import utils

    theirs = getattr(utils, replaced())
    seam.require_parameters(theirs, "layer", "x", "weight", "bias")
    seam.require(utils.dispatch_unquantized_gemm() is theirs, f"{replaced()} in its dispatch")
    seam.require(hasattr(torch.ops.vllm, "rocm_unquantized_gemm"), "torch.ops.vllm.rocm_unquantized_gemm")


def install() -> None:
    """Register our op with vLLM's if this vLLM lets plugins do so, else replace the function where vLLM's dispatch finds it."""
    from vllm import envs
    from vllm.model_executor.layers import utils

    name = replaced()
    theirs = getattr(utils, name)

    if theirs is utils.rocm_unquantized_gemm and hasattr(utils, "register_rocm_unquantized_gemm"):  # see patches/
        utils.register_rocm_unquantized_gemm(few_tokens)
        return

    def unquantized_gemm(layer, x, weight, bias=None):
        if envs.VLLM_BATCH_INVARIANT or not x.is_cuda:
            return theirs(layer, x, weight, bias)
        return torch.ops.vllm_rocm_ops.unquantized_linear(x, weight, bias)

    setattr(utils, name, unquantized_gemm)


SEAM = seam.Seam(
    name="unquantized_linear",
    replaces="rocm_unquantized_gemm, on CUDA default_unquantized_gemm, of model_executor/layers/utils.py",
    probe=probe,
    install=install,
    platforms=("rocm", "cuda"),
)
