"""The tables of attention's times, for pages that readme.py writes."""

import statistics
from collections.abc import Callable

from .measurements import both, head, links, markdown, measured, ratio, time, times, versus

DECODE, PREFILL = "decode-attention", "attention"
SHORT = "up to 4096 keys and 16 requests"


def is_short(line: dict) -> bool:
    return line["shape"]["context"] <= 4096 and line["shape"]["batch"] <= 16


def by_model(lines: list[dict]) -> dict[str, list[dict]]:
    """Lines of decode by the model and rank whose heads they have."""
    found: dict[str, list[dict]] = {}
    for line in lines:
        found.setdefault(line["case"].removesuffix(" ragged").rpartition(" ")[0], []).append(line)
    return found


def beside(lines: list[dict], peer: str) -> str:
    """The geometric mean of how many times as fast ours is, and the least."""
    ratios = [line["peers"][peer] / line["us"] for line in lines if peer in line["peers"]]
    return f"{times([statistics.geometric_mean(ratios)])}, least {times([min(ratios)])}" if ratios else ""


def losses(lines: list[dict]) -> str:
    """Return in how many shapes ours is slower than each peer, and how many times."""
    found = []
    for peer in dict.fromkeys(peer for line in lines for peer in line["peers"]):
        times_slower = [line["us"] / line["peers"][peer] for line in lines if peer in line["peers"]]
        slower = [value for value in times_slower if value > 1]
        how = f", {min(slower):.1f} to {max(slower):.1f} times" if slower else ""
        found.append(f"slower than {peer} in {len(slower)} of {len(times_slower)} shapes{how}")
    return "; ".join(found)


def decode_summary() -> str:
    """A row for each model and range of shapes, a column for each peer."""
    tables = []
    for newest in measured(DECODE):
        lines = [line for line, _ in newest.values()]
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        rows = []
        for model, of_model in by_model(lines).items():
            for what, holds in ((SHORT, True), ("more", False)):
                of_range = [line for line in of_model if is_short(line) is holds]
                if of_range:
                    cells = (beside(of_range, peer) for peer in peers)
                    rows.append((model, what, str(len(of_range)), *cells, versus(of_range)))
        header = ("heads of", "range", "shapes", *peers, "the best peer")
        tables.append(f"{head(lines)}, geometric means:\n\n{markdown(header, rows)}")
    for newest in measured(PREFILL):
        lines = [line for line, _ in newest.values()]
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        row = str(len(lines)), *(beside(lines, peer) for peer in peers)
        what = f"Prefill attention, `flash_attention`, which vLLM does not call: {losses(lines)}. {head(lines)}, geometric means"
        tables.append(f"{what}:\n\n{markdown(('shapes', *peers), [row])}")
    return "\n\n".join(tables) or "Nothing yet."


def decode() -> str:
    """A row for each model and length, a column for each number of requests."""

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

    what = "Decode attention of one layer, microseconds, ours / the best peer (FlashAttention 3, FlashMLA, vLLM's Triton kernels)"
    return _tables(DECODE, f"{what}, by `vllm-rocm-ops bench decode-attention --peers --output FILE.jsonl`", table)


def prompts() -> str:
    """A row for each shape."""

    def table(lines: list[dict]) -> str:
        peers = list(dict.fromkeys(peer for line in lines for peer in line["peers"]))
        rows = [
            (line["case"], time(line["us"]), *(time(line["peers"].get(peer)) for peer in peers), times([ratio(line)]))
            for line in lines
        ]
        table = markdown(("batch x heads:key heads x rows x keys x size", "ours", *peers, "best peer / ours"), rows)
        return f"Ours is {losses(lines)}.\n\n{table}"

    what = "Prefill attention by `flash_attention`, which vLLM does not call, microseconds"
    return _tables(PREFILL, f"{what}, by `vllm-rocm-ops bench attention --peers --output FILE.jsonl`", table)


def _tables(kind: str, what: str, table: Callable[[list[dict]], str]) -> str:
    """One for each GPU."""
    tables = []
    for newest in measured(kind):
        lines = [line for line, _ in newest.values()]
        files = links(path for _, path in newest.values())
        tables.append(f"{what}.\n{head(lines)}: {files}\n\n{table(lines)}")
    return "\n\n".join(tables) or "Nothing yet."
