"""Format the results of latency.py as a table and a figure."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path

import decode_profile

SIDES = {"without": "vLLM", "with": "vLLM + vllm-rocm-ops"}
NO_RATIO = "no kernel ran"
PERCENTILES = (10, 25, 50, 75, 90, 99)  # as in `vllm bench latency`
ITERATIONS = ("decode_ms", "step_ms", "step_rows", "ttft_ms", "host_us")
CHARACTERS_PER_INCH = 14  # of a plot's caption


def summarize(job: dict, batch: dict) -> dict:
    """Return one batch size of one side, in the form of `vllm bench latency` with additional fields."""
    import numpy

    latencies, decode = batch["latencies"], batch["decode_ms"]
    return {
        "model_id": job["name"],
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): float(numpy.percentile(latencies, p)) for p in PERCENTILES},
        "side": job["side"],
        "batch_size": batch["batch_size"],
        "input_len": job["input_len"],
        "output_len": job["output_len"],
        "num_layers": job["num_layers"],
        "rank_of": job["rank_of"],
        "pair": job["pair"],
        "drafts": job["drafts"],
        "ms_per_step": statistics.median(batch["step_ms"]),
        "rows_per_step": statistics.median(batch["step_rows"]),
        "decode_ms_per_token": statistics.median(decode),
        "ttft_ms": statistics.median(batch["ttft_ms"]),
        "decode_ms_percentiles": {str(p): float(numpy.percentile(decode, p)) for p in PERCENTILES},
        "step_ms_percentiles": {str(p): float(numpy.percentile(batch["step_ms"], p)) for p in PERCENTILES},
        "host_us": statistics.median(batch["host_us"]),
        "iterations": {name: batch[name] for name in ITERATIONS},
    }


def json_text(value: object, indent: str = "") -> str:
    """Return a value as JSON that puts a list or object without others on one line."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(item, dict | list) for item in inside):
        return json.dumps(value)
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    items = (f"\n{indent} {name}{json_text(item, indent + ' ')}" for name, item in zip(names, inside))
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}{','.join(items)}\n{indent}{last}"


def append(path: Path, line: dict) -> None:
    """Append a line of JSON to a file, in a folder that is created if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pairs(report: dict) -> list[tuple[str, int, dict[str, list[dict]]]]:
    """Return (model, batch size, {side: results of its starts}), in the order of measurement."""
    cases: dict[tuple[str, int], dict[str, list[dict]]] = {}
    for result in report["results"]:
        sides = cases.setdefault((result["model_id"], result["batch_size"]), {})
        sides.setdefault(result["side"], []).append(result)
    for run in report["runs"]:
        if "error" in run and run["model_id"] not in {model for model, _ in cases}:
            cases[run["model_id"], 0] = {}
    return [(*case, sides) for case, sides in cases.items()]


def compared_ms(start: dict) -> float:
    """Return the time in ms that speedups compare: per output token, with drafts per step, as acceptance is random."""
    return start["ms_per_step" if start.get("drafts") else "decode_ms_per_token"]


def median_ms(starts: list[dict]) -> float:
    """Return the time in ms that speedups compare: the median of the starts' medians."""
    return statistics.median(map(compared_ms, starts))


def spread_ms(starts: list[dict]) -> tuple[float, float]:
    """Return the minimum p10 and the maximum p90 over the starts, of the time that speedups compare."""
    spreads = [start["step_ms_percentiles" if start.get("drafts") else "decode_ms_percentiles"] for start in starts]
    return min(spread["10"] for spread in spreads), max(spread["90"] for spread in spreads)


def speedup(sides: dict[str, list[dict]]) -> float:
    """Return the speedup of the plugin: the median over pairs of starts."""
    times = (map(compared_ms, sides[side]) for side in SIDES)
    return statistics.median(without / with_ops for without, with_ops in zip(*times))


def speedup_spread(sides: dict[str, list[dict]]) -> tuple[float, float]:
    """Return bounds of the speedup: the baseline's p10 over the plugin's p90, and p90 over p10."""
    (low, high), (low_with, high_with) = (spread_ms(sides[side]) for side in SIDES)
    return low / high_with, high / low_with


def op_stats(report: dict) -> dict[str, dict]:
    """Return the call counts by op and kernel, by model."""
    return {run["model_id"]: run["op_stats"] for run in report["runs"] if "op_stats" in run}


