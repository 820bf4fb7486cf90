"""Tabulate the plugin's cost to the host and to a start, from the results of host_time.py and latency.py."""

import json

import host_time
import latency_report

from . import measurements
from .measurements import grouped, kind_of, lines_of, markdown, oldest_first

KIND = "host-time"


def host_times() -> str:
    """Return a row for each GPU, model and seam, from the newest file of each model."""
    body = []
    paths = (path for path in measurements.RESULTS.glob("*/*.jsonl") if kind_of(path) == KIND)
    for gpu, files in sorted(grouped(oldest_first(paths), lambda path: path.parent.name).items()):
        newest: dict[str, list[dict]] = {}  # by model
        for path in files:
            newest |= grouped(lines_of(path), lambda line: line["model"])
        for model, lines in newest.items():
            for seam, timed in grouped(lines, lambda line: line["seam"]).items():
                baseline = _range([line["us"][host_time.VLLMS] for line in timed], "{:.0f}")
                added = (_added(timed, path) for path in host_time.PLUGIN)
                body.append((gpu, model, f"`{seam}`", str(len(timed)), baseline, *added))
    header = "GPU", "model", "seam", "layers", "baseline us", "kernel runs: added us", "falls back: added us"
    return markdown(header, body)


def _range(values: list[float], form: str) -> str:
    low, high = (form.format(value) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _added(lines: list[dict], path: str) -> str:
    """Return the range of a path's median differences from the baseline, bold where one is above the limit."""
    values = [line["apart_us"][path] for line in lines if path in line["apart_us"]]
    if not values:
        return ""
    return f"**{_range(values, '{:+.1f}')}**" if max(values) > host_time.ALLOWED_US else _range(values, "{:+.1f}")


WORSE = 0.02  # share of the baseline, from which on more is bold


def starts() -> str:
    """Return a row for the newest starts of each model on a GPU: medians over pairs, baseline / plugin, bold where the plugin needs more."""
    newest: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in oldest_first(measurements.RESULTS.glob("*/*-start.json")):
        report = json.loads(path.read_text())
        result = report["results"][0]
        pairs = str(sum(run["side"] == "with" for run in report["runs"]))
        cells = {name: _pair(*pair) for _, name, *pair in latency_report.differences(report) if "blocks" not in name}
        case = result["model_id"], report["hardware"].partition(" x ")[2], str(result["num_layers"] or "all")
        newest[case] = {"pairs": pairs} | cells
    names = dict.fromkeys(name for cells in newest.values() for name in cells)
    rows = [(*case, *(cells.get(name, "") for name in names)) for case, cells in newest.items()]
    return markdown(("model", "GPU", "layers", *names), rows)


def _pair(baseline: str, plugin: str, _: str, percent: str) -> str:
    text = f"{baseline} / {plugin}"
    return f"**{text}** ({percent})" if percent and float(percent.removesuffix(" %")) > 100 * WORSE else text
