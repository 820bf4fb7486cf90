"""Test that a call's launches do not depend on the calls before it.

For each part of a signature, two calls differ only there; for each dimension of size 1, two strides are one signature.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch
from argument_mutations import cases, donors, few_cases, laid, moved, on_cpu, roomy, strided, unit_strides, variants
from recorder import Recorder

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import launch, op
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.core.stats import FALLBACK, fallbacks, reset_stats, stats
from vllm_rocm_ops.emulator import Emulator

OPS = list(op.registered())
each_op = pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
REFUSED = FALLBACK + "the arguments break the op's contract"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def counts_of_its_own(monkeypatch):
    """Hide fallback reasons first given here from other tests."""
    monkeypatch.setattr(sys.modules["vllm_rocm_ops.core.stats"], "_counts", {})


@pytest.fixture
def recorder():
    executor = Recorder("gfx950")
    with launch.executor(executor):
        yield executor


def runs(the_op, recorder: Recorder, arguments: tuple) -> list:
    """Return the launches of a call, with arguments' names for their pointers, or the reason for none."""
    names = {id(value): name for name, value in zip(the_op.Arguments._fields, arguments)}

    def said(value):
        if not isinstance(value, torch.Tensor):
            return repr(value)
        return names.get(id(value)) or (value.shape, value.stride(), value.dtype)

    recorder.launches.clear()
    reset_stats()
    the_op.run_kernels(*arguments)
    return [list(stats()[the_op.name]), *(one.with_each(said) for one, _ in recorder.launches)]


def alone(the_op, recorder: Recorder, arguments: tuple) -> list:
    """Return the launches of a call that no other precedes."""
    the_op.invalidate()
    return runs(the_op, recorder, arguments)


def both_orders(the_op, recorder: Recorder, one: tuple, other: tuple) -> tuple[list, list]:
    """Check that each of two calls runs after the other what it runs alone."""
    of_one = alone(the_op, recorder, one)
    behind = runs(the_op, recorder, other)
    of_other = alone(the_op, recorder, other)
    assert (runs(the_op, recorder, one), behind) == (of_one, of_other)
    return of_one, of_other


def replaced(arguments: tuple, place: int, value) -> tuple:
    return (*arguments[:place], value, *arguments[place + 1 :])


# Dimensions of size 1


def of_one(arguments: tuple) -> Iterator[tuple]:
    """Return the arguments with 1 in place of a size of tensors: one token, one head, one page."""
    tensors = [v for v in arguments if isinstance(v, torch.Tensor)]
    for size in sorted({size for tensor in tensors for size in tensor.shape} - {0, 1}):
        yield tuple(
            laid(v, v.stride(), tuple(1 if n == size else n for n in v.shape)) if isinstance(v, torch.Tensor) else v
            for v in arguments
        )


@each_op
def test_strides_of_dimensions_of_size_1_choose_nothing(the_op, recorder):
    """The strides are odd and beyond 2^40. The launches have the same arguments, too, so they compute the same."""
    covered, fp8 = set(), recorder.arch.fp8_dtype
    wanted = {name for name, (value,) in donors(the_op, fp8).items() if value.dim() > 1}

    def check(arguments: tuple) -> None:
        ordinary = on_cpu(arguments)
        odd = tuple(unit_strides(v) if isinstance(v, torch.Tensor) else v for v in ordinary)
        first, second = both_orders(the_op, recorder, ordinary, odd)
        assert first == second
        if first[0] != [REFUSED]:
            units = {n for n, v in zip(the_op.Arguments._fields, odd) if isinstance(v, torch.Tensor) and 1 in v.shape}
            covered.update(units)

    few = few_cases(the_op, fp8)
    for place, arguments in enumerate((*few, *cases(the_op, fp8).values())):
        if place >= len(few) and wanted <= covered:
            break
        check(arguments)
        for smaller in of_one(arguments) if not wanted <= covered else ():
            check(smaller)
    assert wanted <= covered


@pytest.mark.parametrize("arch_name", ["gfx942"])
def test_strides_of_size_1_change_no_result(arch_name):
    """The query of one token is a row of a wider projection."""
    emulator = Emulator(arch_name)
    (case,) = [case for case in ops.paged_attention_decode.cases() if case.name == "no-lse"]
    query, *rest = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
    wide = query.new_empty(1, query[0].numel() + 1)
    odd = wide[:, : query[0].numel()].unflatten(1, query.shape[1:]).copy_(query)
    with launch.executor(emulator):
        for one in (query.contiguous(), odd, query.contiguous()):
            run_and_check(ops.paged_attention_decode, (one, *rest), "cpu")
    assert not fallbacks()


