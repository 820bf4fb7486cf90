"""Time the kernels that vLLM would run under another flag, for `vllm-rocm-ops advise`, and keep them in the machine's record.

A start times the plugin against what vLLM selected. This times it against what vLLM would select with AITER's switch the other way, in
child processes as `check` does, so that a pair that hangs or faults ends alone. It changes no selection: report.py compares both settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models.layers import LayerCall
from vllm_rocm_ops.tools import check, options
from vllm_rocm_ops.tools.bench.baselines import ADVICE, baselines
from vllm_rocm_ops.tools.check_worker import Worker
from vllm_rocm_ops.vllm import comparisons
from vllm_rocm_ops.vllm.selection import kernel_selection, report
from vllm_rocm_ops.vllm.selection.key import AITER_OFF, AITER_ON, Baseline, Key

FLAGS = {
    AITER_OFF: {"block_scaled_mm": "vllm triton", "fused_experts": "vllm"},
    AITER_ON: {"block_scaled_mm": "aiter", "fused_experts": "aiter"},
}
"""Flag -> op -> the kernel of bench/baselines that vLLM then runs. Other ops have one kernel with both, or an unknown one."""
LOCK_SECONDS = 60.0


def pairs(
    calls: list[LayerCall], arch: archs.Arch, record: kernel_selection.Record, sizes: tuple[int, ...]
) -> Iterator[tuple]:
    """Yield what the record lacks: the index of a call in `calls`, the key of its times, and the token counts."""
    for index, call in enumerate(calls):
        if not call.count or call.op not in comparisons.COMPARISONS:
            continue
        shapes, installed = comparisons.shapes_of(call, arch), baselines(call.op) | baselines(call.op, ADVICE)
        for flag, kernels in FLAGS.items():
            name = kernels.get(call.op.name)
            if name not in installed:
                continue
            timed = {
                tokens
                for key, measured in record.shapes.items()
                if key.op == call.op.name and key.shape in shapes and report.flag_of(key) == flag
                for tokens in measured
            }
            if lacking := tuple(tokens for tokens in sizes if tokens not in timed):
                yield index, Key(call.op.name, shapes[0], Baseline(name, flag=flag)), lacking


def measured(part: dict) -> dict[int, kernel_selection.Measured]:
    """Return a part's times and errors by token count, of those whose results were compared."""
    names = "us", "other us", "error", "other error"
    compared = [piece for piece in part["found"] if "other error" in piece]
    return {piece["tokens"]: kernel_selection.Measured(*map(piece.get, names)) for piece in compared}


def survey(
    worker: Worker, model: str, tp: int | None, ep: int | None, sizes: tuple[int, ...], end: float
) -> kernel_selection.Record:
    """Time what the record lacks until `end`, and return it. Raises RuntimeError without a GPU."""
    driver = worker.run("smoke", ("driver",), None, check.SECONDS["smoke"])
    machine = next((piece["machine"] for piece in driver["found"] if "machine" in piece), {})
    if machine.get("arch") not in archs.ARCHS:
        raise RuntimeError("; ".join(check.wrong_of(driver)) or "no supported GPU found")
    arch = archs.ARCHS[machine["arch"]]
    calls = options.calls_of(model, tp, ep, arch)

    def update(change: Callable[[kernel_selection.Record], None]) -> kernel_selection.Record:
        return kernel_selection.update(machine, change, LOCK_SECONDS)  # a starting worker may write it, too

    step = [[call.op.name, comparisons.shapes_of(call, arch), call.count] for call in calls if call.count]
    name = f"{model}, TP {tp or 1}" + f", EP {ep or tp or 1}" * (ep is not None)
    record = update(lambda record: record.steps.update({name: step}))
    for index, key, lacking in [*pairs(calls, arch, record, sizes)]:
        left = end - time.monotonic()
        if left < check.MIN_SECONDS:
            print(f"left out for lack of time: {key}", flush=True)
            continue
        arguments = model, tp, ep, index, key.baseline.name, lacking
        part = worker.run("survey", arguments, None, min(check.SECONDS["survey"], left))
        print(check.line_of(part | {"part": str(key)}), flush=True)
        if timed := measured(part):
            record = update(lambda record, key=key, timed=timed: record.shapes.setdefault(key, {}).update(timed))
        if check.wrong_of(part):
            worker.close(kill=True)
    return record


def lines(record: kernel_selection.Record) -> list[str]:
    """Return the report: what the plugin serves, baselines with wrong results, and the faster setting of AITER."""
    served, advised = report.summary(record), report.advice(record)
    nothing = "no layer was timed with AITER and without: is AITER installed, and has a start timed this model?"
    return [
        *report.columns(served),
        *report.wrong_baselines(record),
        *(report.columns(advised) if advised else [nothing]),
        "no flag was changed",
    ]
