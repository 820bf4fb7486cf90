"""Freeze the predictions of all calls and decode steps of some models, before anybody measures them.

    python -m serving_benchmarks.timing_study.freeze --date 2026-11-24 --commit 1234567 > frozen.json

It takes some forty minutes, with --keep less. In vllm_rocm_ops/timing/frozen/, <date>-<commit>.json replaces the previous file, which Git
keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import fused_calls
from vllm_rocm_ops.models import layers as model_layers
from vllm_rocm_ops.timing import CONTEXT, frozen, machines

from . import step, step_report

PRODUCTS = ("MI300X", "MI325X", "MI355X")
MODELS = {"llama-3.1-405b-fp8": 8, "deepseek-v3": 8, "qwen3-30b-a3b-fp8": 1, "glm-4.5-air-fp8": 4}  # ranks
TOKENS = (1, 8, 32, 64)


def predictions(
    products: tuple[str, ...], tokens: tuple[int, ...], kept: dict[str, dict] | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield the key of each call of the models' decode steps, and its prediction.

    A prediction has microseconds, the band as a ratio or None if unknown, launches, and the code. Calls in `kept` for
    all products, with the same code, are not predicted again.
    """
    from vllm_rocm_ops.timing import predict

    done = set()
    for arch in dict.fromkeys(machines.named(product).arch for product in products):
        alike = [machines.named(product) for product in products if machines.named(product).arch == arch]
        for name, tp in MODELS.items():
            config = model_config.read(name)
            others = [
                *fused_calls.calls(config, tp),
                *model_layers.absorbed(config, tp),
                *fused_calls.quantized_hidden(config, tp),
            ]
            for call in [*model_layers.calls(config, tp), *model_layers.attention(config, tp), *others]:
                for size in tokens if call.count else ():
                    if frozen.key(alike[0].name, call, size) in done:
                        continue
                    done.add(frozen.key(alike[0].name, call, size))
                    before = {
                        each: (kept or {}).get(each) for each in (frozen.key(one.name, call, size) for one in alike)
                    }
                    if all(values and frozen.is_for(values, call, size, arch) for values in before.values()):
                        yield from before.items()
                        continue
                    case = call.case(size).make("meta", torch.Generator(), arch.fp8_dtype)
                    try:
                        kernels = predict.predict_call(call.op, call.op.Arguments(*case)._asdict(), alike[0])
                    except ValueError:  # PyTorch runs it
                        continue
                    code = frozen.code_of(call, size, arch)
                    for machine in alike:  # they run the same instructions
                        us = sum(predict.timed(machine, kernel.recording).us for kernel in kernels)
                        band = predict.band(call.op, machine.name).ratio
                        values = {"us": round(us, 2), "band": band, "launches": len(kernels), "code": code}
                        yield frozen.key(machine.name, call, size), values


def steps(calls: dict[str, dict], products: tuple[str, ...], tokens: tuple[int, ...]) -> Iterator[tuple[str, dict]]:
    """Yield the key of each model's step on each side, with these calls, and its us, launches and band."""
    for machine in map(machines.named, products):
        known = step.frozen_time(machine, calls)
        for name, tp in MODELS.items():
            for side in step_report.sides(machine):
                for size in tokens:
                    found = step.total(step.nodes(model_config.read(name), tp, None, size, machine, side, known))
                    band = [round(1e3 * limit, 1) for limit in step_report.interval(found)]
                    values = {"us": round(found.us, 1), "launches": found.launches, "band": band}
                    yield f"{machine.name} {name} TP {tp} {side} {size} tokens", values


def main() -> None:
    """Print a frozen file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--date", required=True, help="of the file")
    parser.add_argument("--commit", required=True, help="of the kernels and of the model")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=PRODUCTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    meaning = "a frozen file of the same model of the GPU: its calls whose code is the same are not predicted again"
    parser.add_argument("--keep", type=Path, metavar="FILE", help=meaning)
    arguments = parser.parse_args()
    calls, products, tokens = {}, tuple(arguments.products), tuple(arguments.tokens)
    kept = json.loads(arguments.keep.read_text())["calls"] if arguments.keep else {}
    for name, values in predictions(products, tokens, kept):
        calls[name] = values
        print(f"{name}: {values['us']} us", file=sys.stderr, flush=True)
    head = {"date": arguments.date, "commit": arguments.commit, "context": CONTEXT}
    print(
        f'{json.dumps(head)[:-1]}, "calls": {_lines(calls)}, "steps": {_lines(dict(steps(calls, products, tokens)))}}}'
    )


def _lines(of: dict[str, dict]) -> str:
    """Return JSON with a line for each value."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(values)}" for name, values in of.items())
    return f"{{\n{lines}\n}}"


if __name__ == "__main__":
    main()
