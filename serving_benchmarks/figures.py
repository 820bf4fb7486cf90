"""Plot predicted.py's kernel times of a decode step by kind of work. `speedups` draws README's plot for `python tests/pages`.

    python serving_benchmarks/figures.py PREDICTED.jsonl ... [--output DIR]

The SVG has a stacked bar for each model and batch size. Fills differ in hatching, too.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

OUT = Path(__file__).parent / "out"
ACROSS, FALLING, RISING = "M0 3H8", "M0 0L8 8", "M0 8L8 0"
FILLS = {  # by kind: color, and the hatch of an 8x8 tile
    "linear": ("#4e79a7", ""),
    "moe": ("#f28e2b", RISING),
    "norm": ("#e15759", FALLING),
    "activation": ("#76b7b2", FALLING + RISING),
    "routing": ("#59a14f", "M3 3h1v1h-1z"),
    "lm_head": ("#edc948", ACROSS),
    "attention": ("#d4d4d4", "M2 4L4 2L6 4L4 6z"),
}
STYLE = (
    "text{font:11px sans-serif;text-anchor:middle;dominant-baseline:middle}.left{text-anchor:start}.right{text-anchor:end}"
    ".grid{stroke:#ddd}.axis{fill:none}rect,.axis{stroke:#000}"
)
COLUMNS = 5  # per legend row
LINES = (  # of the speedups: color, and a marker centered on its point
    ("#c8102e", "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z"),
    ("#2f6db3", "m-4.5 -4.5h9v9h-9z"),
    ("#e08214", "m0 -6l6 10h-12z"),
    ("#35875a", "m0 -6l6 6l-6 6l-6 -6z"),
    ("#7b5aa6", "m-5 -2h3v-3h4v3h3v4h-3v3h-4v-3h-3z"),
)


def kind_of(layer: str, op: str) -> str:
    """Return the kind of work of a model's call."""
    kinds = {
        "router": "routing",
        "routing": "routing",
        "experts": "moe",
        "lm_head": "lm_head",
        "attention": "attention",
    }
    return kinds.get(layer, "norm" if "rms_norm" in op else "activation" if "silu_and_mul" in op else "linear")


def predicted_lines(paths: Iterable[Path]) -> list[dict]:
    """Return the lines of predicted.py in files. Raises ValueError if there are none."""
    lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    found = [line for line in lines if "predicted_us" in line]
    if not found:
        raise ValueError(f"no predicted times in {', '.join(map(str, paths))}")
    return found


