"""Tabulate attention's times for benchmarks.md."""

import statistics
from collections.abc import Callable

from .measurements import best_baseline, grouped, head, markdown, per_gpu, times

DECODE, PREFILL = "decode-attention", "attention"
SHORT = "up to 4096 keys and 16 requests"


def is_short(line: dict) -> bool:
    return line["shape"]["context"] <= 4096 and line["shape"]["batch"] <= 16


def by_model(lines: list[dict]) -> dict[str, list[dict]]:
    """Group lines of decode by the model and rank of their heads."""
    return grouped(lines, lambda line: line["case"].removesuffix(" ragged").rpartition(" ")[0])


def speedup(lines: list[dict], baseline: Callable[[dict], str | None]) -> str:
    """Return the geometric mean of the speedups over a baseline, and the least."""
    ratios = [line["peers"][name] / line["us"] for line in lines if (name := baseline(line)) in line["peers"]]
    return f"{times([statistics.geometric_mean(ratios)])}, least {times([min(ratios)])}" if ratios else ""


def cells(lines: list[dict], baselines: list[str]) -> list[str]:
    """Return `speedup` over each baseline."""
    return [speedup(lines, lambda _, name=name: name) for name in baselines]


def losses(lines: list[dict]) -> str:
    """Return in how many shapes the plugin is slower than each baseline, and how many times."""
    parts = []
    for baseline in dict.fromkeys(baseline for line in lines for baseline in line["peers"]):
        times_slower = [line["us"] / line["peers"][baseline] for line in lines if baseline in line["peers"]]
        slower = [value for value in times_slower if value > 1]
        span = f", {min(slower):.1f} to {max(slower):.1f} times" if slower else ""
        parts.append(f"slower than {baseline} in {len(slower)} of {len(times_slower)} shapes{span}")
    return "; ".join(parts)


def decode() -> str:
    """Return a table per GPU: a row for each model and range of shapes, a column for each baseline."""

    def table(lines: list[dict]) -> str:
        baselines = list(dict.fromkeys(name for line in lines for name in line["peers"]))
        rows = []
        for model, of_model in by_model(lines).items():
            for what, holds in ((SHORT, True), ("longer or more", False)):
                of_range = [line for line in of_model if is_short(line) is holds]
                if of_range:
                    best = speedup(of_range, best_baseline)
                    rows.append((model, what, str(len(of_range)), *cells(of_range, baselines), best))
        header = ("heads of", "range", "shapes", *baselines, "the best baseline")
        return f"{head(lines)}, geometric means:\n\n{markdown(header, rows)}"

    return per_gpu([DECODE], table)


def prefill() -> str:
    """Return a table per GPU of prefill attention, a column for each baseline."""

    def table(lines: list[dict]) -> str:
        baselines = list(dict.fromkeys(name for line in lines for name in line["peers"]))
        of_all = markdown(("shapes", *baselines), [(str(len(lines)), *cells(lines, baselines))])
        return f"{head(lines)}, geometric means; {losses(lines)}:\n\n{of_all}"

    return per_gpu([PREFILL], table)
