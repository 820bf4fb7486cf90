"""Format decode steps with their error band, for ../step.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_rocm_ops.timing.machines import Machine
from vllm_rocm_ops.vllm.selection.report import columns

from . import baseline, published_steps, step
from .step import Node, Total

WORST = 3  # launches to list


def interval(found: Total) -> tuple[float, float]:
    """Return the bounds of a step in ms, from the spread of published steps and the kernels' error bands."""
    low, high = published_steps.spread()
    return (found.us - found.bound_us) * low / 1e3, (found.us + found.bound_us) * high / 1e3


def sides(machine: Machine) -> Sequence[str]:
    """Return the sides of a product: only the plugin if it has no baseline times."""
    return step.SIDES if machine.name in baseline.PRODUCTS else step.SIDES[1:]


def _cell(*found: Node) -> str:
    if not found:
        return "-"
    kinds = " + ".join(dict.fromkeys(node.kind for node in found))
    return f"{sum(node.us for node in found):.1f}, {kinds}" + "".join(f" +-{n.band:.0%}" for n in found if n.band)


def _in_place_of(node: Node, other: dict[tuple[str, str], Node]) -> list[Node]:
    """Return the baseline's launches that a node of the plugin replaces."""
    if (node.layer, node.op) in other:
        return [other[node.layer, node.op]]
    is_changed = node.op not in {op for _, op in other}  # a layer may be of several ops
    return [
        of
        for part in node.layer.split(" + ")
        for (layer, op), of in other.items()
        if layer == part and (is_changed or op in (node.op, ""))
    ]


def said(side: str, found: Total) -> str:
    """Format the total of a step."""
    low, high = interval(found)
    unknown = f"; kernel error unknown for {(found.us - found.known_us) / 1e3:.1f} ms" if found.known_us else ""
    return f"{side} {found.us / 1e3:.2f} ms ({low:.1f} to {high:.1f}) in {found.launches} launches{unknown}"


def ratio(
    config: dict, tp: int, ep: int | None, batch: int, machine: Machine, known: step.KernelTime, context: int
) -> str:
    """Format baseline / plugin as the range over the costs of a vLLM launch."""

    def of(side: str, launch: float) -> Total:
        return step.total(step.nodes(config, tp, ep, batch, machine, side, known, context, launch))

    low, high = step.speedup(lambda us: of("plugin", us), lambda us: of("baseline", us), machine)
    least, most = baseline.launch_costs(machine)
    return f"{low:.2f} to {high:.2f}x with {least:.1f} to {most:.1f} us a vLLM launch"


def lines(
    config: dict,
    tp: int,
    ep: int | None,
    batches: Sequence[int],
    machine: Machine,
    context: int,
    known: step.KernelTime,
    with_launches: bool = True,
) -> Iterator[str]:
    """Yield a table of the launches of a step at each batch size, if wanted, and both sides' totals."""
    yield f"{machine.name}: predicted times in us, not measured; attention with {context} keys per request"
    for batch in batches:
        found = {side: step.nodes(config, tp, ep, batch, machine, side, known, context) for side in sides(machine)}
        other = {(node.layer, node.op): node for node in found.get("baseline", ())}
        rows = [("layer", "op", "tokens", "calls", "launches", "floor", "baseline", "plugin")]
        for node in found["plugin"]:
            counts = str(batch), str(node.count), str(node.count * node.launches), f"{node.floor_us:.1f}"
            rows.append((node.layer, node.op or "-", *counts, _cell(*_in_place_of(node, other)), _cell(node)))
        yield from columns(rows) if with_launches else ()
        for side, of_side in found.items():
            yield f"predicted step, {batch} tokens: {said(side, step.total(of_side))}"
        if "baseline" in found:
            yield f"predicted speedup, {batch} tokens: {ratio(config, tp, ep, batch, machine, known, context)}"
        named = (
            f"{node.layer} {node.cost_us / 1e3:.2f} ms, {step.cause(node)}"
            for node in step.worst(found["plugin"], WORST)
        )
        yield f"most time above the HBM roofline: {'; '.join(named)}"
    low, high = published_steps.spread()
    yield (
        f"Bounds: {len(published_steps.admitted())} published steps of Llama-3.1-405B took {low:.2f} to {high:.2f} times the "
        "prediction, the most at batch 64; plus the kernels' error bands. Host time between steps is assumed hidden."
    )
