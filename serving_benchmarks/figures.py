"""Draw the kinds of work of a decode step from the results of decode_step.py, stock beside ours, or of predicted.py. `speedups`
draws README's figure for `python tests/readme.py`.

    python serving_benchmarks/figures.py RESULTS.jsonl ... [--batch M] [--output DIR]

Each model and division gets two SVG files. `-share` shows each kind's share of the time at one batch size. `-batches` stacks the
kinds' times for every batch size. The kinds are timed alone, so a stack is not exactly the step. A diamond marks the step. Fills
differ in hatches too, and have labels where there is room. Predicted kernels get one file, with a bar for each model and batch size.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

OUT = Path(__file__).parent / "out"
PATHS = ("stock", "ours")
UPRIGHT, ACROSS, FALLING, RISING = "M3 0V8", "M0 3H8", "M0 0L8 8", "M0 8L8 0"
FILLS = {  # by kind: colour, and the hatch of a square of 8 pixels
    "linear": ("#4e79a7", ""),
    "moe": ("#f28e2b", RISING),
    "norm": ("#e15759", FALLING),
    "activation": ("#76b7b2", FALLING + RISING),
    "routing": ("#59a14f", "M3 3h1v1h-1z"),
    "lm_head": ("#edc948", ACROSS),
    "attention": ("#d4d4d4", "M2 4L4 2L6 4L4 6z"),
    "rotation": ("#bab0ac", RISING + UPRIGHT),
    "absorbed": ("#ff9da7", FALLING + ACROSS),
    "quantization": ("#b07aa1", UPRIGHT + ACROSS),
    "collectives": ("#9c755f", UPRIGHT),
    "rest": ("#ffffff", ""),
}
USUAL_BATCH = 32
LABELLED = {"across": 0.08, "upright": 0.015}  # the least share that gets a label in this direction
STYLE = (
    "text{font:11px sans-serif;text-anchor:middle;dominant-baseline:middle}.left{text-anchor:start}.right{text-anchor:end}"
    ".label{paint-order:stroke;stroke:#fff;stroke-width:4px}.grid{stroke:#ddd}.axis{fill:none}rect,.axis,.step{stroke:#000}.step{fill:#fff}"
)
COLUMNS = 5  # of the legend
LINES = (  # of the speedups: color, and a marker around its point
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
    """Return the lines of predicted.py in files."""
    lines = (json.loads(line) for path in paths for line in path.read_text().splitlines())
    return [line for line in lines if "predicted_us" in line]


def read(paths: Iterable[Path]) -> dict[str, dict[int, dict]]:
    """The last line of each batch size, by the rest of the case's name. Raises ValueError if there is none."""
    found: dict[str, dict[int, dict]] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if line["op"] == "decode_step":
                what = line["case"].rpartition(", batch ")[0]
                found.setdefault(what, {})[line["shape"]["batch"]] = line
    if not found:
        raise ValueError(f"there is no decode step in {', '.join(map(str, paths))}")
    return {what: dict(sorted(lines.items())) for what, lines in found.items()}


def stacks(line: dict) -> dict[str, dict[str, float]]:
    """Microseconds by kind of each path, in the order of `FILLS`."""
    alone = line["kinds_alone_us"]
    return {path: {kind: alone[path][kind] for kind in FILLS if kind in alone[path]} for path in PATHS}


def _step_us(line: dict, path: str) -> float:
    return line["us"] if path == "ours" else line["peers"]["stock"]


