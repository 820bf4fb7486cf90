"""Check an op's results against its reference, for the tests and for `vllm-rocm-ops bench` and `verify`.

- Against the reference in the same precision, 8-bit and 16-bit elements may be off by one ULP, and few elements may be off.
- Against float64, the error may exceed the reference's error by fixed factors only. Errors of fp32 results that are not long sums
  are relative to the element.
- An element of a GEMM has a bound by the sum of its absolute terms.
- A GEMM of integers (`whole_numbers`) is exact in any summation order, so it must match the reference bit for bit.
- Arguments that an op updates in place must match the reference bit for bit, except those that receive results.
- Outputs start as NaN (`unwritten_is_nan`), so that unwritten elements are detected.

A result that breaks a rule raises `Wrong`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Case, Op
from vllm_rocm_ops.core.quantization import MX_SCALES
from vllm_rocm_ops.core.stats import reset_stats, stats
from vllm_rocm_ops.core.tensors import describe

OFF_BY_ONE = 0.01  # share of elements that may be off by one ULP
LARGEST_ERROR, MEAN_ERROR = 2.0, 1.1  # against float64, relative to the reference's errors
FLOOR = 1e-6  # relative to the largest element, or to a GEMM's sum of absolute terms: a few fp32 roundings
FLIP = (
    2.0**-5
)  # relative to the largest result, where a rounded sum is quantized to the next value before another product
QUERIES = ("query", "q_nope", "q_pe")  # where e4m3 does not set the result's dtype
SMALLEST = 2.0**-126  # smallest normal fp32, an error that is always allowed
HALF_ULP = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
}  # at most, relative to an element
SMALLEST_HALF_ULP = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
STEP, SHARE_OF_SUMS = 2.0**-3, 2.0**-7  # tolerance of e4m3 long sums: of an element, and of the largest


class Wrong(AssertionError):
    """A result that breaks a rule."""


def require(holds: bool, what: str) -> None:
    """Raise `Wrong` unless a rule holds."""
    if not holds:
        raise Wrong(what)


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill tensors that PyTorch allocates with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    require(torch.utils.deterministic.fill_uninitialized_memory, "torch.utils.deterministic fills no memory")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def generator_of(name: str) -> torch.Generator:
    """Return a random generator seeded by a case's name."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def clone(value, device: str = "cpu"):
    """Return a copy with the same strides, in its own memory."""
    if not isinstance(value, torch.Tensor):
        return value
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) + 1 if value.numel() else 0
    return value.as_strided((extent,), (1,)).clone().to(device).as_strided(value.shape, value.stride())


def as_tuple(value) -> tuple:
    """Return an op's outputs as a tuple, also for one output or None."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def ulp_index(x: torch.Tensor) -> torch.Tensor:
    """Return each element's position in the ordered values of its format. Both zeros have position 0."""
    width = 8 * x.element_size()
    bits = x.contiguous().view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]).long() & (1 << width) - 1
    sign = bits >> (width - 1)
    magnitude = bits & (1 << (width - 1)) - 1
    return torch.where(sign == 1, -magnitude, magnitude)


