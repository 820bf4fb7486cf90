"""Predicted times of the kernels of decode steps on a GPU that is not here, beside published times of others' GEMMs. Never a measured time
of ours. Their sum is not a step, which `vllm-rocm-ops predict --model` predicts.

    python serving_benchmarks/predicted.py [--device MI300X] [--batch 1 16 32] [--published FOLDER]

A line per call of one rank's step goes to serving_benchmarks/results/<arch>/<date>-<commit>-predicted.jsonl: Llama-3.1-405B FP8 at TP 8,
DeepSeek-V3 at TP 8, and at TP 8 with whole experts on 8 GPUs. Attention has 4096 keys a request. Calls that run no kernel of ours and
collectives are left out. FOLDER has published times on this GPU of products of the same type and shape: aiter_gemm_gfx942_304cu.csv, of
which the least of each product counts, from a profiler that adds up a call's kernels (`profiled_us` are ours as it would count them),
and Hugging Face's skinny GEMM in peer_measurements.csv, with cold weights as here.
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
"""By op: what the published tables call the same."""


def calls(model: str, tp: int, ep: int | None) -> list[LayerCall]:
    """The calls of a rank's step, its attention last."""
    config = model_config.read(model)
    return [*model_layers.calls(config, tp, ep), model_layers.attention(config, tp)]


def published(folder: Path | None, gpu: str) -> dict[tuple, dict[str, float]]:
    """By op, M, N and K: the least published times on this GPU, aiter's and Hugging Face's, as fields of a line."""
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
    """A line for each call of each step of the models of these names, by default of all; what several call is predicted once."""
    from vllm_rocm_ops.timing import predict  # an extra

    machine = machines.named(device)
    known: dict[tuple, predict.Predicted] = {}
    for batch in batches:
        for name in names or MODELS:
            model = MODELS[name]
            for call in calls(*model):
                case = call.case(batch)
                key = call.op.name, call.arguments, call.parameters, batch
                if call.count and key not in known:
                    known[key] = next(predict.step([call], batch, machine))
                if not call.count or known[key].us is None:
                    continue
                found = known[key]
                a = call.op.Arguments(*case.make("meta", None, machine.arch.fp8_dtype))
                shape = call.op.problem(a)
                line = {"model": name, "device": device, "arch": machine.arch.name, "batch": batch, "layer": call.layer}
                line["case"] = f"{name}, {call.layer}, {call.count} of {batch}"
                line |= {"op": call.op.name, "count": call.count, "kernels": found.kernels, "context": CONTEXT}
                line |= {
                    "evidence": "predicted, never measured",
                    "predicted_us": round(found.us, 2),
                    "band": found.band.ratio,
                }
                line |= {"profiled_us": round(found.us + found.kernels * machine["profiled"], 2), "commit": commit}
                if list(shape) == ["m", "n", "k"]:
                    line |= {"shape": shape, **beside.get((call.op.name, *shape.values()), {})}
                yield line


def summary(found: list[dict]) -> Iterator[str]:
    """Lines for people: a table for each model with a column for each batch size, and the sums."""
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
        yield f"{model} on {device}: predicted us of a call, not measured; {context} keys a request"
        yield from explain.table(rows)
        yield ""
    about = (
        "A sum is not a decode step, which `vllm-rocm-ops predict --model` predicts. It has our kernels also where vLLM's own run until "
        "ours were measured to be faster. Its +- leaves out kernels whose band is unknown."
    )
    yield from textwrap.wrap(about, explain.WIDTH, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=machines.COMPARED, choices=list(machines.MACHINES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 32])
    parser.add_argument("--published", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", default=report.commit())
    parser.add_argument("--output", type=Path, default=RESULTS)
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
