"""The command `vllm-rocm-ops`: what is installed and used here, why a call runs the kernel it runs, and how fast."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import bench, envs, model_layers, patch, tune
from vllm_rocm_ops import launch as launches
from vllm_rocm_ops import op as op_module
from vllm_rocm_ops import tables as tuned_tables
from vllm_rocm_ops.clock import GpuClock
from vllm_rocm_ops.model_layers import LayerCall
from vllm_rocm_ops.op import Case, Explanation, Op
from vllm_rocm_ops.vllm import experts
from vllm_rocm_ops.vllm.peers import peers
from vllm_rocm_ops.vllm.seams import block_scaled_linear, mxfp8_linear, scaled_linear, unquantized_linear

PLUGIN = "rocm_ops"
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}
MOST_ELEMENTS = 2**60  # of a tensor that is asked about
MOST_NUMBER = 2**31
MOST_TOKENS = 2**24  # of a step


# doctor


def doctor() -> dict:
    """Everything that decides what runs on this machine, as plain data."""
    gpus = find_gpus()
    known = [gpu["arch"] for gpu in gpus if gpu["arch"] in archs.ARCHS]
    return {
        "package": {"version": vllm_rocm_ops.__version__, "path": str(Path(vllm_rocm_ops.__file__).parent)},
        "torch": {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda},
        "driver": find_driver(),
        "gpus": gpus,
        "code_objects": {arch: find_code_objects(arch) for arch in archs.ARCHS},
        "tables": {"yours": find_tables(envs.tables()), "shipped": find_tables(tuned_tables.TABLES)},
        "vllm": find_vllm(),
        "patches": patch.find(),
        "environment": {name: os.environ[name] for name in envs.VARIABLES if name in os.environ},
        "ops": {
            op.name: {arch: what_runs(op, arch) for arch in dict.fromkeys(known or archs.ARCHS)}
            for op in op_module.registered()
        },
    }


def find_driver() -> dict:
    """The GPU driver that kernels are launched through, or why there is none."""
    runtime, why = launches.runtime()
    if runtime is None:
        return {"backend": None, "status": why, "versions": {}}
    return {"backend": runtime.backend(), "status": runtime.status(), "versions": runtime.versions()}


def find_gpus() -> list[dict]:
    """The GPUs that torch sees."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = archs.of_device(index)
        units = properties.multi_processor_count
        gpus.append({"name": properties.name, "arch": arch.name if arch else None, "compute_units": units})
    return gpus


def find_code_objects(arch: str) -> dict[str, dict]:
    """The stamps of the code objects for `arch`, by module."""
    suffix = archs.ARCHS[arch].code_suffix
    return {path.stem: launches.stamp(path) for path in sorted((launches.CODE / arch).glob("*" + suffix))}