def check(
    name: str,
    outputs: torch.Tensor,
    reference: torch.Tensor,
    oracle: torch.Tensor,
    count_ulps: bool,
    floor: float,
    flip: float = 0.0,
) -> None:
    """Check an output against the reference in the same precision and in float64.

    With `count_ulps`, no element may be off by more than one ULP. `floor` is an error that is always allowed, and `flip` one
    that few elements may have, relative to the largest element.
    """
    require(
        (outputs.shape, outputs.dtype, outputs.stride()) == (reference.shape, reference.dtype, reference.stride()),
        f"{name}: {describe(outputs)}, not {describe(reference)}",
    )
    outputs = outputs.cpu()
    require(torch.equal(outputs.isnan(), reference.isnan()), f"{name}: NaNs differ")
    if not outputs.is_floating_point():
        # A row that overflows in rounding has another MX scale in float64.
        same = torch.equal(outputs, reference) and (outputs.dtype in MX_SCALES or torch.equal(outputs.double(), oracle))
        require(same, f"{name}: {outputs.flatten()[:8].tolist()}..., not {reference.flatten()[:8].tolist()}...")
        return
    if outputs.numel() == 0:
        return
    if outputs.dtype != torch.float32 and count_ulps:
        off = (ulp_index(outputs) - ulp_index(reference)).abs().masked_fill(reference.isnan(), 0)
        worst = off.argmax()
        got, wanted = outputs.flatten()[worst].item(), reference.flatten()[worst].item()
        require(off.max() <= 1, f"{name}: element {int(worst)} is {got}, not {wanted}")
        require(off.sum() <= max(OFF_BY_ONE * off.numel(), 2), f"{name}: {int(off.sum())} of {off.numel()} are off")
    if outputs.element_size() == 1 and not count_ulps:
        steps, largest = STEP * oracle.abs(), oracle.abs().nan_to_num().max()
        off = ((outputs.double() - oracle).abs() - steps).nan_to_num().max()
        require(off <= SHARE_OF_SUMS * largest, f"{name}: off by {off} and a step")
    if outputs.element_size() > 1:  # errors of 8-bit results are rounding, which ULPs measure better
        infinite = reference.isinf()  # may be finite in float64, which would allow any error elsewhere
        require(
            count_ulps and outputs.element_size() < 4 or torch.equal(outputs[infinite], reference[infinite]),
            f"{name}: infinities differ",
        )
        largest = oracle.abs().nan_to_num(posinf=0.0).max()
        error, allowed = (
            (x.double() - oracle).abs().nan_to_num().masked_fill(infinite, 0.0) for x in (outputs, reference)
        )
        if outputs.dtype == torch.float32 and count_ulps:
            sizes = oracle.abs().nan_to_num(posinf=1.0).clamp_min(SMALLEST / floor)
            error, allowed, largest = error / sizes, allowed / sizes, 1.0
        require(
            error.max() <= LARGEST_ERROR * allowed.max() + max(floor, flip) * largest,
            f"{name}: error {error.max()}, not {allowed.max()}",
        )
        require(error.mean() <= MEAN_ERROR * allowed.mean() + floor * largest, f"{name}: mean error {error.mean()}")


def check_terms(name: str, outputs: torch.Tensor, oracle: torch.Tensor, terms: torch.Tensor, share: float) -> None:
    """Check each element of a GEMM.

    It may be off by half a ULP and, for the summation order, by a share of `terms`, the GEMM of absolute values.
    """
    allowed = HALF_ULP[outputs.dtype] * oracle.abs() + SMALLEST_HALF_ULP[outputs.dtype] + share * terms
    off = (outputs.cpu().double() - oracle).abs() / allowed
    off = off.where(outputs.cpu().isfinite() & oracle.isfinite() & terms.isfinite(), 0.0)
    if off.numel() and off.max() > 1:
        worst = off.argmax()
        got, exact = outputs.flatten()[worst].item(), oracle.flatten()[worst].item()
        raise Wrong(
            f"{name}: element {int(worst)} is {got}, not {exact}: the error is {off.max():.3g} times the allowed one"
        )


def absolute(value):
    """Return an argument with absolute values. MX scales have no sign."""
    if (
        not isinstance(value, torch.Tensor)
        or value.dtype in MX_SCALES
        or not (value.is_floating_point() or value.dtype == torch.int8)
    ):
        return value
    copy = clone(value)
    return copy.copy_(value.double().abs())


def whole_numbers(the_op: Op, arguments: tuple, generator: torch.Generator) -> tuple:
    """Return a GEMM's arguments with small integers as values and powers of two as scales, so that fp32 sums are exact.

    If SwiGLU and a quantization follow, most sums have more bits than a 16-bit float, and few results are beyond the largest value.
    """
    is_gated = not the_op.product and "scale_a" in the_op.Arguments._fields
    most = 15 if is_gated else 3

    def small(value: torch.Tensor) -> torch.Tensor:
        return torch.randint(-most, most + 1, value.shape, generator=generator)

    made = {
        name: whole(name, value, small, generator) if isinstance(value, torch.Tensor) else value
        for name, value in zip(the_op.Arguments._fields, arguments)
    }
    if is_gated:
        made["scale_a"].mul_(2.0**-8)
        made["scale"].fill_(2.0 ** ((made["a"].shape[1] - 1).bit_length() - 6))
    return tuple(made.values())


