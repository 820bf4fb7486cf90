"""The tables of serving_benchmarks/quality/quality.py's and arithmetic.py's results, for a page that readme.py writes."""

from .compatibility import QUANTISATIONS
from .measurements import head, markdown, measured, plural

NAMES = {flavour or "dynamic": name for name, (*_, flavour) in QUANTISATIONS.items() if flavour is not None}
ABOUT = (
    "Perplexity of held-out text in vLLM, of small models trained by `python serving_benchmarks/quality/quality.py`: of the bf16 checkpoint "
    "without the ops, then of each checkpoint without and with them. A worst scale error is that of the layer whose scale "
    "would explain most of the difference. Tokens are counted up to the first that differs."
)


def quality() -> str:
    """For each GPU, a row for each checkpoint. Bold is beyond what the command allows."""
    tables = []
    for newest in measured("quality"):
        lines = [line for line, _ in newest.values()]
        header = ("model", "quantization", "bf16", "without", "with", "difference", "worst scale error", "tokens equal")
        tables.append(f"{head(lines)}:\n\n{markdown(header, map(row, lines))}")
    return "\n\n".join([ABOUT, *tables]) if tables else "Nothing yet."


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


ARITHMETIC = (
    "What each op makes of the activations and weights of these models, by `python serving_benchmarks/quality/arithmetic.py`: the norm of the "
    "error over that of the exact result, which is float64's. A cell has the largest error of a call and, of all calls, the most "
    "that ours is of stock's. Stock is vLLM's kernel or, emulated and where vLLM has none, the op's reference, which rounds where "
    "vLLM does. The files have every layer."
)


def arithmetic() -> str:
    """A row for each result of an op, with the errors on each machine."""
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
    rows = (
        (f"`{op}`", result, str(max(map(len, of.values()))), *(errors(of.get(machine, [])) for machine in machines))
        for (op, result), of in sorted(calls.items())
    )
    links = ", ".join(
        f"[{path.parent.name}](../../serving_benchmarks/results/{path.parent.name}/{path.name})" for path in files
    )
    about = f"{ARITHMETIC} {plural(len(checkpoints), 'checkpoint')}: {links}."
    return f"{about}\n\n{markdown(('op', 'result', 'calls', *machines), rows)}"


def errors(found: list[dict]) -> str:
    """The largest error and the most that one is of stock's. Bold is beyond what the command allows."""
    if not found:
        return ""
    bold = "**" if any(one["wrong"] for one in found) else ""
    return f"{bold}{max(one['ours'] for one in found):.2g}, {max(one['beside'] for one in found):.2f}x{bold}"
