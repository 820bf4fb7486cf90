"""The tables of what the plugin costs the host and a start, from the results of host_time.py and of latency.py."""

import json

import host_time
import latency_report

from . import measurements
from .measurements import kind_of, lines_of, links, markdown, oldest_first


def host_times() -> str:
    """Return a table for each GPU: a row for each layer of a seam, the newest of each model."""
    tables = []
    for folder in sorted(
        {path.parent for path in measurements.RESULTS.glob("*/*.jsonl") if kind_of(path) == "host-time"}
    ):
        newest = {}
        for path in oldest_first(path for path in folder.glob("*.jsonl") if kind_of(path) == "host-time"):
            found = lines_of(path)
            newest = {key: value for key, value in newest.items() if key[0] not in {line["model"] for line in found}}
            newest |= {(line["model"], line["seam"], line["layer"]): (line, path) for line in found}
        body = []
        for line, _ in newest.values():
            us, apart = line["us"], line["apart_us"]
            cells = [f"{us[name]:.1f} ({apart[name]:+.1f})" if name in us else "" for name in host_time.OURS]
            cells = [
                f"**{cell}**" * bool(cell and apart[name] > host_time.ALLOWED_US) or cell
                for cell, name in zip(cells, host_time.OURS)
            ]
            body.append((line["model"], f"`{line['seam']}`", line["layer"], f"{us[host_time.VLLMS]:.1f}", *cells))
        header = "model", "seam", "layer", host_time.VLLMS, *host_time.OURS
        files = links({path for _, path in newest.values()})
        tables.append(f"**{folder.name}**, {files}:\n\n{markdown(header, body)}")
    return "\n\n".join(tables) or "Nothing yet."


def starts() -> str:
    """Return a table for each result file of starts, medians over its pairs."""
    tables = []
    for path in oldest_first(measurements.RESULTS.glob("*/*-start.json")):
        report = json.loads(path.read_text())
        header = "model", "what", *latency_report.SIDES, "difference", "share"
        tables.append(
            f"`{report['command']}`, {links([path])}:\n\n{markdown(header, latency_report.differences(report))}"
        )
    return "\n\n".join(tables) or "Nothing yet."
