"""Tabulate serving_benchmarks/results for the README of that folder: an index of its files and three summaries."""

import json
import pathlib
from collections.abc import Iterator

import decode_profile
import latency_report

from . import measurements
from .measurements import EngineCase, EngineRun, grouped, lines_of, links, markdown, measured, oldest_first, times

MANY = 3  # ops or models that the index names
GONE = "decode_step"  # the kind of files whose benchmark no longer exists


def index() -> str:
    """Return a table per folder: its files by contents, oldest first."""
    tables = []
    for folder in sorted(path for path in measurements.RESULTS.glob("*") if path.is_dir()):
        files = [(path, *contents(path)) for path in oldest_first(folder.glob("*.*"))]
        rows = [
            (links(path for path, *_ in alike), what, str(sum(lines for *_, lines in alike)))
            for what, alike in grouped(files, lambda file: file[1]).items()
        ]
        if rows:
            tables.append(f"### {folder.name}\n\n{markdown(('files', 'contents', 'lines'), rows)}")
    return measurements.joined(tables)


def contents(path: pathlib.Path) -> tuple[str, int]:
    """Return the ops or models of a file, and the number of its lines."""
    if path.suffix == ".txt":
        return "output of the command", len(path.read_text().splitlines())
    if path.suffix == ".json":
        report = json.loads(path.read_text())
        runs = dict.fromkeys(engine_run(result, report["command"]) for result in report["results"])
        return ", ".join(runs), len(report["results"])
    lines = lines_of(path)
    names = dict.fromkeys(named for line in lines for named in names_of(line))
    shown = ", ".join(list(names)[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")
    return shown, len(lines)


def engine_run(result: dict, command: str) -> str:
    """Return the model of a result of latency.py, with its ranks and layers."""
    ranks = measurements.parallelism(result["rank_of"], measurements.options_of(command))
    return f"{result['model_id']}{ranks}, {result['num_layers'] or 'all'} layers"


def names_of(line: dict) -> list[str]:
    """Return the ops, the model or the kernel that a line belongs to."""
    if "results" in line:  # of arithmetic.py
        return [f"`{call['op']}`" for call in line["results"]]
    if "seam" in line:
        return [f"seams of {line['model']}"]
    return [f"`{line['op']}`"] if "op" in line else [f"`{line['kernel']}`"] if "kernel" in line else [line["model"]]


def engine() -> str:
    """Return a table for each set of conditions: ms per token at every batch size, baseline / plugin, bold where the plugin is slower."""
    tables = []
    for conditions, cases in measurements.engine_cases().items():
        batches = sorted({batch for case in cases for batch in case.runs})
        rows = [(*case[:3], *_lengths(case), *(_ms(case.runs.get(batch)) for batch in batches)) for case in cases]
        header = "model", "GPU", "layers", "generated", "n", *(f"batch {batch}" for batch in batches)
        tables.append(f"{conditions}\n\n{markdown(header, rows)}")
    return measurements.joined(tables)


def _lengths(case: EngineCase) -> tuple[str, str]:
    cells = zip(*((str(run.sides["with"][0]["output_len"]), run.n) for run in case.runs.values()))
    generated, starts = (", ".join(dict.fromkeys(values)) for values in cells)
    return generated, starts


def _ms(run: EngineRun | None) -> str:
    if run is None:
        return ""
    baseline, plugin = (latency_report.median_ms(run.sides[side]) for side in latency_report.SIDES)
    text = f"{baseline:.2f} / {plugin:.2f}"
    return f"**{text}**" if baseline < plugin else text


def profile_links(run: measurements.ProfiledRun) -> str:
    """Return a profiled run's name, linked to its file, and the number of each further file."""
    names = run.name, *map(str, range(2, len(run.paths) + 1))
    return ", ".join(
        f"[{name}]({path.relative_to(measurements.RESULTS).as_posix()})" for name, path in zip(names, run.paths)
    )


def profiled() -> Iterator[tuple[tuple[str, ...], list[list[dict]], float]]:
    """Yield each profiled step: its first cells, the ranks of both sides, and the us in which the weights are read once."""
    for run in measurements.profiled_runs():
        for batch, sides in run.batches.items():
            cells = profile_links(run), run.hardware, run.layers, batch
            yield cells, [*sides.values()], measurements.weights_us(run)


def steps() -> str:
    """Return a row for each profiled step: us by class of kernels, baseline / plugin, a longer step in bold."""
    kinds = *decode_profile.CLASSES, decode_profile.REST, decode_profile.IDLE
    rows = []
    for cells, sides, floor in profiled():
        firsts = [ranks[0] for ranks in sides]
        classes = [decode_profile.by_class(rank) for rank in firsts]
        spans = " / ".join(f"{rank['span_us']:.0f}" for rank in firsts)
        spans = f"**{spans}**" if firsts[0]["span_us"] < firsts[-1]["span_us"] else spans
        launches = " / ".join(f"{decode_profile.launches(rank):.0f}" for rank in firsts)
        by_kind = (" / ".join(f"{us[kind]:.0f}" if kind in us else "" for us in classes) for kind in kinds)
        shown = ("" if cell == " / " else cell for cell in by_kind)
        rows.append((*cells, spans, launches, f"{floor:.0f}" if floor else "", *shown))
    return markdown(("model", "GPU", "layers", "batch", "step", "launches", "weights alone", *kinds), rows)


def ranks() -> str:
    """Return a row for each profiled step of several GPUs: us of each rank, baseline / plugin."""
    columns = {
        "step minus weights alone": lambda rank, floor: rank["span_us"] - floor,
        "idle": lambda rank, floor: rank["span_us"] - rank["busy_us"],
        "waiting in all-reduces": lambda rank, floor: rank["waiting_us"] or 0,
    }
    rows = [
        (
            *cells,
            *(
                " / ".join(" ".join(f"{us(rank, floor):.0f}" for rank in side) for side in sides)
                for us in columns.values()
            ),
        )
        for cells, sides, floor in profiled()
        if max(map(len, sides)) > 1
    ]
    return markdown(("model", "GPU", "layers", "batch", *columns), rows)


def ops() -> str:
    """Return a row for each GPU and op that was timed beside a baseline: speedups over the best one."""
    rows = []
    for newest in measured(*measurements.timed_kinds() - {GONE}):
        lines = [line for line, _ in newest.values()]
        for op, timed in grouped(lines, lambda line: line["op"]).items():
            ratios = list(filter(None, map(measurements.ratio, timed)))
            cells = "none", "", "", "", ""
            if ratios:
                faster = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
                cells = (
                    measurements.baselines_of(timed),
                    faster,
                    times(ratios),
                    times([min(ratios)]),
                    times([max(ratios)]),
                )
            rows.append((timed[0]["gpu"], f"`{op}`", *cells))
    return markdown(("GPU", "op", "best baseline", "faster in", "geometric mean", "least", "most"), rows)
