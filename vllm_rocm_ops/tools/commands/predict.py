"""Predict the time of a call or a list of shapes on an AMD GPU, without one (needs the extra [emulator])."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.tools import explain, options
from vllm_rocm_ops.tools.bench import lists
from vllm_rocm_ops.tools.bench.shapes import Shape


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    meaning = f"op name, as in explain, or a list of shapes: {', '.join(lists.LISTS)}"
    parser.add_argument("what", choices=[*options.op_names(), *lists.LISTS], metavar="op", help=meaning)
    options.add_sizes(parser, options.OF_LISTS, options.TP_OF_LISTS)
    options.add_machine(parser)
    options.add_call(parser)


def run(
    what: str,
    tp: int | None,
    batch: tuple[int, ...] | None,
    arch: str,
    first: tuple[tuple[int, ...], torch.dtype | None],
    given: list[str],
    context: int,
) -> int:
    """Print the prediction. Raises ValueError, and ImportError without the extra."""
    machine = machines.named(arch)
    from vllm_rocm_ops.timing import predict

    if what in lists.LISTS:
        lines = shape_lines(lists.of_list(what, tp, batch, machine.arch), machine)
    else:
        op = getattr(ops, what)
        arguments = options.parse_arguments_of(op, given)
        lines = predict.call_lines(op, explain.example(op, machine.arch, *first, **arguments), machine, context)
    for line in lines:
        print(line, flush=True)
    return 0


def shape_lines(shapes: Iterable[Shape], machine: Machine) -> Iterator[str]:
    """Format the prediction of each shape; attention needs a context length, so it is left to calls."""
    from vllm_rocm_ops.timing.predict import band, predict_call

    yield f"{machine.name}: predicted times in us, not measured"
    for shape in shapes:
        name, op = f"{shape.op.name} {shape.case.name}", shape.op
        if op in model_layers.ATTENTION:
            yield f"  {name}: see vllm-rocm-ops predict {op.name} --context"
            continue
        made = shape.case.make("meta", torch.Generator(), machine.arch.fp8_dtype)
        try:
            kernels = predict_call(op, op.Arguments(*shape.layout(*made))._asdict(), machine)
        except ValueError as error:
            yield f"  {name}: {error}"
        else:
            us = sum(kernel.prediction.us for kernel in kernels)
            yield f"  {name}: predicted {us:.1f} us, band {band(op, machine.name)}"