def _text(x: float, y: float, text: str, kind: str = "", upright: bool = False) -> str:
    kind = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{turned}>{html.escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="url(#{kind})"/>'


def _svg(width: int, height: int, title: tuple[str, str], body: Iterable[str], used: set[str], caption: str) -> str:
    """Return a figure with its title above, and its caption and the legend of used kinds below."""
    kinds = [kind for kind in FILLS if kind in used]
    parts = [*(_text(width / 2, 12 + 14 * i, text) for i, text in enumerate(title)), *body]
    for place, kind in enumerate(kinds):
        x = width / 2 + 110 * (place % COLUMNS - COLUMNS / 2)
        y = height + 40 + 18 * (place // COLUMNS)
        parts += [_rectangle(x, y - 6, 20, 12, kind), _text(x + 26, y, kind, "left")]
    parts.append(_text(width / 2, height + 18, caption))
    fills = (
        f'<pattern id="{kind}" width="8" height="8" patternUnits="userSpaceOnUse"><path fill="{color}" d="M0 0H8V8H0z"/>'
        f'<path fill="none" stroke="#000" stroke-width=".6" d="{hatch}"/></pattern>'
        for kind, (color, hatch) in FILLS.items()
        if kind in kinds
    )
    return _document(width, height + 40 + 18 * -(-len(kinds) // COLUMNS), ["<defs>", *fills, "</defs>"], parts)


def _document(width: int, height: int, defs: Iterable[str], parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    background = '<path fill="#fff" d="M0 0H9999V9999H0z"/>'
    return "\n".join((head, f"<style>{STYLE}</style>", *defs, background, *parts, "</svg>\n"))


def _axis(left: int, right: int, bottom: int, high: int, highest_us: float, title: str) -> Iterator[str]:
    """Yield an axis in milliseconds with its grid."""
    ticks = tick_step(highest_us / 1000)
    for index in range(math.floor(highest_us / 1000 / ticks) + 1):
        y = bottom - 1000 * high / highest_us * index * ticks
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>' + _text(left - 6, y, f"{index * ticks:g}", "right")
    yield f'<path class="axis" d="M{left} {bottom - high}V{bottom}H{right}"/>'
    yield _text(16, bottom - high / 2, title, upright=True)


def _stack(x: float, bottom: float, kinds: dict[str, float], scale: float) -> Iterator[str]:
    """Yield a bar of kinds, in the order of `FILLS`."""
    y = bottom
    for kind in (kind for kind in FILLS if kind in kinds):
        y -= kinds[kind] * scale
        yield _rectangle(x - 21, y, 42, kinds[kind] * scale, kind)


def predicted(lines: list[dict]) -> str:
    """Draw a bar for each model and batch size, with the error bands of kernels that have one."""
    left, bar, high, bottom = 60, 70, 300, 380
    groups: dict[str, dict[int, list[dict]]] = {}
    for line in lines:
        groups.setdefault(line["model"], {}).setdefault(line["batch"], []).append(line)
    bands = {name: [sum_of(of) for of in found.values()] for name, found in groups.items()}
    highest = max(us + bound for of in bands.values() for us, bound, _ in of)
    scale = high / highest
    width = max(left + bar * sum(len(found) + 0.5 for found in groups.values()) + 20, 110 * COLUMNS + 120)
    kinds = {kind_of(line["layer"], line["op"]) for line in lines}

    def body() -> Iterator[str]:
        yield from _axis(left, int(width) - 20, bottom, high, highest, "ms, predicted sum of these kernels")
        x = left + bar * 0.75
        for name, found in groups.items():
            yield _text(x + bar * (len(found) - 1) / 2, bottom + 28, name)
            for (batch, of), (us, bound, launches) in zip(found.items(), bands[name]):
                stack: dict[str, float] = {}
                for line in of:
                    kind = kind_of(line["layer"], line["op"])
                    stack[kind] = stack.get(kind, 0.0) + line["predicted_us"] * line["count"]
                yield from _stack(x, bottom, stack, scale)
                low, top = (bottom - (us + sign * bound) * scale for sign in (-1, 1))
                yield f'<path class="axis" d="M{x} {low:.1f}V{top:.1f}M{x - 5} {low:.1f}h10M{x - 5} {top:.1f}h10"/>'
                yield _text(x, top - 22, f"{us / 1000:.1f} ms") + _text(x, top - 10, f"{launches} launches")
                yield _text(x, bottom + 12, f"batch {batch}")
                x += bar
            x += bar / 2

    title = (
        f"Predicted for {lines[0]['device']}, never measured: kernels of a decode step by kind",
        "their sum, not a step: excludes launch overhead, all-reduces, rotation, cache writes, absorbed GEMMs, sampling",
    )
    band = f"error bars: kernels with a known error band; {lines[0]['context']} keys per request; kernels of {lines[0]['commit']}"
    return _svg(int(width), bottom + 34, title, body(), kinds, band)


def sum_of(lines: list[dict]) -> tuple[float, float, int]:
    """Return predicted us, the error bound of kernels with a band, and launches, summed over lines of predicted.py."""
    us = sum(line["predicted_us"] * line["count"] for line in lines)
    bound = sum(line["predicted_us"] * line["count"] * (line["band"] or 0) for line in lines)
    return us, bound, sum(line["kernels"] * line["count"] for line in lines)


def speedups(series: dict[str, dict[int, tuple[float, float, float]]]) -> str:
    """Draw a line for each series: speedup, p10 and p90 by batch size. Raises ValueError for more than `LINES` series."""
    if len(series) > len(LINES):
        raise ValueError(f"speedups: at most {len(LINES)} series, got {len(series)}")
    left, right, top, bottom = 60, 700, 34, 300
    sizes = sorted({batch for points in series.values() for batch in points})
    values = [value for points in series.values() for point in points.values() for value in point]
    low, high = math.floor(10 * min(1, *values) - 0.5) / 10, math.ceil(10 * max(values)) / 10
    scale = (bottom - top) / (high - low)

    def x(batch: int, place: int) -> float:  # markers at one batch size are spread out
        doublings = math.log2(sizes[-1] / sizes[0]) or 1
        along = left + 30 + (right - left - 60) * math.log2(batch / sizes[0]) / doublings
        return along + 5 * (place - (len(series) - 1) / 2)

    def y(value: float) -> float:
        return bottom - scale * (value - low)

    middle = (len(series) - 1) / 2
    parts = [_text((left + right) / 2, 14, "Decode speedup with vllm-rocm-ops by batch size (bars: p10 to p90)")]
    parts.append(f'<path fill="#f3f3f3" d="M{left} {y(1):.1f}H{right}V{bottom}H{left}z"/>')
    for tenth in range(round(10 * low), round(10 * high) + 1):
        parts.append(f'<path class="grid" d="M{left} {y(tenth / 10):.1f}H{right}"/>')
        parts.append(_text(left - 8, y(tenth / 10), f"{tenth / 10:.1f}x", "right"))
    parts += [_text(x(batch, middle), bottom + 14, f"{batch}") for batch in sizes]
    parts.append(f'<path class="axis" d="M{left} {top}V{bottom}H{right}M{left} {y(1):.1f}H{right}"/>')
    parts.append(_text(right - 6, y(1) + 10, "slower than vLLM", "right"))
    parts.append(_text((left + right) / 2, bottom + 32, "batch size"))
    for place, ((what, points), (color, marker)) in enumerate(zip(series.items(), LINES)):
        at = [(x(batch, place), *map(y, point)) for batch, point in sorted(points.items())]
        line = "L".join(f"{across:.1f} {value:.1f}" for across, value, _, _ in at)
        bars = "".join(
            f"M{across:.1f} {p10:.1f}V{p90:.1f}m-4 0h8M{across - 4:.1f} {p10:.1f}h8" for across, _, p10, p90 in at
        )
        beside = bottom + 54 + 18 * place
        marks = (
            "".join(f"M{across:.1f} {value:.1f}{marker}" for across, value, _, _ in at)
            + f"M{left + 30} {beside}{marker}"
        )
        parts.append(
            f'<path fill="none" stroke="{color}" stroke-width="1.5" d="M{line}{bars}"/><path fill="{color}" d="{marks}"/>'
        )
        parts.append(_text(left + 44, beside, what, "left"))
    return _document(right + 20, bottom + 54 + 18 * len(series), [], parts)


def tick_step(largest: float) -> float:
    """Return the minimum of 1, 2, 5, 10, ... and their decimal fractions that divides an axis into at most ten parts."""
    power = 10.0 ** math.floor(math.log10(largest / 10))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 10 >= largest)


def main(argv: list[str] | None = None) -> None:
    """Write the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help=".jsonl files of predicted.py")
    parser.add_argument("--output", type=Path, default=OUT, help="output folder (default: serving_benchmarks/out)")
    options = parser.parse_args(argv)
    try:
        lines = predicted_lines(options.results)
        options.output.mkdir(parents=True, exist_ok=True)
        written = options.output / f"predicted-{lines[0]['device']}.svg"
        written.write_text(predicted(lines))
    except (ValueError, OSError) as error:
        sys.exit(f"figures.py: {error}")
    print(written)


if __name__ == "__main__":
    main()
