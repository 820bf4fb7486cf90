"""Tabulate predicted decode steps: both sides, published steps, H200 profiles, and the costliest launches."""

import functools
from collections.abc import Callable

from timing_study import baseline, h200_profiles, published_steps, step, step_report

from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.timing import CONTEXT, machines

from .measurements import SIDES, grouped, markdown

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
    """Return how steps are predicted, a line for each model's step at batch 1, and the other GPU's speedups, for README."""
    least, most = baseline.launch_costs(machines.named("MI300X"))
    other, _ = baseline.launch_costs(machines.named("MI355X"))
    low, high = published_steps.spread()
    said = (
        f"A decode step of one rank with {CONTEXT} keys per request, both sides from one timing model; speedups are ranges for {least:.2f} "
        f"(MI355X {other:.2f}) to {most:g} us per small launch of vLLM's. Published Llama-3.1-405B steps take {low:.2f} to {high:.2f} times "
        "the prediction.\n"
    )
    lines = [said]
    for model in MODELS:
        without, plugin = (total("MI300X", model, side, 1) for side in step.SIDES)
        unknown = (plugin.us - plugin.known_us) / 1e3
        lines.append(
            f"- MI300X, {model}, TP {RANKS}, batch 1: baseline {_ms(without)} ms in {without.launches:,} launches, plugin {_ms(plugin)} "
            f"ms in {plugin.launches:,}: {speedup('MI300X', model, 1)}. The kernels' error is unknown on {unknown:.1f} ms of the plugin's."
        )
    of = "; ".join(f"{model} {', '.join(speedup('MI355X', model, n) for n in BATCHES)}" for model in MODELS)
    batches = ", ".join(map(str, BATCHES))
    return "\n".join(
        [
            *lines,
            f"- MI355X, batch {batches}: {of}. Where AITER's kernels are faster, a start that times both keeps them.",
        ]
    )


def steps() -> str:
    """Return both sides of all steps, with their bands."""
    rows = []
    for product in baseline.PRODUCTS:
        for model in MODELS:
            for side in step.SIDES:
                totals = [total(product, model, side, batch) for batch in BATCHES]
                rows.append((product, model, side, str(totals[0].launches), *map(_ms, totals)))
            rows.append((product, model, "baseline / plugin", "", *(speedup(product, model, n) for n in BATCHES)))
            floors = (f"{least.floor_us / 1e3:.1f}" for least in totals)
            rows.append((product, model, "least time of bytes", "", *floors))
    return markdown(("GPU", "model, TP 8", "side", "launches", *(f"batch {batch}" for batch in BATCHES)), rows)


def constants() -> str:
    """Return every constant of a step with its kind and source."""
    known = {**vars(baseline), **vars(published_steps)}
    for name in ("EMPTY", "OWN_SOURCE"):
        known |= {f"{name}[{product}]": constant for product, constant in known[name].items()}
    rows = [
        (f"`{name}`", f"{constant.value:g} {constant.unit}", constant.kind, constant.source)
        for name, constant in known.items()
        if isinstance(constant, machines.Constant)
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
        (release, f"1 to {batch}", f"+{ms:.1f}", f"+{predicted:.1f}", f"{predicted / ms - 1:+.0%}")
        for release, batch, ms, predicted in published_steps.slopes()
    ]
    low, high = published_steps.spread()
    band = f"The spread, {low:.2f} to {high:.2f}, is the band of a step."
    unexplained = f"**The slope over batch is not explained within 15 %.** {band}"
    verdict = "All slopes are explained within 15 %." if published_steps.explained() else unexplained
    return f"{markdown(head, rows)}\n\n{markdown((*header, 'error'), slopes)}\n\n{verdict}"


def others() -> str:
    """Return published / predicted of other engines, bold outside the band, and their sources."""
    low, high = published_steps.spread()
    rows = []
    for other in published_steps.OTHERS:
        cells = dict.fromkeys((1, 4, 8, 16, 32, 64), "")
        for batch, ms in other.ms.items():
            predicted = published_steps.other_ms(other, batch)
            bold = "" if low <= ms / predicted <= high else "**"
            cells[batch] = f"{ms:.1f} / {predicted:.1f} = {bold}{ms / predicted:.2f}{bold}"
        rows.append((other.name, other.product, *cells.values(), other.source))
    return markdown(("engine and model", "GPU", *(f"batch {batch}" for batch in cells), "source"), rows)


def h200() -> str:
    """Return a row for each profile."""
    rows, held = [], []
    for run in h200_profiles.profiles():
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
    every = [(batch, node) for batch in BATCHES for node in nodes(product, model, "plugin", batch)]
    launches = grouped(every, lambda each: (each[1].layer, each[1].op, each[1].count, each[1].stream))
    by_cost = sorted(launches.items(), key=lambda item: -sum(_share(product, model, *each) for each in item[1]))
    return [(launch, dict(by_batch)) for launch, by_batch in by_cost]


def _share(product: str, model: str, batch: int, node: step.Node) -> float:
    """Return a launch's share of its step's cost above the floor, zero where the second stream hides it."""
    whole = total(product, model, "plugin", batch)
    return node.cost_us / (whole.us - whole.floor_us) if node.stream != step.SECOND else 0.0


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
