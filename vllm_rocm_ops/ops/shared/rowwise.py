"""Share code between row-wise ops: norms and activations, plain or quantized per tensor, per token, per block or to MX-FP8.

A kernel keeps a row, or a part of it, in the registers of a block: each thread owns `vectors_per_thread` vectors of 8 elements.
Symbols end in the element type and that number, or in `general` for the kernel of any size and alignment.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_rocm_ops.core import quantization
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case
from vllm_rocm_ops.core.quantization import MX_BLOCK, MX_SCALES
from vllm_rocm_ops.core.tensors import aligned, apart_contract, describe, is_wide_float, row_stride, rows_of

VECTOR = 8  # elements per 16-byte access
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
GROUP_SIZES = (64, 128)
MAX_THREADS = {0: 1024, 1: 1024, 2: 1024, 4: 512, 8: 512}  # by vectors per thread, as in the kernels' launch bounds
ONE_VECTOR = MAX_THREADS[1] * VECTOR  # most columns with one vector per thread


@dataclass(frozen=True)
class RowConfig:
    """Threads of a block, and vectors of 8 elements that each owns; 0 selects the general kernel."""

    threads: int
    vectors_per_thread: int


def contract(
    a, parts: int, columns: Iterable[str] = ("weight",), whole: int = 1
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the contract of every row-wise op.

    A row of input is `parts` times as long as a row of the output. `columns` names per-column arguments, which may be None. A row of
    the output is a multiple of `whole` elements if there is no group_size.
    """
    x = a.input
    yield "input", "at least one-dimensional", f"{x.dim()} dimensions", x.dim() >= 1
    yield "input", "floating point of 16 bits or more", _name(x.dtype), is_wide_float(x)
    hidden = x.shape[-1] // parts
    for name, value in _given(a, columns):
        holds = value.shape == (hidden,) and value.dtype == x.dtype
        yield name, f"{_name(x.dtype)}[hidden={hidden}]", describe(value), holds
    added = dict(_given(a, ("residual", "addend")))
    for name, value in added.items():
        holds = value.shape == x.shape and value.dtype == x.dtype
        yield name, f"{_name(x.dtype)}{list(x.shape)} like input", describe(value), holds
    if "residual" in added:
        yield apart_contract("residual", added["residual"])
    if "addend" in added:
        yield "addend", "None without a residual", describe(added["addend"]), "residual" in added
    for name, value in _given(a, ("scale", "scale_ub")):
        holds = value.numel() == 1 and value.dtype == torch.float32
        yield name, "float32 with one element", describe(value), holds
    if hasattr(a, "quant_dtype"):
        known = a.quant_dtype in quantization.LIMIT
        yield "quant_dtype", "float8_e4m3fn or float8_e4m3fnuz", _name(a.quant_dtype), known
    if hasattr(a, "scale_ub"):
        yield "input", "rows of one element or more", str(list(x.shape)), hidden > 0
    if whole > 1:
        wanted = f"a multiple of {whole} above 0 in its last output dimension"
        yield "input", wanted, str(hidden), hidden > 0 and hidden % whole == 0
    if hasattr(a, "group_size"):
        yield "group_size", "positive", str(a.group_size), a.group_size > 0
        wanted = f"a multiple of group_size={a.group_size} in its last output dimension"
        yield "input", wanted, str(hidden), hidden % a.group_size == 0


