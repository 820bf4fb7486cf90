"""Tabulate predicted decode steps: both sides, published steps, H200 profiles, and the costliest launches."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from timing_study import baseline, published_steps, step, step_report

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import machines

from .measurements import RESULTS, SIDES, lines_of, markdown

MODELS = {"Llama-3.1-405B FP8": "llama-3.1-405b-fp8", "DeepSeek-V3": "deepseek-v3"}
RANKS = 8
BATCHES = (1, 8, 32, 64)
MAX = 6  # launches in a table


@functools.cache
def nodes(
    product: str, model: str, side: str, batch: int, launch: float = baseline.LAUNCH.value
) -> tuple[step.Node, ...]:
    """Return the launches of a step, with the frozen times of the plugin's kernels."""
    machine = machines.named(product)
    given = model_config.read(MODELS[model]), RANKS, None, batch, machine, side, step.frozen_time(machine)
    return tuple(step.nodes(*given, launch=launch))


def total(product: str, model: str, side: str, batch: int) -> step.Total:
    return step.total(nodes(product, model, side, batch))


def speedup(product: str, model: str, batch: int) -> str:
    """Return baseline / plugin as the range over the costs of a vLLM launch."""
    plugin, stock = (
        lambda us, side=side: step.total(nodes(product, model, side, batch, us)) for side in step.SIDES[::-1]
    )
    low, high = step.speedup(plugin, stock, machines.named(product))
    return f"{low:.2f} to {high:.2f}x"


def _ms(found: step.Total) -> str:
    low, high = step_report.interval(found)
    return f"{found.us / 1e3:.1f} ({low:.1f} to {high:.1f})"


def readme() -> str:
    """Return a line for each model's step at batch 1, for README."""
    lines = []
    for model in MODELS:
        without, plugin = (total("MI300X", model, side, 1) for side in step.SIDES)
        unknown = (plugin.us - plugin.known_us) / 1e3
        lines.append(
            f"- MI300X, {model}, TP {RANKS}, batch 1: baseline {_ms(without)} ms in {without.launches:,} launches, plugin {_ms(plugin)} "
            f"ms in {plugin.launches:,}: {speedup('MI300X', model, 1)}. The kernels' error is unknown on {unknown:.1f} ms of the plugin's."
        )
    return "\n".join(lines)


def steps() -> str:
    """Return both sides of all steps, with their bands."""
    rows = []
    for product in baseline.PRODUCTS:
        for model in MODELS:
            for side in step.SIDES:
                found = [total(product, model, side, batch) for batch in BATCHES]
                rows.append((product, model, side, str(found[0].launches), *map(_ms, found)))
            rows.append((product, model, "baseline / plugin", "", *(speedup(product, model, n) for n in BATCHES)))
            rows.append((product, model, "least time of bytes", "", *(f"{of.floor_us / 1e3:.1f}" for of in found)))
    return markdown(("GPU", "model, TP 8", "side", "launches", *(f"batch {batch}" for batch in BATCHES)), rows)


def constants() -> str:
    """Return every constant of a step with its kind and source."""
    found = {**vars(baseline), **vars(published_steps)}
    for name, of in ("EMPTY", baseline.EMPTY), ("OWN_SOURCE", baseline.OWN_SOURCE):
        found |= {f"{name}[{product}]": each for product, each in of.items()}
    rows = [
        (f"`{name}`", f"{each.value:g} {each.unit}", each.kind, each.source)
        for name, each in found.items()
        if isinstance(each, machines.Constant)
    ]
    return markdown(("constant", "value", "kind", "source"), rows)


def times() -> str:
    """Return the baseline's kernels with published times."""
    rows = []
    for row in baseline.TABLE:
        kernel, us = f"{row['op']} {'x'.join(map(str, row['sizes']))}", (f"{n}: {us:g}" for n, us in row["us"].items())
        rows.append((row["product"], kernel, ", ".join(us), row["timer"], row["kind"], row["source"]))
    return markdown(("GPU", "kernel", "us by tokens", "timer", "kind", "source"), rows)


def _interval(low: float, high: float, digits: int) -> str:
    return "none" if high < 0 else f"{max(low, 0):.{digits}f} to {high:.{digits}f}"


