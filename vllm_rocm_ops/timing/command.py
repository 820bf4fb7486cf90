"""The command `vllm-rocm-ops predict`. What it runs needs the extra [emulator], and is imported when it does."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from vllm_rocm_ops import explain, model_config
from vllm_rocm_ops.model_layers import LayerCall

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
    meaning = "a code object of whoever, whose kernel is run and timed; see docs/timing.md"
    command.add_argument("--object", type=Path, metavar="FILE", help=meaning)
    command.add_argument("--symbol", help="the kernel, where the object holds several")
    command.add_argument("--grid", default="1", metavar="X[xY[xZ]]", help="blocks")
    command.add_argument("--block", default="256", metavar="X[xY[xZ]]", help="threads of a block")
    command.add_argument("--lds", type=int, default=0, metavar="BYTES", help="of LDS beyond the kernel's own")
    meaning = 'the argument buffer: hex digits, with a buffer\'s bytes as its pointer, or JSON such as ["buffer:4096", "u32:7"]'
    command.add_argument("--args", default="", metavar="HEX|JSON", dest="kernel_args", help=meaning)
    meaning = "a file like validation_points_gfx942.csv, printed with the columns predicted_us and why; needs --git"
    command.add_argument("--points", type=Path, metavar="CSV", help=meaning)
    meaning = "a bare git directory of ROCm/aiter, which has the code objects by their blobs"
    command.add_argument("--git", type=Path, metavar="DIR", help=meaning)
    command.add_argument("--limit", type=float, default=60, metavar="SECONDS", help="of a row of --points")
    command.add_argument("--jobs", type=int, default=1, metavar="N", help="processes for the rows of --points")
    meaning = "a folder that keeps what rows of --points got, for the next time that the same model is asked"
    command.add_argument("--cache", type=Path, metavar="FOLDER", help=meaning)
    meaning = (
        "compare the model with the published microbenchmarks in this folder, and show its calibration; without a folder, measure "
        "calls on this machine's AMD GPU, and refit the model to them in a file of the user"
    )
    command.add_argument("--check", type=Path, nargs="?", const=True, metavar="FOLDER", help=meaning)


def check_arguments(arguments: argparse.Namespace, error: Callable[[str], None]) -> None:
    """Calls `error` unless one thing is asked for."""
    if sum(map(bool, (arguments.op, arguments.model, arguments.object, arguments.points, arguments.check))) != 1:
        error("predict takes one of an op, --model, --object, --points and --check")
    if (arguments.points is None) != (arguments.git is None) or not arguments.limit > 0 or arguments.jobs < 1:
        error("predict takes --points and --git together, and a positive --limit and --jobs")
    if not 0 < arguments.context <= MOST_CONTEXT:
        error(f"predict takes a --context of 1 to {MOST_CONTEXT} keys, got {arguments.context}")


def run(arguments: argparse.Namespace, calls: Callable[[], list[LayerCall]], ops) -> int:
    """Prints what was asked for. `calls()` are the calls of the model, `ops` has the ops by name. Raises ValueError."""
    machine = machines.named(arguments.arch)
    from . import foreign, predict, refit, validation

    if arguments.points:
        given = (
            arguments.points,
            arguments.git,
            sys.stdout,
            sys.stderr,
            arguments.limit,
            arguments.jobs,
            arguments.cache,
        )
        validation.run(*given)
        return 0
    machine = refit.of_user(machine)
    if arguments.check is True:  # no folder
        lines = refit.lines(*refit.machine_here())
    elif arguments.object:
        names = ("object", "symbol", "grid", "block", "kernel_args", "lds")
        lines = foreign.lines(machine, *(getattr(arguments, name) for name in names))
    elif arguments.check:
        lines = predict.check_lines(arguments.check)
    else:
        lines = _asked(arguments, machine, arguments.context, calls, ops)
    for line in itertools.chain(() if arguments.check else _refitted(machine), lines):
        print(line, flush=True)
    return 0


def explained(arguments: argparse.Namespace, calls: Callable[[], list[LayerCall]], ops) -> Iterator[str]:
    """Lines about what explain was asked for, as `run` prints them. Raises ValueError, and ImportError without the extra."""
    machine = machines.named(arguments.predict)
    from . import refit

    machine = refit.of_user(machine)
    return itertools.chain(_refitted(machine), _asked(arguments, machine, CONTEXT, calls, ops))


def _refitted(machine: machines.Machine) -> Iterator[str]:
    from . import refit

    if refit.file_of(machine).is_file():
        yield f"constants refitted by --check, of {refit.file_of(machine)}"


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
