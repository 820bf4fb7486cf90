"""The command `vllm-rocm-ops`: what is installed and used here, why a call runs the kernel it runs, and how fast."""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import envs
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.clock import GpuClock
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.timing import command as predict
from vllm_rocm_ops.tools import check, doctor, explain
from vllm_rocm_ops.tools.bench import report, shapes, stream, tune
from vllm_rocm_ops.tools.bench import run as bench
from vllm_rocm_ops.tools.bench.attention import attention
from vllm_rocm_ops.tools.bench.decode_attention import decode_attention
from vllm_rocm_ops.tools.bench.experts import experts
from vllm_rocm_ops.tools.bench.peers import load_vllm, peers
from vllm_rocm_ops.tools.bench.products import products

MOST_TOKENS = 2**24  # of a step
SHOWN = 3  # of the configurations of a sweep; more where they are chosen or wrong
RESULTS = Path("serving_benchmarks", "results")  # in a checkout
LISTS = {
    "rows": shapes.rows,
    "gemm": shapes.gemm,
    "products": products,
    "routing": shapes.routing,
    "moe": experts,
    "attention": attention,
    "decode-attention": decode_attention,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
KINDS = {"rows": "ops"}  # of files of results, where it is not the list's name


def calls_of(arguments: argparse.Namespace) -> list[LayerCall]:
    """The calls of the model that was asked for. Raises ValueError, which names the model."""
    config = model_config.read(arguments.model)
    try:
        return model_layers.calls(config, 1 if arguments.tp is None else arguments.tp, arguments.ep)
    except ValueError as error:
        raise ValueError(f"--model {arguments.model}: {error}") from None


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


def tune_model(arguments: argparse.Namespace) -> None:
    """Finds and keeps the best configurations for a model on this GPU."""
    clock = GpuClock()
    calls = [call for call in calls_of(arguments) if arguments.op in (None, call.op.name)]
    decode, refused = tune.problems([call for call in calls if call.count], arguments.batch or tune.DECODE, clock.arch)
    prefill, more = tune.problems(calls, tune.PREFILL if arguments.prefill else (), clock.arch)
    done = tune.tune(
        [*decode, *prefill],
        clock,
        envs.tables(),
        peers=(lambda op: {}) if arguments.no_peers else peers,
        force=arguments.force,
        on=torch.cuda.get_device_name(),
        log=sys.stderr,
    )
    print(tune.summary(done, refused | more, clock))


def shapes_of(arguments: argparse.Namespace) -> list[shapes.Shape]:
    """The ops' cases, a model's calls or the list of shapes that were asked for. Raises ValueError."""
    given = {"tokens": arguments.batch, "tp": arguments.tp, "hidden": arguments.hidden}
    given |= {"dtype": DTYPES.get(arguments.dtype), "shuffled": arguments.shuffled}
    given = {name: value for name, value in given.items() if value is not None}
    make = LISTS.get(arguments.shapes)
    refused = given.keys() - (inspect.signature(make).parameters if make else ("tokens", "tp"))
    if refused:
        where = f"--shapes {arguments.shapes}" if make else "bench without --shapes"
        raise ValueError(f"{where} takes no {' '.join(f'--{name}' for name in sorted(refused))}")
    if make:
        found = make(**given)
    elif arguments.model:
        calls = ((call, batch) for call in calls_of(arguments) for batch in arguments.batch or (1,))
        found = (shapes.Shape(call.op, call.case(batch)) for call, batch in calls)
    else:
        found = (shapes.Shape(op, case) for op in op_module.registered() for case in op.cases())
    return shapes.select(found, arguments.op or ["*"], arguments.case or ["*"])


def explanation(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines that explain what was asked for, and what --emulate and --predict add. Raises ValueError, TypeError, RuntimeError, and
    ImportError without the extra."""
    ops, predicted = vllm_rocm_ops.ops, iter(())
    if arguments.predict:  # first, so that what it lacks is said alone
        predicted = predict.explained(arguments, lambda: calls_of(arguments), ops)
    arch = arguments.predict or arguments.arch or explain.usual_arch()
    if arguments.model:
        around = explain.around(model_config.read(arguments.model), arguments.tp or 1, arguments.ep, arch)
        calls, batches = [*calls_of(arguments), *around], arguments.batch or (1,)
        rows = explain.explain_model(calls, arch, batches, arguments.verbose)
        yield from explain.table(rows, None if arguments.verbose else explain.WIDTH)
    else:
        op = getattr(ops, arguments.op)
        given = explain.parse_arguments_of(op, arguments.given)
        call = op, arch, arguments.shape, explain.DTYPES.get(arguments.dtype)
        yield str(explain.explain(*call, **given))
        if arguments.emulate:
            yield from explain.emulate(*call, **given)
    yield from predicted


def emulate_cases(arguments: argparse.Namespace) -> int:
    """Prints for each op whether its cases are right in the emulator; 1 if one is not."""
    from vllm_rocm_ops.emulator import cases as emulated  # an extra

    failed = False
    cases = [(shape.op, shape.case) for shape in shapes_of(arguments)]
    for line, wrong in emulated.bench(cases, arguments.emulate, arguments.jobs):
        failed |= wrong
        print(line, flush=True)
    return int(failed)


def predict_shapes(arguments: argparse.Namespace) -> int:
    """Prints what the timing model says of the shapes that were asked for."""
    from vllm_rocm_ops.timing import machines, predict  # an extra

    for line in predict.shape_lines(shapes_of(arguments), machines.named(arguments.predict)):
        print(line, flush=True)
    return 0


def bench_shapes(arguments: argparse.Namespace) -> int:
    """Prints what the shapes that were asked for give and take here; 1 if a result is wrong."""
    wants_gpu = ("hbm", "profile", "shapes", "peers", "sweep", "jsonl", "csv")
    try:
        clock = GpuClock()
    except RuntimeError as error:
        if any(getattr(arguments, name) for name in wants_gpu):
            raise
        clock = None
        print(f"The ops run their PyTorch reference here ({error}): no kernel is checked, nothing is timed.")
    if arguments.hbm:
        asked = arguments.sweep or any(getattr(arguments, name) is not None for name in stream.OPTIONS)
        by_size = () if asked else bench.hbm(clock, vllm_rocm_ops.ops.unquantized_gemm)
        for line in itertools.chain(by_size, stream.run(arguments, clock)):
            print(line, flush=True)
        return 0
    found = shapes_of(arguments)
    vllm = load_vllm(arguments.vllm_library or (), arguments.vllm_version) if arguments.peers else None
    commit = arguments.commit or report.commit()
    origin = report.origin(clock, vllm, commit) if arguments.jsonl else None
    how = {name: getattr(arguments, name) for name in ("once", "profile", "sweep", "peers")}
    lines = []
    print(report.HEADER)
    with torch.inference_mode():
        for of_shape in bench.run(found, clock, **how):
            lines += of_shape
            for place, line in enumerate(of_shape):
                if place < SHOWN or line.chosen or line.wrong:
                    print(line, flush=True)
            for peer, why in of_shape[0].unavailable.items():
                print(f"  no {peer}: {why}")
            if origin:
                report.append(of_shape, origin, result_file(arguments, origin))
            if arguments.csv:
                report.append_csv(of_shape, report.gpu_name(clock), commit, arguments.csv)
    print(report.summary(lines))
    return int(any(line.wrong for line in lines))


def result_file(arguments: argparse.Namespace, origin: report.Origin) -> Path:
    """Where lines are appended: the given file, or the one of today, this GPU and this commit."""
    kind = KINDS.get(arguments.shapes, arguments.shapes) or ("model" if arguments.model else "cases")
    return arguments.jsonl if arguments.jsonl is not True else origin.file(RESULTS, kind)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-rocm-ops", description=__doc__)
    parser.add_argument("--version", action="version", version=vllm_rocm_ops.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [op.name for op in op_module.registered()]

    def add_model(command: argparse.ArgumentParser, required: bool, batches: str, tp: str = "") -> None:
        shipped = ", ".join(model_config.shipped())
        add = command.add_argument
        add("--model", required=required, help=f"a config.json, a folder with one, or of: {shipped}")
        add("--tp", type=int, help=f"GPUs that each layer is divided over; default: 1{tp}")
        ep = "routed experts stay whole and are divided over the GPUs of --tp, or so many"
        add("--ep", type=int, nargs="?", const=0, metavar="GPUS", help=ep)
        add("--batch", type=parse_batches, metavar="N,N,...", help=f"tokens of a step; default: {batches}")

    command = commands.add_parser("doctor", help="what is installed and used here, and what is not and why")
    command.add_argument("--json", action="store_true", help="for machines")

    pages = f"What each op computes and takes, and how exact it is: {Path(vllm_rocm_ops.__file__).parent / 'docs'}"
    meaning = "which kernel a call, or a model's calls, run, and why; needs no GPU"
    command = commands.add_parser("explain", help=meaning, epilog=pages)
    command.add_argument("op", nargs="?", choices=names, metavar="op", help="one of: " + ", ".join(names))
    add_model(command, False, "1")
    arch = "an architecture, or one and its count of compute units, or a product; default: this machine's GPU, else "
    on = command.add_mutually_exclusive_group()
    on.add_argument("--arch", help=arch + next(iter(archs.ARCHS)))
    meaning = "explain it on this product, which need not be here, and predict its time; needs the extra [emulator]; see docs/timing.md"
    on.add_argument("--predict", metavar="PRODUCT", help=meaning)
    command.add_argument("--shape", type=explain.parse_shape, default=(), help="of the first tensor, e.g. 1x16384")
    command.add_argument("--dtype", choices=list(explain.DTYPES), help="of the first tensor")
    others = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    command.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=others)
    meaning = (
        "also run the call in the emulator: registers, LDS, instructions, bytes, waits; needs the extra [emulator]"
    )
    command.add_argument("--emulate", action="store_true", help=meaning)
    meaning = "with --model: also the op, the blocks and the configuration of each call"
    command.add_argument("--verbose", action="store_true", help=meaning)

    predict.add_command(commands, names, add_model)

    command = commands.add_parser("tune", help="find and keep the best configurations for a model on this GPU")
    add_model(command, True, f"1, 2, 4, 8, 16, 24, ... {tune.DECODE[-1]}, as vLLM captures graphs")
    command.add_argument("--op", choices=names, metavar="OP", help="this one only")
    command.add_argument("--prefill", action="store_true", help=f"also {', '.join(map(str, tune.PREFILL))} tokens")
    command.add_argument("--force", action="store_true", help="measure again what has a row")
    command.add_argument("--no-peers", action="store_true", help="leave out PyTorch's, vLLM's and AITER's own ops")

    meaning = (
        "check and benchmark the ops' test cases, a model's calls or a list of shapes, optionally against other kernels"
    )
    command = commands.add_parser("bench", help=meaning)
    add_model(command, False, "1, or the list's own", f", {shapes.TP} with --shapes gemm")
    meaning = "a list in place of cases: norms and activations, linear layers of Llama-3.1-405B and DeepSeek-V3, "
    meaning += "DeepSeek-V3's routing, routed experts of public models, attention of prompts and of decode steps; with --peers each beside "
    meaning += "vLLM's and PyTorch's"
    command.add_argument("--shapes", choices=LISTS, help=meaning)
    command.add_argument("--op", nargs="+", metavar="PATTERN", help="ops of such names, e.g. 'rms_norm*'")
    command.add_argument(
        "--case", nargs="+", metavar="PATTERN", help="cases of such names, e.g. 'm16' 'deepseek-v3-ep8 *'"
    )
    command.add_argument(
        "--hidden", type=parse_batches, metavar="N,N,...", help="columns of --shapes rows; default: 16384,7168"
    )
    meaning = "of --shapes rows, bf16 or fp16; of the weights of --shapes moe, fp8 or bf16; default: the first"
    command.add_argument("--dtype", choices=DTYPES, help=meaning)
    command.add_argument(
        "--shuffled", action="store_const", const=True, help="weights of --shapes gemm in fragment order for ours"
    )
    meaning = "time PyTorch's, vLLM's and AITER's own ops too, as far as installed (or on PYTHONPATH)"
    command.add_argument("--peers", action="store_true", help=meaning)
    meaning = "vLLM's compiled ops for --peers, where there is no more of vLLM"
    command.add_argument("--vllm-library", nargs="+", metavar="PATH", help=meaning)
    command.add_argument("--vllm-version", default="", metavar="TEXT", help="what results say of --vllm-library")
    command.add_argument("--sweep", action="store_true", help="time every configuration; the fastest three are printed")
    meaning = (
        f"append a line of JSON for each case and configuration; default: {RESULTS}/<gpu>/<date>-<commit>-<kind>.jsonl"
    )
    command.add_argument("--jsonl", type=Path, nargs="?", const=True, metavar="FILE", help=meaning)
    meaning = "add a row for each measurement, also of each peer, to this table"
    command.add_argument("--csv", type=Path, metavar="FILE", help=meaning)
    mode = command.add_mutually_exclusive_group()
    meaning = "call each case once and check it; time nothing; as --emulate always does"
    command.add_argument("--once", "-b", action="store_true", help=meaning)
    mode.add_argument("--profile", "-p", action="store_true", help="only call each case a few times, for a profiler")
    mode.add_argument("--hbm", action="store_true", help="the bandwidth of this GPU's memory instead")
    meaning = (
        "check each case, and each kernel, in the emulator of this architecture; needs no GPU, but the extra [emulator]"
    )
    mode.add_argument("--emulate", metavar="ARCH", help=meaning)
    meaning = "predict the time of each case on this product, which need not be here; needs the extra [emulator]; see docs/timing.md"
    mode.add_argument("--predict", metavar="PRODUCT", help=meaning)
    command.add_argument(
        "--commit", metavar="TEXT", help="what --jsonl and --csv say was measured; default: that of this checkout"
    )
    jobs = min(2, os.cpu_count() or 1)
    command.add_argument("--jobs", type=int, default=jobs, metavar="N", help=f"processes of --emulate; default: {jobs}")
    stream.add_options(command)

    check.add_command(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "explain" and (arguments.op is None) == (arguments.model is None):
        parser.error("explain takes an op or --model")
    if arguments.command == "explain" and arguments.model and arguments.emulate:
        parser.error("--emulate takes an op, not --model")
    if arguments.command == "predict":
        predict.check_arguments(arguments, parser.error)
    if arguments.command == "bench" and arguments.shapes and (arguments.model or arguments.emulate):
        parser.error("--shapes goes neither with --model nor with --emulate")
    if arguments.command == "bench" and arguments.once and (arguments.profile or arguments.hbm or arguments.predict):
        parser.error("--once checks results, which none of --profile, --hbm and --predict does")
    untimed = arguments.command == "bench" and (arguments.hbm or arguments.emulate or arguments.predict)
    if untimed and (arguments.csv or arguments.jsonl):
        parser.error("--csv and --jsonl go neither with --hbm nor with --emulate nor with --predict")
    if arguments.command == "bench" and arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    if arguments.command == "bench":
        stream.refuse(parser, arguments)
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The entry point `vllm-rocm-ops`."""
    arguments = parse_arguments(argv)
    try:
        if arguments.command == "doctor":
            found = doctor.find()
            print(json.dumps(found, indent=1) if arguments.json else doctor.text(found))
        elif arguments.command == "check":
            return check.run(arguments)
        elif arguments.command == "predict":
            return predict.run(arguments, lambda: calls_of(arguments), vllm_rocm_ops.ops)
        elif arguments.command == "tune":
            tune_model(arguments)
        elif arguments.command == "bench":
            run = emulate_cases if arguments.emulate else predict_shapes if arguments.predict else bench_shapes
            return run(arguments)
        else:
            for line in explanation(arguments):
                print(line, flush=True)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]  # torch's errors go on with a stack
        print(f"{arguments.command}: {why}" if isinstance(error, RuntimeError) else why, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
