"""Draw SVG by hand: documents for light and dark, text, hatches, axes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

WIDTH = 830  # pixels of a README's column
NAMES = "page ink grid shade plain red blue orange green purple teal yellow brown"
LIGHT, DARK = (
    dict(zip(NAMES.split(), colors.split()))
    for colors in (
        "#fff #1f2328 #d8dee4 #f3f4f6 #8c959f #c8102e #2f6db3 #d9730d #2b7a4b #7b5aa6 #4fa3a0 #d4a72c #9a6a45",
        "#0d1117 #e6edf3 #30363d #1b2129 #8b949e #ff7b72 #79c0ff #ffa657 #7ee787 #d2a8ff #56d4c8 #e3c04b #c9996b",
    )
)
COLORS = ("red", "blue", "orange", "green", "purple", "teal", "brown")
MARKERS = (  # outlines around a point, one for each of COLORS
    "m-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "m-4.5 -4.5h9v9h-9z",
    "m0 -6l6 10h-12z",
    "m0 -6l6 6l-6 6l-6 -6z",
    "m-5 -2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
    "m0 6l6 -10h-12z",
    "m-6 -2.5h12v5h-12z",
)


def _style() -> str:
    """Return the style sheet: colors as variables, with other values where the reader prefers dark."""

    def variables(colors: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{color};" for name, color in colors.items()) + "}"

    strokes = "".join(f".s-{name}{{stroke:var(--{name})}}.f-{name}{{fill:var(--{name})}}" for name in LIGHT)
    return (
        f"{variables(LIGHT)}@media (prefers-color-scheme:dark){{{variables(DARK)}}}"
        "text{font:12px sans-serif;fill:var(--ink);text-anchor:middle;dominant-baseline:middle}"
        ".title{font-size:14px;font-weight:bold}.left{text-anchor:start}.right{text-anchor:end}"
        ".line{fill:none;stroke-width:1.8}.dashed{stroke-dasharray:5 4}.grid{fill:none;stroke:var(--grid)}"
        ".axis{fill:none;stroke:var(--ink)}rect{stroke:var(--page);stroke-width:.7}" + strokes
    )


def text(x: float, y: float, what: str, kind: str = "", upright: bool = False) -> str:
    """Return a text in the middle of a point, or to the `left` or `right` of it by its `kind`."""
    kind = f' class="{kind}"' if kind else ""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{kind}{turned}>{html.escape(what)}</text>'


def path(kind: str, outline: str, more: str = "") -> str:
    """Return a path of a style class."""
    return f'<path class="{kind}" d="{outline}"{more}/>'


def rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Return a bar filled with a color, or with the pattern `#name`."""
    filled = f'fill="url({fill})"' if fill.startswith("#") else f'class="f-{fill}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {filled}/>'


def whiskers(x: float, low: float, high: float) -> str:
    """Return a bar from one y to another with a stroke at each end."""
    return path("axis", f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 5:.1f} {low:.1f}h10M{x - 5:.1f} {high:.1f}h10")


def pattern(name: str, color: str) -> str:
    """Return a fill with a hatch in a square of 8 pixels: in the page's color on a solid color."""
    return (
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse"><path class="f-{color}" d="M0 0H8V8H0z"/>'
        f'<path class="s-page" fill="none" stroke-width="2.2" d="M-2 2L2 -2M0 8L8 0M6 10L10 6"/></pattern>'
    )


def document(height: float, parts: Iterable[str], width: float = WIDTH, defs: Iterable[str] = ()) -> str:
    """Return an SVG file with a style sheet for light and dark pages."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    page = f'<path class="f-page" d="M0 0H{width:.0f}V{height:.0f}H0z"/>'
    return "\n".join((head, f"<style>{_style()}</style>", "<defs>", *defs, "</defs>", page, *parts, "</svg>\n"))


def tick_step(largest: float) -> float:
    """Return the least of 1, 2, 5, 10, ... and their tenths, hundredths, ... that divides an axis into at most ten parts."""
    power = 10.0 ** math.floor(math.log10(largest / 10))
    return next(step * power for step in (1, 2, 5, 10) if step * power * 10 >= largest)


class Panel(NamedTuple):
    """A plot's rectangle in pixels, and the least and largest value on its y axis."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    logarithmic: bool = False

    def y(self, value: float) -> float:
        low, high, value = (math.log(number) if self.logarithmic else number for number in (self.low, self.high, value))
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def x(self, value: float, first: float, last: float, margin: float = 30) -> float:
        """Return where a value is on a logarithmic x axis."""
        along = math.log(value / first) / (math.log(last / first) or 1)
        return self.left + margin + (self.right - self.left - 2 * margin) * along

    def linear_ticks(self) -> list[float]:
        step = tick_step(self.high - self.low)
        return [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]

    def frame(self, ticks: Sequence[float], label: str, title: str = "", axis: str = "") -> Iterator[str]:
        """Yield the grid with a label for each tick (`label` is a format), the axes, and their titles."""
        for tick in ticks:
            yield path("grid", f"M{self.left} {self.y(tick):.1f}H{self.right}")
            yield text(self.left - 8, self.y(tick), label.format(tick), "right")
        yield path("axis", f"M{self.left} {self.top}V{self.bottom}H{self.right}")
        yield text((self.left + self.right) / 2, self.top - 14, title)
        yield text(self.left - 46, (self.top + self.bottom) / 2, axis, upright=True)


def line(points: Sequence[tuple[float, float]], color: str, marker: str, dashed: bool = False) -> str:
    """Return a line through points in pixels, with a marker at each; a dashed one has hollow markers."""
    along = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    marks = "".join(f"M{x:.1f} {y:.1f}{marker}" for x, y in points)
    filled = "page" if dashed else color
    return path(f"line s-{color}{' dashed' * dashed}", f"M{along}") + path(f"s-{color} f-{filled}", marks)


def legend(rows: Sequence[tuple[str, str]], left: float, top: float, columns: int, width: float) -> Iterator[str]:
    """Yield entries of a legend: a mark around the point 0 0, and its text."""
    for place, (mark, what) in enumerate(rows):
        x, y = left + width * (place % columns), top + 19 * (place // columns)
        yield f'<g transform="translate({x:.1f} {y:.1f})">{mark}</g>' + text(x + 16, y, what, "left")
