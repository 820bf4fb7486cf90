"""Run all checks and benchmarks of one machine for `vllm-rocm-ops check`, and write them to one report file.

The parts run one after another in a worker process (check_worker.py), each with a time limit. If a part hangs or faults the GPU, the
report records it with the end of its output, and the next part runs in a new process. The parent process never touches the GPU. Parts:

    smoke ...    stages from loading the driver to the smallest case of each op (smoke.py); nothing runs after a failed stage
    machine      the `doctor` report
    op ...       each op's cases, checked and timed as in `bench`
    bandwidth    HBM bandwidth
    model ...    linear layers and experts of one rank, timed as vLLM's workers do (vllm/selection/kernel_timing.py) against every
                 installed kernel of PyTorch, vLLM and AITER, with the cost model's predictions
    emulator ... the emulator's counters for an op's first case, if the extra is installed

With `--emulate` the emulator replaces the GPU: a few small cases of each op, tiny models, and no times.
"""

from __future__ import annotations

import datetime
import fnmatch
import importlib.util
import json
import re
import time
from pathlib import Path

from vllm_rocm_ops.core import archs, tables
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.tools import smoke
from vllm_rocm_ops.tools.check_worker import GOOD, Worker

MODELS = {"llama-3.1-405b-fp8": 8, "deepseek-v3": 8}  # name: TP size
TINY = {"tiny-llama-fp8": 1, "tiny-deepseek-v3-fp8": 1}
SECONDS = {"smoke": 60, "machine": 60, "op": 30, "bandwidth": 60, "model": 90, "survey": 60, "emulator": 60}
"""Time limit per part."""
MINUTES = 3.0
MIN_SECONDS = 15.0  # remaining time that a part needs to start: an op takes 5 s in a new process on an H200


def planned(arch: str | None, pattern: str) -> list[tuple]:
    """Return the parts to run, each a name followed by its arguments."""
    names = [op.name for op in op_module.registered() if fnmatch.fnmatchcase(op.name, pattern)]
    if not names:
        raise ValueError(f"check: no op matches --op {pattern}")
    stages = [("smoke", stage, *[pattern] * (stage == "ops")) for stage in smoke.STAGES]
    stages = [stage for stage in stages if not arch or stage[1] in smoke.EMULATED]
    parts: list[tuple] = [*stages[:1], ("machine",), *stages[1:], *(("op", name) for name in names)]
    if pattern == "*":
        parts += [] if arch else [("bandwidth",)]
        parts += [("model", name, tp) for name, tp in (TINY if arch else MODELS).items()]
    if importlib.util.find_spec("tinygrad") and not arch:
        parts += [("emulator", name) for name in names]
    return parts


def wrong_of(part: dict) -> list[str]:
    """Return the failures of a part."""
    wrong = [
        f"{piece.get('case') or '{layer}, {tokens} tokens, versus {beside}'.format(**piece)}: {piece['wrong']}"
        for piece in part["found"]
        if piece.get("wrong")
    ]
    begun = part["found"][-1]["case"] if part["found"] and part["found"][-1].get("begun") else ""
    return wrong + ([] if part["ended"] in GOOD else [part["ended"] + f", in {begun}" * bool(begun)])


def line_of(part: dict) -> str:
    """Return the summary line of a part."""
    pieces, wrong = part["found"], wrong_of(part)
    kernels = {piece["kernel"] for piece in pieces if "kernel" in piece and not piece["kernel"].startswith("fallback")}
    what = f"{len(pieces)} result{'s' * (len(pieces) != 1)}" + (f", {len(kernels)} kernels" if kernels else "")
    wins = [piece["us"] < piece["other us"] for piece in pieces if piece.get("us") and piece.get("other us")]
    what += f", plugin faster in {sum(wins)} of {len(wins)}" if wins else ""
    fine = {"done": "ok", "stopped": "ok, stopped at its time limit"}.get(part["ended"], part["ended"])
    verdict = f"FAILED: {wrong[0]}" if wrong else fine
    return f"{part['part']:44} {part['seconds']:6.1f} s  {what:40}  {verdict}"


def file_name(parts: list[dict], arch: str | None) -> Path:
    """Return the name of the report file, from the GPU and the time."""
    gpus = [gpu["name"] for part in parts for piece in part["found"] for gpu in piece.get("gpus", ())]
    name = re.sub(r"\W+", "-", arch or (gpus[0] if gpus else "none"))
    return Path(f"vllm-rocm-ops-check-{name}-{datetime.datetime.now():%Y%m%d-%H%M%S}.json")


def run_parts(
    worker: Worker, path: Path | None, pattern: str, arch: str | None, end: float
) -> tuple[list[dict], Path, str]:
    """Run all parts until `end`, and write the report before and after each.

    Returns the parts, the report's path, and the failed smoke stage or "".
    """
    parts, failed = [], ""

    def write(*part: dict) -> None:
        report = {"command": "check", "emulated": arch, "parts": [*parts, *part]}
        tables.replace(path, json.dumps(report, indent=1))

    plan = planned(arch, pattern)
    for number, (kind, *rest) in enumerate(plan):
        part = {"part": " ".join(map(str, (kind, *rest))), "ended": "left out", "seconds": 0.0, "found": [], "said": ""}
        left = end - time.monotonic()
        if failed:
            part["said"] = f"{failed} failed"
        elif left > MIN_SECONDS:
            if path is not None:
                write(part | {"ended": "begun"})  # names the running part if the machine goes down
            sharing = sum(entry[0] == "model" for entry in plan[number:]) if kind == "model" else 1
            seconds = min(SECONDS[kind], max(left / sharing, MIN_SECONDS))
            part |= worker.run(kind, tuple(rest), arch, seconds)
        parts.append(part)
        print(line_of(part), flush=True)
        if path is None:
            path = file_name(parts, arch)
        write()
        if not arch and any(piece.get("gpus") == [] for piece in part["found"]):
            raise RuntimeError(f"no GPU found; --emulate {next(iter(archs.ARCHS))} runs the kernels in the emulator")
        if wrong_of(part):
            worker.close(kill=True)  # a kernel that writes wrong results may also have written elsewhere
            failed = part["part"] if kind == "smoke" else failed
    return parts, path, failed
