"""Report what is installed and enabled on this machine, and why the rest is not."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path

import torch

import vllm_rocm_ops
from vllm_rocm_ops.collectives import wire
from vllm_rocm_ops.core import archs, envs
from vllm_rocm_ops.core import launch as launches
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.tools import all_reduce_limits as limits
from vllm_rocm_ops.tools.explain import explain
from vllm_rocm_ops.vllm.selection import kernel_selection
from vllm_rocm_ops.vllm.selection import report as selection_report
from vllm_rocm_ops.vllm.selection.report import columns

PLUGIN = "rocm_ops"


def find() -> dict:
    """Return everything that kernel selection on this machine depends on, as plain data."""
    gpus = find_gpus()
    known = [gpu["arch"] for gpu in gpus if gpu["arch"] in archs.ARCHS]
    return {
        "package": {"version": vllm_rocm_ops.__version__, "path": str(Path(vllm_rocm_ops.__file__).parent)},
        "torch": {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda},
        "driver": find_driver(),
        "gpus": gpus,
        "code_objects": {arch: launches.stamps(arch) for arch in archs.ARCHS},
        "tables": find_tables(envs.tables()),
        "measured": find_measured(envs.tables()),
        "reached": find_reached(envs.tables()),
        "machine": kernel_selection.machine(),
        "all_reduce": find_all_reduce(known or [*archs.ARCHS]),
        "vllm": find_vllm(),
        "emulator": find_emulator(),
        "environment": {name: os.environ[name] for name in envs.VARIABLES if name in os.environ},
        "ops": {
            op.name: {arch: what_runs(op, arch) for arch in dict.fromkeys(known or archs.ARCHS)}
            for op in op_module.registered()
        },
    }


def find_driver() -> dict:
    """Return the GPU driver that launches kernels, or why none is usable."""
    runtime, why = launches.runtime()
    if runtime is None:
        return {"backend": None, "status": why, "versions": {}}
    return {"backend": runtime.backend(), "status": runtime.status(), "versions": runtime.versions()}


def find_gpus() -> list[dict]:
    """Return the GPUs that torch sees."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        arch = archs.of_device(index)
        units = properties.multi_processor_count
        product = archs.product_of(index)
        gpus.append(
            {"product": product, "name": properties.name, "arch": arch.name if arch else None, "compute_units": units}
        )
    return gpus


def find_tables(folder: Path) -> dict:
    """Return a folder of tuned tables and the number of rows with a configuration, by arch and op."""
    rows: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*/*.csv")):
        with path.open(newline="", errors="replace") as file:
            changing = [row for row in csv.DictReader(file) if any(row[k] for k in row if k and "config." in k)]
        rows.setdefault(path.parent.name, {})[path.stem] = len(changing)
    return {"folder": str(folder), "rows": rows}


def find_measured(folder: Path) -> list[dict]:
    """Return the measurements of vLLM's workers, plugin against baseline, by machine."""
    records = {path: kernel_selection.read(path) for path in sorted(folder.glob("*/measured-*.json"))}
    return [
        {"path": str(path), **vars(record), "shapes": [*record.shapes.items()]}  # JSON has no records as keys
        for path, record in records.items()
    ]


def find_reached(folder: Path) -> list[dict]:
    """Return the calls of vLLM's workers at their last start, by arch."""
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm_rocm_ops.vllm import coverage

    return coverage.read(folder)


def find_all_reduce(names: list[str]) -> dict:
    """Return the limits of the all-reduce, and by arch the rows for which each protocol is predicted to be fastest."""
    try:
        wires = wire.allowed()
    except ValueError as error:
        return {"limits": str(error), "ways": {}}
    by_arch = {name: limits.spans(archs.ARCHS[name], wires) for name in dict.fromkeys(names)}
    return {"limits": limits.summary(wires), "ways": by_arch}


def reached_lines(starts: list[dict]) -> list[str]:
    """Format the result of `find_reached`."""
    lines = []
    for start in starts:
        calls = ", ".join(f"{seam} {count}" for seam, count in start["seams"].items()) or "no seam"
        lines.append(f"{start['path']}: {start['model']} called {calls}")
        missed = [f"{count} {what}" for layer in start["layers"].values() for what, count in layer["missed"].items()]
        lines += [f"vLLM's own code ran {', '.join(missed)}"] * bool(missed)
        lines += [f"selected, but in no graph: {', '.join(start['unreached'])}"] * bool(start["unreached"])
    return lines or ["nothing yet: vLLM's workers report at startup"]


