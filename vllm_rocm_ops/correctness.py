"""Whether an op computes what its reference does: DESIGN's rules for results, for the tests and for `vllm-rocm-ops bench`.

A result is held against the reference in the same precision, step by step: each element may be off by at most one step of
its format, few may be off at all, and against float64 the error may not be larger than the reference's by more than
given factors. What an op updates in place is compared bit for bit. `unwritten_is_nan` has outputs start out as NaN, so that an
element nobody wrote shows. All raise `Wrong`.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops.op import Op, describe

OFF_BY_ONE = 0.01  # share of elements that may be off by one step
LARGEST_ERROR, MEAN_ERROR = 2.0, 1.1  # against float64, of the reference's
FLOOR = 1e-6  # of the largest element: a few roundings of fp32
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
        largest = oracle.abs().nan_to_num(posinf=0.0).max()
        error, allowed = ((x.double() - oracle).abs().nan_to_num() for x in (ours, reference))
        require(
            error.max() <= LARGEST_ERROR * allowed.max() + floor * largest,
            f"{name}: error {error.max()}, not {allowed.max()}",
        )
        require(error.mean() <= MEAN_ERROR * allowed.mean() + floor * largest, f"{name}: mean error {error.mean()}")


def in_float64(value):
    """An argument of the reference as the oracle takes it: 16-bit tensors, and the output type asked for, as float64."""
    halves = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in halves else clone(value)
    return torch.float64 if value in (*halves, torch.float32) else value


def run_and_check(the_op: Op, arguments: tuple, device: str) -> None:
    """One call of the op against its reference and against its oracle, the reference in float64."""
    reference_arguments, ours_arguments = [clone(v) for v in arguments], [clone(v, device) for v in arguments]
    oracle = as_tuple(the_op.reference(*[in_float64(v) for v in reference_arguments]))
    reference = as_tuple(the_op.reference(*reference_arguments))
    ours = as_tuple(the_op(*ours_arguments))
    for name, mine, theirs in zip(the_op.Arguments._fields, ours_arguments, reference_arguments):
        if isinstance(mine, torch.Tensor):
            left, expected = mine.cpu().float().nan_to_num(), theirs.float().nan_to_num()
            require(torch.equal(left, expected), f"{the_op.name}: leaves another {name}")
    floor = SUMS_FLOOR.get(archs.of_device(0).wave_lanes, FLOOR) if the_op.sums and device == "cuda" else FLOOR
    for i, (mine, theirs, exact) in enumerate(zip(ours, reference, oracle)):
        check(f"{the_op.name} output {i}", mine, theirs, exact.double(), not the_op.sums, floor)
