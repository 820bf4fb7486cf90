"""Tabulate the launches of a profiled decode step before and after, and why each launch that is not the plugin's stays."""

import re
from typing import NamedTuple

import launches as names

from vllm_rocm_ops import ops
from vllm_rocm_ops.core.op import Op
from vllm_rocm_ops.models import fused_calls

from . import measurements
from .measurements import SIDES, ProfiledRun, grouped, markdown, plural

SHARE = 0.002
"""A launch below this share of its step has no row or name of its own."""

LONGEST = 40
"""Characters of a kernel's name."""

OUTSIDE = "Once a step, outside the layers."
ROTATED = (
    "Since this profile in the launch of `rope_and_cache` with the backends of `decode_attention`, where timed faster. FlashAttention has "
    "no seam."
)


def _of_o(op: Op) -> str:
    """Return where the quantization of o's input is that follows an op."""
    fuses = any(row.op is op and row.traits for row in fused_calls.FUSIONS)
    return f"o's input: in the launch of `{op.name}`, where timed faster." if fuses else "o's input: vLLM's."


REASONS: dict[str, str | dict[str, str]] = {
    # what a launch computes -> why it stays, or a reason for each group of models
    names.ATTENTION: "vLLM chooses FlashAttention on NVIDIA. Seams replace ROCm's backends, TRITON_ATTN and TRITON_MLA.",
    names.COMBINE: "Part of FlashAttention.",
    names.WRITE: {
        names.MLA: "In the launch of `mla_norms` with TRITON_MLA. FlashAttention has no seam.",
        names.GQA: ROTATED,
    },
    names.Q_K: ROTATED,
    names.Q_K_NORMS: ROTATED,
    names.Q: "In the launch of the W_UK GEMM with TRITON_MLA. FlashAttention has no seam.",
    names.K_PE: "In the launch of `mla_norms` with TRITON_MLA. FlashAttention has no seam.",
    names.QUANTIZATION: {
        names.MLA: f"{_of_o(ops.batched_gemm)} Shared experts' input: since this profile quantized in the norm's launch.",
        names.HYBRID: OUTSIDE,
        names.GQA: f"{_of_o(ops.paged_attention_decode)} FlashAttention writes BF16.",
    },
    names.QUERIES: "Before attention, where the cache is FP8. No op of the plugin does it.",
    names.NORM: {names.HYBRID: OUTSIDE},
    names.SUM: "Joins two streams. The next norm's kernel adds one residual, not two.",
    **dict.fromkeys(
        (names.FP8, names.BF16),
        "At warm-up the plugin was not more than 2 % faster in these shapes.",
    ),
    names.ABSORPTION: "`mla_attention` covers TRITON_MLA and ROCM_AITER_MLA, not FlashAttention.",
    names.PADDING: "Removed since this profile, with its copy: the top-k kernel writes these ids.",
    names.EMBEDDING: OUTSIDE,
    names.LOGITS: OUTSIDE,
    names.RUNNER: OUTSIDE,
    names.FILLS: OUTSIDE,
    names.POINTWISE: OUTSIDE,
    names.COPIES: {
        "llama|deepseek|minimax|gpt-oss": OUTSIDE,
        "qwen3": f"{OUTSIDE} One a layer belongs to the expert ids of padding.",
    },
}


class Kernel(NamedTuple):
    """Launches of one name in a step: what they compute, their owner, calls and us."""

    what: str
    owner: str
    name: str
    calls: float
    us: float
    is_small: bool

    @property
    def is_own(self) -> bool:
        return self.owner == names.PLUGIN


def kernels(model: str, rank: dict) -> list[Kernel]:
    """Return the kernels of a rank's step, with equal short names as one. Raises ValueError for an unknown kernel."""

    def key(name: str) -> tuple[str, str, str]:
        launch = names.entry(model, name)[-1]
        return launch.what, launch.owner, names.short(name)

    listed = []
    for what, alike in grouped(rank["kernels"], key).items():
        calls, us = map(sum, zip(*(rank["kernels"][name] for name in alike)))
        listed.append(Kernel(*what, calls, us, us < SHARE * rank["span_us"]))
    return listed


def reason(model: str, what: str) -> str:
    """Return why a launch that is not the plugin's stays. Raises ValueError if no reason is known."""
    reasons = REASONS.get(what, {})
    for models, why in [("", reasons)] if isinstance(reasons, str) else reasons.items():
        if re.match(models, model):
            return why
    raise ValueError(f"launch_table.REASONS must say why {what!r} of {model} stays, which is not the plugin's")


