"""Tabulate a machine's record for logs and commands: times, who serves, wrong baselines, and which flags are faster."""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable

from vllm_rocm_ops.vllm import seam
from vllm_rocm_ops.vllm.selection.comparison import NOT_FINITE
from vllm_rocm_ops.vllm.selection.kernel_selection import MARGIN, Record, serves_by_tokens
from vllm_rocm_ops.vllm.selection.key import AITER_OFF, AITER_ON, FP8_SUMS, Key

HEADER = ("op", "shape and vLLM's kernel", "tokens", "plugin us", "vLLM us", "runs", "plugin error", "vLLM error")


def rows(record: Record) -> list[tuple[str, ...]]:
    """Return a table of results: a line per run of neighboring token counts with the same kernel."""

    def span(values: Iterable[float | None], form: str) -> str:
        known = [value for value in values if value is not None]
        if not known:
            return ""
        low, high = form.format(min(known)), form.format(max(known))
        return low if low == high else f"{low}..{high}"

    lines = []
    for key, measured in record.shapes.items():
        served = serves_by_tokens(key, measured)
        serves = {tokens: served[min(tokens, len(served) - 1)] for tokens in measured}
        for wins, group in itertools.groupby(sorted(measured.items()), lambda item, serves=serves: serves[item[0]]):
            tokens, times = zip(*group)
            winner = "off" if key.op in record.off else "plugin" if wins else "vLLM"
            us = (span((getattr(entry, name) for entry in times), "{:.1f}") for name in ("plugin_us", "baseline_us"))
            errors = (span((getattr(entry, name) for entry in times), "{:.1e}") for name in ("error", "baseline_error"))
            lines.append((key.op, f"{key.call} {key.baseline}", span(tokens, "{}"), *us, winner, *errors))
    return lines


KINDS = {
    "linear": "linear layers",
    "moe": "experts and routing",
    "attention": "attention",
    "graph": "norms, activations, all-reduce",
}
"""Folders of seams -> kinds of layers."""


def kind_of(op: str) -> str:
    """Return the kind of layers that an op serves, by the seam that calls it. No seam names MLA's absorption."""
    folders = (
        folder for folder in KINDS for name in seam.in_folder(folder) if op.startswith(seam.load(name).ops or "-")
    )
    return KINDS[next(folders, "attention")]


def speedups_by(name_of: Callable[[Key], str], record: Record) -> dict[str, list[float]]:
    """Return the plugin's speedups at all sizes that a start timed, 0 where it does not serve, by a name of their keys."""
    sizes: dict[str, list[float]] = {}
    for key, measured in record.shapes.items():
        if key.baseline.flag:
            continue
        served = serves_by_tokens(key, measured)
        speedups = sizes.setdefault(name_of(key), [])
        for tokens, times in measured.items():
            serves = served[min(tokens, len(served) - 1)] and key.op not in record.off
            speedups.append(times.baseline_us / times.plugin_us if serves and times.plugin_us else 0.0)
    return sizes


def beside_named(record: Record) -> dict[str, bool]:
    """Return a line per backend that the user named, and whether the plugin serves any size beside it."""
    lines = {}
    for named, speedups in speedups_by(lambda key: key.baseline.named, record).items():
        serves = f"the plugin serves {len([*filter(None, speedups)])} of {len(speedups)} sizes"
        if named:
            lines[f"{named} named; {serves}; VLLM_ROCM_OPS_NAMED_BACKEND=keep keeps it"] = any(speedups)
    return lines


def summary(record: Record) -> list[tuple[str, ...]]:
    """Return a line per op: its kind of layers, at how many of the timed sizes it serves, and what vLLM alone runs."""
    lines = []
    for op, speedups in speedups_by(lambda key: key.op, record).items():
        gains = [speedup for speedup in speedups if speedup]
        faster = f", {statistics.geometric_mean(gains):.2f}x as fast as vLLM's kernel" if gains else ""
        alone = dict.fromkeys(str(key.baseline) for key in record.shapes if key.op == op and not key.baseline.flag)
        said = f"serves {len(gains)} of {len(speedups)} sizes{faster}", f"vLLM alone: {', '.join(alone)}"
        lines.append((kind_of(op), op, *said))
    return sorted(lines, key=lambda line: [*KINDS.values()].index(line[0]))


