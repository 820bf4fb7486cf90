"""Define the options that commands share, and resolve their values to calls and shapes."""

from __future__ import annotations

import argparse
import json
import math
import re
import typing
from collections.abc import Iterable, Sequence

import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.arch import Arch
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.timing import CONTEXT, machines
from vllm_rocm_ops.tools.bench import lists
from vllm_rocm_ops.tools.bench import shapes as bench_shapes

MAX_TOKENS = 2**24  # per step
MAX_CONTEXT = 1 << 20  # keys per request
OF_LISTS = "1, or the list's sizes"  # tokens per step
TP_OF_LISTS = f", {bench_shapes.TP} for the lists linear and linear-shuffled"

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
MAX_ELEMENTS = 2**60  # per tensor
MAX_NUMBER = 2**31
KINDS = {
    torch.Tensor: "a tensor, e.g. bf16[8x7168]",
    torch.dtype: "a dtype, e.g. e4m3fn",
    float: "a number",
    int: "an integer",
    bool: "true or false",
    str: "a quoted string",
    type(None): "none",
}


def op_names() -> list[str]:
    """Return the names of all ops."""
    return [op.name for op in op_module.registered()]


def parse_batches(text: str) -> tuple[int, ...]:
    """Parse '1,8,64' to (1, 8, 64)."""
    try:
        batches = tuple(int(size) for size in text.split(","))
    except ValueError:
        batches = ()
    if not batches or not 1 <= min(batches) <= max(batches) <= MAX_TOKENS:
        wanted = f"comma-separated positive integers up to {MAX_TOKENS}"
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
    return batches


def add_model(parser: argparse.ArgumentParser, batches: str = "1", tp: str = "", required: bool = False) -> None:
    """Add the options for a model, its parallelism and its batch sizes."""
    shipped = f"path of a config.json or its folder, or a shipped model: {', '.join(model_config.shipped())}"
    parser.add_argument("--model", required=required, help=shipped)
    add_sizes(parser, batches, tp)
    ep = "expert parallel size, in GPUs: each holds whole routed experts (without a number: the --tp size)"
    parser.add_argument("--ep", type=int, nargs="?", const=0, metavar="GPUS", help=ep)


def add_sizes(parser: argparse.ArgumentParser, batches: str, tp: str) -> None:
    """Add the options for tensor parallelism and batch sizes."""
    parser.add_argument("--tp", type=int, metavar="GPUS", help=f"tensor parallel size, in GPUs (default: 1{tp})")
    meaning = f"batch sizes, in tokens per step (default: {batches})"
    parser.add_argument("--batch", type=parse_batches, metavar="N,N,...", help=meaning)


def parse_context(text: str) -> int:
    """Parse a number of keys per request."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_CONTEXT:
        raise argparse.ArgumentTypeError(f"must be 1 to {MAX_CONTEXT} keys, got {text}")
    return int(text)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options for the GPU of a prediction, and for the keys of its attention."""
    known, compared = ", ".join(machines.MACHINES), machines.COMPARED
    meaning = f"{known}; error bands for {compared} only (default: {compared})"
    parser.add_argument("--arch", default=compared, metavar="PRODUCT", help=meaning)
    meaning = f"context length of attention, in keys per request (default: {CONTEXT})"
    parser.add_argument("--context", type=parse_context, default=CONTEXT, metavar="KEYS", help=meaning)


def add_call(parser: argparse.ArgumentParser) -> None:
    """Add the options for the arguments of a call."""
    first = "shape of the first tensor, optionally with its dtype, e.g. 1x16384 or fp16[1x16384]"
    default = (), None
    parser.add_argument("--shape", type=parse_first, default=default, dest="first", metavar="SHAPE", help=first)
    others = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    parser.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=others)


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add the options that select cases: the ops' test cases, a list of shapes or a model's calls."""
    meaning = f"list of shapes (default: the ops' test cases), one of: {', '.join(lists.LISTS)}"
    parser.add_argument("shapes", nargs="?", choices=lists.LISTS, metavar="list", help=meaning)
    parser.add_argument("--op", nargs="+", metavar="PATTERN", help="op name patterns, e.g. 'rms_norm*'")
    meaning = "case name patterns, e.g. 'm16' 'deepseek-v3-ep8 *'"
    parser.add_argument("--case", nargs="+", metavar="PATTERN", help=meaning)
    add_model(parser, OF_LISTS, TP_OF_LISTS)


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse '8x7168' to (8, 7168)."""
    sizes = [int(size) if re.fullmatch(r"[0-9]{1,18}", size) else -1 for size in text.split("x")]
    if min(sizes) < 0 or math.prod(filter(None, sizes)) >= MAX_ELEMENTS:
        raise argparse.ArgumentTypeError(f"must be sizes joined by x, e.g. 8x7168, got {text}")
    return tuple(sizes)