def measured_lines(records: list[dict], machine: dict[str, str], verbose: bool) -> list[str]:
    """Format the result of `find_measured`: this machine's results, by op or all of them, and where others are."""
    lines = []
    for entry in records:
        fields = {name: value for name, value in entry.items() if name != "path"}
        record = kernel_selection.Record(**fields | {"shapes": dict(entry["shapes"])})
        what = "{path}: {number} shapes".format(path=entry["path"], number=len(record.shapes))
        if record.machine != machine:
            differs = [f"{k} {v}" for k, v in record.machine.items() if machine.get(k) != v]
            lines.append(f"{what}, on another machine: {', '.join(differs) or 'unknown'}")
            continue
        lines.append(f"{what}, on this machine")
        lines += [f"{op} is off: {why} (to measure again, remove the file)" for op, why in record.off.items()]
        lines += selection_report.wrong_baselines(record)
        lines += selection_report.beside_named(record)
        lines += selection_report.fp8_sums(record)
        lines += selection_report.table(record) if verbose else []
        lines += [*columns(selection_report.summary(record)), *columns(selection_report.advice(record))]
    return lines or ["nothing yet: vLLM's workers measure at startup"]


def find_vllm() -> dict:
    """Return the version of vLLM and the status of each seam."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    result = {"version": None, "plugin": any(plugin.name == PLUGIN for plugin in plugins), "why_off": "", "seams": []}
    if importlib.util.find_spec("vllm") is None:
        return result | {"why_off": "vLLM is not installed"}
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # vLLM's log; the seams' status has the relevant part
    try:
        import vllm

        result["version"] = vllm.__version__
        allowed = vllm.envs.VLLM_PLUGINS
        if allowed is not None and PLUGIN not in allowed:
            return result | {"why_off": f"VLLM_PLUGINS={','.join(allowed)} excludes {PLUGIN}"}
        from vllm_rocm_ops.vllm import seam

        result["seams"] = [vars(status) for status in seam.install_all()]
        if not result["seams"]:
            result["why_off"] = "vLLM does not run on ROCm here; see VLLM_ROCM_OPS_ON_NVIDIA and VLLM_ROCM_OPS_ON_CPU"
    except Exception as error:  # noqa: BLE001  a vLLM that does not import is a finding, not a failure
        result["why_off"] = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(previous)
    return result


def find_emulator() -> dict:
    """Return why the emulator, an extra, is unavailable, or ""."""
    try:
        import vllm_rocm_ops.emulator  # noqa: F401
    except ImportError as error:
        return {"why_off": str(error)}
    return {"why_off": ""}


def what_runs(op: Op, arch: str) -> str:
    """Return the kernel that the op's first case runs on `arch`, or "fallback: why"."""
    explained = explain(op, arch, require_code=True)
    return " + ".join(launch.symbol for launch in explained.launches) or explained.source


def graph_defect(report: dict) -> list[str]:
    """Return what to know of graphs on MI300X. HIP's version does not tell 7.2.0 to 7.2.3, which are concerned, from 7.2.4."""
    here = (archs.ARCHS[gpu["arch"]].corrupts_graphs for gpu in report["gpus"] if gpu["arch"] in archs.ARCHS)
    if not any(begin and (report["torch"]["hip"] or "").startswith(begin) for begin in here):
        return []
    return [
        "HIP 7.2.0 to 7.2.3 corrupts graphs on this GPU, with and without the plugin (ROCm/clr#279)",
        "where answers are wrong, try DEBUG_HIP_GRAPH_SEGMENT_SCHEDULING=0, another ROCm release, or --enforce-eager",
    ]


def ops_lines(by_op: dict[str, dict[str, str]], unbuilt: set[str]) -> list[str]:
    """Format what runs the first case of each op, a line per op and kernel."""
    ops = []
    for name, by_arch in by_op.items():
        built_for = {arch: kernel for arch, kernel in by_arch.items() if arch not in unbuilt}
        for kernel in dict.fromkeys(built_for.values()):
            ops.append((name, " ".join(arch for arch in built_for if built_for[arch] == kernel), kernel))
    asked = dict.fromkeys(arch for by_arch in by_op.values() for arch in by_arch if arch in unbuilt)
    ops += [("every op", arch, "fallback: no code object was built for it") for arch in asked]
    return ["", "ops, with the kernel of their first test case", *("  " + line for line in columns(ops))]


