"""Test contracts: a breach raises ValueError with op and argument before anything is written.

For valid arguments, reference and kernels agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from marks import AMD, full

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import arguments, launch, op, tensors
from vllm_rocm_ops.core.correctness import generator_of, run_and_check
from vllm_rocm_ops.emulator import Emulator

OPS = list(op.registered())
each_op = pytest.mark.parametrize("the_op", OPS, ids=lambda o: o.name)
WITH_RESIDUAL = [o for o in OPS if "residual" in o.Arguments._fields]
ROWS = [o for o in OPS if "input" in o.Arguments._fields]


def example(the_op, case: str | None = None, fp8=torch.float8_e4m3fn) -> dict:
    """Return the arguments of a case by name, by default of the first small one."""
    for candidate in the_op.cases():
        arguments = candidate.make("cpu", torch.Generator().manual_seed(1), fp8)
        size = sum(v.numel() for v in arguments if isinstance(v, torch.Tensor))
        if candidate.name == case or case is None and 0 < size < 10**6:
            return the_op.Arguments(*arguments)._asdict()
    raise LookupError(f"{the_op.name} has no case {case}")


# Breaches


def wrong_values(value) -> Iterator:
    """Yield values of other kinds and shapes than the valid one."""
    if isinstance(value, torch.Tensor):
        yield from (None, value.new_empty(()), value.flatten(), value.unsqueeze(0))
        yield from (value.narrow(d, 0, 0) for d in range(value.dim()))
        yield from (torch.zeros(value.shape).to(t) for t in (torch.int32, torch.bool, torch.complex64))
        yield from (torch.zeros(value.shape).to(t) for t in (torch.float8_e4m3fn, torch.float64))
    elif value is None:
        yield from (torch.empty(()), torch.empty(0), torch.empty(0, dtype=torch.int32))
    elif isinstance(value, torch.dtype):
        yield torch.int32
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (0, -1, 10**6)


@each_op
def test_every_breach_is_a_value_error(the_op):
    """A wrong value of any one argument is refused, or accepted and served, by call, run_kernels and explain alike."""
    given = example(the_op)
    for name in given:
        for value in wrong_values(given[name]):
            arguments = given | {name: value}
            outcomes = set()
            for call in (the_op.run_kernels, lambda *a: the_op.explain(*a, arch="gfx950"), the_op._dispatch):
                try:
                    call(*arguments.values())
                    outcomes.add("taken")
                except ValueError as error:
                    assert str(error).startswith(f"{the_op.name}: "), error
                    outcomes.add("refused")
            # run_kernels returns None on a breach, as its callers have another kernel
            assert outcomes in ({"taken"}, {"taken", "refused"}), (name, value)


@pytest.mark.parametrize("the_op", ROWS, ids=lambda o: o.name)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_rows_are_of_floats(the_op, dtype):
    given = example(the_op)
    for name in ("input", "residual", "weight"):
        if given.get(name) is not None:
            given[name] = torch.zeros(given[name].shape).to(dtype)
    with pytest.raises(ValueError, match=f"{the_op.name}: input must be floating point of 16 bits or more, got "):
        the_op(**given)


@pytest.mark.parametrize("the_op", [ops.grouped_topk, ops.topk_sigmoid], ids=lambda o: o.name)
def test_biases_are_floats_of_16_bits_or_more(the_op):
    given = example(the_op) | {"e_score_correction_bias": None}
    given["e_score_correction_bias"] = torch.zeros(given["gating_output"].shape[1]).to(torch.float8_e4m3fn)
    wanted = f"{the_op.name}: e_score_correction_bias must be .*floating point of 16 bits or more, got "
    with pytest.raises(ValueError, match=wanted):
        the_op(**given)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": None}, "hidden must be a tensor, got None"),
        (
            {"expert_map": torch.empty(0, dtype=torch.int32)},
            r"expert_map must be int32 \[global experts\], one or more",
        ),
        ({"topk_ids": torch.zeros((), dtype=torch.int32)}, "topk_ids must be int32 or int64"),
        ({"apply_router_weight_on_input": True}, r"topk_ids must be \[M, 1\] with apply_router_weight_on_input"),
        ({"act_scale": 3}, "act_scale must be a tensor or None, got 3"),
    ],
)
def test_experts_name_what_is_wrong(change, message):
    given = example(ops.fused_experts) | change
    with pytest.raises(ValueError, match=f"fused_experts: {message}"):
        ops.fused_experts.explain(**given, arch="gfx950")


# Memory


@pytest.mark.parametrize("the_op", WITH_RESIDUAL, ids=lambda o: o.name)
def test_rows_of_a_residual_at_no_single_stride_fall_back(the_op):
    given = example(the_op)
    given["input"] = torch.randn(2, 3, 256).bfloat16()
    given["residual"] = torch.randn(2, 5, 256).bfloat16()[:, :3]
    given["weight"] = torch.ones(256).bfloat16()
    explanation = the_op.explain(**given, arch="gfx950")
    assert (
        explanation.source
        == "fallback: the kernels require that residual's rows have one stride and contiguous elements"
    )


@pytest.mark.parametrize("the_op", WITH_RESIDUAL, ids=lambda o: o.name)
def test_rows_of_a_residual_must_not_overlap(the_op):
    given = example(the_op)
    rows, hidden = given["input"].shape
    for strides in ((0, 1), (hidden - 1, 1), (1, 0)):
        storage = torch.zeros(rows * hidden, dtype=given["input"].dtype)
        given["residual"] = storage.as_strided((rows, hidden), strides)
        with pytest.raises(ValueError, match=f"{the_op.name}: residual must be without overlapping elements"):
            the_op(**given)
    assert tensors.overlaps_itself(torch.zeros(9).as_strided((2, 3), (2, 1))) and not tensors.overlaps_itself(
        torch.zeros(3, 1)
    )
    assert not tensors.overlaps_itself(torch.zeros(4, 6, 8).permute(2, 0, 1)[:, ::2])


@pytest.mark.parametrize("the_op", WITH_RESIDUAL, ids=lambda o: o.name)
def test_a_residual_has_memory_of_its_own(the_op):
    """Nothing is written before the error, in calls of one signature of which some overlap.

    Halves of one buffer's rows, and rows after the input's, do not overlap.
    """
    given = example(the_op)
    rows, hidden = 3, 256
    given["weight"] = torch.ones(hidden).bfloat16()
    buffer = torch.randn(4 * rows, 2 * hidden).bfloat16()
    x = buffer[:rows, :hidden]
    apart = (buffer[:rows, hidden:], buffer[rows : 2 * rows, :hidden], buffer[2 * rows : 3 * rows, hidden:])
    overlapping = (x, buffer[:rows, 128 : 128 + hidden], buffer[1 : 1 + rows, :hidden], buffer[:rows, 8 : 8 + hidden])
    for residual in (*apart, *overlapping, *apart):
        given |= {"input": x, "residual": residual}
        before = buffer.clone()
        if any(residual is one for one in apart):
            the_op(**given)
            assert torch.equal(buffer[:rows, :hidden], before[:rows, :hidden])
            assert not torch.equal(buffer, before)
            continue
        with pytest.raises(
            ValueError, match=f"{the_op.name}: residual must have memory of its own, got some of input's"
        ):
            the_op(**given)
        assert torch.equal(buffer, before) and the_op.run_kernels(*given.values()) is None


def side_by_side(one: torch.Tensor, two: torch.Tensor, distance: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors, unwritten, with two's first element `distance` bytes after one's."""
    first = max(-distance, 0)
    length = max(first + span(one), first + distance + span(two))
    memory = torch.zeros(length + 16, dtype=torch.uint8)

    def at(tensor: torch.Tensor, start: int) -> torch.Tensor:
        part = memory[start : start + span(tensor)].view(tensor.dtype)
        return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())

    return at(one, first), at(two, first + distance)


