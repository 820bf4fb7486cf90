"""The tables of predicted times, for pages that readme.py writes: kernels of decode steps, and others' published points."""

import json

from timing import microbenchmarks

from .measurements import ROOT, links, markdown, measured

PUBLISHED = ROOT / "tests" / "timing" / "published.json"
OTHERS = {"aiter's tuner": ("aiter_us", "profiled_us"), "Hugging Face": ("hugging_face_us", "predicted_us")}
"""By who published times of products: the field of a line, and which of ours is counted in the same way."""


def _by_step(newest: dict) -> dict[str, dict[int, list[dict]]]:
    """Lines of calls by model and tokens."""
    found: dict[str, dict[int, list[dict]]] = {}
    for line, _ in newest.values():
        found.setdefault(line["model"], {}).setdefault(line["batch"], []).append(line)
    return found


def _beside(lines: list[dict], field: str, ours: str) -> str:
    """Of the products with a published time: the sum of ours and of those in a step."""
    found = [line for line in lines if field in line]
    if not found:
        return ""
    sums = (sum(line[name] * line["count"] for line in found) / 1e3 for name in (ours, field))
    return " / ".join(f"{each:.1f}" for each in sums)


def products() -> str:
    """Return a row for each model and each published table of its GEMMs."""
    tables = []
    for newest in measured("predicted"):
        line, _ = next(iter(newest.values()))
        commits = ", ".join(dict.fromkeys(each["commit"] for each, _ in newest.values()))
        models = _by_step(newest)
        batches = list(dict.fromkeys(batch for of in models.values() for batch in of))
        rows = []
        for model, of in models.items():
            for who, fields in OTHERS.items():
                cells = [_beside(of[batch], *fields) for batch in batches]
                if any(cells):
                    rows.append((model, who, *cells))
        tables.append(
            f"**{line['device']}**: ms of a step's GEMMs with a published time, ours predicted / published. Kernels of {commits}.\n\n"
            + markdown(("model", "published by", *(f"batch {batch}" for batch in batches)), rows)
        )
    return "\n\n".join(tables) or "Nothing yet."


def calls() -> str:
    """A row for each call of each model, a column for each number of tokens."""
    tables = []
    for newest in measured("predicted"):
        line, _ = next(iter(newest.values()))
        models = _by_step(newest)
        batches = list(dict.fromkeys(batch for of in models.values() for batch in of))
        rows = []
        for model, of in models.items():
            layers: dict[tuple, dict[int, dict]] = {}
            for batch, lines in of.items():
                for each in lines:
                    layers.setdefault((each["layer"], each["op"], each["count"]), {})[batch] = each
            rows += [
                (model, layer, f"`{op}`", str(count), *(_cell(found.get(batch)) for batch in batches))
                for (layer, op, count), found in layers.items()
            ]
        tables.append(
            f"**{line['device']}**: predicted us of a call, in brackets as a profiler would count it; and what others published of the "
            "same product, A aiter's tuner by a profiler, H Hugging Face from a graph: "
            f"{links(path for _, path in newest.values())}\n\n"
            + markdown(("model", "layer", "op", "calls", *(f"batch {batch}" for batch in batches)), rows)
        )
    return "\n\n".join(tables) or "Nothing yet."


def _cell(line: dict | None) -> str:
    if line is None:
        return ""
    others = [f"{who} {line[name]:.1f}" for who, name in (("A", "aiter_us"), ("H", "hugging_face_us")) if name in line]
    return ", ".join([f"{line['predicted_us']:.1f} ({line['profiled_us']:.1f})", *others])


def facts() -> str:
    """Return a row for each public number of the chip: what was published, what the model said first, and what it says now."""
    rows = []
    for row in microbenchmarks.FACTS:
        low, high, rule = row["least"], row["most"], row.get("rule", "nothing")
        first, now = (
            f"{value:.3g} ({100 * (value / min(max(value, low), high) - 1):+.0f} %)"
            for value in (row["first"], row["now"])
        )
        half = ", fitted" if rule.endswith("chosen by it") else ", held out" if row["first"] != row["now"] else ""
        published = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        rows.append((f"{row['test']}: {row['condition']}", f"{published} {row['unit']}", first, now + half, rule))
    header = ("what", "published", "held out, first prediction", "the model now", "what was fitted")
    sources = "; ".join(dict.fromkeys(row["source"] for row in microbenchmarks.FACTS))
    return f"{markdown(header, rows)}\n\nSources: {sources}."


SETS = {
    "fit": "fit",
    "fit_clock": "fit, clock",
    "holdout_shape": "other shapes",
    "holdout_kernel": "other kernels",
    "holdout_op": "other ops",
    "peer": "decode",
    "other architecture": "other architecture",
}
OPS = {
    "a8w8_rowwise_bpreshuffle": "int8 GEMM",
    "attn_fwd": "attention of prompts",
    "attn_fwd varlen": "attention of prompts, in groups",
    "bf16": "bf16 GEMM",
    "fp8_blockscale_bpreshuffle": "FP8 GEMM, block scales",
    "fused_moe stage 1": "fused MoE, first stage",
    "fused_moe stage 1+2": "fused MoE, both stages",
    "mla_decode": "latent attention of decode",
}


def _share(value: float | None) -> str:
    return "over half have none" if value is None else f"{100 * value:.0f} %"


def _class(each: dict) -> tuple[str, str, str]:
    return OPS.get(each["op"], each["op"]), each["gpu"].partition(" (")[0], SETS[each["set"]]


def simpler() -> str:
    """A row for each class of published points with shapes that the simpler models were not fitted to."""
    found = json.loads(PUBLISHED.read_text())
    ours = {_class(each): _share(each["median"]) for each in found["classes"]}
    names = list(found["simpler"][0])[4:]
    rows = [
        (*_class(each), ours[_class(each)], *("" if each[name] is None else _share(each[name]) for name in names))
        for each in found["simpler"]
    ]
    return markdown(("kernels", "GPU", "set", "this model", *names), rows)


def published() -> str:
    """A row for each class of published points, then the pairs."""
    found = json.loads(PUBLISHED.read_text())

    def signed(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.0f} %"

    rows = [
        (
            *_class(each), f"{each['predicted']} of {each['points']}", _share(each["median"]) if each["predicted"] else "",
            "" if each["p90"] is None else _share(each["p90"]), signed(each["bias"]),
        )
        for each in found["classes"]
    ]  # fmt: skip
    reasons = sorted({reason for each in found["classes"] for reason in each["why"]})
    left = [
        f"{count} rows of {_class(each)[0]} on {_class(each)[1]}, as {reason}"
        for each in found["classes"]
        for reason, count in each.get("left out", {}).items()
    ]
    pairs = [
        (OPS.get(each["op"], each["op"]), each["gpu"].partition(" (")[0], f"{each['right']} of {each['pairs']}")
        for each in found["pairs"]
    ]
    total = [sum(each[name] for each in found["pairs"]) for name in ("right", "pairs")]
    header = (
        "kernels",
        "GPU",
        "set",
        "predicted",
        "median error",
        "nine of ten within",
        "median of predicted / measured",
    )
    return "\n\n".join(
        (
            markdown(header, rows),
            "Why rows have no time: " + "; ".join(reasons) + ".",
            "Left out: " + "; ".join(left) + ".",
            markdown(("pairs of", "GPU", "in order"), [*pairs, ("all", "", f"{total[0]} of {total[1]}")]),
        )
    )
