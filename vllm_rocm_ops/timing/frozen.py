"""Compare measurements with predictions that were frozen before any measurement: `timing/frozen/<date>-<commit>.json`.

serving_benchmarks/timing_study/freeze.py writes these files, and `vllm-rocm-ops check` compares. A prediction holds only for code objects
with its hashes.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from pathlib import Path

import torch

from vllm_rocm_ops.core import archs, launch
from vllm_rocm_ops.models.layers import LayerCall

FOLDER = Path(__file__).parent / "frozen"
WORST = 5  # predictions to list


def code_of(call: LayerCall, tokens: int, arch: archs.Arch) -> dict[str, str]:
    """Return the hashes of the code objects of a call's kernels, by symbol."""
    case = call.case(tokens).make("meta", torch.Generator(), arch.fp8_dtype)
    launches = call.op.explain(*case, arch=arch, require_code=True).launches
    return {one.symbol: launch.stamp(launch.code_object(one.module, arch.name))["sha256"][:16] for one in launches}


def is_for(values: dict, call: LayerCall, tokens: int, arch: archs.Arch) -> bool:
    """True if a prediction holds for the installed code."""
    return values["code"] == code_of(call, tokens, arch)


def key(product: str, call: LayerCall, tokens: int) -> str:
    """Return the key of a prediction."""
    return f"{product} {call.op.name} {call.parameters!r} {str(call.dtype).removeprefix('torch.')} {tokens} tokens"


@functools.cache
def newest() -> dict:
    """Return the last frozen file: its `date`, `commit` and `calls`."""
    paths = sorted(FOLDER.glob("*.json"))
    return json.loads(paths[-1].read_text()) if paths else {"date": "", "commit": "", "calls": {}}


def find(product: str | None, call: LayerCall, tokens: int, arch: archs.Arch) -> dict | None:
    """Return the frozen prediction of a call for the installed code, or None."""
    found = newest()["calls"].get(key(product, call, tokens)) if product else None
    return found if found and is_for(found, call, tokens, arch) else None


def beside(found: list[dict]) -> list[str]:
    """Format the comparison of `check`'s measurements with frozen predictions, each call once."""
    pieces = [piece for piece in found if piece.get("frozen") and piece.get("us")]
    calls = {(piece["layer"], piece["op"], piece["kernel"], piece["tokens"]): piece for piece in reversed(pieces)}
    if not calls:
        return []
    ratios = {name: piece["us"] / piece["frozen"]["us"] for name, piece in calls.items()}
    bands = {name: piece["frozen"]["band"] for name, piece in calls.items()}
    held = [1 / (1 + band) <= ratios[name] <= 1 + band for name, band in bands.items() if band is not None]
    of = newest()
    lines = [f"frozen predictions of {of['date']} at {of['commit']}, before any run on such a GPU: {len(calls)} calls"]
    lines.append(f"  measured / predicted: median {statistics.median(ratios.values()):.2f}")
    lines.append(f"  within the error band: {sum(held)} of {len(held)}; without a band: {len(calls) - len(held)}")
    worst = sorted(ratios, key=lambda name: -abs(math.log(ratios[name])))[:WORST]
    return lines + [
        f"  {layer}, {tokens} tokens: {calls[layer, op, kernel, tokens]['us']:.1f} us measured, "
        f"{calls[layer, op, kernel, tokens]['frozen']['us']:.1f} us predicted ({op})"
        for layer, op, kernel, tokens in worst
    ]
