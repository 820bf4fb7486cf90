"""Predictions that were written down before anybody measured them: `timing/frozen/<date>-<commit>.json`. `vllm-rocm-ops check` sets what
it measures beside them.

    python -m vllm_rocm_ops.timing.frozen --date 2026-11-24 --commit 1234567 > vllm_rocm_ops/timing/frozen/2026-11-24-1234567.json

Makes a file, in some forty minutes, with --keep in less; needs the extra [emulator]. A prediction holds for the code objects whose hashes it has, and is not
set beside others.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vllm_rocm_ops import arch as archs
from vllm_rocm_ops import launch, model_config, model_layers
from vllm_rocm_ops.model_layers import LayerCall

from . import CONTEXT, machines

FOLDER = Path(__file__).parent / "frozen"
MODELS = {"llama-3.1-405b-fp8": 8, "deepseek-v3": 8, "qwen3-30b-a3b-fp8": 1, "glm-4.5-air-fp8": 4}  # ranks
PRODUCTS = ("MI300X", "MI325X", "MI355X")
TOKENS = (1, 8, 32, 64)
WORST = 5  # predictions that are named


def code_of(call: LayerCall, tokens: int, arch: archs.Arch) -> dict[str, str]:
    """Return the hashes of the code objects that a call's kernels are in, by symbol."""
    case = call.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype)
    launches = call.op.explain(*case, arch=arch, require_code=True).launches
    return {one.symbol: launch.stamp(launch.code_object(one.module, arch.name))["sha256"][:16] for one in launches}


def key(product: str, call: LayerCall, tokens: int) -> str:
    """Return what a prediction is found by."""
    return f"{product} {call.op.name} {call.parameters!r} {str(call.dtype).removeprefix('torch.')} {tokens} tokens"


def predictions(
    products: tuple[str, ...], tokens: tuple[int, ...], kept: dict[str, dict] | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield the key of each call of the models' decode steps, and its prediction: microseconds, the band as a share of them or None where
    it is unknown, launches, and the code. Calls that are in `kept` for all products, with the same code, are not predicted again."""
    from . import launch_time, predict

    done = set()
    for arch in dict.fromkeys(machines.named(product).arch for product in products):
        alike = [machines.named(product) for product in products if machines.named(product).arch == arch]
        for name, tp in MODELS.items():
            config = model_config.read(name)
            others = [*model_layers.gated(config, tp), *model_layers.absorbed(config, tp)]
            for call in [*model_layers.calls(config, tp), model_layers.attention(config, tp), *others]:
                for size in tokens if call.count else ():
                    if key(alike[0].name, call, size) in done:
                        continue
                    done.add(key(alike[0].name, call, size))
                    before = {each: (kept or {}).get(each) for each in (key(one.name, call, size) for one in alike)}
                    if all(values and values["code"] == code_of(call, size, arch) for values in before.values()):
                        yield from before.items()
                        continue
                    case = call.case(size).make("meta", torch.Generator(), arch.fp8_dtype)
                    try:
                        kernels = predict.predict_call(call.op, call.op.Arguments(*case)._asdict(), alike[0])
                    except ValueError:  # PyTorch runs it
                        continue
                    code = code_of(call, size, arch)
                    for machine in alike:  # which run the same instructions
                        us = sum(launch_time.predict(machine, kernel.recording).us for kernel in kernels)
                        band = predict.band(call.op, machine.name).ratio
                        values = {"us": round(us, 2), "band": band, "launches": len(kernels), "code": code}
                        yield key(machine.name, call, size), values


def steps(calls: dict[str, dict], products: tuple[str, ...], tokens: tuple[int, ...]) -> Iterator[tuple[str, dict]]:
    """Yield the key of each model's step on each side, with these calls, and its prediction: microseconds, launches, and the band."""
    from . import step, step_report

    for machine in map(machines.named, products):
        known = kernel_times(machine, calls)
        for name, tp in MODELS.items():
            for side in step_report.sides(machine):
                for size in tokens:
                    found = step.total(step.nodes(model_config.read(name), tp, None, size, machine, side, known))
                    band = [round(1e3 * limit, 1) for limit in step_report.interval(found)]
                    values = {"us": round(found.us, 1), "launches": found.launches, "band": band}
                    yield f"{machine.name} {name} TP {tp} {side} {size} tokens", values


@functools.cache
def newest() -> dict:
    """Return the file that was frozen last: its `date`, `commit` and `calls`."""
    paths = sorted(FOLDER.glob("*.json"))
    return json.loads(paths[-1].read_text()) if paths else {"date": "", "commit": "", "calls": {}}


def kernel_times(
    machine: machines.Machine, calls: dict[str, dict] | None = None
) -> Callable[[LayerCall, int], tuple[float, int, float | None] | None]:
    """Return the kernel model as frozen predictions have it, by default the newest. It has no time for a call that they lack, and raises
    ValueError for a number of tokens of which they have none."""
    calls = newest()["calls"] if calls is None else calls
    sizes = {name.rsplit(" ", 2)[1] for name in calls if name.startswith(f"{machine.name} ")}

    def known(call: LayerCall, tokens: int) -> tuple[float, int, float | None] | None:
        if str(tokens) not in sizes:
            raise ValueError(f"frozen predictions of {machine.name} must have {tokens} tokens, got {', '.join(sizes)}")
        values = calls.get(key(machine.name, call, tokens))
        return values and (values["us"], values["launches"], values["band"])

    return known


def product_of(gpu: str) -> str | None:
    """Return the product that a GPU's name has, as torch gives it."""
    return next((product for product in PRODUCTS if product in gpu), None)


def find(product: str | None, call: LayerCall, tokens: int, arch: archs.Arch) -> dict | None:
    """Return what was predicted of a call, if it was, for the code that is installed."""
    found = newest()["calls"].get(key(product, call, tokens)) if product else None
    return found if found and found["code"] == code_of(call, tokens, arch) else None


def beside(found: list[dict]) -> list[str]:
    """Return lines about what `check` has measured of calls that were predicted before, each call once."""
    pieces = [piece for piece in found if piece.get("frozen") and piece.get("us")]
    calls = {(piece["layer"], piece["op"], piece["kernel"], piece["tokens"]): piece for piece in reversed(pieces)}
    if not calls:
        return []
    ratios = {name: piece["us"] / piece["frozen"]["us"] for name, piece in calls.items()}
    bands = {name: piece["frozen"]["band"] for name, piece in calls.items()}
    held = [1 / (1 + band) <= ratios[name] <= 1 + band for name, band in bands.items() if band is not None]
    of = newest()
    lines = [f"predicted on {of['date']} at {of['commit']}, before any such GPU was seen: {len(calls)} of these calls"]
    lines.append(f"  measured / predicted: median {statistics.median(ratios.values()):.2f}")
    lines.append(f"  within the band: {sum(held)} of {len(held)}; {len(calls) - len(held)} have no band")
    worst = sorted(ratios, key=lambda name: -abs(math.log(ratios[name])))[:WORST]
    return lines + [
        f"  {layer}, {tokens} tokens: {calls[layer, op, kernel, tokens]['us']:.1f} us measured, "
        f"{calls[layer, op, kernel, tokens]['frozen']['us']:.1f} predicted ({op})"
        for layer, op, kernel, tokens in worst
    ]


def main() -> None:
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
