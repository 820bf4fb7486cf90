"""Break down a decode step in vLLM's engine: kernels by class, idle time, and waiting between ranks.

With `latency.py --profile` every worker records `STEPS` decode steps with torch's profiler, which slows a step by some per cent. All ranks
are recorded. The time of a class is the sum of its kernels; idle is the rest of the span from the first kernel to the last, so overlapping
kernels of two streams count twice. An all-reduce ends on all ranks when the last has arrived: a rank's time above the minimum over ranks is
waiting.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable

STEPS = 8  # recorded
STEPS_BEFORE = 7  # after the last prefill
TOKENS = STEPS_BEFORE + STEPS + 9  # of a request, if a step adds one: none ends during the profile
LONGEST_NAME = 120  # maximum characters of a kernel's name
IDLE = "idle"
ALL_REDUCE = "all-reduce, with waiting"
NORMS = "norms, activations, quantization"
EXPERTS = "experts: GEMMs"
CLASSES = {  # by a pattern of the kernel's name; the first match counts
    ALL_REDUCE: r"all_?reduce|minimax_reduce|cross_device_reduce|nccl|multimem|all_?gather|reduce_?scatter|one_shot|two_shot",
    "attention": r"flash|fmha|attention|attn|mla_|_cache|_fwd_\w*kernel_stage|^reduce_segments|rotary|rope|triton_poi_\w*neg",  # that rotates
    EXPERTS: r"fused_moe_kernel|fused_experts_\w*(gate_up|down)|_matmul_ogs_",
    NORMS: r"^(?!fused_experts|unquantized|batched_gemm|scaled_mm).*(norm|silu|act_and_mul|clamp|quant|scaled_linear)|triton_(red|per)_",
    "experts: routing, sorting, sums, quantization": r"fused_experts|moe|expert|topk|bitonic|sort|_combined_routing|_sum_bitmatrix|_reduce_grouped",
    "FP8 linears": r"scaled_mm|gemm_\w*fp8|e4m3|w8a8",
    "other GEMMs": r"gemm|gemv|nvjet|cutlass|cublas|splitk|Cijk|wvSplitK|matmul|_mm_",
}
REST = "sampling, copies and the rest"

_recording = None  # in a worker: the profiler


# In the workers


def start(_worker) -> None:
    """Start recording once the GPU is idle."""
    global _recording
    import torch

    activity = torch.profiler.ProfilerActivity.CUDA
    if activity not in torch.profiler.supported_activities() or not torch.cuda.is_available():
        return
    torch.cuda.synchronize()
    _recording = torch.profiler.profile(activities=[activity])
    _recording.start()


def stop(_worker, steps: int) -> dict | None:
    """Stop recording and return `summarize` of the kernels since `start`, or None without a GPU."""
    global _recording
    import torch

    if _recording is None:
        return None
    torch.cuda.synchronize()
    _recording.stop()
    events, _recording = _recording.profiler.kineto_results.events(), None
    on_gpu = torch.autograd.DeviceType.CUDA
    return summarize(
        [(event.name(), event.start_ns(), event.duration_ns()) for event in events if event.device_type() == on_gpu],
        steps,
    )


def summarize(events: list[tuple[str, int, int]], steps: int) -> dict:
    """Summarize one rank's steps from (name, start, duration) of each kernel in ns.

    Microseconds per step: `span_us`; `busy_us`, during which any kernel ran; `kernels`, {name: [calls, us]}; `all_reduce_us` of each
    all-reduce, in order.
    """
    events = sorted(events, key=lambda event: event[1])
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    busy = end = 0
    for name, begin, duration in events:
        totals = kernels[name[:LONGEST_NAME]]
        totals[0] += 1 / steps
        totals[1] += duration / 1e3 / steps
        busy += max(begin + duration - max(begin, end), 0)
        end = max(end, begin + duration)
    span = end - events[0][1] if events else 0
    ordered = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "steps": steps,
        "span_us": span / 1e3 / steps,
        "busy_us": busy / 1e3 / steps,
        "kernels": {name: [round(value, 3) for value in totals] for name, totals in ordered},
        "all_reduce_us": [duration / 1e3 for name, _, duration in events if class_of(name) == ALL_REDUCE],
    }


# In the process that measures


def record(llm, prompts: list, sampling: Callable[[int], object]) -> list[dict]:
    """Profile `STEPS` decode steps of all prompts at once, and return `compare` of every rank's `stop`.

    `sampling` returns vLLM's parameters for a number of tokens.
    """
    parameters = sampling(TOKENS + len(prompts))  # a step may prefill one prompt
    engine, prefilled = llm.llm_engine, set()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"profiled {len(prompts)} {i}", prompt, parameters)
    while len(prefilled) < len(prompts):
        prefilled |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    for _ in range(STEPS_BEFORE):
        engine.step()
    llm.collective_rpc(start)
    for _ in range(STEPS):
        engine.step()
    ranks = llm.collective_rpc(stop, args=(STEPS,))
    while engine.has_unfinished_requests():
        engine.step()
    return compare(ranks) if all(ranks) else []


def compare(ranks: list[dict]) -> list[dict]:
    """Return each rank with `waiting_us`, its waiting per step in all-reduces, or None if the ranks' counts of them differ.

    Only the first rank keeps its kernels, as the others have the same.
    """
    waits = waiting([rank["all_reduce_us"] for rank in ranks], ranks[0]["steps"])
    left_out = {"all_reduce_us"}, {"all_reduce_us", "kernels"}
    return [
        {name: value for name, value in rank.items() if name not in left_out[place > 0]} | {"waiting_us": wait}
        for place, (rank, wait) in enumerate(zip(ranks, waits))
    ]


def waiting(all_reduces: list[list[float]], steps: int) -> list[float | None]:
    """Return the waiting per step by rank, from the times of their all-reduces."""
    if len({len(times) for times in all_reduces}) > 1:
        return [None] * len(all_reduces)
    least = [min(times) for times in zip(*all_reduces)]
    return [round((sum(times) - sum(least)) / steps, 2) for times in all_reduces]


# Afterwards


def class_of(name: str) -> str:
    """Return the class of a kernel."""
    return next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name, re.IGNORECASE)), REST)


def by_class(rank: dict) -> dict[str, float]:
    """Return microseconds per step, in the order of `CLASSES`, without empty classes."""
    times = dict.fromkeys((*CLASSES, REST), 0.0)
    for name, (_, us) in rank["kernels"].items():
        times[class_of(name)] += us
    return {kind: us for kind, us in times.items() if us} | {IDLE: _idle(rank)}


def _idle(rank: dict) -> float:
    return rank["span_us"] - rank["busy_us"]


def launches(rank: dict) -> float:
    """Return the number of kernels and copies per step."""
    return sum(calls for calls, _ in rank["kernels"].values())


def table(batches: dict[str, dict[str, list[dict]]]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows for {batch size: {side: ranks}}, with the sides in their order.

    Rows are microseconds per step of the first rank by class, and each rank's waiting.
    """

    def row(name: str, value: Callable[[list[dict]], object]) -> list[str]:
        return [name, *(" / ".join(str(value(ranks)) for ranks in sides.values()) for sides in batches.values())]

    of_first = {id(ranks): by_class(ranks[0]) for sides in batches.values() for ranks in sides.values()}
    rows = [
        row(kind, lambda ranks, kind=kind: round(of_first[id(ranks)].get(kind, 0)))
        for kind in (*CLASSES, REST, IDLE)
        if any(kind in times for times in of_first.values())
    ]
    rows.append(row("step, under the profiler", lambda ranks: round(ranks[0]["span_us"])))
    rows.append(row("kernels and copies", lambda ranks: round(launches(ranks[0]))))
    if any(len(ranks) > 1 for sides in batches.values() for ranks in sides.values()):
        for what, value in (("idle", _idle), ("waiting in all-reduces", lambda rank: rank["waiting_us"] or 0)):
            rows.append(row(f"{what}, by rank", lambda ranks, value=value: " ".join(f"{value(r):.0f}" for r in ranks)))
    return ["class", *(f"batch {batch}" for batch in batches)], rows
