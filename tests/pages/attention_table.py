"""Write the tables of attention timings for the pages of readme.py."""

import statistics
from collections.abc import Callable

from .measurements import both, head, links, markdown, measured, ratio, time, times, versus

DECODE, PREFILL = "decode-attention", "attention"
SHORT = "up to 4096 keys and 16 requests"


def is_short(line: dict) -> bool:
    """Return whether a line's context and batch are within `SHORT`."""
    return line["shape"]["context"] <= 4096 and line["shape"]["batch"] <= 16


def by_model(lines: list[dict]) -> dict[str, list[dict]]:
    """Return decode lines by model and TP, whose heads they have."""
    found: dict[str, list[dict]] = {}
    for line in lines:
        found.setdefault(line["case"].removesuffix(" ragged").rpartition(" ")[0], []).append(line)
    return found


def beside(lines: list[dict], peer: str) -> str:
    """Return the speedup over a baseline: geometric mean and minimum."""
    ratios = [line["peers"][peer] / line["us"] for line in lines if peer in line["peers"]]
    return f"{times([statistics.geometric_mean(ratios)])}, min {times([min(ratios)])}" if ratios else ""


def losses(lines: list[dict]) -> str:
    """Return how many shapes are slower than each baseline, and the slowdown."""
    found = []
    for peer in dict.fromkeys(peer for line in lines for peer in line["peers"]):
        times_slower = [line["us"] / line["peers"][peer] for line in lines if peer in line["peers"]]
        slower = [value for value in times_slower if value > 1]
        how = f", by {min(slower):.1f}x to {max(slower):.1f}x" if slower else ""
        found.append(f"slower than {peer} in {len(slower)} of {len(times_slower)} shapes{how}")
    return "; ".join(found)


def decode_summary() -> str:
    """Return speedups with a row per model and range of shapes, a column per baseline."""
    tables = []
    for newest in measured(DECODE):
        lines = [line for line, _ in newest.values()]
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        rows = []
        for model, of_model in by_model(lines).items():
            for what, holds in ((SHORT, True), ("larger", False)):
                of_range = [line for line in of_model if is_short(line) is holds]
                if of_range:
                    cells = (beside(of_range, peer) for peer in peers)
                    rows.append((model, what, str(len(of_range)), *cells, versus(of_range)))
        header = ("heads of", "range", "shapes", *peers, "fastest baseline")
        tables.append(f"{head(lines)}, speedup over each baseline, geometric mean:\n\n{markdown(header, rows)}")
    for newest in measured(PREFILL):
        lines = [line for line, _ in newest.values()]
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        row = str(len(lines)), *(beside(lines, peer) for peer in peers)
        what = f"Prefill attention, `flash_attention`, not called by vLLM: {losses(lines)}. {head(lines)}, geometric mean speedup"
        tables.append(f"{what}:\n\n{markdown(('shapes', *peers), [row])}")
    return "\n\n".join(tables) or "Nothing yet."


def decode() -> str:
    """Return decode times with a row per model and length, a column per batch size."""

    def table(lines: list[dict]) -> str:
        batches = sorted({line["shape"]["batch"] for line in lines})
        rows = []
        for model, of_model in by_model(lines).items():
            found: dict[tuple[int, bool], dict[int, dict]] = {}
            for line in of_model:
                keys = line["shape"]["context"], line["case"].endswith(" ragged")
                found.setdefault(keys, {})[line["shape"]["batch"]] = line
            for (keys, ragged), of_keys in sorted(found.items()):
                cells = (both(of_keys[batch]) if batch in of_keys else "" for batch in batches)
                rows.append((model, f"{keys}{', ragged' * ragged}", *cells))
        return markdown(("heads of", "keys", *(f"batch {batch}" for batch in batches)), rows)

    what = "Decode attention of one layer, microseconds, plugin / fastest baseline (FlashAttention 3, FlashMLA, vLLM's Triton kernels)"
    return _tables(DECODE, f"{what}, by `vllm-rocm-ops bench decode-attention --peers --output FILE.jsonl`", table)


def prompts() -> str:
    """Return prefill times with a row per shape."""

    def table(lines: list[dict]) -> str:
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        rows = [
            (line["case"], time(line["us"]), *(time(line["peers"].get(peer)) for peer in peers), times([ratio(line)]))
            for line in lines
        ]
        table = markdown(("batch x heads:key heads x rows x keys x size", "`flash_attention`", *peers, "speedup"), rows)
        found = losses(lines)
        return f"{found[0].upper()}{found[1:]}. Speedup = fastest baseline / `flash_attention`.\n\n{table}"

    what = "Prefill attention by `flash_attention`, not called by vLLM, microseconds"
    return _tables(PREFILL, f"{what}, by `vllm-rocm-ops bench attention --peers --output FILE.jsonl`", table)


def _tables(kind: str, what: str, table: Callable[[list[dict]], str]) -> str:
    """Return a table per GPU."""
    tables = []
    for newest in measured(kind):
        lines = [line for line, _ in newest.values()]
        files = links(path for _, path in newest.values())
        tables.append(f"{what}.\n{head(lines)}: {files}\n\n{table(lines)}")
    return "\n\n".join(tables) or "Nothing yet."
