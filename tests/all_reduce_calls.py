"""All-reduce calls and checks of their results, on emulated devices and on GPUs."""

from __future__ import annotations

import torch

from vllm_rocm_ops.collectives import launches, wire
from vllm_rocm_ops.core import correctness

EPSILON = 1e-6


def generator_of(*what) -> torch.Generator:
    """Return a random generator seeded with the call's description."""
    return correctness.generator_of(repr(what))


def arguments(
    op, arch, dtype, rows, hidden, generator, *, has_residual=True, adds_one=False, has_weight=True, has_addend=False
) -> list:
    """Return the arguments after the input, which are equal on all ranks."""
    weight = torch.randn(hidden, generator=generator) * 0.1 + (0.0 if adds_one else 1.0)
    residual = torch.randn(rows, hidden, generator=generator).to(dtype)
    values = {
        "residual": residual if has_residual else None,
        "weight": weight.to(dtype) if has_weight else None,
        "scale": torch.tensor([0.05]),
        "epsilon": EPSILON,
        "quant_dtype": arch.fp8_dtype,
        "group_size": 128,
        "is_scale_transposed": rows > 1,
        "scale_ub": None,
        "one_plus_weight": adds_one,
        "addend": torch.randn(rows, hidden, generator=generator).to(dtype) if has_addend else None,
        "addend_factor": 2.5,
    }
    return [values[name] for name in op.Arguments._fields[1:]] if op else []


def inputs_of(ranks: int, rows: int, hidden: int, dtype: torch.dtype, generator, padding=0) -> list[torch.Tensor]:
    """Return an input for each rank, with `padding` elements between rows."""
    made = (torch.randn(rows, hidden + padding, generator=generator).to(dtype) for _ in range(ranks))
    return [each[:, :hidden] for each in made]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return tensor.contiguous().view(torch.uint8)


def place_of_residual(op) -> int | None:
    """Return the index of the residual among the arguments after the input."""
    return op.Arguments._fields.index("residual") - 1 if op and "residual" in op.Arguments._fields else None


def as_summed(reduce, op, inputs, args) -> tuple[list[torch.Tensor], list]:
    """Return inputs and arguments of which the call's result is plain: with FP8 on the wire, one input, the sum that arrives."""
    if reduce.wire(op, inputs[0], *args) != wire.FP8:
        return inputs, args
    sent = [launches.with_addend(op, (x, *args)) for x in inputs]
    return [wire.fp8_sum([x for x, *_ in sent], reduce.arch.fp8_dtype)], list(sent[0][1:])


def check_results(op, inputs, args, results, residuals) -> None:
    """Check that all ranks have the same bits, and compare the first rank with the reference and float64."""
    for got in results[1:]:
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(results[0], got, strict=True))
    wanted_args, exact_args = [correctness.clone(v) for v in args], [correctness.in_float64(v) for v in args]
    wanted = correctness.as_tuple(launches.reference(op, inputs, *wanted_args))
    exact = correctness.as_tuple(launches.reference(op, [x.double() for x in inputs], *exact_args))
    for number, (ours, reference, oracle) in enumerate(zip(results[0], wanted, exact)):
        correctness.check(f"output {number}", ours, reference, oracle.double(), True, correctness.FLOOR)
    place = place_of_residual(op)
    for residual in residuals if place is not None and args[place] is not None else ():
        assert torch.equal(residual, wanted_args[place])