def whole(
    name: str, value: torch.Tensor, numbers: Callable[[torch.Tensor], torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """Return a copy of an argument with `numbers(value)`, or powers of two if it is a scale by name or dtype."""
    copy = clone(value)
    if value.dtype in MX_SCALES:
        copy.view(torch.uint8).copy_(torch.randint(125, 130, value.shape, generator=generator))
    else:
        is_scale = "scale" in name
        copy.copy_(2.0 ** torch.randint(-2, 3, value.shape, generator=generator) if is_scale else numbers(value))
    return copy


def in_float64(value, name: str = ""):
    """Return an argument for the reference in float64: 16-bit tensors, queries and the output dtype become float64."""
    halves = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in halves or name in QUERIES else clone(value)
    return torch.float64 if value in (*halves, torch.float32) else value


def all_in_float64(the_op: Op, arguments: Iterable) -> list:
    """Return an op's arguments for the reference in float64."""
    return [in_float64(value, name) for name, value in zip(the_op.Arguments._fields, arguments)]


def run_and_check(the_op: Op, arguments: tuple, device: str, exact: bool = False) -> None:
    """Run the op once, and check it against its reference and its oracle, the reference in float64.

    Args:
        the_op: The op.
        arguments: Its arguments on the CPU, in order.
        device: Where the op runs: "cuda", or "cpu" through an executor.
        exact: Require the reference's bits.

    Raises:
        Wrong: The result breaks a rule.
    """
    reference_arguments, plugin_arguments = [clone(v) for v in arguments], [clone(v, device) for v in arguments]
    oracle_arguments = all_in_float64(the_op, reference_arguments)
    oracle = as_tuple(the_op.reference(*oracle_arguments))
    reference = as_tuple(the_op.reference(*reference_arguments))
    outputs = as_tuple(the_op(*plugin_arguments))
    names = [str(i) for i in range(len(outputs))]
    for name, got, wanted, true in zip(
        the_op.Arguments._fields, plugin_arguments, reference_arguments, oracle_arguments
    ):
        if isinstance(got, torch.Tensor) and name in (*the_op.writes, *the_op.inexact):
            outputs, reference, oracle, names = (*outputs, got), (*reference, wanted), (*oracle, true), [*names, name]
        elif isinstance(got, torch.Tensor):
            left, expected = got.cpu().float(), wanted.float()
            same = (left == expected) | (left.isnan() & expected.isnan())
            require(bool(same.all()), f"{the_op.name}: leaves another {name}")
    quantizes = any(value.element_size() == 1 for name, value in zip(names, reference) if name in the_op.writes)
    products = 1 if the_op.product else 2  # consecutive GEMMs, each with sums that the arch rounds
    rounding = archs.of_device(0).sum_rounding if the_op.sums and device == "cuda" else 0.0
    has_bytes = any(isinstance(value, torch.Tensor) and value.element_size() == 1 for value in arguments)
    floor, flip = max(FLOOR, products * rounding), FLIP if rounding and products > 1 and has_bytes else 0.0
    for what, got, wanted, true in zip(names, outputs, reference, oracle):
        name = f"{the_op.name} output {what}"
        check(name, got, wanted, true.double(), not the_op.sums, floor, flip)
        if exact:
            differ = (got.cpu() != wanted) & ~wanted.isnan()
            require(not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} elements of exact sums differ")
        elif the_op.product and got.numel() and got.is_floating_point() and not quantizes:
            operands = [None if n in the_op.writes else v for n, v in zip(the_op.Arguments._fields, arguments)]
            terms = the_op.reference(*all_in_float64(the_op, map(absolute, operands))).double()
            check_terms(name, got, true.double(), terms, floor)


def check_case(
    the_op: Op, case: Case, device: str, arch: Arch, configs: Iterable | None = None, whole: bool = False
) -> None:
    """Check a case in several configurations, and that the right kernels ran.

    Args:
        the_op: The op.
        case: The case.
        device: Where the op runs: "cuda", or "cpu" through an executor.
        arch: The architecture to plan for.
        configs: The configurations, by default all. None as a configuration, or a case without kernels, must run the reference.
        whole: Run a GEMM on integers in each configuration, and on the case's values once per kernel.

    Raises:
        Wrong: A result breaks a rule, or other kernels ran.
    """
    arguments = case.make("cpu", generator_of(case.name), arch.fp8_dtype)
    a = the_op.Arguments(*arguments)
    has_one_gemm = the_op.product or the_op.linear is not None
    # Integers make its sums exact: all roundings after it must match.
    exact = whole_numbers(the_op, arguments, generator_of(case.name)) if whole and has_one_gemm else None
    seen = set()
    for config in (the_op.configs(a, arch) or [None]) if configs is None else configs:
        planned = the_op.plan(config, the_op.allocate(a), a, arch) if config else ()
        kernels = " + ".join(launch.symbol for launch in planned)
        reset_stats()
        with unwritten_is_nan(), the_op.running(config):
            if exact:
                run_and_check(the_op, exact, device, exact=True)
            if not exact or kernels not in seen:
                run_and_check(the_op, arguments, device)
        seen.add(kernels)
        (ran,) = stats()[the_op.name]
        wanted = (kernels or "nothing to do") if config else "fallback"
        require(ran == wanted if config else ran.startswith(wanted), f"{the_op.name}: ran {ran}, not {wanted}")
