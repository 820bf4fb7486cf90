"""Whether an op computes what its reference does: DESIGN's rules for results, for the tests and for `vllm-rocm-ops bench`.

A result is held against the reference in the same precision, step by step: each element may be off by at most one step of
its format, few may be off at all, and against float64 the error may not be larger than the reference's by more than
given factors. Errors of fp32 results that are no long sums count by each element's own size; each element of a product is
also held to what its own terms allow. Products of whole numbers (`whole_numbers`) are exact in any order, so that bits must
be equal. What an op updates in place is compared bit for bit. `unwritten_is_nan` has outputs start out as NaN, so that an
element nobody wrote shows. All raise `Wrong`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops.arch import Arch
from vllm_rocm_ops.op import Case, Op, describe
from vllm_rocm_ops.quantization import MX_SCALES
from vllm_rocm_ops.stats import reset_stats, stats

OFF_BY_ONE = 0.01  # share of elements that may be off by one step
LARGEST_ERROR, MEAN_ERROR = 2.0, 1.1  # against float64, of the reference's
FLOOR = 1e-6  # of the largest element, or of the absolute terms of a product: a few roundings of fp32
SMALLEST = 2.0**-126  # of fp32, normal: an error that is always allowed
PRODUCTS = (
    "scaled_mm",
    "block_scaled_mm",
    "mxfp8_scaled_mm",
    "unquantized_gemm",
)  # ops that are linear in their operands
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # at most, of an element
SMALLEST_HALF_STEP = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25, torch.float32: 2.0**-150}
SUMS_FLOOR = {32: 2.0**-11}  # by the lanes of a wave: wgmma keeps 14 bits of a sum of e4m3 products


class Wrong(AssertionError):
    """A result that is not what it must be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Within it, tensors that PyTorch allocates start out as NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    require(torch.utils.deterministic.fill_uninitialized_memory, "torch.utils.deterministic fills no memory")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def generator_of(name: str) -> torch.Generator:
    """A generator of a case's own."""
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def clone(value, device: str = "cpu"):
    """A copy with the same strides in storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) + 1 if value.numel() else 0
    return value.as_strided((extent,), (1,)).clone().to(device).as_strided(value.shape, value.stride())


def as_tuple(value) -> tuple:
    """One output or several, as several."""
    return value if isinstance(value, tuple) else (value,)


def steps(x: torch.Tensor) -> torch.Tensor:
    """The position of each element in the ordered list of its format's values; both zeros are 0."""
    width = 8 * x.element_size()
    bits = x.contiguous().view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]).long() & (1 << width) - 1
    sign = bits >> (width - 1)
    magnitude = bits & (1 << (width - 1)) - 1
    return torch.where(sign == 1, -magnitude, magnitude)


def check(
    name: str, ours: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor, steps_apart: bool, floor: float
) -> None:
    """Holds an output against the reference in its own precision and in float64. `steps_apart`: no element may be off by more
    than a step; `floor` is an error that is always allowed, as a share of the largest element."""
    ours = ours.cpu()
    require(
        (ours.shape, ours.dtype, ours.stride()) == (reference.shape, reference.dtype, reference.stride()),
        f"{name}: {describe(ours)}, not {describe(reference)}",
    )
    require(torch.equal(ours.isnan(), reference.isnan()), f"{name}: NaNs differ")
    if not ours.is_floating_point():
        same = torch.equal(ours, reference) and torch.equal(ours.double(), oracle)
        require(same, f"{name}: {ours.flatten()[:8].tolist()}..., not {reference.flatten()[:8].tolist()}...")
        return
    if ours.numel() == 0:
        return
    if ours.dtype != torch.float32 and steps_apart:
        off = (steps(ours) - steps(reference)).abs().masked_fill(reference.isnan(), 0)
        worst = off.argmax()
        mine, theirs = ours.flatten()[worst].item(), reference.flatten()[worst].item()
        require(off.max() <= 1, f"{name}: element {int(worst)} is {mine}, not {theirs}")
        require(off.sum() <= max(OFF_BY_ONE * off.numel(), 2), f"{name}: {int(off.sum())} of {off.numel()} are off")
    if ours.element_size() > 1:  # a cast to 8 bits is all rounding: the steps say more
        infinite = reference.isinf()  # in float64 it may be finite, which would allow any error elsewhere
        require(
            steps_apart and ours.element_size() < 4 or torch.equal(ours[infinite], reference[infinite]),
            f"{name}: infinities differ",
        )
        largest = oracle.abs().nan_to_num(posinf=0.0).max()
        error, allowed = (
            (x.double() - oracle).abs().nan_to_num().masked_fill(infinite, 0.0) for x in (ours, reference)
        )
        if ours.dtype == torch.float32 and steps_apart:
            sizes = oracle.abs().nan_to_num(posinf=1.0).clamp_min(SMALLEST / floor)
            error, allowed, largest = error / sizes, allowed / sizes, 1.0
        require(
            error.max() <= LARGEST_ERROR * allowed.max() + floor * largest,
            f"{name}: error {error.max()}, not {allowed.max()}",
        )
        require(error.mean() <= MEAN_ERROR * allowed.mean() + floor * largest, f"{name}: mean error {error.mean()}")


