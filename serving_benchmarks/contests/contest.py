"""What a contest of AMD and GPU MODE is, and how its judge compares results.

Sizes, seeds, distributions, layouts and tolerances are those of the contests' published tasks (gpu-mode/reference-kernels,
problems/amd). The code is ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

Sizes = dict[str, int]
Stage = Callable[[str], AbstractContextManager]  # within stage("name") runs a part of ours that is timed by itself
SHOWN = 3  # of the wrong elements of a result


def unstaged(name: str) -> AbstractContextManager:
    """Do nothing: a `Stage` without a clock."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Contest:
    """A contest's task.

    make(sizes, seed, device, fp8_dtype) gives the data of a call. reference(data) gives the expected outputs, and ours(data, stage)
    what our ops compute; both may change `data`, of which copy(data) is a copy in memory of its own, and again(data) undoes what a
    call changed. terms(data) are the sums of absolute terms where the inputs are FP8. `tests` are checked, `benchmarks` checked and timed, `reduced` checked in the emulator. A result is right
    where |result - expected| <= atol + rtol * |expected|, and both are NaN or the same infinity. Timing stops where the
    standard error of the mean is below `error` of it. `floors` are the contest's own microseconds at the speed of light, by the
    number of the benchmark."""

    name: str
    make: Callable[[Sizes, int, str, torch.dtype], object]
    reference: Callable[[object], tuple[torch.Tensor, ...]]
    ours: Callable[[object, Stage], object]
    flops: Callable[[Sizes], float]
    tests: tuple[Sizes, ...]
    benchmarks: tuple[Sizes, ...]
    reduced: tuple[Sizes, ...]
    rtol: float
    atol: float
    outputs: tuple[str, ...]
    error: float = 0.001
    floors: Mapping[int, float] = field(default_factory=dict)
    again: Callable[[object], None] = lambda data: None
    terms: Callable[[object], torch.Tensor | float] = lambda data: 0.0

    def data(self, sizes: Sizes, device: str, fp8_dtype: torch.dtype, later: int = 0) -> object:
        """Return the inputs of a problem. A ranked run adds `later` to the seed."""
        given = dict(sizes)
        return self.make(given, given.pop("seed") + later, device, fp8_dtype)


def copy(data):
    """Return a copy with tensors of its own, of the same strides."""
    if isinstance(data, torch.Tensor):
        return data.clone()
    if isinstance(data, (tuple, list)):
        return type(data)(copy(value) for value in data)
    if isinstance(data, dict):
        return {name: copy(value) for name, value in data.items()}
    return data.copy() if hasattr(data, "copy") else data


def compare(
    contest: Contest, result: object, expected: tuple[torch.Tensor, ...], slack: torch.Tensor | float = 0.0
) -> str:
    """Say what is wrong with a result, which may be off by `slack` more than the contest allows; empty if nothing is."""
    results = result if isinstance(result, tuple) else (result,)
    results = [value for value in results if not isinstance(value, dict)]  # auxiliary data
    if len(results) != len(expected):
        wanted = " and ".join(contest.outputs)
        return f"it must return {wanted}, got {len(results)} values"
    for name, got, wanted in zip(contest.outputs, results, expected):
        if not isinstance(got, torch.Tensor):
            return f"{name} must be a tensor, got {type(got).__name__}"
        if got.shape != wanted.shape or got.device != wanted.device:
            shapes = f"{list(wanted.shape)} on {wanted.device}, got {list(got.shape)} on {got.device}"
            return f"{name} must be {shapes}"
        off = wrong_elements(got, wanted, contest.rtol, contest.atol + slack)
        count = int(off.sum())
        if count:
            places = off.nonzero()[:SHOWN].tolist()
            some = "; ".join(f"{place}: {got[tuple(place)]:.6g}, not {wanted[tuple(place)]:.6g}" for place in places)
            return f"{count} of {got.numel()} elements of {name} are wrong: {some}"
    return ""


def wrong_elements(got: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: torch.Tensor | float) -> torch.Tensor:
    """Mark the elements that the contests' judge calls wrong. It computes in the tensors' dtypes."""
    off = (got - wanted).abs() > atol + rtol * wanted.abs()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        off |= kind(got) != kind(wanted)
    return off
