"""Share code between the SwiGLU ops on rows [gate | up], plain or quantized; kernels: csrc/device/gated_row.h."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.quantization import MX_BLOCK
from vllm_rocm_ops.core.tensors import row_stride, rows_of
from vllm_rocm_ops.ops.shared import rowwise
from vllm_rocm_ops.ops.shared.rowwise import VECTOR, RowConfig

MEANINGS = quantization.MEANINGS | {
    "input": "[..., 2 * hidden], bf16 or fp16: gate, then up; rows may be strided.",
}


def activated(gate: Tensor, up: Tensor, limit: float | None, alpha: float, beta: float) -> Tensor:
    """Return gate * sigmoid(alpha * gate) * (up + beta), with both clamped if there is a limit: the reference."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate / (1.0 + torch.exp(-alpha * gate)) * (up + beta)


def per_block(
    y: Tensor, input: Tensor, quant_dtype, group_size: int, is_scale_transposed: bool, scale_ub: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Quantize y, the unrounded result for input, with a scale per group that scale_ub bounds: the reference."""
    groups = y.unflatten(-1, (-1, group_size))
    scale = quantization.scale_of(quantization.absmax(groups), quant_dtype)
    if scale_ub is not None:
        scale = quantization.at_least_minimum(scale.fmin(scale_ub.to(scale.dtype).reshape(())), quant_dtype)
    scales = rowwise.scales(input, rows_of(input), y.shape[-1] // group_size, is_scale_transposed)
    return quantization.cast(groups / scale, quant_dtype).flatten(-2), scales.copy_(scale.view(scales.shape))


def hidden(a) -> int:
    """Return the columns of the result."""
    return a.input.shape[-1] // 2


def _contract(a, mx: bool):
    yield "input", "[..., 2 * hidden]", str(list(a.input.shape)), a.input.dim() >= 1 and a.input.shape[-1] % 2 == 0
    yield from rowwise.contract(a, 2, whole=MX_BLOCK if mx else 1)


def _per_token(a) -> bool:
    return hasattr(a, "scale_ub") and not hasattr(a, "group_size")


def _configs(a, arch: Arch) -> list[RowConfig]:
    vector = rowwise.is_vector(hidden(a), a.input)
    if _per_token(a):
        return list(rowwise.configs(hidden(a), vector, (1, 2, 4, 8), arch))
    split = [RowConfig(threads, 1) for threads in (128, 256, 512)] if vector else []
    return split + list(rowwise.configs(hidden(a), False, (), arch))


def _default(a, arch: Arch) -> RowConfig:
    """Return the default: with scales per token, the fewest vectors per thread with at most 512 threads.

    Otherwise small blocks, for more of them, until all compute units have work. Both were within 5 % of the best on H200.
    """
    fitting = _configs(a, arch)
    if _per_token(a) or fitting[0].vectors_per_thread == 0:
        return next((c for c in fitting if c.threads <= 512), fitting[0])
    return fitting[1] if rows_of(a.input) * (hidden(a) // VECTOR) >= 1024 * arch.compute_units else fitting[0]


def _plan(
    module: str, name: str, further: Callable[..., dict], config: RowConfig, outputs, a, arch: Arch
) -> list[Launch]:
    if rows_of(a.input) == 0:
        return []
    blocks = 1
    if config.vectors_per_thread and not _per_token(a):
        blocks = -(-hidden(a) // (VECTOR * config.vectors_per_thread * config.threads))
    args = {
        "input": a.input,
        "input_stride": row_stride(a.input),
        "hidden": hidden(a),
        "threads_per_block": config.threads,
        **rowwise.output_args(a, outputs),
        **further(a),
    }
    symbol = rowwise.symbol(name, a.input.dtype, config)
    return [Launch(module, symbol, (rows_of(a.input), blocks, 1), (config.threads, 1, 1), args)]


def op(
    reference: Callable,
    module: str,
    further: Callable[..., dict] = lambda a: {},
    contract: Callable[..., Iterator] = lambda a: iter(()),
    cases: Callable[[rowwise.Cases], Iterator[Case]] = rowwise.Cases.standard,
    meanings: dict[str, str] = MEANINGS,
) -> Op:
    """Return an op with the kernels of csrc/ops/`module`.hip.

    `further` gives the kernel arguments of this activation only, `contract` their rules, `meanings` texts of its arguments.
    """
    mx = reference.__name__.endswith("_mxfp8_quant")
    make = rowwise.Cases(reference, 2, {}, quantization.MX_BLOCK if mx else 1)
    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, hidden(a), mx),
        contract=lambda a: itertools.chain(_contract(a, mx), contract(a)),
        can_implement=lambda a, arch: rowwise.can_implement(a, arch, hidden(a)),
        configs=_configs,
        default=_default,
        plan=functools.partial(_plan, module, reference.__name__, further),
        problem=lambda a: rowwise.problem(a, hidden(a)),
        cases=functools.partial(cases, make),
        meanings=quantization.documented(meanings, reference),
    )
