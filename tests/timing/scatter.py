"""Draw predicted against measured times as an SVG file, without a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from .report import Case

SIZE, LEFT, TOP = 420, 70, 30  # size of the square in pixels, and its position
MARKS = {  # by index of the class: color, and the outline of a mark of 8 pixels around its position
    0: ("#4e79a7", "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"),
    1: ("#e15759", "m-4 -4h8v8h-8z"),
    2: ("#59a14f", "m0 -5l5 9h-10z"),
    3: ("#f28e2b", "m0 -5l5 5l-5 5l-5 -5z"),
    4: ("#9c755f", "m-4 0l2 -4h4l2 4l-2 4h-4z"),
}
BAND = 1.2  # between the dashed lines
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
STYLE = (
    "text{font:11px sans-serif;text-anchor:middle;dominant-baseline:middle}.left{text-anchor:start}.right{text-anchor:end}"
    ".grid{stroke:#ddd}.axis{fill:none;stroke:#000}.band{stroke:#999;stroke-dasharray:4 3}"
)


def _text(x: float, y: float, text: str, kind: str = "", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{more}>{html.escape(text)}</text>'


def draw(cases: Sequence[Case], title: str) -> str:
    """Return the figure, with fitted points filled and held-out ones not."""
    times = [us for case in cases for us in (case.us, case.predicted)]
    low = math.log(max(tick for tick in (0.1, 0.5, *TICKS) if tick <= min(times)))
    high = math.log(min(tick for tick in (*TICKS, 1e9) if tick >= max(times)))
    scale = SIZE / (high - low)
    bottom, right = TOP + SIZE, LEFT + SIZE

    def at(us: float) -> float:
        return (math.log(us) - low) * scale

    def line(factor: float, kind: str) -> str:
        start, end = max(low, low - math.log(factor)), min(high, high - math.log(factor))
        x, y = (
            [(each - low) * scale for each in (start, end)],
            [(each + math.log(factor) - low) * scale for each in (start, end)],
        )
        return (
            f'<path class="{kind}" d="M{LEFT + x[0]:.1f} {bottom - y[0]:.1f}L{LEFT + x[1]:.1f} {bottom - y[1]:.1f}"/>'
        )

    def body() -> Iterator[str]:
        for tick in TICKS:
            if low <= math.log(tick) <= high:
                x, y = LEFT + at(tick), bottom - at(tick)
                yield f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}"/>'
                yield _text(x, bottom + 12, f"{tick}") + _text(LEFT - 6, y, f"{tick}", "right")
        yield line(1, "axis") + line(BAND, "band") + line(1 / BAND, "band")
        yield f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>'
        yield _text(LEFT + SIZE / 2, bottom + 30, "measured us, by others")
        middle = TOP + SIZE / 2
        yield _text(20, middle, "predicted us", more=f' transform="rotate(-90 20 {middle:.1f})"')
        kinds = list(dict.fromkeys(case.kind for case in cases))
        for case in cases:
            color, outline = MARKS[kinds.index(case.kind)]
            fill = color if case.half == "fit" else "none"
            place = f"M{LEFT + at(case.us):.1f} {bottom - at(case.predicted):.1f}"
            yield f'<path d="{place}{outline}" fill="{fill}" stroke="{color}"/>'
        for place, kind in enumerate(kinds):
            (color, outline), y = MARKS[place], TOP + 12 + 18 * place
            yield f'<path d="M{LEFT + 14} {y}{outline}" fill="{color}" stroke="{color}"/>' + _text(
                LEFT + 26, y, kind, "left"
            )
        yield _text(LEFT + 8, TOP + 12 + 18 * len(kinds), f"filled: fitted; dashed: {BAND - 1:.0%} off", "left")
        yield _text(LEFT + SIZE / 2, 14, title)

    width, height = right + 20, bottom + 44
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    background = f'<path fill="#fff" d="M0 0H{width}V{height}H0z"/>'
    return "\n".join((head, f"<style>{STYLE}</style>", background, *body(), "</svg>\n"))