def kernels(stats: dict[str, dict[str, int]]) -> set[str]:
    """Return the kernels that ran, from the result of `vllm_rocm_ops.stats()`."""
    ran = {kernel for op in stats.values() for kernel in op}
    return {kernel for kernel in ran if not kernel.startswith(("fallback", "nothing"))}


def ratio(report: dict, model: str, sides: dict[str, list[dict]]) -> str:
    """Return the speedup of a model, `NO_RATIO` if the plugin ran PyTorch only, or "" if a side is missing."""
    if len(sides) < len(SIDES):
        return ""
    if not kernels(op_stats(report)[model]):
        return NO_RATIO
    return f"{speedup(sides):.2f}x"


STARTS = (
    ("start, s", "start_s", 1),
    ("load, s", "load_s", 1),
    ("warm-up, s", "warm_up_s", 1),
    ("peak of load, GiB", "load_peak_bytes", 1 << 30),
    ("peak of warm-up, GiB", "warm_up_peak_bytes", 1 << 30),
    ("steady, GiB", "steady_bytes", 1 << 30),
    ("KV cache, blocks", "kv_blocks", 1),
)
"""Rows of the table of starts: name, key in a run, and unit."""


def differences(report: dict) -> list[list[str]]:
    """Return rows of start, step, first token and host medians on each side, with the difference if both sides exist."""
    values_of: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(run: dict, name: str, value: float | None) -> None:
        if value is not None:
            values_of.setdefault((run["model_id"], name), {}).setdefault(run["side"], []).append(value)

    for run in report["runs"]:
        for name, key, unit in STARTS:
            value = run.get("start", {}).get(key)
            add(run, name, value and value / unit)
    for result in report["results"]:
        batch = result["batch_size"]
        if result.get("drafts"):
            add(result, f"step at batch {batch}, ms", result["ms_per_step"])
            add(result, f"step at batch {batch}, rows", result["rows_per_step"])
        add(result, f"TTFT, {batch} x {result['input_len']} tokens, ms", result.get("ttft_ms"))
        add(result, f"Python loop at batch {batch}, us", result.get("host_us"))
    rows = []
    for (model, name), sides in values_of.items():
        values = [statistics.median(sides[side]) if side in sides else None for side in SIDES]
        cells = ["" if value is None else f"{value:,.2f}" for value in values]
        apart = "" if None in values else f"{values[1] - values[0]:+,.2f}"
        percent = f"{100 * (values[1] / values[0] - 1):+.1f} %" if apart and values[0] else ""
        rows.append([model, name, *cells, apart, percent])
    return rows