def wrong_baselines(record: Record) -> list[str]:
    """Return a line for each of vLLM's kernels whose result was far from float32 where the plugin's was near."""
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for key, measured in record.shapes.items():
        for tokens, times in measured.items():
            if times.baseline_is_wrong:
                is_number = times.baseline_error < NOT_FINITE
                what = f"{times.baseline_error:.2g} from float32" if is_number else "not finite"
                said = f"{what}, the plugin {times.error:.2g} from float32: {key.call}, {tokens} tokens"
                found.setdefault((key.op, str(key.baseline)), []).append((times.baseline_error, said))
    lines = []
    for (op, baseline), each in found.items():
        hint = f"; {AITER_OFF} avoids it" if "aiter" in baseline.lower() else ""
        more = f", and {len(each) - 1} more sizes" * (len(each) > 1)
        lines.append(f"{baseline}, vLLM's kernel for {op}, is wrong on this GPU: {max(each)[1]}{more}{hint}")
    return lines


def fp8_sums(record: Record) -> list[str]:
    """Return a line for each all-reduce that sends FP8: the largest relative errors."""
    lines = []
    for key, measured in record.shapes.items():
        known = [times for times in measured.values() if times.error is not None]
        if key.baseline.name.endswith(FP8_SUMS) and known:
            plugin, vllm = (max(getattr(times, name) for times in known) for name in ("error", "baseline_error"))
            lines.append(f"{key.op} {key.call} may send FP8: relative error up to {plugin:.1e}, vLLM's {vllm:.1e}")
    return lines


def flag_of(key: Key) -> str:
    """Return the flag under which vLLM runs a key's baseline."""
    return key.baseline.flag or (AITER_ON if "aiter" in key.baseline.name.lower() else AITER_OFF)


def steps(record: Record) -> list[tuple[str, str, int, dict[str, float]]]:
    """Return for each model, kind of layers and number of tokens the time in a step under each flag, in microseconds.

    Only calls that were timed under both flags count.
    """
    totals: dict[tuple[str, str, int], dict[str, float]] = {}
    starts_last = sorted(record.shapes.items(), key=lambda item: not item[0].baseline.flag)
    for model, calls in record.steps.items():
        for op, shapes, count in calls:
            by_tokens: dict[int, dict[str, float]] = {}
            for key, measured in starts_last:
                if key.op == op and key.shape in shapes and not key.has_one_choice:
                    for tokens, times in measured.items():
                        us = times.plugin_us if times.wins and op not in record.off else times.baseline_us
                        if us is not None:
                            by_tokens.setdefault(tokens, {})[flag_of(key)] = us
            for tokens, by_flag in by_tokens.items():
                if len(by_flag) == 2:
                    total = totals.setdefault((model, kind_of(op), tokens), dict.fromkeys((AITER_OFF, AITER_ON), 0.0))
                    for flag, us in by_flag.items():
                        total[flag] += count * us
    return [(*of, by_flag) for of, by_flag in sorted(totals.items())]


def advice(record: Record) -> list[tuple[str, ...]]:
    """Return a line for each entry of `steps`: the faster flag and its gain, if that is more than `MARGIN`."""
    lines = []
    for model, kind, tokens, by_flag in steps(record):
        fast, slow = sorted(by_flag, key=by_flag.__getitem__)
        gain, us = by_flag[slow] - by_flag[fast], by_flag[fast]
        is_faster = us * (1 + MARGIN) < by_flag[slow]
        said = (
            f"{fast} is faster by {gain:.0f} us per step" if is_faster else f"both flags are equal within {MARGIN:.0%}"
        )
        each = ", ".join(f"{flag} {time:.0f} us" for flag, time in by_flag.items())
        lines.append((model, kind, f"{tokens} tokens", said, each))
    return lines


def table(record: Record) -> list[str]:
    """Return the table's lines, none without results."""
    lines = rows(record)
    return columns([HEADER, *lines]) if lines else []


def columns(rows: list[tuple[str, ...]], width: int | None = None) -> list[str]:
    """Format rows as lines with aligned columns; the last column wraps at `width`."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = sum(widths[:-1]) + 2 * len(widths[:-1])
    lines = []
    for *row, last in rows:
        parts = textwrap.wrap(last, max(width - left, 1), break_on_hyphens=False) if width else [last]
        for part in parts or [""]:
            lines.append("  ".join((*map(str.ljust, row, widths), part)).rstrip())
            row = [""] * len(row)
    return lines
