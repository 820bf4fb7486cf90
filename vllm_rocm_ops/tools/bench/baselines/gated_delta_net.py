"""Prepare a decode step of Gated DeltaNet by vLLM's Triton kernels, as its layers call them with drafts and without."""

from __future__ import annotations

import importlib

import torch

from vllm_rocm_ops.ops import gated_delta_net_decode, unquantized_gemm
from vllm_rocm_ops.ops.shared import gated_delta_net

FLA = "vllm.third_party.flash_linear_attention.ops"


def prepare(*arguments) -> tuple:
    """Return q, k and v, z, b and a apart, as vLLM's compiled graph leaves them, and the arguments."""
    a = gated_delta_net_decode.Arguments(*arguments)
    if a.out.dtype != a.qkvz.dtype:
        raise ValueError("a result that is not quantized")
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
    """Run the convolution, the recurrence and the gated norm. A fourth launch sets q, k and v of drafts apart, or else fills zeros."""
    convolve = importlib.import_module("vllm.model_executor.layers.mamba.ops.causal_conv1d").causal_conv1d_update
    norm = importlib.import_module(f"{FLA}.layernorm_guard").rmsnorm_fn
    slots, of_rows = a.indices[:, 0], {}
    if a.row_starts is not None:
        of_rows = {"num_accepted_tokens": a.accepted, "query_start_loc": a.row_starts}
        of_rows["max_query_len"] = a.indices.shape[1]
    rows = convolve(mixed, a.conv_state, a.conv_weight, None, "silu", conv_state_indices=slots, **of_rows)
    advance = advance_drafts if of_rows else advance_rows
    return norm(advance(rows, z, b, alpha, a).flatten(0, 1), a.norm_weight, None, z.flatten(0, 1), a.epsilon)


def advance_rows(rows: torch.Tensor, z: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, a) -> torch.Tensor:
    """Advance the states by a row of each request, and return its results."""
    advance = importlib.import_module(f"{FLA}.fused_recurrent").fused_recurrent_gated_delta_rule_packed_decode
    out = torch.zeros_like(z)
    advance(
        mixed_qkv=rows,
        a=alpha,
        b=b,
        A_log=a.a_log,
        dt_bias=a.dt_bias,
        scale=z.shape[2] ** -0.5,
        initial_state=a.state,
        out=out.unsqueeze(1),
        ssm_state_indices=a.indices[:, 0],
        use_qk_l2norm_in_kernel=True,
    )
    return out


def advance_drafts(rows: torch.Tensor, z: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor, a) -> torch.Tensor:
    """Advance the states by all rows of each request, and return their results."""
    update = importlib.import_module(f"{FLA}.fused_sigmoid_gating").fused_sigmoid_gating_delta_rule_update
    sizes = gated_delta_net.sizes_of(a)
    heads = sizes.key_heads, sizes.key_heads, sizes.heads
    parts = rows.split([of * size for of, size in zip(heads, (sizes.key, sizes.key, sizes.value))], 1)
    joined = torch.cat([part.reshape(-1) for part in parts]).split([part.numel() for part in parts])
    q, k, v = (part.view(1, len(rows), of, -1) for part, of in zip(joined, heads))
    out, _ = update(
        A_log=a.a_log,
        a=alpha,
        b=b,
        dt_bias=a.dt_bias,
        q=q,
        k=k,
        v=v,
        initial_state=a.state,
        cu_seqlens=a.row_starts,
        ssm_state_indices=a.indices,
        num_accepted_tokens=a.accepted,
        use_qk_l2norm_in_kernel=True,
    )
    return out.squeeze(0)
