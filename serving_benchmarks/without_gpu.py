"""Demonstrate the plugin without a GPU: vLLM loads it, the kernels of two models on MI300X, and predicted times.

    python serving_benchmarks/without_gpu.py [--device MI300X] [--batch 1 8 32]

A tiny model decodes once in vLLM's CPU build, without and with the plugin. Then follow the tables of `explain --model` and of predicted.py
for one rank of Llama-3.1-405B FP8 and of DeepSeek-V3, both at TP 8, and a figure of the predicted times. Two processes predict while vLLM
runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import figures
import latency
import latency_report
import predicted

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import machines
from vllm_rocm_ops.tools import doctor, explain

MODELS = "Llama-3.1-405B FP8, TP 8", "DeepSeek-V3, TP 8"
TINY = "--model tiny-llama --batch-size 1 --output-len 8 --num-iters 1 --num-iters-warmup 1 --enforce-eager"
PROCESSES = 2


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
    yield from _wrapped("ops called: ", [f"{op} ({sum(ran.values())})" for op, ran in stats.items()])
    if not latency_report.kernels(stats):
        yield "No kernel ran: without a GPU the ops run PyTorch, so the times of this run are meaningless and not shown."


def _wrapped(title: str, names: list[str]) -> list[str]:
    return textwrap.wrap(
        ", ".join(names) or "none", explain.WIDTH, initial_indent=title, subsequent_indent=" " * len(title)
    )


def kernels(name: str, arch: str, batches: list[int]) -> Iterator[str]:
    """Yield the lines of `explain --model` for one rank of a model of predicted.py."""
    model, tp, ep = predicted.MODELS[name]
    config = model_config.read(model)
    known = archs.named(arch)
    calls = [*model_layers.calls(config, tp, ep), *explain.around(config, tp, ep, known)]
    yield f"{name} on {arch}: kernels by tokens per step"
    yield from explain.table(explain.explain_model(calls, known, tuple(batches), verbose=False), explain.WIDTH)


def predict(device: str, batch: int, name: str, commit: str) -> list[dict]:
    """Return the lines of predicted.py for a model and a batch size."""
    return list(predicted.lines(device, [batch], {}, commit, [name]))


def main(argv: list[str] | None = None) -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = list(machines.MACHINES)
    parser.add_argument(
        "--device", default=machines.COMPARED, choices=devices, help="GPU product (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="batch sizes (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=figures.OUT, help="output folder (default: serving_benchmarks/out)"
    )
    options = parser.parse_args(argv)
    options.output.mkdir(parents=True, exist_ok=True)
    commit, why_off = latency.commit(), doctor.find_emulator()["why_off"]
    jobs = [] if why_off else [(batch, name) for name in MODELS for batch in options.batch]
    tiny = latency.parse_arguments([*TINY.split(), "--output-json", str(options.output / "latency.json")])
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        asked = [pool.submit(predict, options.device, *job, commit) for job in jobs]
        try:
            print(*loaded(latency.benchmark(tiny)), sep="\n")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        for name in MODELS:
            print("", *kernels(name, options.device, options.batch), sep="\n", flush=True)
        if asked:
            print("\nPredicting kernel times", file=sys.stderr, flush=True)
        found = [line for one in asked for line in one.result()]
    if why_off:
        print(f"\nNo predicted times: {why_off}")
        return
    print("", *predicted.summary(found), sep="\n")
    path = options.output / f"predicted-{options.device}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    print()
    figures.main([str(path), "--output", str(options.output)])


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"without_gpu.py: {error}")
