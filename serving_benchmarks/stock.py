"""What runs in a decode step where ours does not: vLLM's choice of kernels, as functions of the arguments of our ops.

For each op the first of a list that takes the arguments and computes what the op's reference does: vLLM's compiled ops
and what else peers.py knows, as far as loaded, then PyTorch. Quantisation of what no op of ours quantises is here too,
for both sides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops import ops, quantization
from vllm_rocm_ops.correctness import as_tuple, clone
from vllm_rocm_ops.op import Op, rows_of
from vllm_rocm_ops.ops import rows
from vllm_rocm_ops.ops.gemm import BLOCK
from vllm_rocm_ops.quantization import LIMIT
from vllm_rocm_ops.vllm import peers

UNCHECKED = ("fused_experts", "grouped_topk")  # the reference goes through all experts; equal experts come in any order
MOST_DIFFERENCE = 0.05  # of the norms of results
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError, ImportError)
PREFERRED = {
    "scaled_mm": ("vllm", "vllm rocm", "torch"),
    "block_scaled_mm": ("vllm", "vllm triton", "torch"),
    "unquantized_gemm": ("vllm rocm", "torch"),
    "grouped_topk": ("vllm", "torch"),
    "fused_experts": ("vllm",),
}


def has(name: str, namespace: str = "_C") -> bool:
    """Whether vLLM's op is loaded."""
    peers.load()
    return hasattr(getattr(torch.ops, namespace), name)


# Quantisation: (values, scale)


def per_token(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.is_cuda or not has("dynamic_per_token_scaled_fp8_quant"):
        return quantization.per_token(x.float(), dtype, None)
    values, scale = torch.empty_like(x, dtype=dtype), rows.scales(x, rows_of(x), 1, False)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(values, x, scale, None)
    return values, scale


def per_block(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """With column-major scales, as most products want them."""
    scale = rows.scales(x, rows_of(x), x.shape[-1] // BLOCK, True)
    if not x.is_cuda or not has("per_token_group_fp8_quant"):
        values, found = quantization.per_token(x.float().unflatten(-1, (-1, BLOCK)), dtype, None)
        return values.flatten(-2), scale.copy_(found.view(scale.shape))
    values = torch.empty_like(x, dtype=dtype)
    limit = LIMIT[dtype]
    torch.ops._C.per_token_group_fp8_quant(x, values, scale, BLOCK, 1e-10, -limit, limit, False, True, False)
    return values, scale


def static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not x.is_cuda or not has("static_scaled_fp8_quant"):
        return quantization.static(x.float(), scale, dtype), scale
    values = torch.empty_like(x, dtype=dtype)
    torch.ops._C.static_scaled_fp8_quant(values, x, scale, None)
    return values, scale


# Ops


def _rows(op: Op, run: Callable) -> Callable:
    """vLLM's op, which writes what it is given, as one that returns it."""

    def call(*arguments):
        a = op.Arguments(*arguments)
        if op is ops.fused_add_rms_norm:  # it normalises in place
            run(None, a)
            return a.input
        outputs = op.allocate(a)
        run(outputs, a)
        return outputs

    return call


def _silu_and_mul_then_quantise(input: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None = None):
    product = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
    torch.ops._C.silu_and_mul(product, input)
    return per_token(product, quant_dtype)


def _grouped_topk(gating_output, topk, renormalize, groups, topk_group, scoring_func, scale, bias):
    if scoring_func != "sigmoid" or bias is None:
        raise ValueError("it takes sigmoid scores and a bias")
    return torch.ops._moe_C.grouped_topk(gating_output, groups, topk_group, topk, renormalize, scale, bias, 1)


def _of_peer(peer: peers.Peer, *arguments):
    return peer.call(*peer.prepare(*arguments))


def candidates(op: Op) -> Iterator[tuple[str, Callable]]:
    """Functions of the op's arguments that compute it on a GPU, by name, the first choice first."""
    run = peers.vllm_call(op)
    if run is not None:
        yield "vllm", _rows(op, run)
        yield "vllm, of a contiguous copy", lambda x, *others: _rows(op, run)(x.contiguous(), *others)
    if op is ops.silu_and_mul_per_token_quant and has("silu_and_mul") and has("dynamic_per_token_scaled_fp8_quant"):
        yield "vllm silu_and_mul + dynamic_per_token_scaled_fp8_quant", _silu_and_mul_then_quantise
    if op is ops.grouped_topk and has("grouped_topk", "_moe_C"):
        yield "vllm grouped_topk", _grouped_topk
    found = peers.peers(op)
    for name in PREFERRED.get(op.name, ("torch",)):
        if name in found and op is ops.block_scaled_mm and name == "vllm":  # pads tokens, if it cannot take them so
            yield name, found[name].call
            yield f"{name}, padded", lambda *arguments: _of_peer(found["vllm"], *arguments)[: len(arguments[0])]
        elif name in found:
            yield name, functools.partial(_of_peer, found[name])


class Stock:
    """An op as vLLM computes it. The first call with arguments so laid out finds what takes them; `used` names what
    ran, each with what was refused before."""

    def __init__(self, op: Op, device: str):
        self.op, self.used = op, {}
        self.candidates = [("reference", op.reference)] if device == "cpu" else list(candidates(op))
        self._chosen: dict[tuple, Callable] = {}

    def __bool__(self) -> bool:
        """Whether there is anything that computes the op."""
        return bool(self.candidates)

    def __call__(self, *arguments):
        key = tuple((value.shape, value.stride()) for value in arguments if isinstance(value, Tensor))
        if key not in self._chosen:
            self._chosen[key] = self._choose(arguments)
        return self._chosen[key](*arguments)

    def _choose(self, arguments: tuple) -> Callable:
        refused = []
        for name, call in self.candidates:
            try:
                if call is not self.op.reference:
                    result = call(*_copies(arguments))
                    if self.op.name not in UNCHECKED:
                        require_same(result, self.op.reference(*_copies(arguments)))
            except REFUSALS as error:
                refused.append(f"{name}: {reason(error)}")
                continue
            self.used[name] = refused
            return call
        raise RuntimeError(f"nothing computes {self.op.name}: {'; '.join(refused)}")


def _copies(arguments: tuple) -> tuple:
    return tuple(clone(value, value.device) if isinstance(value, Tensor) else value for value in arguments)


def reason(error: Exception) -> str:
    """Its kind and first line."""
    return f"{type(error).__name__} {str(error).partition(chr(10))[0]}"


def require_same(result, expected) -> None:
    """Raises ValueError for a result that is another."""
    for mine, wanted in zip(as_tuple(result), as_tuple(expected), strict=True):
        off = ((mine.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not off <= MOST_DIFFERENCE:
            raise ValueError(f"its result is off by {off:.2f} of the reference's")
