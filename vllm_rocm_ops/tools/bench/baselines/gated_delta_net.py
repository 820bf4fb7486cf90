"""Prepare a decode step of Gated DeltaNet by vLLM's Triton kernels, as its layers call them without drafts."""

from __future__ import annotations

import importlib

import torch

from vllm_rocm_ops.ops import gated_delta_net_decode, unquantized_gemm
from vllm_rocm_ops.ops.shared import gated_delta_net

FLA = "vllm.third_party.flash_linear_attention.ops"


def prepare(*arguments) -> tuple:
    """Return q, k and v, z, b and a apart, as vLLM's compiled graph leaves them, and the arguments."""
    a = gated_delta_net_decode.Arguments(*arguments)
    if a.row_starts is not None or a.out.dtype != a.qkvz.dtype:
        raise ValueError("one row per request, not quantized")
    return *(part.contiguous() for part in gated_delta_net.parts(a, a.qkvz.dtype)), a


def prepare_tokens(*arguments) -> tuple:
    """Return the arguments of a call with tokens in place of b and a."""
    a = gated_delta_net_decode.Arguments(*arguments)
    if a.tokens is None:
        raise ValueError("tokens in place of b and a")
    return (a,)


def two_launches(a) -> None:
    """Project b and a by a launch of their own."""
    ba = unquantized_gemm(a.tokens, a.ba_weight)
    gated_delta_net_decode(*a._replace(ba=ba, tokens=None, ba_weight=None))


def call(mixed: torch.Tensor, z: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, a) -> torch.Tensor:
    """Run the convolution, the recurrence into zeros and the gated norm: four launches."""
    convolve = importlib.import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d").causal_conv1d_update
    advance = importlib.import_module(f"{FLA}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    norm = importlib.import_module(f"{FLA}.layernorm_guard").rmsnorm_fn
    slots, out = a.indices[:, 0], torch.zeros_like(z)
    rows = convolve(mixed, a.conv_state, a.conv_weight, None, "silu", conv_state_indices=slots)
    advance(
        mixed_qkv=rows,
        a=alpha,
        b=b,
        A_log=a.a_log,
        dt_bias=a.dt_bias,
        scale=z.shape[2] ** -0.5,
        initial_state=a.state,
        out=out.unsqueeze(1),
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
    )
    return norm(out.flatten(0, 1), a.norm_weight, None, z.flatten(0, 1), a.epsilon)