def newest() -> list[ProfiledRun]:
    """Return each model's and attention backend's newest of the profiled runs with its smallest batch."""
    smallest_last = sorted(measurements.profiled_runs(), key=lambda run: -min(map(int, run.batches)))
    runs = {(run.model, measurements.backend_of(run.options)): run for run in smallest_last}
    return sorted(runs.values(), key=lambda run: run.name)


def launches() -> str:
    """Return a table for each run of `newest`, at its smallest batch."""
    return measurements.joined(map(table, newest()))


def table(run: ProfiledRun) -> str:
    """Return the launches of a run's step by what they compute, the costliest first."""
    batch = min(run.batches, key=int)
    layers = measurements.layers_of(run.model) if run.layers == "all" else int(run.layers)
    sides = {side: kernels(run.model, ranks[0]) for side, ranks in run.batches[batch].items()}
    every = [(side, kernel) for side in sides for kernel in sides[side]]
    shown = {kernel.what for _, kernel in every if not kernel.is_small}

    def named(launch: tuple[str, Kernel]) -> str:
        _, kernel = launch
        return kernel.what if kernel.what in shown else f"below {100 * SHARE:g} %: {kernel.owner}"

    costs, rows = {}, {}
    for name, alike in grouped(every, named).items():
        own = {side: [kernel for its_side, kernel in alike if its_side == side] for side in SIDES}
        reasons = dict.fromkeys(reason(run.model, kernel.what) for kernel in own["with"] if not kernel.is_own)
        rows[name] = name, *(cell(own[side], layers) for side in SIDES), " ".join(reasons)
        costs[name] = name not in shown, -max(_sum(own[side], "us") for side in SIDES)
    others = [kernel for kernel in sides["with"] if not kernel.is_own]
    said = f"Not the plugin's: {_sum(others, 'calls'):.0f} launches a step, {_sum(others, 'us'):.0f} us."
    body = [
        *(rows[name] for name in sorted(rows, key=costs.get)),
        ("all", *(total(sides[side], layers) for side in SIDES), said),
    ]
    conditions = f"{plural(layers, 'layer')}, {run.hardware}, batch {batch}, {measurements.links(run.paths)}:"
    header = "launch", *SIDES.values(), "why launches stay that are not the plugin's"
    return f"### {run.name}\n\n{conditions}\n\n{markdown(header, body)}"


def in_layers(kernel: Kernel, layers: int) -> bool:
    """True if a kernel belongs to the layers: at least half of them have it."""
    return kernel.calls >= layers / 2 and kernel.what != names.RUNNER


def count(kernel: Kernel, layers: int) -> str:
    """Return calls per layer, or per step outside the layers."""
    if not in_layers(kernel, layers):
        return f"{kernel.calls:.0f} a step:"
    return f"{kernel.calls / layers:.2f}".rstrip("0").rstrip(".")


def cell(kernels: list[Kernel], layers: int) -> str:
    """Return calls, owner, name and us of each kernel, and the sums of the small ones by owner."""
    by_cost = sorted(kernels, key=lambda kernel: -kernel.us)
    parts = []
    for kernel in by_cost:
        if not kernel.is_small:
            name = kernel.name if len(kernel.name) <= LONGEST else f"{kernel.name[: LONGEST - 3]}..."
            parts.append(f"{count(kernel, layers)} {kernel.owner} `{name}` {kernel.us:.0f} us")
    small = grouped((kernel for kernel in by_cost if kernel.is_small), lambda kernel: kernel.owner)
    sums = ((owner, _sum(owned, "calls"), _sum(owned, "us")) for owner, owned in small.items())
    return "; ".join((*parts, *(f"{calls:.0f} a step: {owner} {us:.0f} us" for owner, calls, us in sums)))


def total(kernels: list[Kernel], layers: int) -> str:
    """Return a side's launches per layer and step, and their us."""
    inside = _sum([kernel for kernel in kernels if in_layers(kernel, layers)], "calls")
    return f"{inside / layers:.1f} a layer, {_sum(kernels, 'calls'):.0f} a step, {_sum(kernels, 'us'):.0f} us"


def _sum(kernels: list[Kernel], value: str) -> float:
    return sum(getattr(kernel, value) for kernel in kernels)
