"""The table of tests/vllm/quality.py's results, for a page that readme.py writes."""

from compatibility import QUANTISATIONS
from measurements import head, markdown, measured

NAMES = {flavour or "dynamic": name for name, (*_, flavour) in QUANTISATIONS.items() if flavour is not None}
ABOUT = (
    "Perplexity of held-out text in vLLM, of small models trained by `python tests/vllm/quality.py`: of the bf16 checkpoint "
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