# Parts of a signature


def bases(the_op, fp8: torch.dtype) -> Iterator[tuple]:
    """Yield cases with a tensor, or a number of its dimensions, that no earlier case has."""
    seen = set()
    for arguments in cases(the_op, fp8).values():
        kinds = {
            (name, value.dim() if isinstance(value, torch.Tensor) else value is None)
            for name, value in zip(the_op.Arguments._fields, arguments)
        }
        if not kinds <= seen:
            seen |= kinds
            yield arguments


def different(base: tuple) -> Iterator[tuple]:
    """Yield calls that differ from a base, or from each other, in one shape, stride, dtype, alignment or number."""
    yield base
    for i, value in enumerate(base):
        for other in variants(value):
            yield replaced(base, i, other)
        if isinstance(value, torch.Tensor):
            for other in strided(roomy(value)):
                yield replaced(base, i, other)
    there = on_cpu(base)
    for i, value in enumerate(there):
        for other in moved(value) if isinstance(value, torch.Tensor) else ():
            yield replaced(there, i, other)


@each_op
def test_calls_of_one_signature_run_the_same(the_op, recorder):
    """Calls of other signatures are decided separately, whatever ran before."""
    for base in bases(the_op, recorder.arch.fp8_dtype):
        calls: dict[tuple, list[tuple]] = {}
        for arguments in different(base):
            with contextlib.suppress(AttributeError):  # None in place of a tensor
                calls.setdefault(the_op._signature(None, *arguments), []).append(arguments)
        for first, *others in calls.values():
            for other in others:
                assert alone(the_op, recorder, first) == alone(the_op, recorder, other)


@each_op
def test_executors_and_devices_count(the_op):
    """The same call is another signature on another arch, and for tensors of another GPU."""
    base = next(iter(cases(the_op, torch.float8_e4m3fn).values()))
    executors, wanted = [Recorder("gfx942"), Recorder("gfx950")], []
    for executor in executors:
        with launch.executor(executor):
            wanted.append(alone(the_op, executor, base))
    for executor, of in zip(executors, wanted):
        with launch.executor(executor):
            assert runs(the_op, executor, base) == of

    class Elsewhere(torch.Tensor):
        def get_device(self) -> int:
            return 1

    for i, value in enumerate(base):
        if isinstance(value, torch.Tensor):
            moved = replaced(base, i, value.as_subclass(Elsewhere))
            assert the_op._signature(None, *base) != the_op._signature(None, *moved)


def apart(tensor: torch.Tensor, dimension: int, room: int) -> torch.Tensor:
    """Return the tensor's values with padding between the elements of one dimension.

    Other dimensions begin at multiples of 16.
    """
    strides, step = [0] * tensor.dim(), 1
    for d in sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), -d)):
        strides[d] = step + room * (d == dimension)
        step = -(-strides[d] * max(tensor.shape[d], 1) // 16) * 16
    storage = torch.empty(sum((n - 1) * step for n, step in zip(tensor.shape, strides)) + 1, dtype=tensor.dtype)
    return storage.as_strided(tensor.shape, strides).copy_(tensor)


@each_op
def test_calls_with_other_strides_compute_the_same(the_op):
    """One after the other, in kernels or fallbacks, with padding of whole vectors and of parts."""
    emulator = Emulator("gfx950")
    with launch.executor(emulator):
        sizes = {
            name: sum(v.numel() for v in arguments if isinstance(v, torch.Tensor))
            for name, arguments in cases(the_op, emulator.arch.fp8_dtype).items()
            if not {0, 1} & {*arguments[0].shape} and the_op.explain(*arguments, arch=emulator.arch).launches
        }
        (case,) = [case for case in the_op.cases() if case.name == min(sizes, key=sizes.get)]
        arguments = case.make("cpu", generator_of(case.name), emulator.arch.fp8_dtype)
        for i, value in enumerate(arguments):
            for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                for room in (16, 4) if size > 1 else ():
                    run_and_check(the_op, replaced(arguments, i, apart(value, d, room)), "cpu")
