"""Test every registered op with arguments so far apart that offsets need more than 32 bits.

The outermost parts of an argument are apart. The op's rules determine the cases, arguments and distances. An op without
such a call needs its own test in test_large_tensors.py, which `OWN` names.
"""

from __future__ import annotations

import pytest
import test_large_tensors as large
import torch
from marks import cover
from test_ops import executor  # noqa: F401

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import op, tensors
from vllm_rocm_ops.core.correctness import generator_of

STEPS = (
    2**32 + 4096,
    2**31 - 4096,
    2**25 - 512,
    2**24 - 512,
    2**23 - 512,
)  # bytes; the first allowed by the rules is taken
FAR, FARTHEST = 2**31, 2**36  # bytes from an argument's first to its last; the emulator does not address more
OWN = {ops.stream_memory: large.test_last_of_a_long_stream}


def steps_of(x: torch.Tensor, outermost: int) -> tuple[int, ...]:
    """Return the byte strides of each dimension, with `outermost` for the outermost."""
    steps = [stride * x.element_size() for stride in x.stride()]
    places = [place for place, step in enumerate(steps) if step and x.shape[place] > 1]
    if x.dim() > 1 and places:
        steps[max(places, key=lambda place: (steps[place], -place))] = outermost
    return tuple(steps)


def apart(the_op: op.Op, given, arch) -> tuple[dict[str, tuple[int, ...]], list]:
    """Return byte strides of arguments that can be far apart at once, and one accepted configuration of each class."""
    found, a = {}, the_op.Arguments(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in given))
    for name, x in a._asdict().items():
        for outermost in STEPS if isinstance(x, torch.Tensor) and x.numel() else ():
            steps, size = steps_of(x, outermost), x.element_size()
            strides = [step // size for step in steps]
            if not FAR < large.reach(x.shape, strides, size) < FARTHEST:
                continue
            far = tensors.canonical(torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta"))
            spread = a._replace(**{name: far})
            rules = [
                *(holds for *_, holds in the_op.contract(spread)),
                *(holds for _, holds in the_op.can_implement(spread, arch)),
            ]
            if all(rules) and the_op.configs(spread, arch):
                found[name], a = steps, spread
                break
    return found, list({type(config): config for config in the_op.configs(a, arch)}.values()) if found else []


@large.EXECUTORS
@pytest.mark.parametrize("the_op", [*op.registered()], ids=lambda o: o.name)
def test_every_argument_that_may_be_large(the_op, executor):  # noqa: F811
    calls, runs_here = [], False
    for case in the_op.cases():
        given = the_op.Arguments(*case.make("cpu", generator_of(case.name), executor[1].fp8_dtype))
        steps, configs = apart(the_op, given, executor[1])
        calls += [(given, steps, config) for config in configs]
        runs_here |= not the_op.explain(*given, arch=executor[1]).is_fallback
    reached = [frozenset((name, type(config)) for name in steps) for _, steps, config in calls]
    costs = [1e6 + sum(v.nbytes for v in given if isinstance(v, torch.Tensor)) for given, *_ in calls]
    assert calls or the_op in OWN or not runs_here, (
        f"{the_op.name}: no call of 2 GB and more is tested: give it one in test_large_tensors.py"
    )
    for place in sorted(cover(reached, costs)):
        given, steps, config = calls[place]
        large.run(the_op, given, steps, executor, [config])


@large.EXECUTORS
@pytest.mark.parametrize("m", [3, 20])
def test_columns_of_any_product(m, executor):  # noqa: F811
    """A weight of over 4 GB is multiplied by the skinny kernels and by the tiled ones."""
    given = large.gemm_arguments(ops.gemm, m, 2**32 // large.TILE_FAR + 9, 48, executor[1].fp8_dtype)
    configs = ops.gemm.configs(ops.gemm.Arguments(*given), executor[1])
    large.run(
        ops.gemm,
        given,
        {"b": (1, large.TILE_FAR)},
        executor,
        configs[:1] if m == 3 else {type(c): c for c in configs}.values(),
    )
