"""The command `vllm-rocm-ops predict`. What it runs needs the extra [emulator], and is imported when it does."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.tools import explain

from . import CONTEXT, machines

MOST_CONTEXT = 1 << 20  # keys of a request
PRODUCT = machines.COMPARED


def add_command(commands, names: Sequence[str], add_model: Callable) -> None:
    """Adds the command to a parser's commands. `names` are those of ops; add_model(command, required, batches) adds the arguments of a
    model."""
    meaning = "predict how long a call, or a model's calls, take on a GPU that is not here; needs the extra [emulator]"
    command = commands.add_parser("predict", help=meaning)
    command.add_argument("op", nargs="?", choices=names, metavar="op", help="an op, as explain takes it")
    add_model(command, False, "1")
    products = f"one of {', '.join(machines.MACHINES)}; error bands are known of {PRODUCT} alone"
    command.add_argument("--arch", "--device", default=PRODUCT, metavar="PRODUCT", help=products)
    command.add_argument("--shape", type=explain.parse_shape, default=(), help="of the first tensor, e.g. 1x16384")
    command.add_argument("--dtype", choices=list(explain.DTYPES), help="of the first tensor")
    others = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    command.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=others)
    meaning = f"keys of each request, for attention; default: {CONTEXT}"
    command.add_argument("--context", type=int, default=CONTEXT, metavar="KEYS", help=meaning)
    meaning = "measure calls on this machine's AMD GPU, and refit the model to them in a file of the user"
    command.add_argument("--check", action="store_true", help=meaning)


def check_arguments(arguments: argparse.Namespace, error: Callable[[str], None]) -> None:
    """Calls `error` unless one thing is asked for."""
    if sum(map(bool, (arguments.op, arguments.model, arguments.check))) != 1:
        error("predict takes one of an op, --model and --check")
    if not 0 < arguments.context <= MOST_CONTEXT:
        error(f"predict takes a --context of 1 to {MOST_CONTEXT} keys, got {arguments.context}")


def run(arguments: argparse.Namespace, calls: Callable[[], list[LayerCall]], ops) -> int:
    """Prints what was asked for. `calls()` are the calls of the model, `ops` has the ops by name. Raises ValueError."""
    machine = machines.named(arguments.arch)
    from . import refit

    if arguments.check:
        found = refit.lines(*refit.machine_here())
    else:
        machine = refit.of_user(machine)
        found = itertools.chain(refit.said(machine), _asked(arguments, machine, arguments.context, calls, ops))
    for line in found:
        print(line, flush=True)
    return 0


def explained(arguments: argparse.Namespace, calls: Callable[[], list[LayerCall]], ops) -> Iterator[str]:
    """Lines about what explain was asked for, as `run` prints them. Raises ValueError, and ImportError without the extra."""
    machine = machines.named(arguments.predict)
    from . import refit

    machine = refit.of_user(machine)
    return itertools.chain(refit.said(machine), _asked(arguments, machine, CONTEXT, calls, ops))


def _asked(
    arguments: argparse.Namespace, machine: machines.Machine, context: int, calls: Callable[[], list[LayerCall]], ops
) -> Iterator[str]:
    """Lines about a model's calls or a call of an op."""
    from . import predict, step, step_report

    if arguments.model:
        calls()  # names the model in what it raises
        given = (
            model_config.read(arguments.model),
            arguments.tp or 1,
            arguments.ep,
            arguments.batch or (1,),
            machine,
            context,
        )
        return step_report.lines(*given, step.live_time(machine, context))
    op = getattr(ops, arguments.op)
    given = explain.parse_arguments_of(op, arguments.given)
    dtype = explain.DTYPES.get(arguments.dtype)
    return predict.call_lines(
        op, explain.example(op, str(machine.arch), arguments.shape, dtype, **given), machine, context
    )