def aligned(rows: list[list[str]]) -> list[str]:
    """Format a table whose first row is its header."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def table(report: dict) -> str:
    """Format the results, and the failures below them."""
    measured = [side for side in SIDES if any(run["side"] == side for run in report["runs"])]
    rows = [["model", "batch", *(SIDES[side] for side in measured), *(["speedup"] if len(measured) == 2 else [])]]
    for model, batch_size, sides in pairs(report):
        row = [model, str(batch_size or "-")]
        for starts in map(sides.get, measured):
            row.append("{:.2f} ({:.2f}-{:.2f})".format(median_ms(starts), *spread_ms(starts)) if starts else "failed")
        if len(measured) == 2:
            row.append(ratio(report, model, sides))
        rows.append(row)
    lines = ["Decode, ms per output token (per step with drafts): median (p10-p90)", "", *aligned(rows)]
    if starts := differences(report):
        header = ["model", "", *SIDES.values(), "difference", ""]
        lines += ["", "Starts, steps with drafts and first tokens: medians", "", *aligned([header, *starts])]
    for run in report["runs"]:
        for key, what in (("error", " failed"), ("profile_error", ": no profile")):
            if key in run:
                said = f"{run['model_id']}{what} with {SIDES[run['side']]}: {textwrap.shorten(run[key], 300)}"
                lines += ["", said, f"  {run['log']}"]
    for model, stats in op_stats(report).items():
        if not stats:
            lines += ["", f"{model}: vLLM called no op of the plugin; see `vllm-rocm-ops doctor`"]
        elif not kernels(stats):
            why = "the ops run PyTorch on this machine, and the times do not predict a GPU's"
            lines += ["", f"{model}: no kernel of the plugin ran: {why}."]
    for model, batches in profiled(report).items():
        header, body = decode_profile.table(batches)
        sides = " / ".join(SIDES[side] for side in next(iter(batches.values())))
        lines += ["", f"{model}: microseconds per decode step, {sides}", ""]
        lines += [f"{row[0]:48}" + "".join(f"  {cell:>30}" for cell in row[1:]) for row in (header, *body)]
    return "\n".join(lines)


def profiled(report: dict) -> dict[str, dict[str, dict[str, list[dict]]]]:
    """Return the profiles as {model: {batch size: {side: ranks}}}."""
    profiles: dict[str, dict[str, dict[str, list[dict]]]] = {}
    for run in report["runs"]:
        for batch_size, ranks in run.get("profile", {}).items():
            profiles.setdefault(run["model_id"], {}).setdefault(str(batch_size), {})[run["side"]] = ranks
    return profiles


def figure(report: dict):
    """Draw bars of the medians with p10 to p90, one panel per model. Returns None without results."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"without": "#9aa5b1", "with": "#c8102e"}
    label = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
    by_model: dict[str, list] = {}
    for model, batch_size, sides in pairs(report):
        if sides:
            by_model.setdefault(model, []).append((batch_size, sides))
    if not by_model:
        return None
    inches = max(6.0, 1.5 + 3.1 * len(by_model))
    drawn, axes = pyplot.subplots(1, len(by_model), figsize=(inches, 4.8), squeeze=False, layout="constrained")
    asked = [side for side in SIDES if any(run["side"] == side for run in report["runs"])]
    width = 0.8 / len(asked)
    for axis, (model, batches) in zip(axes[0], by_model.items()):
        ratios = [ratio(report, model, sides) for _, sides in batches]
        hatch = "//" if NO_RATIO in ratios else ""
        for index, (_, sides) in enumerate(batches):
            for place, side in enumerate(asked):
                x = index + (place - (len(asked) - 1) / 2) * width
                if side not in sides:
                    axis.annotate("failed", (x, 0), (0, 6), rotation=90, **label, color="#777777")
                    continue
                value, (low, high) = median_ms(sides[side]), spread_ms(sides[side])
                error = [[max(value - low, 0)], [max(high - value, 0)]]
                axis.bar(x, value, width * 0.92, color=colors[side], hatch=hatch, edgecolor="white", linewidth=0)
                axis.errorbar(x, value, yerr=error, color="#333333", capsize=3, linewidth=1)
                axis.annotate(f"{value:.2f}", (x, max(value, high)), (0, 4), **label)
        shown = ["" if hatch else f"\n{text}" for text in ratios]
        axis.set_xticks(range(len(batches)), [f"{batch[0]}{text}".strip() for batch, text in zip(batches, shown)])
        axis.set_xlim(-0.5, len(batches) - 0.5)
        axis.set_xlabel("batch size, and speedup" if any(ratios) and not hatch else "batch size")
        axis.set_title(f"{model}\nno kernel of the plugin ran: no speedup" if hatch else model, fontsize=10)
        axis.margins(y=0.12)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("decode, ms per output token (per step with drafts)")
    drawn.suptitle("Decode latency: median, p10 to p90", fontsize=12, fontweight="bold")
    result, versions = report["results"][0], report["versions"]
    number = len({run["pair"] for run in report["results"] if "pair" in run})
    starts = f" in each of {number} starts" if number > 1 else ""
    rank = f", one of {result['rank_of']} ranks without collectives" if result["rank_of"] > 1 else ""
    drafts = result.get("drafts")
    drafted = f", {drafts['num_speculative_tokens']} {drafts['method']} drafts" if drafts else ""
    caption = (
        f"{report['hardware']}{rank}; vLLM {versions['vllm']}, torch {versions['torch']}; input {result['input_len']}, "
        f"output {result['output_len']}, {len(result['latencies'])} iterations{starts}{drafted}; random weights"
    )
    drawn.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colors[side]) for side in asked],
        [SIDES[side] for side in asked],
        title=textwrap.fill(caption, int(CHARACTERS_PER_INCH * inches)),
        title_fontproperties={"size": 8},
        loc="outside lower center",
        ncols=len(asked),
        frameon=False,
    )
    return drawn


def plot(report: dict, path: Path) -> bool:
    """Write the figure as PNG, and return whether there was anything to draw."""
    drawn = figure(report)
    if drawn is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)
    return True
