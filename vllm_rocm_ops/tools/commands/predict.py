"""Predict the time of a call, a model's decode step or a list of shapes on an AMD GPU, without one (needs the extra [emulator])."""

from __future__ import annotations

import argparse
import itertools

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import CONTEXT, machines
from vllm_rocm_ops.tools import explain, options
from vllm_rocm_ops.tools.bench import lists

MAX_CONTEXT = 1 << 20  # keys per request


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    meaning = f"op name, as in explain, or a list of shapes: {', '.join(lists.LISTS)}"
    parser.add_argument("what", nargs="?", choices=[*options.op_names(), *lists.LISTS], metavar="op", help=meaning)
    options.add_model(parser, options.OF_LISTS, options.TP_OF_LISTS)
    products = (
        f"{', '.join(machines.MACHINES)}; error bands for {machines.COMPARED} only (default: {machines.COMPARED})"
    )
    parser.add_argument("--arch", default=machines.COMPARED, metavar="PRODUCT", help=products)
    options.add_call(parser)
    meaning = f"context length of attention, in keys per request (default: {CONTEXT})"
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="KEYS", help=meaning)


def run(
    what: str | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    arch: str,
    first: tuple[tuple[int, ...], torch.dtype | None],
    given: list[str],
    context: int,
) -> int:
    """Print the prediction. Raises ValueError, and ImportError without the extra."""
    if (what is None) == (model is None):
        raise ValueError("predict needs either an op, a list of shapes or --model")
    if not 0 < context <= MAX_CONTEXT:
        raise ValueError(f"--context must be 1 to {MAX_CONTEXT} keys, got {context}")
    machine = machines.named(arch)
    from vllm_rocm_ops.timing import predict, refit, step, step_report

    machine = refit.of_user(machine)
    if model:
        options.calls_of(model, tp, ep)  # its errors name the model
        asked = model_config.read(model), tp or 1, ep, batch or (1,), machine, context
        found = step_report.lines(*asked, step.live_time(machine, context))
    elif what in lists.LISTS:
        found = predict.shape_lines(lists.of_list(what, tp, batch), machine)
    else:
        op = getattr(ops, what)
        arguments = explain.parse_arguments_of(op, given)
        found = predict.call_lines(op, explain.example(op, str(machine.arch), *first, **arguments), machine, context)
    for line in itertools.chain(refit.said(machine), found):
        print(line, flush=True)
    return 0
