"""Test that every registered op rounds ties to even, as its reference does.

Arguments are integers and scales powers of two, so that results before rounding are exact. A second run, in an emulator
whose conversions round ties away from zero, finds the ties: the elements that differ.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from marks import FULL

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, launch, op
from vllm_rocm_ops.core.correctness import as_tuple, clone, generator_of, unwritten_is_nan, whole
from vllm_rocm_ops.core.quantization import MX_SCALES
from vllm_rocm_ops.emulator import Emulator, device, formats
from vllm_rocm_ops.emulator.instructions.table import VECTOR

ROUNDED = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)
FILLS = ("whole", "ones", "no queries")
MAX_CASES = 20  # per type of results
NEVER: dict[op.Op, set[str]] = {
    ops.softmax: {"torch.bfloat16"},  # exponentials are divided by their sum
    ops.silu_and_mul_with_clamp_per_token_quant: {"torch.float8_e4m3fn"},  # a scale is a 448th of a largest result
    ops.silu_and_mul_with_clamp_per_block_quant: {"torch.float8_e4m3fn"},
    ops.silu_and_mul_with_expert_gate_per_token_quant: {"torch.float8_e4m3fn"},
    ops.mx_dequantize: {"torch.bfloat16"},  # four bits by a power of two
    ops.gated_delta_net_decode: {"torch.float8_e4m3fn"},  # divided by the root of a mean
}
"""Types of results that are never exact, so that none is a tie: with --full all calls show it."""


def filled(name: str, x, fill: str, generator: torch.Generator):
    """Return an argument of integers, or a scale of powers of two.

    If `fill` says so, the first argument is +-1, or queries are zeros.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in (*ROUNDED, torch.float16, torch.float32, *MX_SCALES):
        return x

    def numbers(x: torch.Tensor) -> torch.Tensor:
        most = 127 if x.dtype == torch.int8 else 255
        largest = {"ones": 2, "no queries": 1 if name.startswith("q") else most}.get(fill, most)
        sign = torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1
        return sign * torch.randint(int(largest > 1), largest, x.shape, generator=generator)

    return whole(name, x, numbers, generator)


def results(the_op: op.Op, given: tuple, run) -> list[torch.Tensor]:
    """Return a call's results, and the arguments that it updates or writes."""
    a = the_op.Arguments(*map(clone, given))
    outputs = as_tuple(run(*a))
    return [
        *outputs,
        *(x for name, x in a._asdict().items() if x is not None and name in (*the_op.mutates, *the_op.writes)),
    ]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


@contextlib.contextmanager
def away_from_zero(whole_numbers: bool):
    """Make the emulator's conversions to 8 and 16 bits, and its v_rndne, round ties away from zero."""
    nearest, rndne = formats.Format._nearest_even, VECTOR["v_rndne_f32"]

    def away(self, magnitude):
        codes = nearest(self, magnitude)
        low, high = (self.values[np.minimum(codes + up, self._largest_code)].astype(np.float64) for up in (0, 1))
        value = magnitude.view(np.float32).astype(np.float64)
        with np.errstate(all="ignore"):
            return codes + np.uint32(1) * ((value != low) & (value - low == high - value))

    def invalidate() -> None:
        if whole_numbers:  # programs hold v_rndne; conversions to floats look up the format
            device.forget_programs()
        for one in (formats.E4M3FN, formats.E5M2):
            one.__dict__.pop("_codes", None)

    invalidate()
    formats.Format._nearest_even = away
    VECTOR["v_rndne_f32"] = dataclasses.replace(
        rndne, fn=lambda x: np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)
    )
    try:
        yield
    finally:
        formats.Format._nearest_even, VECTOR["v_rndne_f32"] = nearest, rndne
        invalidate()


def check_ties(the_op: op.Op, given: tuple) -> set[torch.dtype]:
    """Check the ties of a call, and return the types of results that have some."""
    with unwritten_is_nan():
        with launch.executor(Emulator("gfx950")):
            the_op.invalidate()
            right = results(the_op, given, the_op)
        with launch.executor(Emulator("gfx950")), away_from_zero(any(x.dtype == torch.int8 for x in right)):
            the_op.invalidate()
            other = results(the_op, given, the_op)
        the_op.invalidate()
    found = set()
    for mine, away, wanted in zip(right, other, results(the_op, given, the_op.reference)):
        halfway = bits(mine) != bits(away)
        if mine.dtype in ROUNDED and halfway.any():
            assert torch.equal(bits(mine)[halfway], bits(wanted)[halfway]), (
                f"{the_op.name} rounds a tie as {mine.dtype}"
            )
            found.add(mine.dtype)
    return found


def calls(the_op: op.Op, arch) -> Iterator[tuple[set[torch.dtype], tuple]]:
    """Yield few calls that kernels accept for each rounded type of their results.

    Cases with lengths come first, as these have all kinds.
    """
    count = collections.Counter()
    for case in sorted(the_op.cases(), key=lambda case: "lengths" not in case.name):
        a = the_op.Arguments(*case.make("cpu", generator_of(case.name), arch.fp8_dtype))
        if the_op.configs(a, arch):
            outputs = [*as_tuple(the_op.allocate(a)), *(getattr(a, name) for name in (*the_op.mutates, *the_op.writes))]
            types = {x.dtype for x in outputs if x is not None and x.numel()}.intersection(ROUNDED)
            count.update(types)
            if any(count[dtype] <= MAX_CASES for dtype in types):
                for fill in FILLS:
                    generator = generator_of(case.name)
                    yield types, tuple(filled(name, x, fill, generator) for name, x in a._asdict().items())


@pytest.mark.parametrize("the_op", [*op.registered()], ids=lambda o: o.name)
def test_every_op_rounds_ties_to_even(the_op):
    wanted, found, never = set(), set(), NEVER.get(the_op, set())
    for types, given in calls(the_op, archs.ARCHS["gfx950"]):
        wanted |= types
        if not {dtype for dtype in types if FULL or str(dtype) not in never} <= found:
            found |= check_ties(the_op, given)
    left = {str(dtype) for dtype in wanted - found}
    assert left == never, f"{the_op.name}: no case has a result of {left} halfway between two"
