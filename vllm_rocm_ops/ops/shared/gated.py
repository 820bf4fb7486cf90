"""Share code between gated ops, plain or quantized: on rows [gate | up], or with a gate apart; kernels: csrc/device/gated_row.h."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.quantization import MX_BLOCK
from vllm_rocm_ops.core.tensors import describe, row_stride, rows_of
from vllm_rocm_ops.ops.shared import rowwise
from vllm_rocm_ops.ops.shared.gemm import divisor
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
    return a.input.shape[-1] // parts(a._fields)


def parts(arguments: Iterable[str]) -> int:
    """Return how many times a row of the result is in a row of input, by the names of an op's arguments."""
    return 1 if "gate" in arguments else 2


class Gate(NamedTuple):
    """A gate of rows of heads: its strides in elements, and the elements of a head."""

    stride: int
    head_stride: int
    head_size: int


def gate_of(a) -> Gate | None:
    """Return the gate's layout, None if it has more strides than the kernels support."""
    gate, rows = a.gate, hidden(a)
    if gate.dim() != 3 or gate.shape == a.input.shape:
        stride = row_stride(gate)
        return None if stride is None else Gate(stride, 0, rows)
    return Gate(gate.stride(0), gate.stride(1), gate.shape[2])


def _gate_contract(a) -> Iterator[tuple[str, str, str, bool]]:
    shape = a.input.shape
    fits = a.gate.shape == shape or (
        len(shape) == 2
        and a.gate.dim() == 3
        and a.gate.shape[0] == shape[0]
        and a.gate.shape[1] * a.gate.shape[2] == shape[1]
    )
    wanted = f"{a.input.dtype} {list(shape)}, or [{shape[0] if shape else 1}, heads, size] of as many elements"
    yield "gate", wanted, describe(a.gate), fits and a.gate.dtype == a.input.dtype


def _contract(a, mx: bool):
    if "gate" not in a._fields:
        yield "input", "[..., 2 * hidden]", str(list(a.input.shape)), a.input.dim() >= 1 and a.input.shape[-1] % 2 == 0
    yield from rowwise.contract(a, parts(a._fields), whole=MX_BLOCK if mx else 1)
    if "gate" in a._fields:
        yield from _gate_contract(a)


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    yield from rowwise.can_implement(a, arch, hidden(a))
    if "gate" in a._fields:
        gate = gate_of(a)
        yield (
            "gate's rows, or heads, have one stride and contiguous elements",
            gate is not None and (a.gate.stride(-1) == 1 or a.gate.shape[-1] == 1),
        )
        reach = 0 if gate is None else hidden(a) // max(gate.head_size, 1) * gate.head_stride
        yield "gate's heads of a token are within 2^31 elements", reach < 2**31


def _per_token(a) -> bool:
    return hasattr(a, "scale_ub") and not hasattr(a, "group_size")


def _configs(a, arch: Arch) -> list[RowConfig]:
    vector = rowwise.is_vector(hidden(a), a.input, getattr(a, "gate", None))
    if vector and "gate" in a._fields:
        gate = gate_of(a)
        vector = gate is not None and gate.head_size % VECTOR == 0 and gate.head_stride % VECTOR == 0
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
        **_gate_args(a),
        **rowwise.output_args(a, outputs),
        **further(a),
    }
    symbol = rowwise.symbol(name, a.input.dtype, config)
    return [Launch(module, symbol, (rows_of(a.input), blocks, 1), (config.threads, 1, 1), args)]


def _gate_args(a) -> dict[str, object]:
    """Return the arguments of a gate apart from input."""
    if "gate" not in a._fields:
        return {}
    stride, head_stride, head_size = gate_of(a)
    strides = {"gate_stride": stride, "head_stride": head_stride, "head_size": head_size}
    return {"gate": a.gate, **strides, **divisor(head_size)}


@dataclasses.dataclass(frozen=True)
class GateCases(rowwise.Cases):
    """Cases with a gate: of heads in a projection [q | gate] if its heads can be of 64 elements or more, else of rows."""

    def more(self, shape, dtype, fill, given, device: str, generator) -> dict[str, Tensor]:
        gate = fill(shape, dtype, generator).to(device)
        size = given.get("head_size", next((size for size in (256, 128, 64) if shape[-1] % size == 0), 0))
        if size and len(shape) == 2:
            heads = gate.unflatten(1, (shape[1] // size, size))
            between = given.get("between", 1)  # heads before each gate
            gate = torch.cat((*[torch.full_like(heads, torch.nan)] * between, heads), -1)[..., between * size :]
        return {"gate": gate}


def op(
    reference: Callable,
    module: str,
    further: Callable[..., dict] = lambda a: {},
    contract: Callable[..., Iterator] = lambda a: iter(()),
    cases: Callable[[rowwise.Cases], Iterator[Case]] = rowwise.Cases.standard,
    meanings: dict[str, str] = MEANINGS,
    rules: Callable[..., Iterator] = lambda a: iter(()),
) -> Op:
    """Return an op with the kernels of csrc/ops/`module`.hip.

    `further` gives the kernel arguments of this activation only, `contract` and `rules` what the op and its kernels demand of them,
    `meanings` texts of its arguments.
    """
    mx = reference.__name__.endswith("_mxfp8_quant")
    count = parts(inspect.signature(reference).parameters)
    make = (rowwise.Cases if count == 2 else GateCases)(reference, count, {}, quantization.MX_BLOCK if mx else 1)
    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, hidden(a), mx),
        contract=lambda a: itertools.chain(_contract(a, mx), contract(a)),
        can_implement=lambda a, arch: itertools.chain(_can_implement(a, arch), rules(a)),
        configs=_configs,
        default=_default,
        plan=functools.partial(_plan, module, reference.__name__, further),
        problem=lambda a: rowwise.problem(a, hidden(a)),
        cases=functools.partial(cases, make),
        meanings=quantization.documented(meanings, reference),
    )
