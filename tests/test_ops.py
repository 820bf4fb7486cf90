"""Every op, every case, every configuration of its kernels, on every executor at hand.

The executors: the GPU of this machine if it has one of ours, and the emulator with the gfx942 and gfx950 code that ships.
A result is held against the reference in the same precision, step by step: each element may be off by at most one step of
its format, few may be off at all, and against float64 the error may not be larger than the reference's by more than
DESIGN's factors. What an op updates in place is compared bit for bit. Outputs start out as NaN, so that an element
nobody wrote shows.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch, op

OPS = list(op.registered())
CASES = [pytest.param(o, c, id=f"{o.name}-{c.name}") for o in OPS for c in o.cases()]
OFF_BY_ONE = 0.01  # share of elements that may be off by one step
FLOOR = 1e-6  # of the largest element: a few roundings of fp32
SUMS_FLOOR = {"sm_90": 2.0**-11}  # wgmma keeps 14 bits of a sum of e4m3 products


def executors():
    if torch.cuda.is_available() and archs.of_device(0) is not None:
        yield pytest.param("cuda", id=archs.of_device(0).name)
    else:
        yield "gfx942"
        yield "gfx950"


@pytest.fixture(scope="module", params=executors())
def executor(request):
    """(device of the tensors, arch)"""
    if request.param == "cuda":
        yield "cuda", archs.of_device(0)
        return
    from emulator import Emulator

    emulator = Emulator(request.param)
    with launch.executor(emulator):
        yield "cpu", emulator.arch


@pytest.fixture(autouse=True)
def outputs_start_as_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def generator_of(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def clone(value, device: str = "cpu"):
    """A copy with the same strides in storage of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) + 1 if value.numel() else 0
    return value.as_strided((extent,), (1,)).clone().to(device).as_strided(value.shape, value.stride())


def as_tuple(value):
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
    ours = ours.cpu()
    assert ours.shape == reference.shape and ours.dtype == reference.dtype and ours.stride() == reference.stride()
    assert torch.equal(ours.isnan(), reference.isnan()), f"{name}: NaNs differ"
    if ours.numel() == 0:
        return
    if ours.dtype != torch.float32 and steps_apart:
        off = (steps(ours) - steps(reference)).abs().masked_fill(reference.isnan(), 0)
        worst = off.argmax()
        mine, theirs = ours.flatten()[worst].item(), reference.flatten()[worst].item()
        assert off.max() <= 1, f"{name}: element {int(worst)} is {mine}, not {theirs}"
        assert off.sum() <= max(OFF_BY_ONE * off.numel(), 2), f"{name}: {int(off.sum())} of {off.numel()} are off"
    if ours.element_size() > 1:  # a cast to 8 bits is all rounding: the steps say more
        largest = oracle.abs().nan_to_num(posinf=0.0).max()
        error, allowed = ((x.double() - oracle).abs().nan_to_num() for x in (ours, reference))
        assert error.max() <= 2 * allowed.max() + floor * largest, f"{name}: error {error.max()}, not {allowed.max()}"
        assert error.mean() <= 1.1 * allowed.mean() + floor * largest, f"{name}: mean error {error.mean()}"


def in_float64(value):
    """An argument of the reference as the oracle takes it: 16-bit tensors, and the output type asked for, as float64."""
    halves = (torch.bfloat16, torch.float16)
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in halves else clone(value)
    return torch.float64 if value in (*halves, torch.float32) else value


def run_and_check(the_op, arguments: tuple, device: str) -> None:
    """One call of the op against its reference and against its oracle, the reference in float64."""
    reference_arguments, ours_arguments = [clone(v) for v in arguments], [clone(v, device) for v in arguments]
    oracle = as_tuple(the_op.reference(*[in_float64(v) for v in reference_arguments]))
    reference = as_tuple(the_op.reference(*reference_arguments))
    ours = as_tuple(the_op(*ours_arguments))
    for name, mine, theirs in zip(the_op.Arguments._fields, ours_arguments, reference_arguments):
        if isinstance(mine, torch.Tensor):
            left, expected = mine.cpu().float().nan_to_num(), theirs.float().nan_to_num()
            assert torch.equal(left, expected), f"{the_op.name}: leaves another {name}"
    floor = SUMS_FLOOR.get(archs.of_device(0).name, FLOOR) if the_op.sums and device == "cuda" else FLOOR
    for i, (mine, theirs, exact) in enumerate(zip(ours, reference, oracle)):
        check(f"{the_op.name} output {i}", mine, theirs, exact.double(), not the_op.sums, floor)


@pytest.mark.parametrize("the_op, case", CASES)
def test_case(the_op, case, executor, monkeypatch):
    device, arch = executor
    arguments = case.make("cpu", generator_of(case.name), arch.fp8_dtype)
    a = the_op.Arguments(*arguments)
    for config in the_op.configs(a, arch) or [None]:
        monkeypatch.setattr(the_op, "default", lambda *_, config=config: config)
        the_op._executions.clear()
        op.reset_stats()
        run_and_check(the_op, arguments, device)
        (ran,) = op.stats()[the_op.name]
        if config is None:
            assert ran.startswith("fallback")  # no kernel of this arch takes it
            continue
        planned = the_op.plan(config, the_op.allocate(a), a, arch)
        assert ran == (" + ".join(l.symbol for l in planned) or "nothing to do")
    the_op._executions.clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU; test_same_bits.py is its like in the emulator")
@pytest.mark.parametrize("m", [1, 16, 64])
def test_same_bits_in_1000_calls(m):
    """A product whose K is divided over blocks, which arrive in another order in every call."""
    from vllm_rocm_ops import ops

    n, k, fp8 = 2304, 16384, archs.of_device(0).fp8_dtype
    a, b = (torch.randn(rows, k, device="cuda").to(fp8) for rows in (m, n))
    scale_a, scale_b = torch.rand(m, 1, device="cuda"), torch.rand(n, 1, device="cuda")
    first = ops.scaled_mm(a, b.t(), scale_a, scale_b, torch.bfloat16)
    differ = torch.zeros((), device="cuda")
    for _ in range(1000):
        differ += (ops.scaled_mm(a, b.t(), scale_a, scale_b, torch.bfloat16) != first).sum()
    assert "fallback" not in str(op.stats()["scaled_mm"]) and differ == 0