def find_tables(folder: Path) -> dict:
    """A folder of tuned tables: how many rows it has that change a configuration, by arch and op."""
    rows: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*/*.csv")):
        with path.open(newline="", errors="replace") as file:
            changing = [row for row in csv.DictReader(file) if any(row[k] for k in row if k and "config." in k)]
        rows.setdefault(path.parent.name, {})[path.stem] = len(changing)
    return {"folder": str(folder), "rows": rows}


def find_vllm() -> dict:
    """vLLM's version and what became of each seam in it."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    result = {"version": None, "plugin": any(plugin.name == PLUGIN for plugin in plugins), "why_off": "", "seams": []}
    if importlib.util.find_spec("vllm") is None:
        return result | {"why_off": "vLLM is not installed"}
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # vLLM's own remarks; what matters is in the seams' status
    try:
        import vllm

        result["version"] = vllm.__version__
        allowed = vllm.envs.VLLM_PLUGINS
        if allowed is not None and PLUGIN not in allowed:
            return result | {"why_off": f"VLLM_PLUGINS={','.join(allowed)} leaves out {PLUGIN}"}
        from vllm_rocm_ops.vllm import seam

        result["seams"] = [vars(status) for status in seam.install_all()]
        if not result["seams"]:
            result["why_off"] = "vLLM runs on neither ROCm nor CPU here, and VLLM_ROCM_OPS_ON_NVIDIA is not 1"
    except Exception as error:  # noqa: BLE001  a vLLM that does not import is a finding, not a failure
        result["why_off"] = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(previous)
    return result


def what_runs(op: Op, arch: str) -> str:
    """The kernel that the op's first case runs on `arch`, or "fallback: why"."""
    explained = explain(op, arch, require_code=True)
    return " + ".join(launch.symbol for launch in explained.launches) or explained.source


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with the rows' cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def doctor_text(found: dict) -> str:
    """What `doctor` found, for people."""
    lines = []

    def section(title: str, first: str, *more: str) -> None:
        lines.append(f"{title:<14}{first}")
        lines.extend(" " * 14 + line for line in more)

    package, driver, vllm, pytorch = found["package"], found["driver"], found["vllm"], found["torch"]
    section("vllm-rocm-ops", f"{package['version']} in {package['path']}")
    build = f"HIP {pytorch['hip']}" if pytorch["hip"] else f"CUDA {pytorch['cuda']}" if pytorch["cuda"] else "CPU build"
    section("torch", f"{pytorch['version']}, {build}")
    versions = ", ".join(f"{name} {version}" for name, version in driver["versions"].items())
    section("driver", f"{driver['backend']}: {versions}" if driver["backend"] else f"none: {driver['status']}")
    gpus = [f"{i}: {gpu['name']}, {gpu['arch'] or 'no kernels for it'}" for i, gpu in enumerate(found["gpus"])]
    section("GPUs", *(gpus or ["none: the ops run their PyTorch reference"]))
    built = []
    for arch, modules in found["code_objects"].items():
        compilers = {stamp.get("compiler", "unknown") for stamp in modules.values()}
        debug = ", debug" if any(stamp.get("debug") for stamp in modules.values()) else ""
        built.append(
            (arch, ", ".join(modules) + debug, "; ".join(sorted(compilers))) if modules else (arch, "none", "")
        )
    section("code objects", *table(built))
    tuned = []
    for whose, tables in found["tables"].items():
        counts = [f"{op} {rows}" for by_op in tables["rows"].values() for op, rows in by_op.items()]
        tuned.append((whose, ", ".join(counts) or "no rows", tables["folder"]))
    section("tuned tables", *table(tuned))
    section("vLLM", *filter(None, [vllm["version"], vllm["why_off"]]))
    if not vllm["plugin"]:
        section(
            "", f"the entry point {PLUGIN} is not installed, so vLLM does not find the ops: pip install vllm-rocm-ops"
        )
    if vllm["seams"]:
        seams = [
            ("on" if s["on"] else "off", s["name"], s["replaces"] if s["on"] else s["reason"]) for s in vllm["seams"]
        ]
        section("seams", *table(seams))
    patches = [
        ("applied" if row["applied"] else "not applied", row["name"], row["reason"] or row["loss"])
        for row in found["patches"]["patches"]
    ]
    section("patches", *(table(patches) or [f"none: {found['patches']['why_none']}"]))
    if found["environment"]:
        section("environment", *(f"{name}={value}" for name, value in found["environment"].items()))
    ops = []
    for name, by_arch in found["ops"].items():
        for kernel in dict.fromkeys(by_arch.values()):
            ops.append((name, " ".join(arch for arch in by_arch if by_arch[arch] == kernel), kernel))
    lines += ["", "ops, each with the kernel of its first test case", *("  " + line for line in table(ops))]
    return "\n".join(lines)


# explain


def example(op: Op, arch: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None, **given) -> dict:
    """Arguments like those of the op's first case, on the meta device.

    `shape` and `dtype` replace those of the first tensor, and what equals them in the others; the order of strides stays.
    `given` replaces whole arguments by name.
    """
    case = next(iter(op.cases()))
    of_case = op.Arguments(*case.make("meta", torch.Generator().manual_seed(0), archs.named(arch).fp8_dtype))
    first = next(value for value in of_case if isinstance(value, torch.Tensor))
    sizes = dict(zip(reversed(first.shape), reversed(shape or first.shape)))

    def like(value: torch.Tensor) -> torch.Tensor:
        new_shape = shape if shape and value.shape == first.shape else [sizes.get(size, size) for size in value.shape]
        new_dtype = dtype if dtype and value.dtype == first.dtype else value.dtype
        if (*new_shape, new_dtype) == (*value.shape, value.dtype):
            return value
        if len(new_shape) != value.dim():
            return torch.empty(new_shape, dtype=new_dtype, device="meta")
        outermost_first = sorted(range(value.dim()), key=value.stride, reverse=True)
        return torch.empty_permuted(new_shape, outermost_first, dtype=new_dtype, device="meta")

    return {k: like(v) if isinstance(v, torch.Tensor) else v for k, v in of_case._asdict().items()} | given


def explain(op: Op, arch: str, *changes, require_code: bool = False, **given) -> Explanation:
    """What the op runs on `arch` with the arguments of `example`. No memory is allocated, and no GPU is needed."""
    return op.explain(**example(op, arch, *changes, **given), arch=arch, require_code=require_code)


def emulate(op: Op, arch: str, *changes, **given) -> Iterator[str]:
    """What the kernels of that call have and do in the emulator, line by line."""
    from vllm_rocm_ops import emulated  # an extra

    case = None if any(changes) or given else next(iter(op.cases()))
    return emulated.describe(op, op.Arguments(**example(op, arch, *changes, **given)), case, arch)


def usual_arch() -> str:
    """The architecture of this machine's first GPU if there are kernels for it, else the first of all."""
    arch = archs.of_device(0) if torch.cuda.is_available() else None
    return str(arch or next(iter(archs.ARCHS)))


def parse_shape(text: str) -> tuple[int, ...]:
    """'8x7168' -> (8, 7168)."""
    sizes = [int(size) if re.fullmatch(r"[0-9]{1,18}", size) else -1 for size in text.split("x")]
    if min(sizes) < 0 or math.prod(filter(None, sizes)) >= MOST_ELEMENTS:
        raise argparse.ArgumentTypeError(f"must be sizes with x between them, as 8x7168, got {text}")
    return tuple(sizes)


def parse_argument(text: str) -> tuple[str, object]:
    """'name=value', where a value is bf16[8x7168] (a tensor), e4m3fn (a dtype), none, true, false or a number."""
    name, found, value = text.partition("=")
    tensor = re.fullmatch(r"(\w+)\[([\dx]+)\]", value)
    if not found:
        raise ValueError(f"{text} must be name=value")
    if tensor and tensor[1] in DTYPES:
        try:
            return name, torch.empty(parse_shape(tensor[2]), dtype=DTYPES[tensor[1]], device="meta")
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name}: the shape {error}") from None
    if value in DTYPES:
        return name, DTYPES[value]
    constants = {"none": None, "true": True, "false": False}
    try:
        return name, constants[value] if value in constants else json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} must be a number, true, false, none, a dtype or dtype[shape], got {value}") from None


KINDS = {
    torch.Tensor: "a tensor, as bf16[8x7168]",
    torch.dtype: "a dtype, as e4m3fn",
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text in quotes",
    type(None): "none",
}


def parse_arguments_of(op: Op, texts: Iterable[str]) -> dict[str, object]:
    """Arguments of an op by name, each of the type that it has there. Raises ValueError."""
    given = {}
    hints = typing.get_type_hints(op.reference)
    for text in texts:
        name, value = parse_argument(text)
        if name not in op.Arguments._fields:
            raise ValueError(f"{op.name} has no argument {name}, only {', '.join(op.Arguments._fields)}")
        kinds = typing.get_args(hints[name]) or (hints[name],)
        taken = (*kinds, int) if float in kinds else kinds
        if type(value) not in taken or (type(value) is int and abs(value) >= MOST_NUMBER):
            wanted = " or ".join(KINDS[kind] for kind in kinds)
            raise ValueError(f"{op.name}: {name} must be {wanted}, got {text.partition('=')[2]}")
        given[name] = value
    return given


# a model


LIMITED = {
    "scaled_mm": scaled_linear,
    "block_scaled_mm": block_scaled_linear,
    "mxfp8_scaled_mm": mxfp8_linear,
    "unquantized_gemm": unquantized_linear,
    "fused_experts": experts,
}
"""By op: the seam that gives it few tokens only, and leaves more to a kernel of vLLM's."""


def most_tokens(op: Op) -> int | None:
    """How many tokens an op gets in vLLM on a GPU; None for any number. Weights that are shuffled for us no other kernel takes."""
    module = LIMITED.get(op.name)
    if module is None or (
        envs.VLLM_ROCM_OPS_SHUFFLE == "1" and module in (scaled_linear, block_scaled_linear, mxfp8_linear)
    ):
        return None
    return module.MOST_TOKENS


def calls_of(arguments: argparse.Namespace) -> list[LayerCall]:
    """The calls of the model that was asked for. Raises ValueError, which names the model."""
    config = model_layers.read(arguments.model)
    try:
        return model_layers.calls(config, arguments.tp, arguments.ep)
    except ValueError as error:
        raise ValueError(f"--model {arguments.model}: {error}") from None


def explain_model(calls: list[LayerCall], arch: str, batches: tuple[int, ...]) -> list[tuple[str, ...]]:
    """A table of what each call of a rank runs on `arch`: the layer, calls per step, op, batch sizes, kernels, their blocks at
    each size, and the configuration with the reason for it; a line for sizes that differ in blocks alone. Where vLLM gives our op
    no call of that size it says so. Needs no GPU."""
    lines: list[tuple[str, ...]] = [("layer", "calls", "op", "tokens", "kernel", "blocks", "configuration")]
    known = archs.named(arch)
    for call in calls:
        same: dict[tuple[str, str], list[tuple[int, str]]] = {}
        most = most_tokens(call.op)
        for batch in batches:
            if most is not None and batch > most:
                same.setdefault(("vLLM's own", f"of more than {most} tokens the seam leaves to vLLM"), []).append(
                    (batch, "")
                )
                continue
            arguments = call.case(batch).make("meta", torch.Generator(), known.fp8_dtype)
            explained = call.op.explain(*arguments, arch=known)
            row = call.op.tuned_row(call.op.Arguments(*arguments), known) if explained.launches else None
            kernel = " + ".join(launch.symbol for launch in explained.launches) or "PyTorch"
            blocks = "+".join(str(math.prod(launch.grid)) for launch in explained.launches)
            why = f"{explained.source}: {row.path}: {row.source}" if row else explained.source
            same.setdefault((kernel, why), []).append((batch, blocks))
        for (kernel, why), sizes in same.items():
            tokens, blocks = (",".join(filter(None, map(str, column))) for column in zip(*sizes))
            lines.append((call.layer, str(call.count), call.op.name, tokens, kernel, blocks, why))
    return lines


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


def cases_of(arguments: argparse.Namespace) -> list[tuple[Op, Case]]:
    """The ops' cases, or a model's calls, that were asked for."""
    cases = [(op, case) for op in op_module.registered() for case in op.cases()]
    if arguments.model:
        cases = [(call.op, call.case(batch)) for call in calls_of(arguments) for batch in arguments.batch or (1,)]
    return bench.select(cases, arguments.op or "*", arguments.case or "*")


def emulate_cases(arguments: argparse.Namespace) -> int:
    """Prints for each op whether its cases are right in the emulator; 1 if one is not."""
    from vllm_rocm_ops import emulated  # an extra

    failed = False
    for line, wrong in emulated.bench(cases_of(arguments), arguments.emulate, arguments.jobs):
        failed |= wrong
        print(line, flush=True)
    return int(failed)


def bench_cases(arguments: argparse.Namespace) -> int:
    """Prints what the ops' cases, or a model's calls, give and take here; 1 if a result is wrong."""
    try:
        clock = GpuClock()
    except RuntimeError as error:
        if arguments.hbm or arguments.profile:
            raise
        clock = None
        print(f"The ops run their PyTorch reference here ({error}): no kernel is checked, nothing is timed.")
    if arguments.hbm:
        for line in bench.hbm(clock, vllm_rocm_ops.ops.unquantized_gemm):
            print(line, flush=True)
        return 0
    lines = []
    print(bench.HEADER)
    with torch.inference_mode():
        for line in bench.run(cases_of(arguments), clock, once=arguments.once, profile=arguments.profile):
            lines.append(line)
            print(line, flush=True)
    print(bench.summary(lines))
    return int(any(line.wrong for line in lines))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-rocm-ops", description=__doc__)
    parser.add_argument("--version", action="version", version=vllm_rocm_ops.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    names = [op.name for op in op_module.registered()]

    def add_model(command: argparse.ArgumentParser, required: bool, batches: str) -> None:
        shipped = ", ".join(model_layers.shipped())
        add = command.add_argument
        add("--model", required=required, help=f"a config.json, a folder with one, or of: {shipped}")
        add("--tp", type=int, default=1, help="GPUs that each layer is divided over; default: 1")
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
    command.add_argument("--arch", help=arch + next(iter(archs.ARCHS)))
    command.add_argument("--shape", type=parse_shape, default=(), help="of the first tensor, e.g. 1x16384")
    command.add_argument("--dtype", choices=list(DTYPES), help="of the first tensor")
    others = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    command.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=others)
    meaning = (
        "also run the call in the emulator: registers, LDS, instructions, bytes, waits; needs the extra [emulator]"
    )
    command.add_argument("--emulate", action="store_true", help=meaning)

    command = commands.add_parser("tune", help="find and keep the best configurations for a model on this GPU")
    add_model(command, True, f"1, 2, 4, 8, 16, 24, ... {tune.DECODE[-1]}, as vLLM captures graphs")
    command.add_argument("--op", choices=names, metavar="OP", help="this one only")
    command.add_argument("--prefill", action="store_true", help=f"also {', '.join(map(str, tune.PREFILL))} tokens")
    command.add_argument("--force", action="store_true", help="measure again what has a row")
    command.add_argument("--no-peers", action="store_true", help="leave out PyTorch's, vLLM's and AITER's own ops")

    command = commands.add_parser(
        "patch", help="apply what no plugin reaches to the installed vLLM, or undo it; optional"
    )
    command.add_argument("patch", nargs="*", help="names or numbers of patches; default: all")
    mode = command.add_mutually_exclusive_group()
    for action, meaning in {
        "list": "what there is, what is applied, and what is lost without it; the default",
        "apply": "apply what is not; all or nothing",
        "revert": "undo what is applied; all or nothing",
        "check": "as --list; fails if a patch cannot be applied",
    }.items():
        mode.add_argument(
            f"--{action}", action="store_const", dest="action", const=action, default="list", help=meaning
        )
    command.add_argument("--vllm", metavar="PATH", help="the folder of vLLM's package; default: where Python finds it")

    command = commands.add_parser("bench", help="run the ops' test cases, or a model's calls: right, and how fast?")
    add_model(command, False, "1")
    command.add_argument("--op", metavar="PATTERN", help="ops of such names, e.g. 'rms_norm*'")
    command.add_argument("--case", metavar="PATTERN", help="cases of such names, e.g. 'm16'")
    mode = command.add_mutually_exclusive_group()
    mode.add_argument("--once", action="store_true", help="call each case once and check it; time nothing")
    mode.add_argument("--profile", action="store_true", help="only call each case a few times, for a profiler")
    mode.add_argument("--hbm", action="store_true", help="the bandwidth of this GPU's memory instead")
    meaning = (
        "check each case, and each kernel, in the emulator of this architecture; needs no GPU, but the extra [emulator]"
    )
    mode.add_argument("--emulate", metavar="ARCH", help=meaning)
    jobs = min(2, os.cpu_count() or 1)
    command.add_argument("--jobs", type=int, default=jobs, metavar="N", help=f"processes of --emulate; default: {jobs}")

    arguments = parser.parse_args(argv)
    if arguments.command == "explain" and (arguments.op is None) == (arguments.model is None):
        parser.error("explain takes an op or --model")
    if arguments.command == "explain" and arguments.model and arguments.emulate:
        parser.error("--emulate takes an op, not --model")
    if arguments.command == "bench" and arguments.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {arguments.jobs}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The entry point `vllm-rocm-ops`."""
    arguments = parse_arguments(argv)
    try:
        if arguments.command == "doctor":
            found = doctor()
            print(json.dumps(found, indent=1) if arguments.json else doctor_text(found))
        elif arguments.command == "patch":
            return patch.run(arguments.action, arguments.vllm, arguments.patch)
        elif arguments.command == "tune":
            tune_model(arguments)
        elif arguments.command == "bench":
            return emulate_cases(arguments) if arguments.emulate else bench_cases(arguments)
        elif arguments.model:
            rows = explain_model(calls_of(arguments), arguments.arch or usual_arch(), arguments.batch or (1,))
            print("\n".join(table(rows)))
        else:
            op = getattr(vllm_rocm_ops.ops, arguments.op)
            given = parse_arguments_of(op, arguments.given)
            call = op, arguments.arch or usual_arch(), arguments.shape, DTYPES.get(arguments.dtype)
            print(explain(*call, **given))
            for line in emulate(*call, **given) if arguments.emulate else ():
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