def published() -> str:
    """Return the gaps and all-reduces that each published step admits, and the verdict on the slopes."""
    rows = []
    for step_ms in published_steps.admitted():
        ms = f"{step_ms.published:.1f}", f"{step_ms.predicted:.1f}", f"{step_ms.ratio:.2f}"
        rows.append((step_ms.release, str(step_ms.batch), *ms, _interval(*step_ms.gap, 2), f"{step_ms.reduce:.1f}"))
    header = "vLLM", "batch", "published ms", "predicted ms"
    head = *header, "published / predicted", "gaps, us", "all-reduces without gaps, us"
    slopes = [
        (release, f"1 to {batch}", f"+{ms:.1f}", f"+{found:.1f}", f"{found / ms - 1:+.0%}")
        for release, batch, ms, found in published_steps.slopes()
    ]
    low, high = published_steps.spread()
    band = f"The spread, {low:.2f} to {high:.2f}, is the band of a step."
    unexplained = f"**The slope over batch is not explained within 15 %.** {band}"
    verdict = "All slopes are explained within 15 %." if published_steps.explained() else unexplained
    return f"{markdown(head, rows)}\n\n{markdown((*header, 'error'), slopes)}\n\n{verdict}"


# Profiles on H200

PROFILES = {  # files of results/nvidia-h200: layers with shared experts, all layers
    "2026-11-22-215c3c3-llama-tp4": (0, 30),
    "2026-11-23-9afc31a-llama-rank-of-8": (0, 40),
    "2026-11-23-9afd86e-deepseek-rank-of-8": (17, 20),
    "2026-11-23-e10d0ef-deepseek-whole-rank-of-8": (58, 61),
}
FITTED = {("2026-11-23-9afc31a-llama-rank-of-8", "without"), ("2026-11-23-e10d0ef-deepseek-whole-rank-of-8", "without")}
ALONE = "2026-11-22-cf0696c-gemm.jsonl"  # times of block-scaled GEMMs alone
ONCE, DENSE = ((2112, 7168), (3072, 1536), (7168, 2048)), ((4608, 7168), (7168, 2304))
SHARED = ((512, 7168), (7168, 256))
LINEARS = {"without": "gemm_fp8_blockwise", "with": "block_scaled_mm"}
ACTIVATIONS = {"without": "mul_silu", "with": "silu_and_mul"}
QUANTIZED = {"without": 2, "with": 1}  # launches of a shared expert that quantize alone


class Profile(NamedTuple):
    """A recorded step in us: its kernels, the second stream's kernels, launches, and the spans measured and predicted."""

    name: str
    side: str
    batch: int
    kernels: float
    hidden: float
    launches: float
    span: float
    predicted: float
    engine: float | None

    @property
    def error(self) -> float:
        return self.predicted / self.span - 1

    @property
    def fitted(self) -> bool:
        return (self.name, self.side) in FITTED and self.batch == 1


@functools.cache
def _alone(side: str) -> dict[tuple[int, int, int], float]:
    return {
        tuple(line["shape"].values()): line["us"] if side == "with" else line["peers"]["vllm"]
        for line in lines_of(RESULTS / "nvidia-h200" / ALONE)
        if line["op"] == "block_scaled_mm"
    }


def second_stream(kernels: dict, side: str, batch: int, experts: int, layers: int) -> float:
    """Return the shared experts' time, us.

    The profile has one sum for all block-scaled linears: the main stream's take at most their time alone, the second stream's at
    least their share.
    """

    def sums(pattern: str) -> tuple[float, float]:
        found = [times for name, times in kernels.items() if pattern in name]
        return sum(calls for calls, _ in found), sum(us for _, us in found)

    if not experts:
        return 0.0
    alone = {shape: us for (m, *shape), us in _alone(side).items() if m == batch for shape in [tuple(shape)]}
    main = layers * sum(alone[shape] for shape in ONCE) + (layers - experts) * sum(alone[shape] for shape in DENSE)
    second = experts * sum(alone[shape] for shape in SHARED)
    _, us = sums(LINEARS[side])
    linears = max(us * second / (main + second), us - main)
    (calls, quantize), (acts, activate) = sums("per_token_group_quant"), sums(ACTIVATIONS[side])
    return linears + QUANTIZED[side] * experts * quantize / calls + experts * activate / acts


