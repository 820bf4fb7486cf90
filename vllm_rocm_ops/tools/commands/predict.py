"""Predict how long a call, a model's step or a list of shapes takes on a GPU that is not here; needs the extra [emulator]."""

from __future__ import annotations

import argparse
import itertools

import torch

from vllm_rocm_ops import ops
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import CONTEXT, machines
from vllm_rocm_ops.tools import explain, options
from vllm_rocm_ops.tools.bench import lists

MOST_CONTEXT = 1 << 20  # keys of a request


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    meaning = f"an op, as explain takes it, or a list of shapes, one of: {', '.join(lists.LISTS)}"
    parser.add_argument("what", nargs="?", choices=[*options.op_names(), *lists.LISTS], metavar="op", help=meaning)
    options.add_model(parser, options.OF_LISTS, options.TP_OF_LISTS)
    products = f"one of {', '.join(machines.MACHINES)}; error bands are known of {machines.COMPARED} alone"
    parser.add_argument("--arch", default=machines.COMPARED, metavar="PRODUCT", help=products)
    options.add_call(parser)
    meaning = f"keys of each request, for attention; default: {CONTEXT}"
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
        raise ValueError("predict takes an op, a list of shapes or --model")
    if not 0 < context <= MOST_CONTEXT:
        raise ValueError(f"predict takes a --context of 1 to {MOST_CONTEXT} keys, got {context}")
    machine = machines.named(arch)
    from vllm_rocm_ops.timing import predict, refit, step, step_report

    machine = refit.of_user(machine)
    if model:
        options.calls_of(model, tp, ep)  # names the model in what it raises
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
