"""Apply a shared expert's SwiGLU and multiply by its gate, with optional FP8 quantization fused.

Kernels: csrc/ops/silu_and_mul_with_expert_gate.hip. In Qwen2-MoE, Qwen3-Next and Qwen3.5 a token's gate multiplies the result of the shared
expert: sigmoid(token . expert_gate) * down(silu(gate) * up). The projection `down` is linear, so here the gate multiplies its input: the
same product without a GEMM for the gate, and without the launches of a sigmoid and a product. Results round once, from float32;
dynamic quantization reads the unrounded result. NaN propagates up to the cast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.core.tensors import aligned, describe, row_stride
from vllm_rocm_ops.ops.shared import gated, rowwise

__all__ = [
    "silu_and_mul_with_expert_gate",
    "silu_and_mul_with_expert_gate_mxfp8_quant",
    "silu_and_mul_with_expert_gate_per_block_quant",
    "silu_and_mul_with_expert_gate_per_token_quant",
    "silu_and_mul_with_expert_gate_quant",
]

MEANINGS = gated.MEANINGS | {
    "tokens": "[..., K], input's dtype, as many rows as input; the rows may be strided.",
    "expert_gate": "[1, K], input's dtype: the gate's weight.",
}


def _product(input: Tensor, tokens: Tensor, expert_gate: Tensor) -> Tensor:
    """Return the gated activation, unrounded."""
    gate, up = rowwise.exact(input).chunk(2, -1)
    logits = (rowwise.exact(tokens) * rowwise.exact(expert_gate[0])).sum(-1)
    return gated.activated(gate, up, None, 1.0, 0.0) * torch.sigmoid(logits).view(*input.shape[:-1], 1)


def _contract(a) -> Iterator[tuple[str, str, str, bool]]:
    dtype, rows = a.input.dtype, a.input.shape[:-1]
    wanted = f"{dtype} of input's rows {list(rows)} and one column or more"
    holds = a.tokens.dim() >= 1 and a.tokens.shape[:-1] == rows and a.tokens.shape[-1] > 0 and a.tokens.dtype == dtype
    yield "tokens", wanted, describe(a.tokens), holds
    shape = (1, a.tokens.shape[-1] if a.tokens.dim() else 0)
    yield (
        "expert_gate",
        f"{dtype}{list(shape)}",
        describe(a.expert_gate),
        a.expert_gate.shape == shape and a.expert_gate.dtype == dtype,
    )


def _can_implement(a) -> Iterator[tuple[str, bool]]:
    for name in ("tokens", "expert_gate"):
        tensor = getattr(a, name)
        stride = row_stride(tensor)
        yield f"{name}'s rows have one stride and contiguous elements", stride is not None and tensor.stride(-1) == 1
        holds = tensor.shape[-1] % rowwise.VECTOR == 0 and aligned(tensor)
        yield f"{name}'s rows are of whole vectors of {rowwise.VECTOR} elements, 16-byte aligned", holds
    yield "tokens' rows are below 2^30 elements", a.tokens.shape[-1] < 2**30


def _further(a) -> dict[str, object]:
    columns = a.tokens.shape[-1]
    given = {"tokens": a.tokens, "tokens_stride": row_stride(a.tokens)}
    return {**given, "expert_gate": a.expert_gate, "token_columns": columns}


@dataclasses.dataclass(frozen=True)
class TokenCases(rowwise.Cases):
    """Cases with tokens of 256 columns, apart by 8 more, and a gate whose products with them are mostly within 3."""

    def more(self, shape, dtype, fill, given, device: str, generator) -> dict[str, Tensor]:
        columns, fills = given.get("columns", 256), given.get("of_tokens", rowwise.normal)
        tokens = torch.nn.functional.pad(fills((*shape[:-1], columns), dtype, generator), (0, 8))
        weight = torch.randn(1, columns, generator=generator) * given.get("largest", 1.0) / columns**0.5
        return {"tokens": tokens.to(device)[..., :columns], "expert_gate": weight.to(dtype).to(device)}


def _cases(make: rowwise.Cases) -> Iterator[Case]:
    """Yield the cases of all activations, tokens of one and several rounds of loads with tails, special tokens, and gates near 0 and 1."""
    make = TokenCases(make.reference, make.parts, make.columns, make.whole)
    yield from make.standard()
    yield make.case("qwen3-next", (5, 512), columns=2048)
    yield make.case("qwen3-next-tp2", (3, 256), columns=2048)
    yield make.case("qwen3.5", (2, 1024), columns=4096)
    yield make.case("tokens-of-one-vector", (3, 512), columns=8)
    yield make.case("tokens-with-a-tail", (3, 384), columns=8 * 1031)
    yield make.case("tokens-special", (9, 512), of_tokens=rowwise.special, columns=512)
    yield make.case("gates-far-from-0", (6, 512), largest=40.0)
    if "group_size" not in make.parameters:
        yield make.case("tp8", (4, 64), columns=2048)


def _op(reference: Callable):
    further = {"further": _further, "contract": _contract, "rules": _can_implement}
    return gated.op(reference, "silu_and_mul_with_expert_gate", **further, cases=_cases, meanings=MEANINGS)


@_op
def silu_and_mul_with_expert_gate(input: Tensor, tokens: Tensor, expert_gate: Tensor) -> Tensor:
    """Compute silu(gate) * up * sigmoid(tokens . expert_gate), rounded once.

    Source:
        vLLM's Qwen2MoeMLP, whose gate multiplies the result of `down_proj`.
    """
    return _product(input, tokens, expert_gate).to(input.dtype)


@_op
def silu_and_mul_with_expert_gate_quant(
    input: Tensor, tokens: Tensor, expert_gate: Tensor, scale: Tensor, quant_dtype: torch.dtype
) -> Tensor:
    """Apply `silu_and_mul_with_expert_gate`, then quantize to FP8 with a static scale.

    Source:
        vLLM's Qwen2MoeMLP and `static_scaled_fp8_quant`, in one launch.
    """
    product = _product(input, tokens, expert_gate).to(input.dtype)
    return quantization.static(rowwise.exact(product), scale, quant_dtype)


@_op
def silu_and_mul_with_expert_gate_per_token_quant(
    input: Tensor, tokens: Tensor, expert_gate: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_expert_gate` in float32, then quantize to FP8 with one dynamic scale per row.

    Source:
        vLLM's Qwen2MoeMLP and `dynamic_per_token_scaled_fp8_quant`, in one launch.
    """
    return quantization.per_token(_product(input, tokens, expert_gate), quant_dtype, scale_ub)


@_op
def silu_and_mul_with_expert_gate_per_block_quant(
    input: Tensor,
    tokens: Tensor,
    expert_gate: Tensor,
    quant_dtype: torch.dtype,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    scale_ub: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_expert_gate` in float32, then quantize to FP8 per `group_size` columns.

    Args:
        scale_ub: float32, one element: upper bound of the scale, or None.

    Source:
        vLLM's Qwen2MoeMLP, with the quantization of `silu_and_mul_per_block_quant`.
    """
    y = _product(input, tokens, expert_gate)
    return gated.per_block(y, input, quant_dtype, group_size, is_scale_transposed, scale_ub)


@_op
def silu_and_mul_with_expert_gate_mxfp8_quant(
    input: Tensor, tokens: Tensor, expert_gate: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `silu_and_mul_with_expert_gate` in float32, then quantize to MX-FP8 with one e8m0 scale per 32 columns.

    Args:
        input: [..., 2 * hidden], bf16 or fp16, hidden a multiple of 32: gate, then up; rows may be strided.

    Source:
        vLLM's Qwen2MoeMLP and `mxfp8_quantize`, in one launch.
    """
    return rowwise.mx(_product(input, tokens, expert_gate))
