"""Seam, ROCm only: linear layers in bf16 and fp16, as lm_head and routers are, run our `unquantized_gemm` for few tokens.

vLLM's own op, with its own choice of kernels, serves the rest. Compiler passes for AITER that look for that op beside a
norm no longer find it; where our norm is in place they do not find that either. On CPU vLLM's own layers run.
"""

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.vllm import held, seam

MOST_TOKENS = 16  # that ours takes; where it wins on AMD was not measured


def unquantized_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`unquantized_gemm`, or what vLLM's own op makes of the same arguments."""

    def theirs() -> Tensor:
        return torch.ops.vllm.rocm_unquantized_gemm(x, weight, bias)

    return held.ours_or(theirs, ops.unquantized_gemm, MOST_TOKENS, x, weight, bias)


def _fake(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


held.define(unquantized_linear, _fake)


def probe() -> None:
    """vLLM's function for ROCm is what its dispatch gives to layers, and calls an op."""
    from vllm.model_executor.layers import utils

    seam.require_parameters(utils.rocm_unquantized_gemm, "layer", "x", "weight", "bias")
    seam.require(
        utils.dispatch_unquantized_gemm() is utils.rocm_unquantized_gemm, "rocm_unquantized_gemm in its dispatch"
    )
    seam.require(hasattr(torch.ops.vllm, "rocm_unquantized_gemm"), "torch.ops.vllm.rocm_unquantized_gemm")


def install() -> None:
    """Replace the function where vLLM's dispatch looks it up."""
    from vllm import envs
    from vllm.model_executor.layers import utils

    theirs = utils.rocm_unquantized_gemm

    def rocm_unquantized_gemm(layer, x, weight, bias=None):
        if envs.VLLM_BATCH_INVARIANT or not x.is_cuda:
            return theirs(layer, x, weight, bias)
        return torch.ops.vllm_rocm_ops.unquantized_linear(x, weight, bias)

    utils.rocm_unquantized_gemm = rocm_unquantized_gemm


SEAM = seam.Seam(
    name="unquantized_linear",
    replaces="rocm_unquantized_gemm of model_executor/layers/utils.py",
    probe=probe,
    install=install,
    platforms=("rocm",),
)
