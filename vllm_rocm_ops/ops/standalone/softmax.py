"""Compute the softmax of rows of any length; kernels: csrc/ops/standalone/softmax.hip."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.launch import Launch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.tensors import row_stride, rows_of
from vllm_rocm_ops.ops.shared import routing, rowwise

__all__ = ["softmax"]

ELEMENTS = routing.ELEMENTS
IN_FLIGHT = 4  # kAhead of the online kernel
MAX_THREADS = 1024


@dataclass(frozen=True)
class SoftmaxConfig:
    """Threads of a block, and the kernel.

    `kernel` is "x2" or "x4" for the vectors of 8 elements that a thread holds, "online" for rows of any length, or "general" for
    any alignment.
    """

    threads: int
    kernel: str


def _hidden(a) -> int:
    return a.input.shape[-1]


def _can_implement(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    x = a.input
    yield "input is bfloat16, float16 or float32", x.dtype in ELEMENTS
    side_by_side = x.shape[-1] <= 1 or x.stride(-1) == 1
    yield "input's rows have one stride and contiguous elements", side_by_side and row_stride(x) is not None
    yield "hidden is at least 1 and below 2^30", 1 <= _hidden(a) < 2**30


def _configs(a, arch: Arch) -> list[SoftmaxConfig]:
    hidden, vector = _hidden(a), rowwise.is_vector(_hidden(a), a.input)
    *held, general = rowwise.configs(hidden, vector, (2, 4), arch)
    fitting = [SoftmaxConfig(config.threads, f"x{config.vectors_per_thread}") for config in held]
    if vector:
        threads = rowwise.threads_for(hidden // rowwise.VECTOR, IN_FLIGHT, arch)
        fitting.append(SoftmaxConfig(min(threads, MAX_THREADS), "online"))
    return [*fitting, SoftmaxConfig(general.threads, "general")]


def _default(a, arch: Arch) -> SoftmaxConfig:
    """Return the default of norms, or the online kernel for rows that no block holds: it keeps many loads in flight."""
    fitting = _configs(a, arch)
    held = [config for config in fitting if config.kernel.startswith("x")]
    return rowwise.default(a, held) if held else fitting[0]


def _plan(config: SoftmaxConfig, out: Tensor, a, arch: Arch) -> list[Launch]:
    rows = rows_of(a.input)
    if rows == 0:
        return []
    args = {
        "input": a.input,
        "out": out,
        "input_stride": row_stride(a.input) * a.input.element_size(),
        "hidden": _hidden(a),
        "threads_per_block": config.threads,
    }
    symbol = f"softmax_{ELEMENTS[a.input.dtype]}_{config.kernel}"
    return [Launch("softmax", symbol, (rows, 1, 1), (config.threads, 1, 1), args)]


def _masked(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return rows that are -inf whole, except the last element, in the first half, in every third, and a wide spread."""
    x = torch.randn(shape, generator=generator)
    x[0] = x[1] = x[2, : shape[-1] // 2] = x[3, ::3] = -math.inf
    x[1, -1] = -5.0
    x[4] = torch.linspace(-85.0, 0.0, shape[-1])[torch.randperm(shape[-1], generator=generator)]
    return x.to(dtype)


def _rising(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return rows whose running maximum grows with every element."""
    return torch.linspace(-6.0, 6.0, shape[-1]).expand(shape).to(dtype)


def _cases(reference) -> Iterator[Case]:
    """Yield the cases of every row-wise op; rows that no block holds, masked rows, and fp32."""
    make = rowwise.Cases(reference, 1, {})
    case = make.case
    yield from make.standard()
    for dtype, label in ELEMENTS.items():
        yield case(f"{label}-masked", (5, 1040), dtype, _masked)
        yield case(f"{label}-masked-general", (5, 333), dtype, _masked, padding=1)
        yield case(f"{label}-long", (1, 16392), dtype)
    yield case("fp32", (3, 4096), torch.float32)
    yield case("fp32-special", (9, 512), torch.float32, rowwise.special)
    yield case("fp32-general", (2, 333), torch.float32, padding=1)
    yield case("fp32-strided", (4, 704), torch.float32, padding=64)
    yield case("rising", (1, 40008), fill=_rising)
    yield case("one-column", (3, 1), torch.float32)


def _op(reference) -> Op:
    return Op(
        reference,
        allocate=lambda a: rowwise.allocate(a, _hidden(a)),
        contract=lambda a: rowwise.contract(a, 1, ()),
        can_implement=_can_implement,
        configs=_configs,
        default=_default,
        plan=_plan,
        problem=lambda a: rowwise.problem(a, _hidden(a)) | {"dtype": ELEMENTS.get(a.input.dtype)},
        cases=functools.partial(_cases, reference),
        baseline=functools.partial(torch.softmax, dim=-1),
    )


@_op
def softmax(input: Tensor) -> Tensor:
    """Compute the softmax over the last dimension, rounded once.

    Args:
        input: [..., hidden], bf16, fp16 or fp32; rows may be strided.

    Returns:
        [..., hidden], input's dtype. A row that has NaN or +infinity, or only -infinity, is NaN.

    Source:
        torch.softmax; softmax of the Inference Sprint and softmax.py of AMD perf-kernels.
    """
    return torch.softmax(rowwise.exact(input), -1).to(input.dtype)
