"""Find the features that calls of an op reach, without a run, to choose the default tests.

In a configuration on a chip, a case reaches each argument present or absent, with its type, layout and kind of values;
and its plan: the kernels' symbols and each kernel argument by its kind, per class of configuration. A case that no
kernel accepts reaches the rules that it breaks.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.correctness import as_tuple, generator_of
from vllm_rocm_ops.core.launch import Counters, Workspace
from vllm_rocm_ops.core.op import Case, Op

SMALL = 4  # numbers below are distinguished: they are types, orders and levels
BOUNDS = (0, SMALL, 65, 129, 2**16, 2**31)  # classes of larger numbers: a wave has 64 lanes, a tile 128 rows
SIZES = (1e-30, 1e-4, 100.0, 1e4, 1e30)  # classes of floats
MAX_VALUES = 2**16  # of a tensor whose values are classified


class Run(NamedTuple):
    """A case in one configuration, or in None if no kernel accepts it."""

    config: object
    reached: frozenset[Hashable]
    cost: float  # approximate seconds in the emulator


def kind_of(value) -> Hashable:
    """Return the class of an argument's value."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (Workspace, Counters)):
        return type(value)
    if isinstance(value, float):
        return (value > 0) - (value < 0), value == 1.0
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < SMALL else (bisect.bisect(BOUNDS, value), value % 8 == 0)
    return value


def looks(x: torch.Tensor) -> Iterator[Hashable]:
    """Yield the layout of an argument, and the classes of its values that kernels distinguish."""
    yield "packed" if x.is_contiguous() else "with gaps" if x.dim() and x.stride(-1) == 1 else "in another order"
    yield "elements", min(x.numel(), 2)
    if not 0 < x.numel() <= MAX_VALUES or x.dtype == torch.bool:
        return
    if not x.is_floating_point():
        yield "least", kind_of(int(x.min()))
        yield "most", bisect.bisect(BOUNDS, int(x.max()))
        rows = x.reshape(-1, x.shape[-1] if x.dim() else 1).sort(-1).values
        yield "repeats", bool((rows[:, 1:] == rows[:, :-1]).any())
        return
    values = x.double()
    finite = values[values.isfinite()]
    yield "special", *(bool(found.any()) for found in (values.isnan(), values == torch.inf, values == -torch.inf))
    if finite.numel():
        yield "size", bisect.bisect(SIZES, float(finite.abs().max())), float(finite.min()) >= 0, float(finite.max()) < 0
        yield "equal", bool((finite == finite[0]).all())


class Made(NamedTuple):
    """A case's arguments and outputs, and the features of the arguments."""

    a: tuple
    outputs: object
    given: frozenset[Hashable]
    special: frozenset[Hashable]
    megabytes: float


def made(the_op: Op, case: Case, fp8_dtype: torch.dtype) -> Made:
    """Return a case with inputs in an FP8 dtype."""
    a = the_op.Arguments(*case.make("cpu", generator_of(case.name), fp8_dtype))
    outputs = the_op.allocate(a)
    tensors = {name: value for name, value in a._asdict().items() if isinstance(value, torch.Tensor)}
    given = {(the_op.name, name, kind_of(value)) for name, value in a._asdict().items()}
    seen = {(name, look) for name, value in tensors.items() for look in looks(value)}
    given |= {(the_op.name, name, tensors[name].dtype, look) for name, look in seen}
    special = {(name, look) for name, look in seen if look[0] == "special"}
    megabytes = sum(x.nbytes for x in (*tensors.values(), *as_tuple(outputs))) / 1e6
    return Made(a, outputs, frozenset(given), frozenset(special), megabytes)


def has_fp8(a: tuple) -> bool:
    """True if an argument is of FP8, which differs among archs."""
    return any("float8" in str(getattr(value, "dtype", value)) for value in a if not isinstance(value, str))


def runs_of(the_op: Op, case: Case, archs: Sequence[Arch]) -> Iterator[list[Run]]:
    """Yield a case in each configuration, for each arch."""
    of = None
    for arch in archs:
        if of is None or has_fp8(of.a):
            of = made(the_op, case, arch.fp8_dtype)
        runs = []
        for config in the_op.configs(of.a, arch):
            reached, waves = {(the_op.name, type(config)), *of.given}, 0
            for launched in the_op.plan(config, of.outputs, of.a, arch):
                reached |= {launched.symbol, (launched.symbol, launched.grid[1] > 1)}
                reached |= {(the_op.name, type(config), name, kind_of(v)) for name, v in launched.named.items()}
                reached |= {(launched.symbol, name) for name, v in launched.named.items() if v is None}
                reached |= {(launched.symbol, *look) for look in of.special}
                waves += torch.Size((*launched.grid, *launched.block)).numel() // 64
            runs.append(Run(config, frozenset(reached), 0.1 + 0.006 * waves + 0.2 * of.megabytes))
        broken = frozenset((the_op.name, rule) for rule, holds in the_op.can_implement(of.a, arch) if not holds)
        yield runs or [Run(None, broken | {(the_op.name, None)}, 0.1 + 0.2 * of.megabytes)]
