"""The command `vllm-rocm-ops`: what is installed and used here, and why a call runs the kernel it runs."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import envs
from vllm_rocm_ops import launch as launches
from vllm_rocm_ops import op as op_module
from vllm_rocm_ops.op import Explanation, Op

PLUGIN = "rocm_ops"
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


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
        "vllm": find_vllm(),
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
        gpus.append({"name": properties.name, "arch": arch.name if arch else None})
    return gpus


def find_code_objects(arch: str) -> dict[str, dict]:
    """The stamps of the code objects for `arch`, by module."""
    suffix = archs.ARCHS[arch].code_suffix
    stamps = {path.stem: path.with_suffix(".json") for path in sorted((launches.CODE / arch).glob("*" + suffix))}
    return {module: json.loads(path.read_text()) if path.exists() else {} for module, path in stamps.items()}


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
            result["why_off"] = "vLLM runs on neither ROCm nor CPU here"
    except Exception as error:  # noqa: BLE001  a vLLM that does not import is a finding, not a failure
        result["why_off"] = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(previous)
    return result


def what_runs(op: Op, arch: str) -> str:
    """The kernel that the op's first case runs on `arch`, or "fallback: why"."""
    explained = explain(op, arch)
    if not explained.launches:
        return explained.source
    for launch in explained.launches:
        if not launches.code_object(launch.module, arch).exists():
            return f"fallback: no code object of {launch.module} for {arch}"
    return " + ".join(launch.symbol for launch in explained.launches)


def doctor_text(found: dict) -> str:
    """What `doctor` found, for people."""
    lines = []

    def section(title: str, first: str, *more: str) -> None:
        lines.append(f"{title:<14}{first}")
        lines.extend(" " * 14 + line for line in more)

    def table(rows: list[tuple[str, ...]]) -> list[str]:
        widths = [max(map(len, column)) for column in zip(*rows)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]

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
    if found["environment"]:
        section("environment", *(f"{name}={value}" for name, value in found["environment"].items()))
    ops = []
    for name, by_arch in found["ops"].items():
        for kernel in dict.fromkeys(by_arch.values()):
            ops.append((name, " ".join(arch for arch in by_arch if by_arch[arch] == kernel), kernel))
    lines += ["", "ops, each with the kernel of its first test case", *("  " + line for line in table(ops))]
    return "\n".join(lines)


# explain


def explain(op: Op, arch: str, shape: tuple[int, ...] = (), dtype: torch.dtype | None = None, **given) -> Explanation:
    """What the op runs on `arch` with arguments like those of its first case.

    `shape` and `dtype` replace those of the first tensor, and what equals them in the others; the order of strides stays.
    `given` replaces whole arguments by name. No memory is allocated, and no GPU is needed.
    """
    case = next(iter(op.cases()))
    example = op.Arguments(*case.make("meta", torch.Generator().manual_seed(0), archs.named(arch).fp8_dtype))
    first = next(value for value in example if isinstance(value, torch.Tensor))
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

    arguments = {k: like(v) if isinstance(v, torch.Tensor) else v for k, v in example._asdict().items()}
    return op.explain(**(arguments | given), arch=arch)


def parse_shape(text: str) -> tuple[int, ...]:
    """'8x7168' -> (8, 7168)."""
    return tuple(int(size) for size in text.split("x"))


def parse_argument(text: str) -> tuple[str, object]:
    """'name=value', where a value is bf16[8x7168] (a tensor), e4m3fn (a dtype), none, true, false or a number."""
    name, found, value = text.partition("=")
    tensor = re.fullmatch(r"(\w+)\[([\dx]+)\]", value)
    if not found:
        raise ValueError(f"{text} must be name=value")
    if tensor and tensor[1] in DTYPES:
        return name, torch.empty(parse_shape(tensor[2]), dtype=DTYPES[tensor[1]], device="meta")
    if value in DTYPES:
        return name, DTYPES[value]
    constants = {"none": None, "true": True, "false": False}
    try:
        return name, constants[value] if value in constants else json.loads(value)
    except ValueError:
        raise ValueError(f"{name} must be a number, true, false, none, a dtype or dtype[shape], got {value}") from None


def main(argv: list[str] | None = None) -> int:
    """The entry point `vllm-rocm-ops`."""
    parser = argparse.ArgumentParser(prog="vllm-rocm-ops", description=__doc__)
    parser.add_argument("--version", action="version", version=vllm_rocm_ops.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("doctor", help="what is installed and used here, and what is not and why")
    command.add_argument("--json", action="store_true", help="for machines")
    command = commands.add_parser("explain", help="which kernel a call runs, and why; needs no GPU")
    command.add_argument("op", choices=[op.name for op in op_module.registered()], metavar="op")
    command.add_argument(
        "--arch",
        default=next(iter(archs.ARCHS)),
        help="an architecture, or one and its count of compute units, or a product",
    )
    command.add_argument("--shape", type=parse_shape, default=(), help="of the first tensor, e.g. 1x16384")
    command.add_argument("--dtype", choices=list(DTYPES), help="of the first tensor")
    example = "other arguments, e.g. residual=none weight=bf16[7168] group_size=64"
    command.add_argument("--with", nargs="+", default=(), metavar="NAME=VALUE", dest="given", help=example)
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        found = doctor()
        print(json.dumps(found, indent=1) if arguments.json else doctor_text(found))
        return 0
    try:
        given = dict(parse_argument(text) for text in arguments.given)
        op = getattr(vllm_rocm_ops.ops, arguments.op)
        print(explain(op, arguments.arch, arguments.shape, DTYPES.get(arguments.dtype), **given))
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
