"""Tabulate the results of serving_benchmarks/quality/quality.py and arithmetic.py for benchmarks.md."""

from .compatibility import formats
from .measurements import grouped, head, markdown, measured, per_gpu, plural

NAMES = {one.flavour or one.linear: one.title for one in formats.FORMATS}


def quality() -> str:
    """Return a table per GPU: a row for each checkpoint, bold beyond the command's limits."""
    header = "model", "quantization", "bf16", "baseline", "plugin", "difference", "worst scale error", "tokens equal"
    return per_gpu(["quality"], lambda lines: f"{head(lines)}:\n\n{markdown(header, map(row, lines))}")


def row(line: dict) -> tuple[str, ...]:
    shape, perplexity = line["shape"], line["perplexity"]
    values = (f"{perplexity[side]:.4f}" if side in perplexity else "not runnable" for side in ("bf16", "stock", "ours"))
    cells = (shape["model"], NAMES[shape["quantization"]], *values)
    if "perplexity_off" not in line:
        return (*cells, "", "", "")
    worst = max(line["scale_errors"].values(), key=abs)
    bold = "**" if line["wrong"] else ""
    shares = (f"{bold}{value:+.3%}{bold}" for value in (line["perplexity_off"], worst))
    return (*cells, *shares, f"{line['tokens_equal']} of {line['greedy_tokens']}")


def arithmetic() -> str:
    """Return a row per result of an op, with the errors on each machine."""
    lines = [entry for newest in measured("arithmetic") for entry in newest.values()]
    machines, checkpoints = (dict.fromkeys(line[name] for line, _ in lines) for name in ("machine", "case"))
    calls = [call | {"machine": line["machine"]} for line, _ in lines for call in line["results"]]
    rows = []  # (cells, op, calls)
    for (op, result), alike in sorted(grouped(calls, lambda call: (call["op"], call["result"])).items()):
        by_machine = grouped(alike, lambda call: call["machine"])
        cells = result, *(errors(by_machine.get(machine, [])) for machine in machines)
        rows.append((cells, f"`{op}`", max(map(len, by_machine.values()))))
    body = [
        (", ".join(op for _, op, _ in alike), result, str(sum(count for *_, count in alike)), *cells)
        for (result, *cells), alike in grouped(rows, lambda row: row[0]).items()
    ]
    files = dict.fromkeys(f"{path.parent.name}/{path.name}" for _, path in lines)
    links = ", ".join(f"[{file.partition('/')[0]}](../../serving_benchmarks/results/{file})" for file in files)
    table = markdown(("op", "result", "calls", *machines), body)
    return f"{plural(len(checkpoints), 'checkpoint')}: {links}.\n\n{table}" if lines else table


def errors(calls: list[dict]) -> str:
    """Return the largest error and the largest ratio to the baseline's, bold beyond the command's limits."""
    if not calls:
        return ""
    bold = "**" if any(call["wrong"] for call in calls) else ""
    return f"{bold}{max(call['ours'] for call in calls):.2g}, {max(call['beside'] for call in calls):.2f}x{bold}"
