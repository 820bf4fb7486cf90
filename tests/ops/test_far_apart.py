"""Test every registered op with arguments so far apart that offsets need more than 32 bits.

Each dimension of each argument is lengthened, one of an argument at a time, as far as the op's rules allow. A dimension that no case can
lengthen needs its own test in test_large_tensors.py, which `OWN` names.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator

import marks
import pytest
import test_large_tensors as large
import torch
from marks import cover

from vllm_rocm_ops import ops
from vllm_rocm_ops.core import archs, op, tensors
from vllm_rocm_ops.core.correctness import generator_of

STEPS = sorted((2**power + of for power in range(20, 35) for of in (4096, -4096)), reverse=True)  # bytes
FAR, FARTHEST = 2**31 - 2**26, 2**35  # bytes from an argument's first to its last; 64 rows below 32 MB reach the former
IN_ALL = 2**36  # bytes that a call's arguments span, to fit on a GPU
COLUMN, ROW = "a column, by the contract", "one row, by the contract"
OWN = {
    (ops.router_gemm_topk, "x"): "test_last_group_of_long_rows",
    (ops.gemm, "a"): "test_rows_and_columns_of_any_product",
    (ops.gemm, "b"): "test_rows_and_columns_of_any_product",
    (ops.gemm, "bias"): COLUMN,
    (ops.scaled_mm, "scale_a"): COLUMN,
    (ops.scaled_mm, "scale_b"): COLUMN,
    (ops.scaled_mm_silu_and_mul_quant, "scale_a"): COLUMN,
    (ops.scaled_mm_silu_and_mul_quant, "scale_b"): COLUMN,
    **{(the_op, "expert_gate"): ROW for the_op in large.ROWS if "expert_gate" in the_op.Arguments._fields},
    (ops.stream_memory, "words"): "test_last_of_a_long_stream",
    **dict.fromkeys(((the_op, "x") for the_op in (ops.mx_gemm, ops.w4a16_gemm)), "16 rows below 32 MB on NVIDIA"),
}
"""Arguments that are not lengthened here, with the test that lengthens them or what bounds them."""

HALVES = 2**32  # 2^31 elements of 16 bits
BOUNDS = {
    **{the_op: {("input", 1): HALVES} for the_op in large.HEADS},
    **{the_op: {("residual", 0): HALVES} for the_op in large.ROWS if "addend" in the_op.Arguments._fields},
    **{
        the_op: {("input", 1): HALVES, ("residual", 0): HALVES}
        for the_op in large.HEADS
        if "addend" in the_op.Arguments._fields
    },
    **{the_op: {("gate", 1): 2**31} for the_op in large.ROWS if "gate" in the_op.Arguments._fields},
    ops.block_scaled_mm: {("a", 0): 2**25, ("b", 0): 2**25, ("scale_b", 0): 2**33},  # 2^31 scales
    ops.flash_attention: {(name, dimension): 2**25 for name in "kv" for dimension in (0, 1, 2)},  # 2^24 elements
    ops.mx_gemm: {("x", 0): 2**25, ("weight", 0): 2**24, ("scale", 0): 2**24},
    ops.mxfp8_scaled_mm: {(name, 0): 2**24 for name in ("a", "b", "scale_a", "scale_b")},
    ops.router_gemm_topk: {("x", 0): 2**25, ("weight", 0): 2**25},
    ops.scaled_mm: {("a", 0): 2**25, ("b", 1): 2**25},
    ops.scaled_mm_silu_and_mul_quant: {("a", 0): 2**25},
    ops.unquantized_gemm: {("x", 0): 2**25, ("weight", 0): 2**25},
    ops.w4a16_gemm: {("x", 0): 2**25, ("weight", 0): 2**28, ("scale", 0): 2**30},  # 2 GB of 8 and 2 rows
}
"""Strides in bytes that kernels do not take, in a dimension of an argument; others are bound by what they span."""

Dimension = tuple[str, int, int]
"""An argument, its number of dimensions, and one of these."""


def spread_of(x: torch.Tensor, dimension: int, step: int) -> tuple[int, ...]:
    """Return the byte strides of each dimension, with `step` for one."""
    steps = [stride * x.element_size() for stride in x.stride()]
    steps[dimension] = step
    return tuple(steps)


def order_of(x: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's layout: its dimensions, outermost first."""
    return tuple(sorted(range(x.dim()), key=lambda dimension: -x.stride(dimension)))


