"""Tables of the results in serving_benchmarks/results, made from the newest line of each case in any file."""

import argparse
import functools
import json
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import decode_profile
import figures
import latency
import latency_report
import torch

from vllm_rocm_ops.core import arch as archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "serving_benchmarks" / "results"
ROWS = (1, 8, 32, 128, 512, 2048)  # in the tables with times
SUMMARY_ROWS = (1, 8, 16, 32, 64, 128, 1024)
NO_ATTENTION = "-decode_attention,-latent_attention"  # VLLM_ROCM_OPS_SEAMS of runs with all ops but attention
PER_OP = "ops", "gemm", "shuffled-gemm"  # the kinds of files with rows and GEMMs by the number of rows


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


# Lines


def in_git() -> bool:
    """Whether this is a checkout and git is installed."""
    return (ROOT / ".git").exists() and shutil.which("git") is not None


@functools.cache
def committed(path: pathlib.Path) -> int:
    """The time of a file's last commit. Later than all others for a new file. Equal for all files outside a checkout."""
    if not in_git():
        return 0
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct", "--", str(path)]
    return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip() or 2**62)


def oldest_first(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The files by the day in their names, and those of one day by the time of their commits."""
    return sorted(paths, key=lambda path: (path.name[: len("2026-01-01")], committed(path), path.name))


def kind_of(path: pathlib.Path) -> str:
    """Return what follows <date>-<commit>- in a result file's name."""
    return path.stem.split("-", 4)[-1]


def lines_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest_lines(folder: pathlib.Path, kinds: Iterable[str]) -> dict[tuple[str, str], tuple[dict, pathlib.Path]]:
    """The last line of every case in a folder's results of these kinds, and its file. A sweep over configurations counts only by
    the line of the configuration that a call gets."""
    newest = {}
    for path in oldest_first(path for path in folder.glob("*.jsonl") if kind_of(path) in kinds):
        for line in lines_of(path):
            if line.get("chosen", True):
                newest[line["op"], line["case"]] = line, path
    return newest


def timed_kinds() -> set[str]:
    """Return the kinds of files whose lines have an op's time and its peers'."""
    first = {path: path.read_text().partition("\n")[0] for path in RESULTS.glob("*/*.jsonl")}
    return {kind_of(path) for path, line in first.items() if {"op", "us", "peers"} <= json.loads(line).keys()}


def measured(*kinds: str) -> Iterator[dict[tuple[str, str], tuple[dict, pathlib.Path]]]:
    """`newest_lines` of each folder of results that has any of these kinds."""
    folders = sorted(path for path in RESULTS.glob("*") if path.is_dir())
    return filter(None, (newest_lines(folder, kinds) for folder in folders))


def of_op(name: str, *kinds: str) -> list[list[tuple[dict, pathlib.Path]]]:
    """For each folder that has any, the newest lines of one op."""
    found = ([found for found in newest.values() if found[0]["op"] == name] for newest in measured(*kinds))
    return [lines for lines in found if lines]


def best_peer(line: dict) -> str | None:
    return min(line["peers"], key=line["peers"].get, default=None)


def ratio(line: dict) -> float | None:
    """The best peer's time over the op's time."""
    return line["peers"][best_peer(line)] / line["us"] if line["peers"] and line["us"] else None


def groups_of(lines: Iterable[dict]) -> dict[tuple[str, str], dict[int, dict]]:
    """Group lines by op and by what `rows_of` leaves of their shape, then by rows. The last of equal lines counts."""
    groups: dict[tuple[str, str], dict[int, dict]] = {}
    for line in lines:
        case, shape = line["case"], line["shape"]
        if line["op"] == "fused_experts":
            name, _, weights = case.split()
            what = f"{name}, {weights}"
        elif "keys" in shape:  # prefill attention
            name, batch, heads, rows, keys, size, causal = PREFILL.fullmatch(case).groups()
            what = f"{name}, {batch} x {heads} heads of {size}{', causal' if causal else ''}"
            what += "" if keys == rows else f", {keys} keys"
        elif "context" in shape:  # decode attention
            what = f"{case.removesuffix(' ragged').rpartition(' ')[0]}, {shape['context']} keys"
            what += ", ragged" * case.endswith(" ragged")
        else:
            last = case.rpartition("x")[2].partition(" ")[2]  # a type or a layout
            sizes = " x ".join(map(str, list(shape.values())[1:]))
            what = ", ".join(filter(None, (sizes, last if last != "bfloat16" else "")))
        groups.setdefault((line["op"], what), {})[rows_of(line)] = line
    return groups


PREFILL = re.compile(r"(.+) (\d+)x(\d+:\d+)x(\d+)x(\d+)x(\d+)( causal)?")


def rows_of(line: dict) -> int:
    """Return the query rows of prefill attention, the requests of decode attention, else the rows or tokens."""
    shape = line["shape"]
    return shape["rows"] if "keys" in shape else next(iter(shape.values()))


def unmeasured(op: str | None = None) -> str:
    """A sentence about the GPUs on which no file has a time, of an op or of anything."""
    timed = set().union(*(gpus(path, op) for path in (*RESULTS.glob("*/*.jsonl"), *RESULTS.glob("*/*-latency.json"))))
    what = f"No time of `{op}`" if op else "No time"
    products = [product for product in archs.PRODUCTS if not any(product in gpu for gpu in timed)]
    if not timed:
        return f"{what} was ever measured."
    if not products:
        return ""
    *most, last = products
    never = f"**{what} was ever measured on an {', '.join(most)} or {last}.**"
    return never if op else f"{never} All times are of {', '.join(sorted(timed))}."


def gpus(path: pathlib.Path, op: str | None = None) -> set[str]:
    """The GPUs on which a file has times, of an op or of anything."""
    if path.suffix == ".json":
        return set() if op else {(json.loads(path.read_text())["hardware"] or "").partition(" x ")[2]} - {""}
    lines = map(json.loads, path.read_text().splitlines())
    return {line["gpu"] for line in lines if line.get("gpu", "CPU") != "CPU" and op in (None, line.get("op"))}


# Text


def time(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def times(ratios: Iterable[float | None]) -> str:
    """A geometric mean. Bold if it is below 1."""
    known = [value for value in ratios if value]
    if not known:
        return ""
    mean = round(statistics.geometric_mean(known), 2)
    return f"**{mean:.2f}x**" if mean < 1 else f"{mean:.2f}x"


def links(paths: Iterable[pathlib.Path]) -> str:
    """Links to files from the page in their folder."""
    return ", ".join(f"[{path.name}]({path.relative_to(RESULTS).as_posix()})" for path in sorted(set(paths)))


def head(lines: list[dict]) -> str:
    """The GPU and the versions that a table's times are of."""
    versions = {f"{name} {line['versions'][name]}" for line in lines for name in ("torch", "vllm")}
    return f"**{lines[0]['gpu']}**, {', '.join(sorted(versions))}"


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def peers_of(lines: Iterable[dict]) -> str:
    """The best peers of the lines."""
    return " or ".join(sorted({name.split()[0] for line in lines if (name := best_peer(line))}))


def both(line: dict) -> str:
    return f"{time(line['us'])} / {time(line['peers'].get(best_peer(line)))}"


def versus(lines: Iterable[dict], peers: str = "") -> str:
    ratios = [value for line in lines if (value := ratio(line))]
    return f"{statistics.geometric_mean(ratios):.2f}x{peers}, least {min(ratios):.2f}x" if ratios else ""


# Summaries, for the README and the page on measuring


def single_ops() -> str:
    """Geometric means over sizes, by rows or tokens."""
    tables = []
    for newest in measured(*PER_OP):
        lines = [line for line, _ in newest.values()]
        of_ops: dict[str, list[dict[int, dict]]] = {}
        for (op, size), by_rows in groups_of(lines).items():
            of_ops.setdefault(f"`{op}`{', shuffled' * size.endswith('shuffled')}", []).append(by_rows)
        body = []
        for op, sizes in of_ops.items():
            cells = (times(ratio(size[rows]) for size in sizes if rows in size) for rows in SUMMARY_ROWS)
            body.append((op, str(len(sizes)), *cells, peers_of(line for size in sizes for line in size.values())))
        header = ("op", "sizes", *(plural(rows, "row") for rows in SUMMARY_ROWS), "best peer")
        tables.append(f"{head(lines)}:\n\n{markdown(header, body)}")
    return "\n\n".join(tables) or "Nothing yet."


def experts_by_tokens(lines: list[dict], cell: Callable[[dict], str]) -> tuple[list[str], list[tuple]]:
    """The headers, one for each number of tokens, and a row for each rank's experts: name, lines, cells."""
    shown = sorted({rows_of(line) for line in lines})
    rows = [
        (case, group, [cell(group[m]) if m in group else "" for m in shown])
        for (_, case), group in groups_of(lines).items()
    ]
    return [plural(m, "token") for m in shown], rows


def experts_summary() -> str:
    """Ratios by tokens, for each rank's experts."""
    tables = []
    for newest in measured("moe"):
        lines = [line for line, _ in newest.values()]
        tokens, rows = experts_by_tokens(lines, lambda line: times([ratio(line)]))
        body = [(case, *cells) for case, _, cells in rows]
        header = ("experts of a layer", *tokens)
        tables.append(f"{head(lines)}, beside the best of vLLM's fused MoE (Triton):\n\n{markdown(header, body)}")
    return "\n\n".join(tables) or "Nothing yet."


def by_batch(header: tuple[str, ...], rows: dict[tuple[str, ...], dict[int, str]]) -> str:
    """A table of rows, each with cells by batch size."""
    batches = sorted(set().union(*rows.values()))
    body = ((*row, *(cells.get(batch, "") for batch in batches)) for row, cells in rows.items())
    return markdown((*header, *(f"batch {batch}" for batch in batches)), body)


def layers_of(model: str) -> int:
    """How many layers a shipped model has."""
    return model_config.read(str(latency.find_model(model)))["num_hidden_layers"]


class EngineRun(NamedTuple):
    """A pair of sides through the engine, with what other sides there are, the files of all, the command of the last side, and the
    baseline: vLLM's version with the switches of its kernels."""

    hardware: str
    sides: dict[str, list[dict]]
    paths: list[pathlib.Path]
    command: str
    baseline: str


def engine_runs() -> list[EngineRun]:
    """The newest pair of each case in the files of latency.py. The sides of one commit may be in several files. Runs without some seams
    are a side of their own."""
    newest: dict[tuple, EngineRun] = {}
    pairs: dict[tuple, tuple[dict, list[pathlib.Path]]] = {}
    for path in oldest_first(RESULTS.glob("*/*-latency.json")):
        report = json.loads(path.read_text())
        for result in report["results"]:
            kept = ("model_id", "num_layers", "rank_of", "input_len", "output_len", "batch_size")
            case = path.parent.name, *(result[name] for name in kept), backend_of(report["command"])
            sides, paths = pairs.setdefault((report.get("commit") or path.name, case), ({}, []))
            sides.setdefault(" ".join(filter(None, (result["side"], seams_of(report)))), []).append(result)
            if path not in paths:
                paths.append(path)
            if not seams_of(report) and sides.keys() >= latency_report.SIDES.keys():
                newest[case] = EngineRun(report["hardware"], sides, paths, report["command"], baseline_of(report))
    return [newest[case] for case in sorted(newest, key=str_and_numbers)]


def baseline_of(report: dict) -> str:
    """Return vLLM's version in a report, with the switches of its kernels that were set."""
    set_here = sorted(report.get("environment", {}).items())
    switches = [f"`{name}={value}`" for name, value in set_here if name.startswith("VLLM_USE_")]
    return f"vLLM {report['versions']['vllm']}" + (f" with {', '.join(switches)}" if switches else "")


def seams_of(report: dict) -> str:
    """The seams of a run, where it names them."""
    return report.get("environment", {}).get("VLLM_ROCM_OPS_SEAMS", "")


def options_of(command: str) -> argparse.Namespace:
    """The options of a command of latency.py."""
    return latency.parse_arguments(shlex.split(command)[2:])


def backend_of(command: str) -> str:
    """The attention backend that a command of latency.py asks for. Empty if vLLM chooses it."""
    return options_of(command).engine_args.get("attention_backend", "")


def attention_in_engine() -> str:
    """Decode through vLLM's engine without the ops, with all but attention, and with all."""
    rows: dict[tuple, dict[int, str]] = {}
    for run in engine_runs():
        result, partly = run.sides["with"][0], run.sides.get(f"with {NO_ATTENTION}")
        if partly is None:
            continue
        row = result["model_id"], backend_of(run.command), f"1 of {result['rank_of']}", run.hardware
        row += str(result["num_layers"] or "all"), str(result["input_len"])
        stock, others, ours = map(latency_report.median_ms, (run.sides["without"], partly, run.sides["with"]))
        cell = f"{stock:.2f} / {others:.2f} / {ours:.2f} {times([others / ours])}"
        rows.setdefault(row, {})[result["batch_size"]] = cell
    return by_batch(("model", "backend", "rank", "GPU", "layers", "prompt"), rows) if rows else "Nothing yet."


def str_and_numbers(case: tuple) -> tuple:
    """A sort key for cases whose numbers may be None."""
    return tuple((value is None, value or 0) if not isinstance(value, str) else value for value in case)


class EngineCase(NamedTuple):
    """One row of the engine tables: a model on some GPUs, and its runs by batch size."""

    model: str
    gpus: str
    layers: str
    runs: dict[int, EngineRun]


def engine_cases() -> dict[str, list[EngineCase]]:
    """Return the rows of the engine tables by how they were measured, with vLLM's default compilation first. A model that was measured
    with it is in no other table for another compilation."""
    ways: dict[str, dict[tuple[str, ...], dict[int, EngineRun]]] = {}
    runs = engine_runs()
    compiled = {run.sides["with"][0]["model_id"] for run in runs if not lacking(run.command)}
    for run in sorted(runs, key=lambda run: bool(lacking(run.command))):
        result, options = run.sides["with"][0], options_of(run.command)
        if lacking(run.command) and result["model_id"] in compiled:
            continue
        rank = f", one TP{result['rank_of']} rank, no all-reduce" if result["rank_of"] > 1 else ""
        if options.tensor_parallel_size > 1:
            experts = " + EP" if options.engine_args.get("enable_expert_parallel") else ""
            rank += f", TP{options.tensor_parallel_size}{experts}"
        if backend := backend_of(run.command):
            rank += f", {backend}"
        row = f"{result['model_id']}{rank}", run.hardware, str(result["num_layers"] or "all")
        ways.setdefault(way(run), {}).setdefault(row, {})[result["batch_size"]] = run
    return {
        how: [EngineCase(*row, dict(sorted(of.items()))) for row, of in cases.items()] for how, cases in ways.items()
    }


def samples(run: EngineRun) -> str:
    """Return n of a run: pairs of engine starts x iterations of each start."""
    starts = run.sides["with"]
    return f"{len(starts)} x {len(starts[0]['latencies'])}"


def speedup_text(run: EngineRun) -> str:
    """Return a run's speedup with its spread."""
    low, high = latency_report.speedup_spread(run.sides)
    return f"{times([latency_report.speedup(run.sides)])} ({low:.2f} to {high:.2f})"


def host_loop(run: EngineRun) -> str:
    """Return the microseconds of the same loop of Python beside both sides, where it was timed: without the plugin / with it."""
    timed = [[one["host_us"] for one in run.sides[side] if "host_us" in one] for side in latency_report.SIDES]
    return " / ".join(f"{statistics.median(us):.0f}" for us in timed) if all(timed) else ""


def engine() -> str:
    """Return a table for each way in which the engine was measured, with a row for each model and batch size."""
    made = []
    for how, cases in engine_cases().items():
        body = []
        for case in cases:
            for batch, run in case.runs.items():
                medians = (f"{latency_report.median_ms(run.sides[side]):.2f}" for side in latency_report.SIDES)
                generated = str(run.sides["with"][0]["output_len"])
                body.append(
                    (*case[:3], generated, str(batch), samples(run), *medians, speedup_text(run), host_loop(run))
                )
        header = (
            "model",
            "GPU",
            "layers",
            "generated",
            "batch",
            "n",
            "vLLM ms",
            "with the plugin ms",
            "speedup (p10 to p90)",
            "host loop us",
        )
        made.append(f"{how}\n\n{markdown(header, body)}")
    return "\n\n".join(made) or "Nothing yet."


SHOWN_BATCHES = (1, 8, 32, 64)  # in README's table


def is_whole(case: EngineCase) -> bool:
    """Whether a case has all layers of its model, or real tensor parallelism."""
    return case.layers == "all" or any(options_of(run.command).tensor_parallel_size > 1 for run in case.runs.values())


def named(case: EngineCase) -> str:
    """Return a case's model, with its share of the layers if it has not all."""
    model = next(iter(case.runs.values())).sides["with"][0]["model_id"]
    return case.model if case.layers == "all" else f"{case.model}, {case.layers} of {layers_of(model)} layers"


def whole_models() -> tuple[str, list[EngineCase]]:
    """Return how the whole models were measured with vLLM's default compilation and choice of backend, and their rows."""
    how, cases = next(iter(engine_cases().items()), ("", []))
    return how, [case for case in cases if is_whole(case)]


def whole_models_table() -> str:
    """Return the speedups of the whole models at the batch sizes that most of them have."""
    how, cases = whole_models()
    body = []
    for case in cases:
        cells = (speedup_text(case.runs[batch]) if batch in case.runs else "" for batch in SHOWN_BATCHES)
        each_n = dict.fromkeys(samples(case.runs[batch]) for batch in SHOWN_BATCHES if batch in case.runs)
        body.append((named(case), case.gpus, ", ".join(each_n), *cells))
    header = ("model", "GPU", "n", *(f"batch {batch}" for batch in SHOWN_BATCHES))
    return f"{how}\n\n{markdown(header, body)}" if body else "Nothing yet."


def whole_models_figure() -> str:
    """Return the figure of these speedups, as SVG."""
    _, cases = whole_models()
    series = {
        f"{named(case)}, {case.gpus}": {
            batch: (latency_report.speedup(run.sides), *latency_report.speedup_spread(run.sides))
            for batch, run in case.runs.items()
        }
        for case in cases
    }
    return figures.speedups(series)


def way(run: EngineRun) -> str:
    """Return how a run was measured: prompt, compilation, versions and switches."""
    prompt = f"{plural(run.sides['with'][0]['input_len'], 'token')} of prompt"
    compiled = lacking(run.command) or "vLLM's default compilation and graph capture"
    text = f"Random weights, {prompt}, {compiled}, {run.baseline}."
    if lacking(run.command):
        text += " vLLM's compiler would fuse a part of the baseline: expect lower speedups with it."
    return text


def lacking(command: str) -> str:
    """The default optimisations that an engine of this command lacked. Empty if it had them all."""
    options = options_of(command)
    config = options.engine_args.get("compilation_config", {})
    if options.enforce_eager:
        return "eager: neither compiled nor captured in graphs"
    mode = config.get("mode") if isinstance(config, dict) else config
    return "captured in graphs, without compilation" if mode == 0 else ""


# Tables, for the page of results


def results() -> str:
    """One table per GPU: each op and size with its time and its best peer's."""
    tables = []
    for newest in measured(*PER_OP):
        lines = [line for line, _ in newest.values()]
        shown = [rows for rows in ROWS if any(rows == rows_of(line) for line in lines)]
        body = []
        for (op, size), by_rows in groups_of(lines).items():
            cells = (both(by_rows[rows]) if rows in by_rows else "" for rows in shown)
            body.append((f"`{op}`", size, *cells, versus(by_rows.values(), f" {peers_of(by_rows.values())}")))
        bandwidth = statistics.median(line["copy_gb_s"] for line in lines)
        header = ("op", "size", *(plural(rows, "row") for rows in shown), "all rows: geometric mean")
        tables.append(
            f"{head(lines)}; a copy reads and writes {bandwidth:.0f} GB/s. Microseconds, ours / "
            f"best peer.\nEvery case with every peer: {links(path for _, path in newest.values())}\n\n"
            + markdown(header, body)
        )
    return "\n\n".join([*tables, *products(), *trees(), *choices()]) or "Nothing yet."


def products() -> list[str]:
    """Return a table per GPU of GEMMs of all types: a row for each M, N and K, a column for each type."""
    tables = []
    for newest in measured("products"):
        lines = [line for line, _ in newest.values()]
        rows: dict[str, dict[str, dict]] = {}
        for line in lines:
            size, _, kind = line["case"].partition(" ")
            rows.setdefault(size, {})[kind] = line
        kinds = list(dict.fromkeys(kind for found in rows.values() for kind in found))
        body = [(size, *(both(found[kind]) if kind in found else "" for kind in kinds)) for size, found in rows.items()]
        tables.append(
            f"`gemm`, {head(lines)}: microseconds, ours / best peer, by `vllm-rocm-ops bench products --peers --output FILE.jsonl`; "
            f"{versus(lines, ' as a geometric mean')}. {links(path for _, path in newest.values())}\n\n"
            + markdown(("M x N x K", *kinds), body)
        )
    return tables


def by_op(lines: list[dict], cells: Callable[[list[dict]], tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a row for each op: its name, the number of its lines, and cells made of them."""
    names = dict.fromkeys(line["op"] for line in lines)
    found = {name: [line for line in lines if line["op"] == name] for name in names}
    return [(f"`{name}`", str(len(of)), *cells(of)) for name, of in found.items()]


def trees() -> list[str]:
    """Return a table per GPU of two trees of this project beside each other."""

    def cells(lines: list[dict]) -> tuple[str, str]:
        ratios = [line["other_us"] / line["us"] for line in lines]
        return times([statistics.geometric_mean(ratios)]), times([min(ratios)])

    tables = []
    for newest in measured("compare"):
        lines, files = [line for line, _ in newest.values()], links(path for _, path in newest.values())
        caption = (
            f"This tree beside an older one, {lines[0]['gpu']}, by `python serving_benchmarks/compare.py`: {files}"
        )
        tables.append(
            f"{caption}\n\n{markdown(('op', 'cases', 'speedup, geometric mean', 'least'), by_op(lines, cells))}"
        )
    return tables


def choices() -> list[str]:
    """Return a table per GPU of how much slower the chosen configurations are than the fastest."""

    def cells(lines: list[dict]) -> tuple[str, str, str]:
        regrets = [line["us"][line["chosen"]] / min(line["us"].values()) for line in lines]
        return (
            str(sum(len(line["us"]) for line in lines)),
            f"{100 * statistics.geometric_mean(regrets) - 100:.1f} %",
            f"{100 * max(regrets) - 100:.1f} %",
        )

    tables = []
    for newest in measured("configurations"):
        lines, files = [line for line, _ in newest.values()], links(path for _, path in newest.values())
        caption = f"Regret of the default configuration, {lines[0]['gpu']}, all configurations timed from graphs, all tensors cold: {files}"
        header = "op", "calls", "configurations", "geometric mean", "largest"
        tables.append(f"{caption}\n\n{markdown(header, by_op(lines, cells))}")
    return tables


def experts() -> str:
    """One table per GPU on which experts were timed: each rank's experts beside the best of vLLM's."""
    tables = []
    for newest in measured("moe"):
        lines = [line for line, _ in newest.values()]
        tokens, rows = experts_by_tokens(lines, both)
        body = [(case, *cells, versus(group.values())) for case, group, cells in rows]
        header = ("experts of a layer", *tokens, "geometric mean")
        tables.append(
            "All launches of one layer's experts, random routing, microseconds, ours / the best of vLLM's fused MoE (Triton), by"
            f" `vllm-rocm-ops bench moe --peers --output FILE.jsonl`.\n{head(lines)}: {links(path for _, path in newest.values())}\n\n"
            + markdown(header, body)
        )
    return "\n\n".join(tables)


def engine_commands() -> str:
    """The commands that measured the engine."""
    commands: dict[pathlib.Path, str] = {}
    for path in (path for run in engine_runs() for path in run.paths):
        report = json.loads(path.read_text())
        versions = ", ".join(f"{name} {report['versions'][name]}" for name in ("torch", "vllm"))
        command = re.sub(r" --(output-json|plot) \S+", "", report["command"])  # without paths on that machine
        seams = f"VLLM_ROCM_OPS_SEAMS={seams_of(report)} " if seams_of(report) else ""
        commands[path] = f"{links([path])}, {versions}:\n\n```\n{seams}{command}\n```"
    return "\n\n".join(commands.values()) or "Nothing yet."


def serving() -> str:
    """vLLM's server at each rate of requests, without the ops / with them, by the newest file of each model, rank and layers."""
    newest: dict[tuple, tuple[dict, pathlib.Path]] = {}
    for path in oldest_first(RESULTS.glob("*/*-serve.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            model = (line["hardware"], line["model"], line["num_layers"], line["rank_of"])
            newest[(*model, float(line["request_rate"]), line["side"])] = line, path
    rows = []
    for case in dict.fromkeys(case[:-1] for case in sorted(newest, key=str_and_numbers)):
        (without, path), (ours, _) = (newest[(*case, side)] for side in latency_report.SIDES)
        hardware, model, layers, rank_of, rate = case
        figures = (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("itl_ms", "p99"), ("output_tokens_per_s", None))
        pairs = [[line[name][of] if of else line[name] for line in (without, ours)] for name, of in figures]
        what = f"{model}, a rank of {rank_of}" if rank_of > 1 else model
        asked = f"{ours['num_prompts']} x {ours['input_len']} + {ours['output_len']}"
        cells = (" / ".join(f"{value:.{0 if value > 50 else 2}f}" for value in pair) for pair in pairs)
        speedup = times([pairs[1][0] / pairs[1][1]])
        rows.append((what, hardware, str(layers or "all"), asked, f"{rate:g}", *cells, speedup, links([path])))
    header = (
        "model",
        "GPU",
        "layers",
        "prompts x tokens + generated",
        "requests per s",
        "TTFT ms",
        "TPOT ms",
        "ITL p99 ms",
    )
    return markdown((*header, "tokens/s", "TPOT", "file"), rows) if rows else "Nothing yet."


def profiles() -> str:
    """The time of decode steps in the engine by class of kernels: each model's newest profile, without the ops / with them."""
    newest: dict[tuple, str] = {}
    for path in oldest_first(RESULTS.glob("*/*-latency.json")):
        report = json.loads(path.read_text())
        for model, batches in latency_report.profiled(report).items():
            if any(len(sides) < len(latency_report.SIDES) for sides in batches.values()):
                continue
            [result, *_] = (result for result in report["results"] if result["model_id"] == model)
            layers = f"{result['num_layers']} layers" if result["num_layers"] else "all layers"
            header, rows = decode_profile.table(batches)
            floor = weights_us(path.parent.name, model, report["command"])
            floors = [
                (f"{kind}: least time of the weights", *[f"{us:.0f}"] * len(batches)) for kind, us in floor.items()
            ]
            what = f"**{model}**, {layers}, {report['hardware']}, {links([path])}.\n"
            what += "Above the least time of the weights, with the ops, ms:\n\n"
            for batch, sides in batches.items():
                above = {
                    kind: us - floor.get(kind, 0) for kind, us in decode_profile.by_class(sides["with"][0]).items()
                }
                parts = (f"{kind} {us / 1e3:.2f}" for kind, us in sorted(above.items(), key=lambda item: -item[1]))
                what += f"- batch {batch}: {', '.join(parts)}\n"
            newest[path.parent.name, model, layers] = f"{what}\n{markdown(header, [*floors, *rows])}"
    return "\n\n".join(newest.values()) or "Nothing yet."


def weights_us(gpu: str, model: str, command: str) -> dict[str, float]:
    """Microseconds that a rank's GPU needs to read all weights of its linears once, at the bandwidth of a copy, by class."""
    options = options_of(command)
    config = model_config.read(str(latency.find_model(model)))
    config["num_hidden_layers"] = options.num_layers or config["num_hidden_layers"]
    timed = newest_lines(RESULTS / gpu, PER_OP)
    if not timed:
        return {}
    copy_gb_s = statistics.median(line["copy_gb_s"] for line, _ in timed.values())
    found: dict[str, float] = {}
    for call in model_layers.calls(config, options.tensor_parallel_size * options.rank_of, 0):
        if not call.op.name.endswith(("mm", "gemm")):
            continue
        arguments = call.op.Arguments(*call.case(1).make("meta", None, torch.float8_e4m3fn))
        weight = arguments.weight if hasattr(arguments, "weight") else arguments.b
        kind = decode_profile.class_of(call.op.name)
        found[kind] = found.get(kind, 0.0) + call.count * weight.nbytes / copy_gb_s / 1e3
    return found


OF_A_KERNEL = {
    "waves per block": lambda line: f"{line['waves_per_block']}",
    "VGPRs": lambda line: f"{line['vgprs']}",
    "AGPRs": lambda line: f"{line['agprs']}",
    "SGPRs": lambda line: f"{line['sgprs']}",
    "spills": lambda line: f"{line['vgpr_spills'] + line['sgpr_spills']}",
    "LDS bytes": lambda line: f"{line['lds']}",
    "waves that a compute unit holds": lambda line: f"{line['occupancy']}",
}
OF_A_LAYER = {
    "waves per compute unit": lambda line: f"{line['waves_per_compute_unit']:.0f}",
    "KB in flight per compute unit": lambda line: f"{line['bytes_in_flight_per_compute_unit'] / 1024:.0f}",
    "HBM bytes / least": lambda line: f"{line['hbm_bytes_over_minimum']:.2f}",
    "LDS cycles lost to banks": lambda line: f"{100 * line['lds_conflicts']:.0f} %",
    "issue cycles per byte": lambda line: f"{line['issue_cycles_per_byte']:.2f}",
    "matrix cycles per byte": lambda line: f"{line['matrix_cycles_per_byte']:.2f}",
}


def each(values: Iterable[str]) -> str:
    """The values with slashes between them, or one value if all are equal."""
    values = list(values)
    return values[0] if len(set(values)) == 1 else " / ".join(values)


def waits() -> str:
    """One table per architecture: the loads that the waits of each streaming loop leave in flight, commit by commit."""

    def left(loops: list[dict]) -> str:
        return "; ".join(" / ".join(" ".join(map(str, stage)) or "-" for stage in loop["left"]) for loop in loops)

    tables = []
    for folder in sorted({path.parent for path in RESULTS.glob("*/*-waits.jsonl")}):
        kernels: dict[str, dict[str, list[dict]]] = {}
        for path in oldest_first(folder.glob("*-waits.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                kernels.setdefault(line["kernel"], {}).setdefault(line["commit"], []).append(line)
        commits = list(dict.fromkeys(commit for by_commit in kernels.values() for commit in by_commit))
        body = [
            (f"`{kernel}`", *(left(by_commit.get(commit, [])) for commit in commits))
            for kernel, by_commit in sorted(kernels.items())
        ]
        tables.append(f"**{folder.name}**:\n\n{markdown(('kernel', *commits), body)}")
    return "\n\n".join(tables)


def static() -> str:
    """Two tables per arch: the GEMM kernels, and the layers of decode with a value for each M."""
    tables = []
    for newest in measured("static"):
        lines = [line for line, _ in newest.values()]
        layers: dict[tuple[str, str], list[dict]] = {}
        for line in lines:
            shape = line["shape"]
            layers.setdefault((line["case"].rpartition(" ")[0], f"{shape['n']} x {shape['k']}"), []).append(line)
        tokens = ", ".join(dict.fromkeys(str(line["shape"]["m"]) for line in lines))
        kernels = {line["kernel"]: line for line in lines}
        of_kernels = [(f"`{name}`", *(show(line) for show in OF_A_KERNEL.values())) for name, line in kernels.items()]
        of_layers = [
            (*layer, *(each(map(show, group)) for show in OF_A_LAYER.values())) for layer, group in layers.items()
        ]
        tables.append(
            f"**{lines[0]['arch']}**, static and emulated, never a time; M = {tokens}. A byte at HBM's full rate takes as long as"
            f" {lines[0]['cycles_per_byte_at_bandwidth']:.2f} issue cycles.\nEvery layer and M with its kernel:"
            f" {links(path for _, path in newest.values())}\n\n"
            + markdown(("kernel", *OF_A_KERNEL), of_kernels)
            + "\n\n"
            + markdown(("layer", "N x K", *OF_A_LAYER), of_layers)
        )
    return "\n\n".join(tables) or "Nothing yet."
