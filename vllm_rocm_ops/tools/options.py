"""Options that several commands have, and what their values stand for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.tools.bench import lists, shapes

MOST_TOKENS = 2**24  # of a step
OF_LISTS = "1, or the list's own"  # tokens of a step
TP_OF_LISTS = f", {shapes.TP} with the lists linear and linear-shuffled"


def op_names() -> list[str]:
    return [op.name for op in op_module.registered()]


def parse_batches(text: str) -> tuple[int, ...]:
    """'1,8,64' -> (1, 8, 64)."""
    try:
        batches = tuple(int(size) for size in text.split(","))
    except ValueError:
        batches = ()
    if not batches or not 1 <= min(batches) <= max(batches) <= MOST_TOKENS:
        wanted = f"positive numbers with commas between them, at most {MOST_TOKENS}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
    return batches


def add_model(parser: argparse.ArgumentParser, batches: str = "1", tp: str = "", required: bool = False) -> None:
    """Add a model, the GPUs that it is divided over, and the tokens of its steps."""
    add, shipped = parser.add_argument, ", ".join(model_config.shipped())
    add("--model", required=required, help=f"a config.json, a folder with one, or of: {shipped}")
    add("--tp", type=int, metavar="GPUS", help=f"GPUs that each layer is divided over; default: 1{tp}")
    ep = "routed experts stay whole and are divided over the GPUs of --tp, or over this number of GPUs"
    add("--ep", type=int, nargs="?", const=0, metavar="GPUS", help=ep)
    add("--batch", type=parse_batches, metavar="N,N,...", help=f"tokens of a step; default: {batches}")


def add_call(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a call of an op."""
    first = "of the first tensor: sizes, and a dtype before them, e.g. 1x16384 or fp16[1x16384]"
    default = (), None
    parser.add_argument("--shape", type=explain.parse_first, default=default, dest="first", metavar="SHAPE", help=first)
    others = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    parser.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=others)


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add what is timed or checked: the ops' test cases, a list of shapes or a model's calls."""
    meaning = f"in place of the ops' test cases, a list of shapes, one of: {', '.join(lists.LISTS)}"
    parser.add_argument("shapes", nargs="?", choices=lists.LISTS, metavar="list", help=meaning)
    parser.add_argument("--op", nargs="+", metavar="PATTERN", help="ops of such names, e.g. 'rms_norm*'")
    meaning = "cases of such names, e.g. 'm16' 'deepseek-v3-ep8 *'"
    parser.add_argument("--case", nargs="+", metavar="PATTERN", help=meaning)
    add_model(parser, OF_LISTS, TP_OF_LISTS)


def calls_of(model: str, tp: int | None, ep: int | None) -> list[LayerCall]:
    """The calls of a model. Raises ValueError, which names the model."""
    config = model_config.read(model)
    try:
        return model_layers.calls(config, 1 if tp is None else tp, ep)
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from None


def shapes_of(
    name: str | None,
    op: Sequence[str] | None,
    case: Sequence[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
) -> list[shapes.Shape]:
    """The shapes of a list, of a model's calls or of the ops' cases whose names match. Raises ValueError."""
    if name and model:
        raise ValueError(f"either the list {name} or --model {model}")
    if name:
        found = lists.of_list(name, tp, batch)
    elif model:
        calls = ((call, size) for call in calls_of(model, tp, ep) for size in batch or (1,))
        found = (shapes.Shape(call.op, call.case(size)) for call, size in calls)
    else:
        found = (shapes.Shape(op, case) for op in op_module.registered() for case in op.cases())
    return shapes.select(found, op or ["*"], case or ["*"])