def _text(x: float, y: float, text: str, kind: str = "", upright: bool = False) -> str:
    kind = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{turned}>{html.escape(text)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="url(#{kind})"/>'


def _measured_svg(width: int, height: int, title: tuple[str, str], body: Iterable[str], lines: Iterable[dict]) -> str:
    """A figure of decode_step.py's lines."""
    lines = list(lines)
    kinds = {kind for line in lines for of_path in stacks(line).values() for kind in of_path}
    versions = ", ".join(f"{name} {lines[0]['versions'][name]}" for name in ("vllm", "torch"))
    left_out = f"; left out: {', '.join(lines[0]['left_out'])}" if lines[0]["left_out"] else ""
    return _svg(width, height, title, body, kinds, f"{lines[0]['gpu']}; {versions}{left_out}")


def _svg(width: int, height: int, title: tuple[str, str], body: Iterable[str], used: set[str], caption: str) -> str:
    """A figure with its title above and, below, its caption and the legend of the kinds that are used."""
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


def share(what: str, line: dict) -> str:
    """Two bars of 100 % each."""
    left, wide, high = 80, 780, 90

    def body() -> Iterator[str]:
        for place, (path, kinds) in enumerate(stacks(line).items()):
            x, y, total = float(left), 45 + place * (high + 20), sum(kinds.values())
            yield _text(left - 8, y + high / 2 - 7, path, "right")
            yield _text(left - 8, y + high / 2 + 7, f"{_step_us(line, path) / 1000:.2f} ms", "right")
            for kind, us in kinds.items():
                part = us / total
                yield _rectangle(x, y, part * wide, high, kind)
                if part >= LABELLED["upright"]:
                    label = f"{kind} {100 * part:.0f} %"
                    yield _text(x + part * wide / 2, y + high / 2, label, "label", part < LABELLED["across"])
                x += part * wide
        for tick in range(0, 101, 20):
            yield _text(left + wide * tick / 100, 260, f"{tick} %")

    title = f"Share of a decode step, batch {line['shape']['batch']}", what
    return _measured_svg(left + wide + 40, 270, title, body(), [line])


def _axis(left: int, right: int, bottom: int, high: int, highest_us: float, title: str) -> Iterator[str]:
    """An axis of milliseconds with its grid."""
    ticks = tick_step(highest_us / 1000)
    for index in range(math.floor(highest_us / 1000 / ticks) + 1):
        y = bottom - 1000 * high / highest_us * index * ticks
        yield f'<path class="grid" d="M{left} {y:.1f}H{right}"/>' + _text(left - 6, y, f"{index * ticks:g}", "right")
    yield f'<path class="axis" d="M{left} {bottom - high}V{bottom}H{right}"/>'
    yield _text(16, bottom - high / 2, title, upright=True)


def _stack(x: float, bottom: float, kinds: dict[str, float], scale: float) -> Iterator[str]:
    """A bar of kinds, in the order of `FILLS`."""
    y = bottom
    for kind in (kind for kind in FILLS if kind in kinds):
        y -= kinds[kind] * scale
        yield _rectangle(x - 21, y, 42, kinds[kind] * scale, kind)


def batches(what: str, lines: dict[int, dict]) -> str:
    """A bar of each path for every batch size."""
    left, group, high, bottom = 60, 110, 300, 370
    width = max(left + group * len(lines) + 20, 110 * COLUMNS + 20)
    highest = max(
        max(_step_us(line, path), sum(stacks(line)[path].values())) for line in lines.values() for path in PATHS
    )
    scale = high / highest

    def body() -> Iterator[str]:
        yield from _axis(left, width - 20, bottom, high, highest, "ms of a decode step (diamond: the whole step)")
        for index, (batch, line) in enumerate(lines.items()):
            middle = left + group * (index + 0.5)
            yield _text(middle, bottom + 12, f"{batch}")
            for place, (path, kinds) in enumerate(stacks(line).items()):
                x = middle + 46 * (place - 0.5)
                yield from _stack(x, bottom, kinds, scale)
                step = _step_us(line, path)
                at = bottom - step * scale
                yield f'<path class="step" d="M{x:.1f} {at - 5:.1f}l5 5l-5 5l-5 -5z"/>'
                above = min(bottom - sum(kinds.values()) * scale, at)
                yield _text(x, above - 24, path) + _text(x, above - 12, f"{step / 1000:.2f}")
        yield _text(left + group * len(lines) / 2, bottom + 28, "batch size")

    return _measured_svg(
        width, bottom + 34, ("Decode step by kind of work, stock and ours", what), body(), lines.values()
    )


def predicted(lines: list[dict]) -> str:
    """A bar of each model and batch size, with the error band of what has one."""
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
        f"Predicted for {lines[0]['device']}, never measured: the kernels of a decode step by kind",
        "their sum, not a step: without launch overhead, all-reduces, rotation, cache writes, absorbed GEMMs, sampling",
    )
    band = f"error bars: of kernels with a known error band; {lines[0]['context']} keys a request; kernels of {lines[0]['commit']}"
    return _svg(int(width), bottom + 34, title, body(), kinds, band)


def sum_of(lines: list[dict]) -> tuple[float, float, int]:
    """Return predicted us, the error bound of the part that has a band, and launches of lines of predicted.py."""
    us = sum(line["predicted_us"] * line["count"] for line in lines)
    bound = sum(line["predicted_us"] * line["count"] * (line["band"] or 0) for line in lines)
    return us, bound, sum(line["kernels"] * line["count"] for line in lines)


def speedups(series: dict[str, dict[int, tuple[float, float, float]]]) -> str:
    """Draw a line for each series: speedup, p10 and p90 by batch size. Raises ValueError for more series than lines are told apart."""
    if len(series) > len(LINES):
        raise ValueError(f"speedups: at most {len(LINES)} series, got {len(series)}")
    left, right, top, bottom = 60, 700, 34, 300
    sizes = sorted({batch for points in series.values() for batch in points})
    values = [value for points in series.values() for point in points.values() for value in point]
    low, high = math.floor(10 * min(1, *values) - 0.5) / 10, math.ceil(10 * max(values)) / 10
    scale = (bottom - top) / (high - low)

    def x(batch: int, place: int) -> float:  # markers at one batch size stand side by side
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
    """The least of 1, 2, 5, 10, ... and their tenths, hundredths, ... that divides an axis into at most ten parts."""
    power = 10.0 ** math.floor(math.log10(largest / 10))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 10 >= largest)


def stem(what: str) -> str:
    """The beginning of the names of a case's files."""
    return re.sub(r"[^\w.]+", "-", what).strip("-")


def draw(found: dict[str, dict[int, dict]], batch: int | None, output: Path) -> list[Path]:
    """Write both figures of each case. Raises ValueError if a case lacks the batch size."""
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for what, lines in found.items():
        chosen = batch or (USUAL_BATCH if USUAL_BATCH in lines else max(lines))
        if chosen not in lines:
            raise ValueError(f"{what} has batch sizes {', '.join(map(str, lines))}, not {chosen}")
        for name, figure in (("share", share(what, lines[chosen])), ("batches", batches(what, lines))):
            path = output / f"{stem(what)}-{name}.svg"
            path.write_text(figure)
            written.append(path)
    return written


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files of decode_step.py or predicted.py")
    parser.add_argument(
        "--batch", type=int, help=f"for the shares; default: {USUAL_BATCH} if measured, else the largest"
    )
    parser.add_argument("--output", type=Path, default=OUT, help="folder; default: serving_benchmarks/out")
    options = parser.parse_args(argv)
    try:
        lines = predicted_lines(options.results)
        if lines:
            written = [options.output / f"predicted-{lines[0]['device']}.svg"]
            options.output.mkdir(parents=True, exist_ok=True)
            written[0].write_text(predicted(lines))
        else:
            written = draw(read(options.results), options.batch, options.output)
    except (ValueError, OSError) as error:
        sys.exit(f"figures.py: {error}")
    print("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
