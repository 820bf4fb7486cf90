"""Demonstrate the plugin without a GPU: vLLM loads it, the kernels of two models on MI300X, and predicted decode steps.

    python serving_benchmarks/without_gpu.py [--device MI300X] [--batch 1 8 32]

A tiny model decodes once in vLLM's CPU build, without and with the plugin. Then follow the tables of `explain --model` for one rank of
Llama-3.1-405B FP8 and of DeepSeek-V3, both at TP 8, and their predicted steps on both sides. Where the frozen predictions lack a batch
size or the GPU, the emulator predicts now, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import latency
import latency_report
from timing_study import step, step_report

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import CONTEXT, machines
from vllm_rocm_ops.tools import explain

MODELS = {"Llama-3.1-405B FP8": "llama-3.1-405b-fp8", "DeepSeek-V3": "deepseek-v3"}
TP = 8
TINY = "--model tiny-llama --batch-size 1 --output-len 8 --num-iters 1 --num-iters-warmup 1 --enforce-eager"


def loaded(report: dict) -> Iterator[str]:
    """Yield lines about the tiny run of latency.py: loaded versions, seams and ops. Raises RuntimeError if a side failed."""
    for run in report["runs"]:
        if "error" in run:
            raise RuntimeError(f"{run['model_id']} failed {run['side']} the plugin: {run['error']}; see {run['log']}")
    [run] = (run for run in report["runs"] if run["side"] == "with")
    versions, stats = report["versions"], run["op_stats"]
    seams = {on: [seam["name"] for seam in run["seams"] if seam["on"] is on] for on in (True, False)}
    yield f"vLLM {versions['vllm']} decoded {run['model_id']} without and with the plugin, on {report['hardware']}."
    yield from _wrapped("seams on:   ", seams[True])
    yield from _wrapped("seams off:  ", seams[False])
    yield from _wrapped("ops called: ", [f"{op} ({sum(kernels.values())})" for op, kernels in stats.items()])
    if not latency_report.kernels(stats):
        yield "No kernel ran: without a GPU the ops run PyTorch, so the times of this run are meaningless and not shown."


def _wrapped(title: str, names: list[str]) -> list[str]:
    indents = {"initial_indent": title, "subsequent_indent": " " * len(title)}
    return textwrap.wrap(", ".join(names) or "none", explain.WIDTH, **indents)


def kernels(name: str, device: str, batches: Sequence[int]) -> Iterator[str]:
    """Yield the lines of `explain --model` for one rank of a model."""
    config, arch = model_config.read(MODELS[name]), archs.named(device)
    calls = [*model_layers.calls(config, TP, None), *explain.around(config, TP, None, arch)]
    yield f"{name}, TP {TP}, on {device}: kernels by tokens per step"
    yield from explain.lines_of(
        explain.shortened(explain.table(calls, arch, tuple(batches), verbose=False)), verbose=False
    )


def steps(name: str, device: str, batches: Sequence[int]) -> Iterator[str]:
    """Yield the totals of a model's predicted steps. Raises ImportError if they are not frozen and there is no emulator."""
    machine = machines.named(device)
    asked = model_config.read(MODELS[name]), TP, None, batches, machine, CONTEXT
    try:
        totals = list(step_report.lines(*asked, step.frozen_time(machine), with_launches=False))
    except ValueError:
        totals = step_report.lines(*asked, step.live_time(machine, CONTEXT), with_launches=False)
    yield f"{name}, TP {TP}: `python -m serving_benchmarks.step --model {MODELS[name]} --tp {TP}` prints each launch"
    for line in totals:
        yield from textwrap.wrap(line, explain.WIDTH, break_on_hyphens=False)


def main(argv: list[str] | None = None) -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, devices = parser.add_argument, list(machines.MACHINES)
    add("--device", default=machines.COMPARED, choices=devices, help="GPU product (default: %(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default: %(default)s)")
    add("--output", type=Path, default=latency.HERE / "out", help="output folder (default: serving_benchmarks/out)")
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    tiny = latency.parse_arguments([*TINY.split(), "--output-json", str(options.output / "latency.json")])
    print(*loaded(latency.benchmark(tiny)), sep="\n")
    for name in MODELS:
        print("", *kernels(name, options.device, options.batch), sep="\n", flush=True)
    try:
        for name in MODELS:
            print("", *steps(name, options.device, options.batch), sep="\n", flush=True)
    except ImportError as error:
        print(f"\nNo predicted times: {error}")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"without_gpu.py: {error}")
