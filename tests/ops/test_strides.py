"""Test two arguments at a time at strides that the others do not have; test_far_apart.py has one at a time.

A kernel, or a rule, that takes a tensor's stride for another's is then wrong. By default the two have the same rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import test_large_tensors as large
import torch
from marks import FULL, cover
from test_far_apart import far_apart, kernels, spread_of

from vllm_rocm_ops.core import op
from vllm_rocm_ops.core.correctness import generator_of


def wider(x: torch.Tensor) -> tuple[int, ...]:
    """Return byte strides with as much room again between the rows of every dimension but the innermost."""
    inner = min(x.stride())
    twice = (1 + (size > 1 and step > inner) for size, step in zip(x.shape, x.stride()))
    return tuple(step * x.element_size() * times for step, times in zip(x.stride(), twice))


def calls(the_op: op.Op, given, arch) -> Iterator[tuple[dict[str, tuple[int, ...]], object]]:
    """Yield strides of two arguments that the kernels take, and a configuration."""
    a = the_op.Arguments(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in given))
    given = {name: x for name, x in a._asdict().items() if isinstance(x, torch.Tensor) and x.dim() > 1 and x.numel()}
    rows = [name for name, x in given.items() if spread_of(x, 0, x.stride(0) * x.element_size()) != wider(x)]
    pairs = itertools.combinations(rows, 2)
    for names in [(one, two) for one, two in pairs if FULL or given[one].shape[:-1] == given[two].shape[:-1]]:
        apart = {name: wider(getattr(a, name)) for name in names}
        further = a._replace(**{name: far_apart(getattr(a, name), steps) for name, steps in apart.items()})
        for config in [*kernels(the_op, further, arch).values()][:1]:
            yield apart, config


@functools.cache
def calls_of(the_op: op.Op, arch) -> list[tuple]:
    found = []
    for case in the_op.cases():
        given = the_op.Arguments(*case.make("cpu", generator_of(case.name), arch.fp8_dtype))
        if sum(v.nbytes for v in given if isinstance(v, torch.Tensor)) < 2**24:
            found += [(given, *of) for of in calls(the_op, given, arch)]
    return found


@large.EXECUTORS
@pytest.mark.parametrize("the_op", [*op.registered()], ids=lambda o: o.name)
def test_pairs_of_arguments_at_strides_of_their_own(the_op, executor):
    found = calls_of(the_op, executor[1])
    costs = [1e5 + sum(v.nbytes for v in given if isinstance(v, torch.Tensor)) for given, *_ in found]
    for place in sorted(cover([frozenset({frozenset(apart)}) for _, apart, _ in found], costs)):
        given, apart, config = found[place]
        large.run(the_op, given, apart, executor, [config])
