"""Define a contest of AMD and GPU MODE, and its comparison of results.

Sizes, seeds, distributions, layouts and tolerances come from the published tasks (gpu-mode/reference-kernels, problems/amd). The code is
this project's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

Sizes = dict[str, int]
Stage = Callable[[str], AbstractContextManager]  # stage("name") times a part of the plugin's solution separately
SHOWN = 3  # wrong elements to print


def unstaged(name: str) -> AbstractContextManager:
    """Do nothing: a `Stage` without a clock."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Contest:
    """A contest's task.

    make(sizes, seed, device, fp8_dtype) returns the data of a call. reference(data) returns the expected outputs, ours(data, stage)
    the plugin's. Both may change `data`: copy(data) returns a copy in separate memory, and again(data) undoes a call's changes.
    terms(data) returns the sums of absolute terms for FP8 inputs. `tests` are checked, `benchmarks` checked and timed, `reduced`
    checked in the emulator. A result is correct if |result - expected| <= atol + rtol * |expected|, or both are NaN or the same
    infinity. Timing stops when the standard error of the mean is below `error` of it. `floors` are the contest's speed-of-light
    microseconds by number of the benchmark.
    """

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


def problems(names: str, table: str) -> tuple[Sizes, ...]:
    """Return the problems of a table, one after each comma, by the names of their sizes."""
    return tuple(dict(zip(names.split(), map(int, problem.split()), strict=True)) for problem in table.split(","))


def normal(seed: int, device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return a function that draws normal values of a shape, on its own dtype if given."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape, dtype=dtype: torch.randn(shape, dtype=dtype, device=device, generator=generator)


def copy(data):
    """Return a copy with separate tensors of the same strides."""
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
    """Return what is wrong with a result, with `slack` added to the contest's tolerance, or ""."""
    results = result if isinstance(result, tuple) else (result,)
    results = [value for value in results if not isinstance(value, dict)]  # auxiliary data
    if len(results) != len(expected):
        wanted = " and ".join(contest.outputs)
        return f"the kernel must return {wanted}, got {len(results)} values"
    for name, got, wanted in zip(contest.outputs, results, expected):
        if not isinstance(got, torch.Tensor):
            return f"{name} must be a tensor, got {type(got).__name__}"
        if got.shape != wanted.shape or got.device != wanted.device:
            shapes = f"{list(wanted.shape)} on {wanted.device}, got {list(got.shape)} on {got.device}"
            return f"{name} must be {shapes}"
        off = wrong_elements(got, wanted, contest.rtol, contest.atol + slack)
        count = int(off.sum())
        if count:
            places = map(tuple, off.nonzero()[:SHOWN].tolist())
            shown = "; ".join(f"{[*place]}: {got[place]:.6g}, expected {wanted[place]:.6g}" for place in places)
            return f"{count} of {got.numel()} elements of {name} are wrong: {shown}"
    return ""


def wrong_elements(got: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: torch.Tensor | float) -> torch.Tensor:
    """Mark the elements that the contests' judge rejects. It computes in the tensors' dtypes."""
    off = (got - wanted).abs() > atol + rtol * wanted.abs()
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        off |= kind(got) != kind(wanted)
    return off
