"""Fall back to vLLM's kernels for norms and activations, in place of an op's PyTorch reference.

Layers that the kernels cannot serve run vLLM's forward, see fused_quant.py. This file covers single calls on a GPU:
unaligned addresses, or kernels that do not load. bench times the same kernels as baselines.
"""

import functools
import types
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.quantization import BLOCKS, MX, STATIC, TOKEN, UNQUANTIZED
from vllm_rocm_ops.ops.shared import by_quantization, rowwise
from vllm_rocm_ops.ops.shared.gemm import BLOCK

COMPILED: dict[str, Callable] = {
    "rms_norm": lambda out, a: torch.ops._C.rms_norm(out, a.input, a.weight, a.epsilon),
    "fused_add_rms_norm": lambda out, a: torch.ops._C.fused_add_rms_norm(a.input, a.residual, a.weight, a.epsilon),
    "rms_norm_static_fp8_quant": lambda out, a: torch.ops._C.rms_norm_static_fp8_quant(
        out, a.input, a.weight, a.scale, a.epsilon
    ),
    "fused_add_rms_norm_static_fp8_quant": lambda out, a: torch.ops._C.fused_add_rms_norm_static_fp8_quant(
        out, a.input, a.residual, a.weight, a.scale, a.epsilon
    ),
    "rms_norm_dynamic_per_token_quant": lambda out, a: torch.ops._C.rms_norm_dynamic_per_token_quant(
        out[0], a.input, a.weight, out[1], a.epsilon, a.scale_ub, a.residual
    ),
    "rms_norm_per_block_quant": lambda out, a: torch.ops._C.rms_norm_per_block_quant(
        out[0], a.input, a.weight, out[1], a.epsilon, a.scale_ub, a.residual, a.group_size, a.is_scale_transposed
    ),
    "silu_and_mul": lambda out, a: torch.ops._C.silu_and_mul(out, a.input),
    "silu_and_mul_quant": lambda out, a: torch.ops._C.silu_and_mul_quant(out, a.input, a.scale),
    "silu_and_mul_per_block_quant": lambda out, a: torch.ops._C.silu_and_mul_per_block_quant(
        out[0], a.input, out[1], a.group_size, a.scale_ub, a.is_scale_transposed
    ),
}
"""vLLM's compiled ops, by op name. Called with the outputs, which they write, and the op's arguments."""


def _norm(a) -> Tensor:
    """Return the norm of an op's arguments, and update their residual."""
    from vllm import _custom_ops  # noqa: F401  registers `COMPILED`

    residual, addend = getattr(a, "residual", None), getattr(a, "addend", None)
    x = a.input if addend is None else torch.add(a.input, addend, alpha=a.addend_factor)
    if a.one_plus_weight:
        return _gemma(x, a.weight, a.epsilon, residual)
    if residual is None:
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        COMPILED["rms_norm"](output, ops.rms_norm.Arguments(x.contiguous(), a.weight, a.epsilon))
        return output
    output, added = x.clone(memory_format=torch.contiguous_format), residual.contiguous()
    COMPILED["fused_add_rms_norm"](None, ops.fused_add_rms_norm.Arguments(output, added, a.weight, a.epsilon))
    if added is not residual:
        residual.copy_(added)
    return output


def _gemma(input: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> Tensor:
    """Run vLLM's GemmaRMSNorm, which does not update the residual."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    norm = types.SimpleNamespace(weight=weight, variance_epsilon=epsilon)
    result = GemmaRMSNorm.forward_native(norm, input.contiguous(), residual)
    if residual is None:
        return result
    output, added = result
    residual.copy_(added)
    return output


def _activation(a) -> Tensor:
    output = a.input.new_empty(*a.input.shape[:-1], a.input.shape[-1] // 2)
    COMPILED["silu_and_mul"](output, ops.silu_and_mul.Arguments(a.input.contiguous()))
    return output


def _gated(a) -> Tensor:
    return a.input * torch.sigmoid(a.gate.reshape(a.input.shape))


def _expert_gated(a) -> Tensor:
    return _activation(a) * torch.sigmoid(torch.nn.functional.linear(a.tokens, a.expert_gate))


def _static(x: Tensor, a) -> Tensor:
    from vllm import _custom_ops

    return _custom_ops.scaled_fp8_quant(x.view(-1, x.shape[-1]), a.scale)[0].view(x.shape)


def _per_token(x: Tensor, a) -> tuple[Tensor, Tensor]:
    from vllm import _custom_ops

    quantized = _custom_ops.scaled_fp8_quant(
        x.view(-1, x.shape[-1]), scale_ub=a.scale_ub, use_per_token_if_dynamic=True
    )
    return quantized[0].view(x.shape), quantized[1]


def _per_block(x: Tensor, group_size: int, column_major: bool) -> tuple[Tensor, Tensor]:
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    quantized = fp8_utils.per_token_group_quant_fp8(
        x.view(-1, x.shape[-1]), group_size, column_major_scales=column_major, use_ue8m0=False
    )
    return quantized[0].view(x.shape), quantized[1]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows per 128 columns by vLLM's kernel, on CPU by PyTorch."""
    if x.device.type == "cpu":
        from vllm_rocm_ops.vllm.graph.fused_quant import QUANT_DTYPE

        return rowwise.per_block(x, QUANT_DTYPE, None, BLOCK, False)
    return _per_block(x, BLOCK, False)


def _mx(x: Tensor) -> tuple[Tensor, Tensor]:
    values, scale = torch.ops.vllm.mxfp8_quantize(x.view(-1, x.shape[-1]), False, 0)
    return values.view(x.shape), scale


def _fallbacks(make: Callable, quantizations: dict[str, Callable]) -> dict[str, Callable]:
    """Return by op a function of its arguments: what `make` returns, in the op's quantization."""

    def run(name: str, quantize: Callable, *arguments):
        a = getattr(ops, name).Arguments(*arguments)
        return quantize(make(a), a)

    return {name: functools.partial(run, name, quantize) for name, quantize in quantizations.items()}


_QUANTIZE: dict[str, Callable] = {
    UNQUANTIZED: lambda y, a: y,
    STATIC: _static,
    TOKEN: _per_token,
    BLOCKS: lambda y, a: _per_block(y, a.group_size, a.is_scale_transposed),
    MX: lambda y, a: _mx(y),
}
NORMS = _fallbacks(
    _norm,
    {
        **{name: _QUANTIZE[kind] for kind, names in by_quantization.NORMS.items() for name in names},
        "rms_norm_and_per_block_quant": lambda y, a: (y, *_per_block(y, BLOCK, False)),
    },
)
ACTIVATIONS = {}
for make, table in (
    (_activation, by_quantization.ACTIVATIONS),
    (_gated, by_quantization.GATES),
    (_expert_gated, by_quantization.EXPERT_GATES),
):
    ACTIVATIONS |= _fallbacks(make, {name: _QUANTIZE[kind] for kind, (name,) in table.items()})
"""By op, with the op's arguments. Scales per block have no bound: no seam passes one."""


def install(table: dict[str, Callable]) -> None:
    """Have the ops of a table fall back to vLLM's kernels. Not on CPU, where vLLM lacks most of them."""
    from vllm.platforms import current_platform

    for name, function in () if current_platform.is_cpu() else table.items():
        getattr(ops, name).native = function