def can_implement(
    a, arch: Arch, hidden: int, columns: Iterable[str] = ("weight",), two_strides: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the rules of the kernels beyond the contract.

    With `two_strides`, rows of an input without a residual may have two strides, as heads of wider rows.
    """
    x, residual = a.input, getattr(a, "residual", None)
    yield "input is bfloat16 or float16", x.dtype in ELEMENTS
    if two_strides and residual is None:
        fits = _is_side_by_side(x) and (row_stride(x) is not None or heads(x) is not None)
        yield "input's rows have one stride, or two as heads of wider rows, and contiguous elements", fits
    else:
        yield "input's rows have one stride and contiguous elements", _is_rows(x)
    if hasattr(a, "residual"):
        yield "residual's rows have one stride and contiguous elements", residual is None or _is_rows(residual)
    if hasattr(a, "addend"):
        strides = [row_stride(each) or 0 for each in (x, residual) if each is not None]
        fits = a.addend is None or (_is_rows(a.addend) and row_stride(a.addend) == strides[0] and max(strides) < 2**31)
        yield "addend's rows have contiguous elements and input's stride, which is below 2^31 as residual's is", fits
    for name in columns:
        if hasattr(a, name):
            value = getattr(a, name)
            yield f"{name} is contiguous", value is None or value.is_contiguous()
    yield "hidden is at least 1 and below 2^30", 1 <= hidden < 2**30
    if hasattr(a, "quant_dtype"):
        yield f"quant_dtype is {_name(arch.fp8_dtype)}, the FP8 dtype of {arch.name}", a.quant_dtype == arch.fp8_dtype
    if hasattr(a, "group_size"):
        yield f"group_size is one of {GROUP_SIZES}", a.group_size in GROUP_SIZES


def allocate(a, hidden: int, mx: bool = False):
    """Return the outputs, unwritten: [..., hidden] in input's dtype or quantized, then dynamic scales."""
    x = a.input
    if mx:
        scale = x.new_empty((rows_of(x), hidden // MX_BLOCK), dtype=MX_SCALES[0])
        return x.new_empty((*x.shape[:-1], hidden), dtype=torch.float8_e4m3fn), scale
    out = x.new_empty((*x.shape[:-1], hidden), dtype=getattr(a, "quant_dtype", x.dtype))
    if not hasattr(a, "scale_ub"):
        return out
    rows = out.numel() // hidden if hidden else 0
    groups = hidden // a.group_size if hasattr(a, "group_size") else 1
    return out, scales(x, rows, groups, getattr(a, "is_scale_transposed", False))


def scales(like: Tensor, rows: int, groups: int, transposed: bool) -> Tensor:
    """Return scales [rows, groups] float32, unwritten, column-major if transposed."""
    if transposed:
        return like.new_empty((groups, rows), dtype=torch.float32).t()
    return like.new_empty((rows, groups), dtype=torch.float32)


def problem(a, hidden: int) -> dict[str, object]:
    """Return the key of a tuned row."""
    return {"dtype": ELEMENTS.get(a.input.dtype), "rows": a.input.numel() // a.input.shape[-1], "hidden": hidden}


class Heads(NamedTuple):
    """Rows with two strides in elements: `inner_count` rows at the inner stride, groups of them at the outer stride."""

    outer_stride: int
    inner_stride: int
    inner_count: int


def heads(tensor: Tensor) -> Heads | None:
    """Return a tensor's two row strides, or None if it has one, more, or a stride that the kernels cannot hold."""
    groups: list[tuple[int, int]] = []  # rows and their step, innermost first
    for size, step in zip(tensor.shape[-2::-1], tensor.stride()[-2::-1]):
        if groups and step == groups[-1][0] * groups[-1][1]:
            groups[-1] = size * groups[-1][0], groups[-1][1]
        elif size != 1:
            groups.append((size, step))
    if len(groups) != 2:
        return None
    (inner_count, inner_stride), (_, outer_stride) = groups
    return Heads(outer_stride, inner_stride, inner_count) if max(inner_count, inner_stride) < 2**31 else None


def is_vector(hidden: int, *tensors: Tensor | None) -> bool:
    """True if rows of `hidden` elements can be read and written in vectors."""
    return hidden % VECTOR == 0 and all(aligned(tensor) for tensor in tensors)


def configs(hidden: int, vector: bool, vectors_per_thread: tuple[int, ...], arch: Arch) -> Iterator[RowConfig]:
    """Yield the configurations that hold a row in one block, fewest vectors per thread first, then the general one."""
    if vector:
        for count in vectors_per_thread:
            threads = threads_for(hidden // VECTOR, count, arch)
            if threads <= MAX_THREADS[count]:
                yield RowConfig(threads, count)
    yield RowConfig(min(threads_for(hidden, 4, arch), MAX_THREADS[0]), 0)


def threads_for(count: int, per_thread: int, arch: Arch) -> int:
    """Return the threads of whole waves that hold `count` elements or vectors."""
    waves = -(-count // (per_thread * arch.wave_lanes))
    return max(waves, 1) * arch.wave_lanes


def symbol(op_name: str, dtype: torch.dtype, config: RowConfig) -> str:
    """Return the kernel's name."""
    kernel = f"x{config.vectors_per_thread}" if config.vectors_per_thread else "general"
    return f"{op_name}_{ELEMENTS[dtype]}_{kernel}"


def default(a, fitting: list[RowConfig], grouped: bool = False) -> RowConfig:
    """Return the configuration with the fewest vectors per thread and at most 512 threads.

    On H200 it was within 5 % of the best everywhere. With scales per group, where more waves hide the shuffles, there is no limit of
    512 threads.
    """
    limit = MAX_THREADS[1] if grouped or hasattr(a, "group_size") else 512
    return next((config for config in fitting if config.threads <= limit), fitting[0])


def output_args(a, outputs) -> dict[str, object]:
    """Return the arguments of RowOutput in csrc/device/row_output.h: outputs as of `allocate`, and the quantization."""
    out, scale_out = outputs if isinstance(outputs, tuple) else (outputs, None)
    scale_row_stride, scale_stride = (0, 0) if scale_out is None else scale_out.stride()
    return {
        "scale": getattr(a, "scale", getattr(a, "scale_ub", None)),
        "out": out,
        "scale_out": scale_out,
        "scale_row_stride": scale_row_stride,  # elements between scales of neighboring rows
        "scale_stride": scale_stride,  # elements between scales of neighboring groups
        "group_size": getattr(a, "group_size", 0),
    }


def exact(x: Tensor) -> Tensor:
    """Return x in the precision that references compute in."""
    return x if x.dtype == torch.float64 else x.float()


def per_block(
    y: Tensor, quant_dtype: torch.dtype, scale_ub: Tensor | None, group_size: int, is_scale_transposed: bool
) -> tuple[Tensor, Tensor]:
    """Quantize y [..., hidden] with a scale per group: the reference. Return (values, scale [rows, hidden / group_size])."""
    q, scale = quantization.per_token(exact(y).unflatten(-1, (-1, group_size)), quant_dtype, scale_ub)
    result = scales(y, rows_of(y), y.shape[-1] // group_size, is_scale_transposed)
    return q.flatten(-2), result.copy_(scale.view(result.shape))


def mx(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize y [..., hidden] to MX-FP8: the reference. Return (e4m3fn, scale [rows, hidden / 32])."""
    q, scale = quantization.mx(exact(y))
    return q, scale.reshape(rows_of(y), y.shape[-1] // MX_BLOCK)


Fill = Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return normal values."""
    return torch.randn(shape, generator=generator).to(dtype)


def corners(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return rows with a spike in the last, first or middle column, a row of zeros, and one of large finite values."""
    x = torch.randn(shape, generator=generator)
    for row, column in enumerate((-1, 0, shape[-1] // 2)):
        x[row, column] = 300.0
    x[3] = 0.0
    x[4, ::7] = 60000.0
    return x.to(dtype)


def special(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return nine rows in random order.

    They have infinities and NaN in the first or second half, only zeros, small values, and large values.
    """
    x, half = torch.randn(shape, generator=generator), shape[-1] // 2
    for row, value in enumerate((math.inf, -math.inf, math.nan)):
        x[row, 5] = x[row + 3, half + 7] = value
    x[6:] *= torch.tensor([0.0, 1e-3, 20.0])[:, None]
    return x[torch.randperm(len(x), generator=generator)].to(dtype)


@dataclass(frozen=True)
class Cases:
    """The cases of a row-wise op: `standard` yields the cases of every op, and an op adds its own by `case`.

    A row of input is `parts` times as long as a row of the output. `columns` fills per-column arguments. A row of the output is a
    multiple of `whole` elements if there is no group_size. `further` are default arguments of all cases.
    """

    reference: Callable
    parts: int
    columns: Mapping[str, Fill]
    whole: int = 1
    further: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def parameters(self) -> dict[str, object]:
        """Return the types of the op's arguments by name."""
        return {k: v for k, v in typing.get_type_hints(self.reference).items() if k != "return"}

    def case(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype=torch.bfloat16,
        fill: Fill = normal,
        padding=0,
        heads_of=0,
        **given,
    ) -> Case:
        """Return a case whose output has this shape.

        `fill` makes input and residual, with `padding` elements after each row, or as heads of rows with stride `heads_of`. Other
        arguments are `given`, where per-column ones may be another fill; else usual values; else defaults.
        """
        return Case(
            name, functools.partial(self._make, shape, dtype, fill, (padding, heads_of), {**self.further, **given})
        )

    def standard(self) -> Iterator[Case]:
        """Yield the cases of every row-wise op.

        They cover vectors per thread and their tails, strides, the general kernel, corner and special values, and bounds from below
        the smallest scale to none.
        """
        case, parameters = self.case, self.parameters
        columns = [name for name in self.columns if name in parameters]
        grouped = "group_size" in parameters
        whole = 128 if grouped else self.whole
        for dtype, label in ELEMENTS.items():
            yield case(f"{label}", (3, 4096), dtype)
            yield case(f"{label}-corners", (5, 1024), dtype, corners)
            yield case(f"{label}-special", (9, 512), dtype, special)
            for name in columns:
                yield case(f"{label}-special-{name}", (2, 512), dtype, **{name: special_columns})
            if columns:
                yield case(f"{label}-far-from-zero", (3, 4224), dtype, far_from_zero)
                yield case(f"{label}-tiny-variance", (3, 1024), dtype, tiny_variance)
                yield case(f"{label}-far-from-zero-general", (2, 1152), dtype, far_from_zero, padding=1)
            yield case(f"{label}-general", (2, 384 if whole > 1 else 333), dtype, padding=1)
            if parameters.get("residual") == Tensor | None:
                yield case(f"{label}-no-residual", (3, 4096), dtype, residual=None)
                yield case(f"{label}-no-residual-general", (2, 384), dtype, residual=None, padding=1)
        for hidden in (whole, 8 * whole, 2048 - whole, 2048 + whole):
            yield case(f"hidden{hidden}", (2, hidden))
        yield case("hidden2040-tail" if whole == 1 else "hidden1920-tail", (2, 2040 if whole == 1 else 1920))
        yield case("one-row", (1, 7168))
        yield case("no-rows", (0, 512))
        yield case("strided", (4, 704 - 704 % whole), padding=64)
        yield case("three-dimensional", (2, 3, 512), padding=8)
        if self.parts == 1:
            yield case("llama", (1, 16384))
        for name in columns:
            if parameters[name] == Tensor | None:
                yield case(f"no-{name}", (2, 512), **{name: None})
        if "scale_ub" in parameters:
            yield case("scale_ub", (2, 512), scale_ub=0.004)
            for bound in (1e-9, 0.5, math.inf):
                yield case(f"scale_ub-{bound:g}", (9, 512), fill=special, scale_ub=bound)
            for name in columns:
                yield case(f"scale_ub-special-{name}", (2, 512), scale_ub=0.5, **{name: special_columns})
        if grouped:
            yield case("group64", (2, 1024), group_size=64)
            yield case("group64-general", (2, 192), group_size=64, padding=1)
            yield case("transposed", (3, 1024), is_scale_transposed=True)

    def _make(
        self, shape, dtype, fill: Fill, apart: tuple[int, int], given, device: str, generator, fp8_dtype
    ) -> tuple:
        hidden, (padding, heads_of) = shape[-1], apart

        def rows(columns: int, padding: int) -> Tensor:
            values = fill((*shape[:-1], columns), dtype, generator)
            if heads_of:
                wide = torch.nn.functional.pad(values.flatten(1), (0, heads_of - shape[-2] * columns)).to(device)
                return wide[:, : shape[-2] * columns].unflatten(1, (shape[-2], columns))
            return torch.nn.functional.pad(values, (0, padding)).to(device)[..., :columns]

        usual = {
            "input": lambda: rows(self.parts * hidden, padding),
            "residual": lambda: rows(hidden, 2 * padding),  # unlike input's stride
            "epsilon": lambda: 1e-5,
            "scale": lambda: torch.tensor([0.013], device=device),
            "quant_dtype": lambda: fp8_dtype,
        }

        def value(name: str):
            override = given.get(name, self.columns.get(name))
            if callable(override):
                return override((hidden,), torch.float32, generator).to(dtype).to(device)
            if name not in given and name in usual:
                return usual[name]()
            if name == "addend" and name in given:
                return rows(hidden, padding)
            if name == "scale_ub" and name in given:
                return torch.tensor([override], device=device)
            return override if name in given else inspect.signature(self.reference).parameters[name].default

        values = {name: value(name) for name in self.parameters}
        return tuple((values | self.more(shape, dtype, fill, given, device, generator)).values())

    def more(self, shape, dtype, fill: Fill, given, device: str, generator) -> dict[str, Tensor]:
        """Return arguments that only some ops have."""
        return {}


def far_from_zero(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return values with mean 1000 and standard deviation 1."""
    return (torch.randn(shape, generator=generator) + 1000).to(dtype)


def tiny_variance(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return three rows: with variance 0, with a single deviating element, and with a tenth of the usual epsilon."""
    x = torch.full(shape, 7.0)
    x[1, 5] += 2.0**-5
    x[2] = 1e-3 * torch.randn(shape[-1], generator=generator)
    return x.to(dtype)


def around_one(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return values with mean 1 and standard deviation 0.2."""
    return (torch.randn(shape, generator=generator) * 0.2 + 1).to(dtype)


def special_columns(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return per-column values with infinities and a zero in the first block, and a NaN in the second."""
    values = around_one(shape, dtype, generator)
    values[[7, 8, 40, 130]] = torch.tensor([math.inf, -math.inf, 0.0, math.nan])
    return values


def _given(a, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the arguments of these names that exist and are not None."""
    values = ((name, getattr(a, name, None)) for name in names)
    return ((name, value) for name, value in values if value is not None)


def _is_side_by_side(tensor: Tensor) -> bool:
    return tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def _is_rows(tensor: Tensor) -> bool:
    return _is_side_by_side(tensor) and row_stride(tensor) is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