def check_terms(name: str, ours: torch.Tensor, oracle: torch.Tensor, terms: torch.Tensor, share: float) -> None:
    """Holds each element of a product to a rounding of its own and, for the order of summation, a share of `terms`, the same
    product of absolute values."""
    allowed = HALF_STEP[ours.dtype] * oracle.abs() + SMALLEST_HALF_STEP[ours.dtype] + share * terms
    off = (ours.cpu().double() - oracle).abs() / allowed
    off = off.where(ours.cpu().isfinite() & oracle.isfinite() & terms.isfinite(), 0.0)
    if off.numel() and off.max() > 1:
        worst = off.argmax()
        mine, exact = ours.flatten()[worst].item(), oracle.flatten()[worst].item()
        raise Wrong(
            f"{name}: element {int(worst)} is {mine}, not {exact}: an error of {off.max():.3g} times what it may be"
        )


def absolute(value):
    """An argument with the absolute values of its elements; scales of 8 bits have no sign."""
    if not isinstance(value, torch.Tensor) or value.dtype in MX_SCALES or not value.is_floating_point():
        return value
    copy = clone(value)
    return copy.copy_(value.double().abs())


def whole_numbers(the_op: Op, arguments: tuple, generator: torch.Generator) -> tuple:
    """A product's arguments with small whole numbers in place of their values, and scales that are powers of two: no sum of
    theirs is rounded in fp32."""

    def whole(name: str, value):
        if not isinstance(value, torch.Tensor):
            return value
        copy = clone(value)
        if value.dtype in MX_SCALES:
            copy.view(torch.uint8).copy_(torch.randint(125, 130, value.shape, generator=generator))
        elif "scale" in name:
            copy.copy_(2.0 ** torch.randint(-2, 3, value.shape, generator=generator))
        else:
            copy.copy_(torch.randint(-3, 4, value.shape, generator=generator))
        return copy

    return tuple(whole(name, value) for name, value in zip(the_op.Arguments._fields, arguments))


def in_float64(value):
    """An argument of the reference as the oracle takes it: 16-bit tensors, and the output type asked for, as float64."""
    halves = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in halves else clone(value)
    return torch.float64 if value in (*halves, torch.float32) else value


def run_and_check(the_op: Op, arguments: tuple, device: str, exact: bool = False) -> None:
    """One call of the op against its reference and against its oracle, the reference in float64. `exact`: as no sum is rounded,
    the reference's bits."""
    reference_arguments, ours_arguments = [clone(v) for v in arguments], [clone(v, device) for v in arguments]
    oracle = as_tuple(the_op.reference(*[in_float64(v) for v in reference_arguments]))
    reference = as_tuple(the_op.reference(*reference_arguments))
    ours = as_tuple(the_op(*ours_arguments))
    for name, mine, theirs in zip(the_op.Arguments._fields, ours_arguments, reference_arguments):
        if isinstance(mine, torch.Tensor):
            left, expected = mine.cpu().float(), theirs.float()
            same = (left == expected) | (left.isnan() & expected.isnan())
            require(bool(same.all()), f"{the_op.name}: leaves another {name}")
    floor = SUMS_FLOOR.get(archs.of_device(0).wave_lanes, FLOOR) if the_op.sums and device == "cuda" else FLOOR
    for i, (mine, theirs, true) in enumerate(zip(ours, reference, oracle)):
        name = f"{the_op.name} output {i}"
        check(name, mine, theirs, true.double(), not the_op.sums, floor)
        if exact:
            differ = (mine.cpu() != theirs) & ~theirs.isnan()
            require(not differ.any(), f"{name}: {int(differ.sum())} of {differ.numel()} elements of exact sums differ")
        elif the_op.name in PRODUCTS:
            terms = the_op.reference(*[in_float64(absolute(v)) for v in arguments]).double()
            check_terms(name, mine, true.double(), terms, floor)


def check_case(
    the_op: Op, case: Case, device: str, arch: Arch, configs: Iterable | None = None, whole: bool = False
) -> None:
    """Checks a case in these configurations of its kernels, by default in all, and that they are what runs; for None, or where no
    kernel takes the case, that the reference does. `whole`: a product in each of them on whole numbers, for the reference's bits,
    and once for each kernel on the values of the case."""
    arguments = case.make("cpu", generator_of(case.name), arch.fp8_dtype)
    a = the_op.Arguments(*arguments)
    exact = whole_numbers(the_op, arguments, generator_of(case.name)) if whole and the_op.name in PRODUCTS else None
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