def span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first through its last element."""
    return tensors.extent(tensor) * tensor.element_size()


APART = [the_op for the_op in OPS if the_op.mutates or the_op.writes]


@pytest.mark.parametrize("the_op", APART, ids=lambda o: o.name)
def test_neighbors_in_memory_are_no_overlap(the_op):
    """An argument that an op writes may touch any other, before it and behind it, but share no element with it."""
    left, tried = set(), set()
    for case in the_op.cases():
        made = [
            tensors.canonical(v) if isinstance(v, torch.Tensor) else v
            for v in the_op.Arguments(*case.make("cpu", generator_of(case.name), torch.float8_e4m3fnuz))
        ]
        for updated, other, *_ in arguments.apart(the_op, the_op.Arguments(*made)):
            one, two = made[other], made[updated]
            left.add((updated, other))
            size = max(one.element_size(), two.element_size())
            if (updated, other) in tried or span(one) % size or span(two) % size or span(one) + span(two) > 2**24:
                continue
            tried.add((updated, other))
            for distance in (span(one), -span(two)):
                given = dict(zip((other, updated), side_by_side(one, two, distance)))
                the_op._execution(tuple(given.get(place, v) for place, v in enumerate(made)))
                closer = distance - size if distance > 0 else distance + size
                given = dict(zip((other, updated), side_by_side(one, two, closer)))
                with pytest.raises(ValueError, match="memory of its own"):
                    the_op._execution(tuple(given.get(place, v) for place, v in enumerate(made)))
    assert left == tried


# Gradients


@pytest.mark.parametrize(
    "the_op", [o for o in OPS if o not in (ops.dequantize_int4, ops.stream_memory)], ids=lambda o: o.name
)
def test_no_gradient_is_lost_silently(the_op):
    """Neither on CPU, where the reference could have a gradient, nor through kernels.

    Integers have none.
    """
    given = example(the_op)
    name, value = next((n, v) for n, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
    wanting = given | {name: value.detach().requires_grad_()}
    with pytest.raises(ValueError, match=f"{the_op.name}: {name} must not require grad in grad mode"):
        the_op(**wanting)
    assert the_op.run_kernels(*wanting.values()) is None
    with torch.no_grad():
        the_op(**wanting)


# Valid arguments are the same for reference and kernels


@pytest.mark.parametrize("arch_name", AMD)
@pytest.mark.parametrize("the_op", [o for o in OPS if "scale_ub" in o.Arguments._fields], ids=lambda o: o.name)
def test_a_bound_that_is_nan_bounds_nothing(the_op, arch_name):
    emulator = Emulator(arch_name)
    given = example(the_op, "scale_ub", emulator.arch.fp8_dtype)
    given["scale_ub"] = torch.tensor([math.nan])
    with launch.executor(emulator):
        run_and_check(the_op, tuple(given.values()), "cpu")


@pytest.mark.parametrize("arch_name", ["gfx942", pytest.param("gfx950", marks=full)])
@pytest.mark.parametrize("case", ["block-map", "bf16", "bf16-m70"])
def test_the_weight_of_no_expert_counts_nothing(case, arch_name):
    """The weight may have any value."""
    emulator = Emulator(arch_name)
    given = example(ops.fused_experts, case, emulator.arch.fp8_dtype)
    weights, ids = given["topk_weights"].clone(), given["topk_ids"].clone()
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        weights[row, 0], ids[row, 0] = value, (-1, 10**6, -5)[row]
    given |= {"topk_weights": weights, "topk_ids": ids}
    with launch.executor(emulator):
        run_and_check(ops.fused_experts, tuple(given.values()), "cpu")
