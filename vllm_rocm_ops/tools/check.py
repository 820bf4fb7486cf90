"""`vllm-rocm-ops check`: everything that can be found out about the ops on one machine, in one file to send.

The parts run one after another in another process (check_worker.py), each within a time: one that hangs or faults the GPU is written down,
with the end of what it said, and the next one runs in a new process. The process that starts them touches no GPU. The parts:

    smoke ...    stages from loading the driver to the smallest case of each op (smoke.py); after one that fails, nothing else runs
    machine      what `doctor` finds
    op ...       each op's cases, checked and timed as `bench` does
    bandwidth    of the GPU's memory
    model ...    linear layers and experts of a model's rank, as vLLM's workers would measure them (vllm/kernel_timing.py), beside
                 each of PyTorch's, vLLM's and AITER's kernels that is installed, with what our cost model predicts
    emulator ... what the emulator counts for an op's first case, where its extra is installed

With `--emulate` the emulator stands in for a GPU: some small cases of each op, tiny models, and no times.
"""

from __future__ import annotations

import datetime
import fnmatch
import importlib.util
import json
import re
import time
from pathlib import Path

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.core import tables
from vllm_rocm_ops.tools import smoke
from vllm_rocm_ops.tools.check_worker import GOOD, Worker

MODELS = {"llama-3.1-405b-fp8": 8, "deepseek-v3": 8}  # with so many ranks
TINY = {"tiny-llama-fp8": 1, "tiny-deepseek-v3-fp8": 1}
SECONDS = {"smoke": 60, "machine": 60, "op": 30, "bandwidth": 60, "model": 90, "emulator": 60}  # of a part, at most
MINUTES = 3.0
LEAST_SECONDS = 15.0  # that must be left for a part to be begun: one of an op takes 5 in a new process on an H200


def planned(arch: str | None, pattern: str) -> list[tuple]:
    """The parts to run: a name, and arguments."""
    names = [op.name for op in op_module.registered() if fnmatch.fnmatchcase(op.name, pattern)]
    if not names:
        raise ValueError(f"check: no op matches --op {pattern}")
    stages = [("smoke", stage, *[pattern] * (stage == "ops")) for stage in smoke.STAGES]
    stages = [stage for stage in stages if not arch or stage[1] in smoke.EMULATED]
    found: list[tuple] = [*stages[:1], ("machine",), *stages[1:], *(("op", name) for name in names)]
    if pattern == "*":
        found += [] if arch else [("bandwidth",)]
        found += [("model", name, tp) for name, tp in (TINY if arch else MODELS).items()]
    if importlib.util.find_spec("tinygrad") and not arch:
        found += [("emulator", name) for name in names]
    return found


def wrong_of(part: dict) -> list[str]:
    """What is wrong in a part."""
    wrong = [
        f"{piece.get('case') or '{layer} {tokens} tokens beside {beside}'.format(**piece)}: {piece['wrong']}"
        for piece in part["found"]
        if piece.get("wrong")
    ]
    begun = part["found"][-1]["case"] if part["found"] and part["found"][-1].get("begun") else ""
    return wrong + ([] if part["ended"] in GOOD else [part["ended"] + f", in {begun}" * bool(begun)])


def line_of(part: dict) -> str:
    """One line about a part."""
    pieces, wrong = part["found"], wrong_of(part)
    kernels = {piece["kernel"] for piece in pieces if "kernel" in piece and not piece["kernel"].startswith("fallback")}
    what = f"{len(pieces)} results" + (f", {len(kernels)} kernels" if kernels else "")
    wins = [piece["us"] < piece["other us"] for piece in pieces if piece.get("us") and piece.get("other us")]
    what += f", ours the faster in {sum(wins)} of {len(wins)}" if wins else ""
    fine = {"done": "right", "stopped": "right, stopped for lack of time"}.get(part["ended"], part["ended"])
    verdict = f"WRONG: {wrong[0]}" if wrong else fine
    return f"{part['part']:44} {part['seconds']:6.1f} s  {what:40}  {verdict}"


def file_name(found: list[dict], arch: str | None) -> Path:
    """A name for the file: what ran, and when."""
    gpus = [gpu["name"] for part in found for piece in part["found"] for gpu in piece.get("gpus", ())]
    name = re.sub(r"\W+", "-", arch or (gpus[0] if gpus else "none"))
    return Path(f"vllm-rocm-ops-check-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json")


def run_parts(
    worker: Worker, path: Path | None, pattern: str, arch: str | None, end: float
) -> tuple[list[dict], Path, str]:
    """Run all parts until a time, and write the file before and after each. Return what they found, the file, and the smoke stage that
    failed, or none."""
    parts, failed = [], ""

    def write(*part: dict) -> None:
        found = {"command": "check", "emulated": arch, "parts": [*parts, *part]}
        tables.replace(path, json.dumps(found, indent=1))

    plan = planned(arch, pattern)
    for number, (kind, *rest) in enumerate(plan):
        part = {"part": " ".join(map(str, (kind, *rest))), "ended": "left out", "seconds": 0.0, "found": [], "said": ""}
        left = end - time.monotonic()
        if failed:
            part["said"] = f"{failed} failed"
        elif left > LEAST_SECONDS:
            if path is not None:
                write(part | {"ended": "begun"})  # what a machine that goes down leaves
            sharing = sum(one[0] == "model" for one in plan[number:]) if kind == "model" else 1
            seconds = min(SECONDS[kind], max(left / sharing, LEAST_SECONDS))
            part |= worker.run(kind, tuple(rest), arch, seconds)
        parts.append(part)
        print(line_of(part), flush=True)
        if path is None:
            path = file_name(parts, arch)
        write()
        if not arch and any(piece.get("gpus") == [] for piece in part["found"]):
            raise RuntimeError(
                f"there is no GPU; --emulate {next(iter(archs.ARCHS))} has the emulator stand in for one"
            )
        if wrong_of(part):
            worker.close(kill=True)  # what wrote a wrong result may have written elsewhere, too
            failed = part["part"] if kind == "smoke" else failed
    return parts, path, failed
