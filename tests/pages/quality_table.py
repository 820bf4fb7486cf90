"""Tabulate the results of serving_benchmarks/quality/quality.py and arithmetic.py for benchmarks.md."""

from .compatibility import QUANTIZATIONS
from .measurements import head, markdown, measured, per_gpu, plural

NAMES = {flavour or "dynamic": name for name, (*_, flavour) in QUANTIZATIONS.items() if flavour is not None}


def quality() -> str:
    """Return a table per GPU: a row for each checkpoint, bold beyond the command's limits."""
    header = "model", "quantization", "bf16", "baseline", "plugin", "difference", "worst scale error", "tokens equal"
    return per_gpu(["quality"], lambda lines: f"{head(lines)}:\n\n{markdown(header, map(row, lines))}")


def row(line: dict) -> tuple[str, ...]:
    shape, perplexity = line["shape"], line["perplexity"]
    values = (f"{perplexity[side]:.4f}" if side in perplexity else "not runnable" for side in ("bf16", "stock", "ours"))
    found = (shape["model"], NAMES[shape["quantization"]], *values)
    if "perplexity_off" not in line:
        return (*found, "", "", "")
    worst = max(line["scale_errors"].values(), key=abs)
    bold = "**" if line["wrong"] else ""
    shares = (f"{bold}{value:+.3%}{bold}" for value in (line["perplexity_off"], worst))
    return (*found, *shares, f"{line['tokens_equal']} of {line['greedy_tokens']}")


def arithmetic() -> str:
    """Return a row per result of an op, with the errors on each machine."""
    calls: dict[tuple[str, str], dict[str, list[dict]]] = {}
    machines, checkpoints, files = [], set(), []
    for newest in measured("arithmetic"):
        for line, path in newest.values():
            machines += [line["machine"]] * (line["machine"] not in machines)
            checkpoints.add(line["case"])
            files += [path] * (path not in files)
            for one in line["results"]:
                calls.setdefault((one["op"], one["result"]), {}).setdefault(line["machine"], []).append(one)
    if not calls:
        return "Nothing yet."
    alike: dict[tuple[str, ...], dict[str, int]] = {}
    for (op, result), of in sorted(calls.items()):
        cells = result, *(errors(of.get(machine, [])) for machine in machines)
        alike.setdefault(cells, {})[f"`{op}`"] = max(map(len, of.values()))
    rows = ((", ".join(of), result, str(sum(of.values())), *cells) for (result, *cells), of in alike.items())
    links = ", ".join(
        f"[{path.parent.name}](../../serving_benchmarks/results/{path.parent.name}/{path.name})" for path in files
    )
    about = f"{plural(len(checkpoints), 'checkpoint')}: {links}."
    return f"{about}\n\n{markdown(('op', 'result', 'calls', *machines), rows)}"


def errors(found: list[dict]) -> str:
    """Return the largest error and the largest ratio to the baseline's, bold beyond the command's limits."""
    if not found:
        return ""
    bold = "**" if any(one["wrong"] for one in found) else ""
    return f"{bold}{max(one['ours'] for one in found):.2g}, {max(one['beside'] for one in found):.2f}x{bold}"