def ops_by_arch(by_op: dict[str, dict[str, str]], unbuilt: set[str]) -> list[str]:
    """Return, for each arch that has code objects, how many ops run kernels, and which do not."""
    lines = []
    for arch in dict.fromkeys(arch for by_arch in by_op.values() for arch in by_arch if arch not in unbuilt):
        without = [name for name, by_arch in by_op.items() if by_arch.get(arch, "").startswith("fallback: ")]
        rest = f"; {', '.join(without)}: PyTorch reference" if without else ""
        lines.append(f"{len(by_op) - len(without)} of {len(by_op)} run kernels on {arch}{rest}")
    return lines or ["all run their PyTorch reference: no code object was built for this machine"]


def seam_lines(seams: list[dict], verbose: bool) -> list[str]:
    """Format the status of seams: those that are off with the reason, and how many are on or which."""
    on = [("on", status["name"], status["replaces"]) for status in seams if status["on"]]
    off = [("off", status["name"], status["reason"]) for status in seams if not status["on"]]
    return columns([*on, *off]) if verbose else [f"{len(on)} on", *columns(off)]


def text(report: dict, verbose: bool = False) -> str:
    """Format the result of `find` on one screen, or with all modules, seams, times and ops."""
    lines = []

    def section(title: str, first: str, *more: str) -> None:
        lines.append(f"{title:<14}{first}")
        lines.extend(" " * 14 + line for line in more)

    package, driver, vllm, pytorch = report["package"], report["driver"], report["vllm"], report["torch"]
    section("vllm-rocm-ops", f"{package['version']} in {package['path']}")
    build = f"HIP {pytorch['hip']}" if pytorch["hip"] else f"CUDA {pytorch['cuda']}" if pytorch["cuda"] else "CPU build"
    section("torch", f"{pytorch['version']}, {build}", *graph_defect(report))
    versions = ", ".join(f"{name} {version}" for name, version in driver["versions"].items())
    section("driver", f"{driver['backend']}: {versions}" if driver["backend"] else f"none: {driver['status']}")
    gpus = []
    for i, gpu in enumerate(report["gpus"]):
        name = gpu["name"] if gpu["product"] in gpu["name"] else f"{gpu['product']} (named {gpu['name'] or 'nothing'})"
        gpus.append(f"{i}: {name}, {gpu['arch'] or 'unsupported'}")
    section("GPUs", *(gpus or ["none: ops run their PyTorch reference"]))
    built = [
        (arch, ", ".join(modules) if verbose else str(len(modules)), launches.origin(arch, modules))
        if modules
        else (arch, "none", "")
        for arch, modules in report["code_objects"].items()
    ]
    section("code objects", *columns(built))
    tuned = report["tables"]
    counts = [f"{op} {rows}" for by_op in tuned["rows"].values() for op, rows in by_op.items()]
    section("tuned tables", *columns([(", ".join(counts) or "no rows", tuned["folder"])]))
    section("measured", *measured_lines(report["measured"], report["machine"], verbose))
    section("reached", *reached_lines(report["reached"]))
    by_arch = report["all_reduce"]["ways"].items() if verbose else ()
    ways = (line for arch, found in by_arch for line in (f"predicted on {arch}:", *columns(limits.table(found))))
    section("all-reduce", report["all_reduce"]["limits"], *ways)
    section("vLLM", *filter(None, [vllm["version"], vllm["why_off"]]))
    if not vllm["plugin"]:
        section("", f"entry point {PLUGIN} not found, so vLLM does not load the plugin: pip install vllm-rocm-ops")
    if vllm["seams"]:
        section("seams", *seam_lines(vllm["seams"], verbose))
    section("emulator", report["emulator"]["why_off"] or "installed")
    if report["environment"]:
        section("environment", *(f"{name}={value}" for name, value in report["environment"].items()))
    unbuilt = {arch for arch, modules in report["code_objects"].items() if not modules}
    section("ops", *ops_by_arch(report["ops"], unbuilt))
    lines += ops_lines(report["ops"], unbuilt) if verbose else ["--verbose lists every module, seam, time and op"]
    return "\n".join(lines)
