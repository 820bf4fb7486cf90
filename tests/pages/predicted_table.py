"""Tabulate predictions beside published times, for timing.md, decode_steps.md and the timing model's notes."""

import json

from timing_study import calibrate, microbenchmarks, report

from .measurements import ROOT, markdown

PUBLISHED = ROOT / "serving_benchmarks" / "timing_study" / "published.json"


def facts() -> str:
    """Return a row for each public number of the chip: published, first predicted, and predicted now."""
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
    header = ("fact", "published", "first prediction, held out", "the model now", "fitted")
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
    "attn_fwd": "prefill attention",
    "attn_fwd varlen": "prefill attention, varlen",
    "bf16": "bf16 GEMM",
    "fp8_blockscale_bpreshuffle": "FP8 GEMM, block scales",
    "fused_moe stage 1": "fused MoE, first stage",
    "fused_moe stage 1+2": "fused MoE, both stages",
    "mla_decode": "MLA decode",
}


def _share(value: float | None) -> str:
    return "over half without" if value is None else f"{100 * value:.0f} %"


def _class(each: dict) -> tuple[str, str, str]:
    return OPS.get(each["op"], each["op"]), each["gpu"].partition(" (")[0], SETS[each["set"]]


FITTED = "fit", "fit_clock"  # sets that constants were fitted to
KINDS = {
    "skinny GEMM": "skinny FP8 GEMM, 1 to 32 rows",
    "add RMSNorm": "add + RMSNorm + FP8, 1 to 2048 rows",
    "SwiGLU": "SwiGLU + FP8, 1 to 2048 rows",
    "gemv": "wvSplitK, FP16, one row",
}


def accuracy() -> str:
    """Return a row for each class of points that no constant was fitted to: the calibration's held-out halves, then published times."""
    rows, classes = [], calibrate.read()["classes"]
    for kind, name in KINDS.items():
        found = classes[kind][report.HALVES[1]]
        rows.append((name, "MI300X", "held out", str(found["points"]), _share(found["median"]), _share(found["p90"])))
    published = json.loads(PUBLISHED.read_text())
    rows += [_row(each) for each in published["classes"] if each["set"] not in FITTED and each["predicted"]]
    right, every = (sum(each[name] for each in published["pairs"]) for name in ("right", "pairs"))
    by_class = "; ".join(" ".join(_pair(each)[:2]) + f": {_pair(each)[2]}" for each in published["pairs"])
    header = "kernels", "GPU", "set", "points", "p50 error", "p90 error"
    return f"{markdown(header, rows)}\n\nPairs in order: **{right} of {every}**. {by_class}."


def _row(each: dict) -> tuple[str, ...]:
    """Return a class of points, how many are predicted, and their errors."""
    errors = _share(each["median"]) if each["predicted"] else "", "" if each["p90"] is None else _share(each["p90"])
    return (*_class(each), f"{each['predicted']} of {each['points']}", *errors)


def _pair(each: dict) -> tuple[str, str, str]:
    """Return a class of pairs, its GPU, and the pairs in order."""
    return OPS.get(each["op"], each["op"]), each["gpu"].partition(" (")[0], f"{each['right']} of {each['pairs']}"


def simpler() -> str:
    """Return a row for each class of published points with shapes held out of the simpler models' fit."""
    study = json.loads(PUBLISHED.read_text())
    plugin = {_class(each): _share(each["median"]) for each in study["classes"]}
    names = list(study["simpler"][0])[4:]
    rows = [
        (*_class(each), plugin[_class(each)], *("" if each[name] is None else _share(each[name]) for name in names))
        for each in study["simpler"]
    ]
    return markdown(("kernels", "GPU", "set", "this model", *names), rows)


def published() -> str:
    """Return a row for each class of published points, then the pairs."""
    study = json.loads(PUBLISHED.read_text())
    rows = [(*_row(each), "" if each["bias"] is None else f"{100 * each['bias']:+.0f} %") for each in study["classes"]]
    reasons = sorted({reason for each in study["classes"] for reason in each["why"]})
    left = [
        f"{count} rows of {_class(each)[0]} on {_class(each)[1]}: {reason}"
        for each in study["classes"]
        for reason, count in each.get("left out", {}).items()
    ]
    pairs = map(_pair, study["pairs"])
    total = [sum(each[name] for each in study["pairs"]) for name in ("right", "pairs")]
    header = "kernels", "GPU", "set", "predicted", "p50 error", "p90 error", "p50 of predicted / measured"
    return "\n\n".join(
        (
            markdown(header, rows),
            "Reasons for rows without a prediction: " + "; ".join(reasons) + ".",
            "Left out: " + "; ".join(left) + ".",
            markdown(("pairs", "GPU", "in order"), [*pairs, ("all", "", f"{total[0]} of {total[1]}")]),
        )
    )
