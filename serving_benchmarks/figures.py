"""Draw a decode step from the results of decode_step.py: what its time is made of, stock beside ours.

    python serving_benchmarks/figures.py RESULTS.jsonl ... [--batch M] [--output DIR]

Two figures per model and division, each as PNG and SVG: `-share`, the kinds' shares of the time at one batch size, and
`-batches`, their times stacked over all batch sizes. Kinds are timed alone, so that a stack is not exactly the step,
which a diamond marks. Fills differ in hatches too, and are labelled where there is room.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

OUT = Path(__file__).parent / "out"
PATHS = ("stock", "ours")
FILLS = {  # of kinds: colour, hatch
    "linear": ("#4e79a7", ""),
    "moe": ("#f28e2b", "//"),
    "norm": ("#e15759", "\\\\"),
    "activation": ("#76b7b2", "xx"),
    "routing": ("#59a14f", "."),
    "lm_head": ("#edc948", "--"),
    "attention": ("#d4d4d4", "o"),
    "quantization": ("#b07aa1", "++"),
    "collectives": ("#9c755f", "||"),
    "rest": ("#ffffff", ""),
}
USUAL_BATCH = 32
LABELLED = {"across": 0.08, "upright": 0.015}  # the least part of a bar that has a label so


def read(paths: Iterable[Path]) -> dict[str, dict[int, dict]]:
    """The last line of each batch size, by what else a case is. Raises ValueError where there is none."""
    found: dict[str, dict[int, dict]] = {}
    for path in paths:
        for line in map(json.loads, path.read_text().splitlines()):
            if line["op"] == "decode_step":
                what = line["case"].rpartition(", batch ")[0]
                found.setdefault(what, {})[line["shape"]["batch"]] = line
    if not found:
        raise ValueError(f"there is no decode step in {', '.join(map(str, paths))}")
    return {what: dict(sorted(lines.items())) for what, lines in found.items()}


def stacks(line: dict) -> dict[str, dict[str, float]]:
    """Microseconds by kind of each path, in the order of `FILLS`."""
    alone = line["kinds_alone_us"]
    return {path: {kind: alone[path][kind] for kind in FILLS if kind in alone[path]} for path in PATHS}


def _step_us(line: dict, path: str) -> float:
    return line["us"] if path == "ours" else line["peers"]["stock"]


def _legend(figure, pyplot, kinds: Iterable[str], lines: Iterable[dict]) -> None:
    kinds, line = set(kinds), next(iter(lines))
    shown = [kind for kind in FILLS if kind in kinds]
    boxes = [
        pyplot.Rectangle((0, 0), 1, 1, facecolor=FILLS[kind][0], hatch=FILLS[kind][1], edgecolor="black")
        for kind in shown
    ]
    versions = ", ".join(f"{name} {line['versions'][name]}" for name in ("vllm", "torch"))
    left_out = f"; left out: {', '.join(line['left_out'])}" if line["left_out"] else ""
    figure.legend(
        boxes,
        shown,
        title=f"{line['gpu']}; {versions}{left_out}",
        title_fontsize=8,
        fontsize=8,
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )


def share(what: str, line: dict, pyplot):
    """Two bars, each of 100 %."""
    figure, axis = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
    of_paths = stacks(line)
    for place, path in enumerate(PATHS):
        left, total = 0.0, sum(of_paths[path].values())
        for kind, us in of_paths[path].items():
            color, hatch = FILLS[kind]
            part = us / total
            axis.barh(place, part, left=left, color=color, hatch=hatch, edgecolor="black", linewidth=0.8)
            if part >= LABELLED["upright"]:
                _label(axis, left + part / 2, place, f"{kind} {100 * part:.0f} %", part < LABELLED["across"])
            left += part
    steps = {path: f"{path}\n{_step_us(line, path) / 1000:.2f} ms" for path in PATHS}
    axis.set_yticks(range(len(PATHS)), [steps[path] for path in PATHS])
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    axis.set_xticks([i / 5 for i in range(6)], [f"{20 * i} %" for i in range(6)])
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(f"Share of a decode step, batch {line['shape']['batch']}\n{what}", fontsize=10)
    _legend(figure, pyplot, (kind for of in of_paths.values() for kind in of), [line])
    return figure


def _label(axis, x: float, y: float, text: str, upright: bool) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
    axis.text(x, y, text, ha="center", va="center", fontsize=7, rotation=90 if upright else 0, bbox=box)


def batches(what: str, lines: dict[int, dict], pyplot):
    """A bar of each path for every batch size."""
    figure, axis = pyplot.subplots(figsize=(2.5 + 1.5 * len(lines), 5.2), layout="constrained")
    kinds: set[str] = set()
    highest = max(
        max(_step_us(line, path), sum(stacks(line)[path].values())) for line in lines.values() for path in PATHS
    )
    for index, line in enumerate(lines.values()):
        for place, path in enumerate(PATHS):
            x, bottom = index + (place - 0.5) * 0.42, 0.0
            for kind, us in stacks(line)[path].items():
                color, hatch = FILLS[kind]
                axis.bar(x, us / 1000, 0.38, bottom / 1000, color=color, hatch=hatch, edgecolor="black", linewidth=0.8)
                bottom += us
                kinds.add(kind)
            step = _step_us(line, path)
            axis.plot(x, step / 1000, marker="D", color="black", markerfacecolor="white", markersize=5)
            top = max(step, bottom) / 1000
            axis.annotate(
                f"{path}\n{step / 1000:.2f}", (x, top), (0, 6), textcoords="offset points", ha="center", fontsize=7
            )
    axis.set_xticks(range(len(lines)), [str(batch) for batch in lines])
    axis.set_xlabel("batch size")
    axis.set_ylabel("ms of a decode step (diamond: the whole step)")
    axis.set_ylim(0, 1.15 * highest / 1000)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)
    axis.set_title(f"Decode step by kind of work, stock and ours\n{what}", fontsize=10)
    _legend(figure, pyplot, kinds, lines.values())
    return figure


def stem(what: str) -> str:
    """Of the files that show a case."""
    return re.sub(r"[^\w.]+", "-", what).strip("-")


def draw(found: dict[str, dict[int, dict]], batch: int | None, output: Path) -> list[Path]:
    """Both figures of each case, in both formats. Raises ValueError for a batch size that a case lacks."""
    import matplotlib

    matplotlib.use("Agg")
    # The same file every time, with text as such.
    matplotlib.rcParams |= {"svg.hashsalt": "decode step", "svg.fonttype": "none"}
    from matplotlib import pyplot

    output.mkdir(parents=True, exist_ok=True)
    written = []
    for what, lines in found.items():
        chosen = batch or (USUAL_BATCH if USUAL_BATCH in lines else max(lines))
        if chosen not in lines:
            raise ValueError(f"{what} has batch sizes {', '.join(map(str, lines))}, not {chosen}")
        for name, figure in (
            ("share", share(what, lines[chosen], pyplot)),
            ("batches", batches(what, lines, pyplot)),
        ):
            for kind, metadata in (("png", {}), ("svg", {"Date": None})):
                path = output / f"{stem(what)}-{name}.{kind}"
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
            pyplot.close(figure)
    return written


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files of decode_step.py")
    parser.add_argument("--batch", type=int, help=f"of the shares; default: {USUAL_BATCH} if there, else the largest")
    parser.add_argument("--output", type=Path, default=OUT, help="folder; default: serving_benchmarks/out")
    options = parser.parse_args(argv)
    try:
        written = draw(read(options.results), options.batch, options.output)
    except (ValueError, OSError) as error:
        sys.exit(f"figures.py: {error}")
    print("\n".join(map(str, written)))


if __name__ == "__main__":
    main()