def reach(x: torch.Tensor, steps: tuple[int, ...]) -> int:
    return large.reach(x.shape, [step // x.element_size() for step in steps], x.element_size())


def far_apart(x: torch.Tensor, steps: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without values at these byte strides."""
    strides = [step // x.element_size() for step in steps]
    return tensors.canonical(torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta"))


def kernels(the_op: op.Op, a, arch) -> dict[frozenset[str], object]:
    """Return one accepted configuration for each set of kernels, by their names, of the first of each class."""
    if not all(holds for *_, holds in the_op.contract(a)) or not all(
        holds for _, holds in the_op.can_implement(a, arch)
    ):
        return {}
    found, outputs = {}, the_op.allocate(a)
    for config in {type(config): config for config in the_op.configs(a, arch)}.values():
        found.setdefault(frozenset(kind(l.symbol) for l in the_op.plan(config, outputs, a, arch)), config)
    return found


def kind(symbol: str) -> str:
    """Return what instances for other dtypes and sizes have in common."""
    return re.sub(r"bf16|fp16|fp32|fp8|\d+", "", symbol)


def edges(outcome: Callable[[int], object], first: int, last: int) -> Iterator[int]:
    """Yield the first place of each run of equal outcomes: no two runs are of one outcome."""
    yield first
    while first < last and outcome(first) != outcome(last):
        low, high = first, last
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if outcome(middle) == outcome(first) else (low, middle)
        yield high
        first = high


@dataclasses.dataclass(frozen=True)
class Longest:
    """The longest byte strides in one dimension at which a set of kernels runs.

    `bound` is the power of two above them if other kernels, or none, run there. `rules` are what the next longer strides
    then break.
    """

    steps: tuple[int, ...]
    bound: int
    rules: frozenset[str]


def longest(the_op: op.Op, a, name: str, dimension: int, arch) -> list[Longest]:
    """Return the longest strides for each set of kernels, in one dimension of an argument."""
    x = getattr(a, name)
    own = x.stride(dimension) * x.element_size()
    steps = [spread_of(x, dimension, step) for step in STEPS if step > own]
    steps = [step for step in steps if reach(x, step) < FARTHEST]

    def further(place: int):
        return a._replace(**{name: far_apart(x, steps[place])})

    @functools.cache
    def outcome(place: int) -> frozenset:
        return frozenset(kernels(the_op, further(place), arch))

    found = []
    for place in edges(outcome, 0, len(steps) - 1) if steps else ():
        if outcome(place):
            rules = the_op.can_implement(further(place - 1), arch) if place else ()
            bound = 1 << steps[place][dimension].bit_length() if place else 0
            found.append(Longest(steps[place], bound, frozenset(rule for rule, holds in rules if not holds)))
    return found


@dataclasses.dataclass
class Calls:
    """Calls with lengthened arguments, what each reaches, and what became of each dimension."""

    calls: list[tuple] = dataclasses.field(default_factory=list)
    reached: list[frozenset] = dataclasses.field(default_factory=list)
    bounds: dict[tuple[str, int], set[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))
    became: dict[Dimension, set[str]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))

    def add_case(self, the_op: op.Op, given, arch) -> None:
        """Add calls that each lengthen at most one dimension of each argument."""
        a = the_op.Arguments(*(v.to("meta") if isinstance(v, torch.Tensor) else v for v in given))
        if not kernels(the_op, a, arch):
            return
        left: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for name, x in a._asdict().items():
            for dimension in range(x.dim()) if isinstance(x, torch.Tensor) and x.numel() > 1 else ():
                became = self.became[name, x.dim(), dimension]
                if x.shape[dimension] == 1:
                    became.add("single")
                    continue
                found = longest(the_op, a, name, dimension, arch) if x.stride(dimension) else []
                is_far = any(reach(x, of.steps) > FAR for of in found)
                became |= {"far"} if is_far else found[0].rules if found else {"refused"}
                left.setdefault(name, []).extend((dimension, of.steps) for of in found)
                bounds = {of.bound for of in found if of.bound and not any(" span" in rule for rule in of.rules)}
                self.bounds[name, dimension] |= bounds
        edges_of = {name: [*waiting] for name, waiting in left.items()}
        while any(left.values()):
            apart, call, dimensions, spanned = {}, a, [], 0
            for name, waiting in left.items():
                x = getattr(a, name)
                for place, (dimension, steps) in enumerate(waiting):
                    further, spans = call._replace(**{name: far_apart(x, steps)}), spanned + reach(x, steps)
                    if not apart or (spans < IN_ALL and kernels(the_op, further, arch)):
                        apart[name], call, spanned = steps, further, spans
                        # by default, kernels are told apart where their bounds differ
                        is_any = not marks.FULL and sum(of == dimension for of, _ in edges_of[name]) == 1
                        dimensions.append((name, order_of(x), dimension, is_any))
                        del waiting[place]
                        break
            for ran, config in kernels(the_op, call, arch).items():
                self.calls.append((given, apart, config))
                self.reached.append(frozenset((*of, None if of[3] else ran) for of in dimensions))


@functools.cache
def calls_of(the_op: op.Op, arch) -> Calls:
    found = Calls()
    for case in the_op.cases():
        found.add_case(the_op, the_op.Arguments(*case.make("cpu", generator_of(case.name), arch.fp8_dtype)), arch)
    return found


@pytest.mark.parametrize("arch_name", ["gfx950", pytest.param("gfx942", marks=marks.full)])
@pytest.mark.parametrize("the_op", [*op.registered()], ids=lambda o: o.name)
def test_bounds_of_strides(the_op, arch_name):
    """Just below each, the kernels run; just above it, others do, or none: a bound that moves is an error."""
    calls = calls_of(the_op, archs.named(arch_name))
    found = {at: max(bounds) for at, bounds in calls.bounds.items() if bounds}
    assert found == (BOUNDS.get(the_op, {}) if calls.became else {})


@large.EXECUTORS
@pytest.mark.parametrize("the_op", [*op.registered()], ids=lambda o: o.name)
def test_every_dimension_that_may_be_long(the_op, executor):
    """Each runs at the longest stride that each kernel takes, so a bound that is too wide shows."""
    found = calls_of(the_op, executor[1])
    for (name, dimensions, dimension), became in found.became.items():
        is_bounded = all(re.search("(?<!rows of .)(?<! of .) spans? ", why) for why in became - {"single", "refused"})
        assert "far" in became or became != {"single"} and is_bounded or (the_op, name) in OWN, (
            f"{the_op.name}: dimension {dimension} of {name} with {dimensions} is never over 2 GB long: {became}. "
            "Give it such a case, or a test in test_large_tensors.py"
        )
    assert found.calls or not found.became or the_op is ops.stream_memory
    costs = [1e6 + sum(v.nbytes for v in given if isinstance(v, torch.Tensor)) for given, *_ in found.calls]
    chosen = sorted(cover(found.reached, costs))
    for place in chosen:
        given, steps, config = found.calls[place]
        large.run(the_op, given, steps, executor, [config])


@large.EXECUTORS
@pytest.mark.parametrize("m", [3, 20, 265])
def test_rows_and_columns_of_any_product(m, executor):
    """A weight of over 4 GB is multiplied by the skinny kernels and by the tiled ones, and inputs of over 2 GB, too."""
    n = 20 if m == 265 else 2**32 // large.TILE_FAR + 9
    given = large.gemm_arguments(ops.gemm, m, n, 48, executor[1].fp8_dtype)
    apart = {"a": (large.TILE_FAR, 1)} if m == 265 else {"b": (1, large.TILE_FAR)}
    configs = ops.gemm.configs(ops.gemm.Arguments(*given), executor[1])
    chosen = configs[:1] if m == 3 else {type(c): c for c in configs}.values()
    large.run(ops.gemm, given, apart, executor, chosen)