def parse_first(text: str) -> tuple[tuple[int, ...], torch.dtype | None]:
    """Parse '8x7168' to ((8, 7168), None), and 'fp16[8x7168]' to ((8, 7168), torch.float16)."""
    dtype, bracket, sizes = text.partition("[")
    if bracket and dtype in DTYPES and sizes.endswith("]"):
        return parse_shape(sizes[:-1]), DTYPES[dtype]
    return parse_shape(text), None


def parse_argument(text: str) -> tuple[str, object]:
    """Parse 'name=value'; a value is bf16[8x7168] (a tensor), e4m3fn (a dtype), none, true, false or a number."""
    name, equals, value = text.partition("=")
    tensor = re.fullmatch(r"(\w+)\[([\dx]+)\]", value)
    if not equals:
        raise ValueError(f"{text} must be name=value")
    if tensor and tensor[1] in DTYPES:
        try:
            return name, torch.empty(parse_shape(tensor[2]), dtype=DTYPES[tensor[1]], device="meta")
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: shape {error}") from None
    if value in DTYPES:
        return name, DTYPES[value]
    constants = {"none": None, "true": True, "false": False}
    try:
        return name, constants[value] if value in constants else json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} must be a number, true, false, none, a dtype or dtype[shape], got {value}") from None


def parse_arguments_of(op: Op, texts: Iterable[str]) -> dict[str, object]:
    """Parse an op's arguments by name. Raises ValueError for an unknown name or a wrong type."""
    given = {}
    hints = typing.get_type_hints(op.reference)
    for text in texts:
        name, value = parse_argument(text)
        if name not in op.Arguments._fields:
            raise ValueError(f"{op.name} has no argument {name}; arguments: {', '.join(op.Arguments._fields)}")
        kinds = typing.get_args(hints[name]) or (hints[name],)
        taken = (*kinds, int) if float in kinds else kinds
        if type(value) not in taken or (type(value) is int and abs(value) >= MAX_NUMBER):
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise ValueError(f"{op.name}: {name} must be {wanted}, got {text.partition('=')[2]}")
        given[name] = value
    return given


def calls_of(model: str, tp: int | None, ep: int | None, arch: Arch | None = None) -> list[LayerCall]:
    """Return the calls of a model's step. Raises ValueError, which names the model."""
    config = model_config.read(model)
    try:
        return model_layers.calls(config, 1 if tp is None else tp, ep, model_layers.built_for(arch))
    except ValueError as error:
        raise ValueError(f"--model {model}: {error}") from None


def shapes_of(
    shapes: str | None,
    op: Sequence[str] | None,
    case: Sequence[str] | None,
    model: str | None,
    tp: int | None,
    ep: int | None,
    batch: tuple[int, ...] | None,
    arch: Arch | None = None,
) -> list[bench_shapes.Shape]:
    """Return the shapes of a list, of a model's calls or of the ops' cases, filtered by name. Raises ValueError.

    vLLM builds models for `arch`, by default this machine's.
    """
    if arch is None and torch.cuda.is_available():
        arch = archs.of_device(0)
    if shapes and model:
        raise ValueError(f"give either a list or --model, got {shapes} and --model {model}")
    if shapes:
        selected = lists.of_list(shapes, tp, batch, arch)
    elif model:
        calls = ((call, size) for call in calls_of(model, tp, ep, arch) for size in batch or (1,))
        selected = (bench_shapes.Shape(call.op, call.case(size)) for call, size in calls)
    else:
        selected = (bench_shapes.Shape(op, case) for op in op_module.registered() for case in op.cases())
    return bench_shapes.select(selected, op or ["*"], case or ["*"])