def profiles() -> Iterator[Profile]:
    """Yield every profile of the engine with its step: measured kernels, two streams, gaps and the time outside the graph."""
    for name, (experts, layers) in PROFILES.items():
        report = json.loads((RESULTS / "nvidia-h200" / f"{name}-latency.json").read_text())
        engine = {(line["side"], line["batch_size"]): line["decode_ms_per_token"] for line in report["results"]}
        for run in report["runs"]:
            for size, ranks in run["profile"].items():
                kernels, batch, side = ranks[0]["kernels"], int(size), run["side"]
                launches, us = (sum(times) for times in zip(*kernels.values()))
                hidden = second_stream(kernels, side, batch, experts, layers)
                predicted = us - hidden + launches * baseline.H200_GAP.value + baseline.H200_HOST.value
                ms = engine.get((side, batch))
                yield Profile(name, side, batch, us, hidden, launches, ranks[0]["span_us"], predicted, ms and ms * 1e3)


def others() -> str:
    """Return published / predicted of other engines, bold outside the band, and their sources."""
    low, high = published_steps.spread()
    rows = []
    for other in published_steps.OTHERS:
        cells = dict.fromkeys((1, 4, 8, 16, 32, 64), "")
        for batch, ms in other.ms.items():
            found = published_steps.other_ms(other, batch)
            ratio = f"{ms / found:.2f}"
            cells[batch] = f"{ms:.1f} / {found:.1f} = " + (ratio if low <= ms / found <= high else f"**{ratio}**")
        rows.append((other.name, other.product, *cells.values(), other.source))
    return markdown(("engine and model", "GPU", *(f"batch {batch}" for batch in cells), "source"), rows)


def h200() -> str:
    """Return a row for each profile."""
    rows, held = [], []
    for run in profiles():
        us = (f"{us:.0f}" for us in (run.launches, run.kernels, run.hidden, run.span, run.predicted))
        error, engine = f"{run.error:+.1%}" + ", fitted" * run.fitted, f"{run.engine:.0f}" if run.engine else ""
        rows.append((run.name, SIDES[run.side], str(run.batch), *us, error, engine))
        held += [] if run.fitted else [abs(run.error)]
    head = "profile", "side", "batch", "launches", "kernels", "second stream", "step", "predicted", "error"
    table = markdown((*head, "without the profiler"), rows)
    return f"{table}\n\nHeld out: {len(held)} steps, largest error {max(held):.1%}."


# What to do next


def _by_cost(product: str, model: str) -> list[tuple[tuple, dict[int, step.Node]]]:
    """Return the launches of the plugin's steps by batch size, largest mean share of a step's cost above the floor first."""
    found: dict[tuple, dict[int, step.Node]] = {}
    for batch in BATCHES:
        for node in nodes(product, model, "plugin", batch):
            found.setdefault((node.layer, node.op, node.count, node.stream), {})[batch] = node
    return sorted(found.items(), key=lambda item: -sum(_share(product, model, *each) for each in item[1].items()))


def _share(product: str, model: str, batch: int, node: step.Node) -> float:
    """Return a launch's share of its step's cost above the floor, zero where the second stream hides it."""
    of = total(product, model, "plugin", batch)
    return node.cost_us / (of.us - of.floor_us) if node.stream != step.SECOND else 0.0


def worst() -> str:
    """Return the launches of the plugin's step on each GPU and model that cost most above the time of their bytes."""
    causes = f"cause at {BATCHES[0]}", f"cause at {BATCHES[-1]}"
    head = ("GPU, model", "launch", "op", "calls", *(f"batch {n}" for n in BATCHES), *causes)
    rows = [
        (f"{product}, {model}", *_row(product, model, *launch))
        for product in baseline.PRODUCTS
        for model in MODELS
        for launch in _by_cost(product, model)[:MAX]
    ]
    return markdown(head, rows)


def _row(product: str, model: str, launch: tuple, of: dict[int, step.Node]) -> tuple[str, ...]:
    layer, op, count, _ = launch
    costs = _cells(of, lambda node, batch: f"{node.cost_us / 1e3:.2f} ({_share(product, model, batch, node):.0%})")
    causes = _cells(of, lambda node, batch: step.cause(node))
    return layer, f"`{op}`" if op else "", str(count), *costs, causes[0], causes[-1]


def _cells(of: dict[int, step.Node], text: Callable[[step.Node, int], str]) -> list[str]:
    """Return a text for each batch size, nothing where the step has no such launch."""
    return [text(of[batch], batch) if batch in of else "" for batch in BATCHES]
