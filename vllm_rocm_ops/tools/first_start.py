"""Try the kernels on a machine without a record, as a child process of a vLLM worker (vllm/selection/kernel_trial.py).

It runs the stages of smoke.py like the parts of `check`, with one op after another at the end. This process
never touches the GPU: each fault or hang costs the process that runs the stages, and is recorded at once.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator

from vllm_rocm_ops.collectives import launches
from vllm_rocm_ops.core import op as op_module
from vllm_rocm_ops.tools import check, check_worker, smoke
from vllm_rocm_ops.vllm.selection import kernel_selection

SECONDS = 8.0  # time limit per op whose kernels are loaded; no stage starts that could not have it
GRACE_SECONDS = 2.0  # for a process that was killed to exit
LAUNCHING = "launch", "replay"
"""Stages before the first op that launch kernels."""
OUT_OF_MEMORY = "OutOfMemoryError"  # another process may hold the memory


def names() -> list[str]:
    """Return the ops to try: those that seams may call."""
    return [op.name for op in op_module.registered() if not op.is_standalone]


def stages() -> Iterator[tuple[str, ...]]:
    """Yield the stages, each a name followed by its arguments. An op's kernels are loaded before it is tried.

    Loading may take all the time that is left: a driver that compiled PTX beside other processes took over 8 s.
    """
    yield from ((stage,) for stage in smoke.STAGES if stage not in ("load", "ops"))
    yield from ((stage, name) for name in names() for stage in ("load", "ops"))


def blamed(stage: tuple[str, ...], ended: str) -> list[str]:
    """Return the ops to turn off after a failed stage.

    A fault before the first op blames all kernels, and so does a hang after a launch. Other failures there are not the
    kernels': opening a GPU may take long, an op meets a code object that does not load by itself, and replays that
    differ are the graphs'.
    """
    if stage[0] == "load":
        return []
    if stage[0] == "ops":
        return [] if OUT_OF_MEMORY in ended else [stage[1]]
    launches_hang = ended.startswith("hung") and stage[0] in LAUNCHING
    return [*names(), *launches.NAMES] if ended.startswith("died") or launches_hang else []


def run(worker: check_worker.Worker, end: float) -> dict:
    """Run the stages until `end`, a time of the monotonic clock, and keep the machine's record.

    Returns:
        The number of stages that ran, the failures, and the ops that are off.
    """
    machine, off, failed, ran, todo = {}, {}, [], 0, [*stages()]

    def keep() -> None:
        if machine:
            kernel_selection.update(machine, lambda record: record.off.update(off), 1.0)

    for stage in todo:
        left = end - time.monotonic() - GRACE_SECONDS
        if left < SECONDS:
            failed.append(f"{len(todo) - ran} of {len(todo)} stages were left out, for lack of time")
            break
        part = worker.run("smoke", stage, None, SECONDS if stage[0] == "ops" else left)
        ran += 1
        machine = next((piece["machine"] for piece in part["found"] if "machine" in piece), machine)
        wrong = check.wrong_of(part)
        if not wrong:
            continue
        worker.close(kill=True)  # a kernel that writes wrong results may also have written elsewhere
        why = f"smoke stage {stage[0]}: {wrong[0]}"
        failed.append(why)
        off |= dict.fromkeys(blamed(stage, part["ended"]), why)
        keep()
        if stage[0] == "driver" or launches.SUM in off:
            break
    keep()
    return {"ran": ran, "failed": failed, "off": off}


def main() -> None:
    """Run the stages until the time that is the first argument, and print the outcome as JSON.

    The second argument is the process with which this one ends.
    """
    check_worker.end_with(int(sys.argv[2]))
    check_worker.GRACE_SECONDS = GRACE_SECONDS
    with contextlib.closing(check_worker.Worker(multiprocessing.get_context("fork"))) as worker:
        print(json.dumps(run(worker, float(sys.argv[1]))), flush=True)
