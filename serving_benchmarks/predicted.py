"""Predict the kernel times of decode steps on a GPU that is not present, with published times of other GEMMs for comparison.

    python serving_benchmarks/predicted.py [--device MI300X] [--batch 1 16 32] [--published FOLDER]

No time of the plugin is measured. The sum of kernels is not a step: `python -m serving_benchmarks.step` predicts steps. Each call of one rank's
step writes a line to serving_benchmarks/results/<arch>/<date>-<commit>-predicted.jsonl, for Llama-3.1-405B FP8 at TP 8, and DeepSeek-V3 at
TP 8, and at TP 8 with EP 8. Attention has 4096 keys per request. Calls without a kernel of the plugin, and collectives, are excluded.
FOLDER has published times on this GPU for GEMMs of the same dtype and shape: the minimum per GEMM of aiter_gemm_gfx942_304cu.csv, from a
profiler that sums a call's kernels (`profiled_us` is the prediction on that scale), and Hugging Face's skinny GEMM in
peer_measurements.csv, with cold weights as here.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import figures
from timing_study import step

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.timing import CONTEXT, machines
from vllm_rocm_ops.tools import explain
from vllm_rocm_ops.tools.bench import report

RESULTS = Path(__file__).parent / "results"
MODELS = {
    "Llama-3.1-405B FP8, TP 8": ("llama-3.1-405b-fp8", 8, None),
    "DeepSeek-V3, TP 8": ("deepseek-v3", 8, None),
    "DeepSeek-V3, TP 8, EP 8": ("deepseek-v3", 8, 8),
}
AITER, PEERS = "aiter_gemm_gfx942_304cu.csv", "peer_measurements.csv"
KINDS = {
    "scaled_mm": ("a8w8_rowwise", "a8w8_rowwise_bpreshuffle", "fp8_gemm_per_tensor"),
    "block_scaled_mm": ("fp8_blockscale", "fp8_blockscale_bpreshuffle"),
}
"""By op: its kinds in the published tables."""


def calls(model: str, tp: int, ep: int | None) -> list[LayerCall]:
    """Return the calls of a rank's step, attention last."""
    config = model_config.read(model)
    return [*model_layers.calls(config, tp, ep), model_layers.attention(config, tp)]


def published(folder: Path | None, gpu: str) -> dict[tuple, dict[str, float]]:
    """Return the minimum published times on this GPU by op, M, N and K, as fields of a line."""
    found: dict[tuple, dict[str, float]] = {}
    for name, file in (("aiter_us", AITER), ("hugging_face_us", PEERS)) if folder else ():
        with (folder / file).open(newline="") as opened:
            for row in csv.DictReader(opened):
                op = next((op for op, kinds in KINDS.items() if row["op"] in kinds), None)
                is_of = file == AITER or row["kernel"] == "hfrk_skinny_gemm"
                if op and is_of and row["gpu"] == gpu and float(row["us"]) > 0 and row.get("B", "") in ("", "1"):
                    times = found.setdefault((op, *(int(row[size]) for size in "MNK")), {})
                    times[name] = min(times.get(name, float("inf")), float(row["us"]))
    return found


def lines(
    device: str, batches: Iterable[int], beside: dict[tuple, dict[str, float]], commit: str, names: Iterable[str] = ()
) -> Iterator[dict]:
    """Yield a line for each call of each step of these models, by default all; equal calls are predicted once."""
    machine = machines.named(device)
    time, known = step.live_time(machine, CONTEXT), {}
    for batch in batches:
        for name in names or MODELS:
            model = MODELS[name]
            for call in calls(*model):
                case = call.case(batch)
                key = call.op.name, call.arguments, call.parameters, batch
                if call.count and key not in known:
                    known[key] = time(call, batch)
                if not call.count or known[key] is None:
                    continue
                us, kernels, band = known[key]
                a = call.op.Arguments(*case.make("meta", None, machine.arch.fp8_dtype))
                shape = call.op.problem(a)
                line = {"model": name, "device": device, "arch": machine.arch.name, "batch": batch, "layer": call.layer}
                line["case"] = f"{name}, {call.layer}, {call.count} of {batch}"
                line |= {"op": call.op.name, "count": call.count, "kernels": kernels, "context": CONTEXT}
                line |= {
                    "evidence": "predicted, never measured",
                    "predicted_us": round(us, 2),
                    "band": band,
                }
                line |= {"profiled_us": round(us + kernels * machine["profiled"], 2), "commit": commit}
                if list(shape) == ["m", "n", "k"]:
                    line |= {"shape": shape, **beside.get((call.op.name, *shape.values()), {})}
                yield line


def summary(found: list[dict]) -> Iterator[str]:
    """Yield a table per model with a column per batch size, and the sums."""
    from vllm_rocm_ops.timing import predict  # an extra

    device, context = found[0]["device"], found[0]["context"]
    batches = list(dict.fromkeys(line["batch"] for line in found))
    for model in dict.fromkeys(line["model"] for line in found):
        of_model = [line for line in found if line["model"] == model]
        calls: dict[tuple, dict[int, dict]] = {}
        for line in of_model:
            calls.setdefault((line["layer"], line["op"], line["count"]), {})[line["batch"]] = line
        rows = [("layer", "op", "calls", *(f"batch {batch}" for batch in batches), "band")]
        for (layer, op, count), of_call in calls.items():
            cells = (f"{of_call[batch]['predicted_us']:.1f}" if batch in of_call else "-" for batch in batches)
            band = predict.Band(next(iter(of_call.values()))["band"], "")
            rows.append((layer, op, str(count), *cells, str(band)))
        sums = [figures.sum_of([line for line in of_model if line["batch"] == batch]) for batch in batches]
        rows.append(
            ("sum of these kernels, ms", "", "", *(f"{us / 1e3:.1f} +-{bound / 1e3:.1f}" for us, bound, _ in sums), "")
        )
        rows.append(("launches", "", "", *(str(launches) for *_, launches in sums), ""))
        yield f"{model} on {device}: predicted us per call, not measured; {context} keys per request"
        yield from explain.table(rows)
        yield ""
    about = (
        "A sum is not a decode step, which `python -m serving_benchmarks.step` predicts. It includes the plugin's kernels where "
        "vLLM's would run until the plugin is measured faster. Its +- excludes kernels without an error band."
    )
    yield from textwrap.wrap(about, explain.WIDTH, break_on_hyphens=False)


def main() -> None:
    """Write the predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = list(machines.MACHINES)
    parser.add_argument(
        "--device", default=machines.COMPARED, choices=devices, help="GPU product (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32], help="batch sizes (default: %(default)s)")
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="folder with published GEMM times to add")
    parser.add_argument("--commit", default=report.commit(), help="commit of the code (default: the checkout's)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="results folder (default: serving_benchmarks/results)"
    )
    options = parser.parse_args()
    arch = machines.named(options.device).arch.name
    path = options.output / arch / f"{datetime.date.today()}-{options.commit}-predicted.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = published(options.published, options.device)
    with path.open("w") as file:
        for line in lines(options.device, options.batch, beside, options.commit):
            file.write(json.dumps(line) + "\n")
            file.flush()
    print(path)


if __name__ == "__main__":
    main()
