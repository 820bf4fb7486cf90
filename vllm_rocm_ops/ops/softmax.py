"""Softmax of rows of any length; kernels: csrc/ops/softmax.hip."""

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
from vllm_rocm_ops.ops.families import routing, rowwise

__all__ = ["softmax"]

ELEMENTS = routing.ELEMENTS
IN_FLIGHT = 4  # kAhead of the online kernel
MOST_THREADS = 1024


@dataclass(frozen=True)
class SoftmaxConfig:
    """A block has so many threads. `kernel` is x2 or x4 where a thread keeps so many vectors of 8 elements, online where it
    goes through rows of any length, general for any alignment."""

    threads: int
    kernel: str


def _hidden(a) -> int:
    return a.input.shape[-1]


def _envelope(a, arch: Arch) -> Iterator[tuple[str, bool]]:
    x = a.input
    yield "input is bfloat16, float16 or float32", x.dtype in ELEMENTS
    side_by_side = x.shape[-1] <= 1 or x.stride(-1) == 1
    yield "input's rows lie at one stride, their elements side by side", side_by_side and row_stride(x) is not None
    yield "hidden is at least 1 and below 2^30", 1 <= _hidden(a) < 2**30
    yield "there are fewer than 2^31 rows", rows_of(x) < 2**31


def _configs(a, arch: Arch) -> list[SoftmaxConfig]:
    hidden, vector = _hidden(a), rowwise.is_vector(_hidden(a), a.input)
    *held, general = rowwise.configs(hidden, vector, (2, 4), arch)
    found = [SoftmaxConfig(config.threads, f"x{config.vectors_per_thread}") for config in held]
    if vector:
        threads = rowwise.threads_for(hidden // rowwise.VECTOR, IN_FLIGHT, arch)
        found.append(SoftmaxConfig(min(threads, MOST_THREADS), "online"))
    return [*found, SoftmaxConfig(general.threads, "general")]


def _default(a, arch: Arch) -> SoftmaxConfig:
    """As of norms; a row that no block holds goes online, which needs many loads in flight."""
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
    """Rows of -inf alone, but for the last element, in the first half, every third; and with a wide spread."""
    x = torch.randn(shape, generator=generator)
    x[0] = x[1] = x[2, : shape[-1] // 2] = x[3, ::3] = -math.inf
    x[1, -1] = -5.0
    x[4] = torch.linspace(-85.0, 0.0, shape[-1])[torch.randperm(shape[-1], generator=generator)]
    return x.to(dtype)


def _rising(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows whose maximum grows all the way."""
    return torch.linspace(-6.0, 6.0, shape[-1]).expand(shape).to(dtype)


def _cases(reference) -> Iterator[Case]:
    """Those of every op on rows; rows that no block holds, masked ones, and fp32."""
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
        envelope=_envelope,
        configs=_configs,
        default=_default,
        plan=_plan,
        problem=lambda a: rowwise.problem(a, _hidden(a)) | {"dtype": ELEMENTS.get(a.input.dtype)},
        cases=functools.partial(_cases, reference),
        peer=functools.partial(torch.softmax, dim=-1),
    )


@_op
def softmax(input: Tensor) -> Tensor:
    """Softmax over the last dimension, rounded once.

    input [..., hidden] bf16, fp16 or fp32, rows may be strided. A row with NaN or +infinity, or of -infinity alone, is NaN. Returns
    [..., hidden].
    """
    return torch.softmax(rowwise.exact(input), -1).to(input.dtype)
