"""Draw the figures of the documentation: `python tests/pages` writes them. Predicted times are hatched, measured ones are solid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import decode_profile
import svg
from svg import COLORS, MARKERS, Panel, rectangle, text

CLASSES = ("blue", "purple", "orange", "red", "brown", "green", "teal", "yellow", "plain")
"""Colors of a measured step's classes, in the order of the figure's legend."""
SIDES = {"baseline": "plain", "plugin": "red"}


def _stack(panel: Panel, x: float, width: float, fills: dict[str, float]) -> Iterator[str]:
    """Yield a bar of values by fill, from the axis up."""
    base = 0.0
    for fill, value in fills.items():
        base += value
        yield rectangle(x, panel.y(base), width, panel.y(base - value) - panel.y(base), fill)


def _panels(
    models: dict[str, dict], highest: Callable[[dict], float], bottom: int, axis: str, label: str = "{:g}"
) -> Iterator[tuple[Panel, dict, list[str]]]:
    """Yield each model's panel side by side, with the model's values and the parts of the frame."""
    width = (svg.WIDTH - 20) / len(models)
    for place, (model, values) in enumerate(models.items()):
        panel = Panel(60 + width * place, width * (place + 1), 62, bottom, 0, highest(values))
        yield panel, values, list(panel.frame(panel.linear_ticks(), label, model, "" if place else axis))


Points = dict[int, tuple[float, float, float]]
"""By batch size: a value, and the low and the high end of its spread or band."""


def speedups(measured: dict[str, Points], predictions: dict[str, Points] | None = None, product: str = "") -> str:
    """Draw a line for each measured model, and beside them hatched bars of the predicted ones. Raises ValueError for too many lines."""
    if len(measured) > len(COLORS):
        raise ValueError(f"speedups: at most {len(COLORS)} series, got {len(measured)}")
    predictions = predictions or {}
    series = (*measured.values(), *predictions.values())
    values = [value for points in series for point in points.values() for value in point]
    low, high = math.floor(10 * min(1, *values) - 0.5) / 10, math.ceil(10 * max(values)) / 10
    ticks = [tenth / 10 for tenth in range(round(10 * low), round(10 * high) + 1)]
    panel = Panel(60, 540 if predictions else 810, 62, 330, low, high)
    sizes = sorted({batch for points in measured.values() for batch in points})
    of_models = {what.partition(",")[0]: color for what, color in zip(measured, COLORS)}
    of_predicted = {what: of_models.get(what.partition(",")[0], "plain") for what in predictions}
    parts = [text(svg.WIDTH / 2, 16, "Decode speedup of vllm-rocm-ops over vLLM by batch size", "title")]
    parts += _ground(panel, ticks, "Measured (bars: p10 to p90)")
    parts += [text(panel.x(batch, sizes[0], sizes[-1]), panel.bottom + 14, f"{batch}") for batch in sizes]
    for place, ((what, points), color, marker) in enumerate(zip(measured.items(), COLORS, MARKERS)):
        apart = 5 * (place - (len(measured) - 1) / 2)  # markers at one batch size are side by side
        places = [
            (panel.x(batch, sizes[0], sizes[-1]) + apart, *map(panel.y, point))
            for batch, point in sorted(points.items())
        ]
        bars = "".join(f"M{x:.1f} {p10:.1f}V{p90:.1f}m-4 0h8M{x - 4:.1f} {p10:.1f}h8" for x, _, p10, p90 in places)
        parts.append(svg.line([(x, y) for x, y, *_ in places], color, marker) + svg.path(f"line s-{color}", bars))
    if predictions:
        right = Panel(600, 810, 62, 330, low, high)
        parts += _ground(right, ticks, f"{product}: predicted, never measured")
        parts += _bars(right, predictions, of_predicted, 1.0)
    rows = [
        *((svg.path(f"f-{color}", f"M0 0{marker}"), what) for what, color, marker in zip(measured, COLORS, MARKERS)),
        *((rectangle(-7, -6, 14, 12, f"#hatch-{color}"), what) for what, color in of_predicted.items()),
    ]
    top = panel.bottom + 58
    parts += svg.legend(rows, 40, top, 1, svg.WIDTH)
    hatches = (svg.pattern(f"hatch-{color}", color) for color in dict.fromkeys(of_predicted.values()))
    return svg.document(top + 19 * len(rows), parts, defs=hatches)


def _ground(panel: Panel, ticks: list[float], title: str) -> Iterator[str]:
    """Yield a panel of speedups, with the part that is slower shaded."""
    yield svg.path("f-shade", f"M{panel.left} {panel.y(1):.1f}H{panel.right}V{panel.bottom}H{panel.left}z")
    yield from panel.frame(ticks, "{:.1f}x", title)
    yield svg.path("axis", f"M{panel.left} {panel.y(1):.1f}H{panel.right}")
    yield text(panel.right - 6, panel.bottom - 9, "slower than vLLM", "right")
    yield text((panel.left + panel.right) / 2, panel.bottom + 34, "batch size")


def _bars(
    panel: Panel, series: dict[str, Points], colors: dict[str, str], base: float, label: str = ""
) -> Iterator[str]:
    """Yield hatched bars from a base, by batch size and series, with their bands."""
    sizes = sorted({batch for points in series.values() for batch in points})
    step = (panel.right - panel.left) / len(sizes)
    width = min(34, step * 0.8 / len(series))
    for group, batch in enumerate(sizes):
        middle = panel.left + step * (group + 0.5)
        yield text(middle, panel.bottom + 14, f"{batch}")
        for place, (name, points) in enumerate(series.items()):
            if batch in points:
                value, low, high = points[batch]
                x = middle + width * (place - len(series) / 2)
                top, bottom = sorted((panel.y(value), panel.y(base)))
                yield rectangle(x + 1, top, width - 2, bottom - top, f"#hatch-{colors[name]}")
                outline = f"M{x + 1:.1f} {top:.1f}h{width - 2:.1f}v{bottom - top:.1f}h{2 - width:.1f}z"
                yield svg.path(f"line s-{colors[name]}", outline)
                yield svg.whiskers(x + width / 2, panel.y(low), panel.y(high))
                if label:
                    yield text(x + width / 2, panel.y(high) - 9, label.format(value))


def predicted_steps(models: dict[str, dict[str, Points]], floors: dict[str, dict[int, float]], product: str) -> str:
    """Draw both sides' predicted steps in ms, a panel for each model, with the floor of a step's bytes."""
    parts = [text(svg.WIDTH / 2, 16, f"Predicted decode step on {product}, never measured: ms by batch size", "title")]

    def highest(sides: dict[str, Points]) -> float:
        return max(high for points in sides.values() for *_, high in points.values()) * 1.08

    for (panel, sides, frame), of_bytes in zip(_panels(models, highest, 330, "ms per token"), floors.values()):
        parts += [*frame, *_bars(panel, sides, SIDES, 0.0, "{:.1f}")]
        step = (panel.right - panel.left) / len(of_bytes)
        for group, (_, floor) in enumerate(sorted(of_bytes.items())):
            start = panel.left + step * (group + 0.08)
            parts.append(svg.path("line s-ink dashed", f"M{start:.1f} {panel.y(floor):.1f}h{step * 0.84:.1f}"))
        parts.append(text((panel.left + panel.right) / 2, panel.bottom + 34, "batch size"))
    rows = [(rectangle(-7, -6, 14, 12, f"#hatch-{color}"), f"{side}, predicted") for side, color in SIDES.items()]
    floor = "least time of the step's bytes; whiskers: the band of a step"
    rows.append((svg.path("line s-ink dashed", "M-16 0h24"), floor))
    parts += svg.legend(rows, 80, 386, 3, 180)
    return svg.document(404, parts, defs=[svg.pattern(f"hatch-{color}", color) for color in SIDES.values()])


Step = tuple[dict[str, float], float]
"""A profiled step: ms by class of kernels, and its span in ms."""


def breakdown(models: dict[str, dict[int, dict[str, Step]]]) -> str:
    """Draw a measured step by class of kernels, a panel for each model, baseline beside plugin. Raises ValueError for too many classes."""
    steps = [step for batches in models.values() for sides in batches.values() for step in sides.values()]
    every = *decode_profile.CLASSES, decode_profile.REST, decode_profile.IDLE
    classes = [name for name in every if any(name in ms for ms, _ in steps)]
    if len(classes) > len(CLASSES):
        raise ValueError(f"breakdown: at most {len(CLASSES)} classes, got {len(classes)}")
    color = dict(zip(classes, CLASSES))
    title = "Where a decode step's time goes, measured: baseline (left) and plugin (right)"
    parts = [text(svg.WIDTH / 2, 16, title, "title")]

    def highest(batches: dict[int, dict[str, Step]]) -> float:
        return max(max(sum(ms.values()), span) for sides in batches.values() for ms, span in sides.values()) * 1.06

    for panel, batches, frame in _panels(models, highest, 350, "ms per token, under the profiler"):
        parts += frame
        step = (panel.right - panel.left) / len(batches)
        for group, (batch, sides) in enumerate(batches.items()):
            middle = panel.left + step * (group + 0.5)
            parts.append(text(middle, panel.bottom + 14, f"batch {batch}"))
            for x, (ms, span) in zip((middle - 44, middle + 2), sides.values()):
                parts += _stack(panel, x, 42, {color[name]: ms[name] for name in classes if name in ms})
                parts.append(svg.path("line s-ink", f"M{x - 1:.1f} {panel.y(span):.1f}h44"))
                parts.append(text(x + 21, panel.y(max(sum(ms.values()), span)) - 9, f"{span:.1f}"))
    rows = [(rectangle(-10, -6, 20, 12, color[name]), name) for name in classes]
    rows.append((svg.path("line s-ink", "M-16 0h24"), "the step; kernels of two streams overlap"))
    parts += svg.legend(rows, 110, 394, 2, 330)
    return svg.document(394 + 19 * -(-len(rows) // 2), parts)


Curves = dict[tuple[str, int], dict[int, float]]
"""By side and batch size: a value by context length."""


def roofline(models: dict[str, Curves], title: str) -> str:
    """Draw a share of the HBM roofline by context length, a panel for each model: plugin solid, baseline dashed and hollow."""
    batches = sorted({batch for curves in models.values() for _, batch in curves})
    contexts = sorted({keys for curves in models.values() for points in curves.values() for keys in points})
    parts = [text(svg.WIDTH / 2, 16, title, "title")]
    width = (svg.WIDTH - 20) / len(models)
    for place, (model, curves) in enumerate(models.items()):
        panel = Panel(60 + width * place, width * (place + 1), 62, 330, 0, 1)
        parts += panel.frame(
            [tenth / 10 for tenth in range(0, 11, 2)], "{:.0%}", model, "" if place else "of the HBM roofline"
        )
        for keys in contexts:
            named = f"{keys // 1024}k" if keys >= 1024 else f"{keys}"
            parts.append(text(panel.x(keys, contexts[0], contexts[-1], 18), panel.bottom + 14, named))
        parts.append(text((panel.left + panel.right) / 2, panel.bottom + 34, "context length, keys per request"))
        for (side, batch), points in curves.items():
            shares = sorted(points.items())
            places = [(panel.x(keys, contexts[0], contexts[-1], 18), panel.y(share)) for keys, share in shares]
            series = batches.index(batch)
            parts.append(svg.line(places, COLORS[series], MARKERS[series], dashed=side == "baseline"))
    rows = [
        (svg.path(f"line s-{color}{' dashed' * hollow}", "M-14 0h28") + svg.path(f"s-{color} f-{'page' if hollow else color}", f"M0 0{marker}"),
         f"{side}, batch {batch}")
        for side, hollow in (("plugin", False), ("best baseline", True)) for batch, color, marker in zip(batches, COLORS, MARKERS)
    ]  # fmt: skip
    parts += svg.legend(rows, 150, 386, len(batches), 200)
    return svg.document(386 + 38, parts)


def accuracy(points: dict[str, list[tuple[float, float, bool]]], title: str, band: float) -> str:
    """Draw predicted / measured by measured us, a color for each kernel; points that were held out of the fit are hollow."""
    times = [us for of_kernel in points.values() for us, *_ in of_kernel]
    ratios = [predicted / us for of_kernel in points.values() for us, predicted, _ in of_kernel]
    reach = 1.1 * max(*ratios, 1 / min(ratios), 1 + band)
    panel = Panel(60, 810, 40, 330, 1 / reach, reach, logarithmic=True)
    first, last = min(times), max(times)
    every = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4, 1.6, 2)
    ticks = [tick for tick in every if panel.low <= tick <= panel.high]
    parts = [text(svg.WIDTH / 2, 16, title, "title")]
    low, high = panel.y(1 / (1 + band)), panel.y(1 + band)
    parts.append(svg.path("f-shade", f"M{panel.left} {low:.1f}V{high:.1f}H{panel.right}V{low:.1f}z"))
    parts += panel.frame(ticks, "{:.1f}", axis="predicted / measured")
    parts.append(svg.path("axis", f"M{panel.left} {panel.y(1):.1f}H{panel.right}"))
    parts.append(text(panel.left + 6, high - 9, f"shaded: within {band:.0%}", "left"))
    for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        if first <= tick <= last:
            x = panel.x(tick, first, last)
            parts.append(
                svg.path("grid", f"M{x:.1f} {panel.top}V{panel.bottom}") + text(x, panel.bottom + 14, f"{tick}")
            )
    parts.append(text((panel.left + panel.right) / 2, panel.bottom + 34, "measured us, published by others"))
    rows = []
    for (kind, of_kernel), color, marker in zip(points.items(), COLORS, MARKERS):
        for us, predicted, held_out in of_kernel:
            outline = f"M{panel.x(us, first, last):.1f} {panel.y(predicted / us):.1f}{marker}"
            parts.append(svg.path(f"s-{color} f-{'page' if held_out else color}", outline, ' stroke-width="1.6"'))
        rows.append((svg.path(f"f-{color}", f"M0 0{marker}"), kind))
    rows.append((svg.path("s-ink f-page", f"M0 0{MARKERS[0]}"), "hollow: held out of the fit"))
    parts += svg.legend(rows, 70, 386, len(rows), 142)
    return svg.document(404, parts)
