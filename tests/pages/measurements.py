"""Read the results in serving_benchmarks/results and tabulate the newest line of each case for README and benchmarks.md."""

import argparse
import contextlib
import datetime
import functools
import json
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

import latency
import latency_report
import torch

from vllm_rocm_ops.core import archs
from vllm_rocm_ops.models import config as model_config
from vllm_rocm_ops.models import layers as model_layers

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "serving_benchmarks" / "results"
SUMMARY_ROWS = (1, 8, 16, 32, 64, 128, 1024)
NO_ATTENTION = "-decode_attention,-mla_attention"  # VLLM_ROCM_OPS_SEAMS of runs with all ops but attention
PER_OP = "ops", "gemm", "shuffled-gemm"  # kinds of files with norms, activations and GEMMs by rows


SIDES = {"without": "baseline", "with": "plugin"}
NOTHING = "Nothing yet."


def grouped(items: Iterable, key: Callable[..., Hashable]) -> dict:
    """Return lists of the items by key."""
    groups: dict = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows with the first cells of otherwise equal ones in one cell."""
    return [
        (", ".join(name for name, *_ in alike), *cells) for cells, alike in grouped(rows, lambda row: row[1:]).items()
    ]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table, or a sentence in place of one without rows."""
    header, rows = list(header), list(rows)
    lines = ("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))
    return "\n".join(lines) if rows else NOTHING


def joined(parts: Iterable[str]) -> str:
    """Return the parts below each other, or a sentence in place of none."""
    return "\n\n".join(parts) or NOTHING


# Lines


def in_git() -> bool:
    """True if this is a checkout and git is installed."""
    return (ROOT / ".git").exists() and shutil.which("git") is not None


@functools.cache
def committed(path: pathlib.Path) -> int:
    """Return the time of the commit that added a file: after all others for a new one, equal for all outside a checkout."""
    if not in_git():
        return 0
    git = ["git", "-C", str(ROOT), "log", "-1", "--diff-filter=A", "--format=%ct", "--", str(path)]
    return int(subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip() or 2**62)


def taken(path: pathlib.Path) -> int:
    """Return when an engine's report was taken, which it says, or for other files when they were committed."""
    date = json.loads(path.read_text()).get("date") if path.name.endswith("-latency.json") else None
    return int(datetime.datetime.fromisoformat(date).timestamp()) if date else committed(path)


def oldest_first(paths: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """Sort files by the day in their names, then by when they were taken."""
    return sorted(paths, key=lambda path: (path.name[: len("2026-01-01")], taken(path), path.name))


def kind_of(path: pathlib.Path) -> str:
    """Return what follows <date>-<commit>- in a result file's name."""
    return path.stem.split("-", 4)[-1]


def lines_of(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def newest_lines(folder: pathlib.Path, kinds: Iterable[str]) -> dict[tuple[str, str], tuple[dict, pathlib.Path]]:
    """Return the last line of every case in a folder's results of these kinds, with its file.

    In a sweep over configurations only the line of the chosen configuration counts.
    """
    newest = {}
    for path in oldest_first(path for path in folder.glob("*.jsonl") if kind_of(path) in kinds):
        for line in lines_of(path):
            if line.get("chosen", True):
                newest[line["op"], line["case"]] = line, path
    return newest


def timed_kinds() -> set[str]:
    """Return the kinds of files whose lines have the times of an op and its baselines."""
    first = {path: path.read_text().partition("\n")[0] for path in RESULTS.glob("*/*.jsonl")}
    return {kind_of(path) for path, line in first.items() if {"op", "us", "peers"} <= json.loads(line).keys()}


def measured(*kinds: str) -> Iterator[dict[tuple[str, str], tuple[dict, pathlib.Path]]]:
    """Yield `newest_lines` of each folder of results that has any of these kinds."""
    folders = sorted(path for path in RESULTS.glob("*") if path.is_dir())
    return filter(None, (newest_lines(folder, kinds) for folder in folders))


def best_baseline(line: dict) -> str | None:
    return min(line["peers"], key=line["peers"].get, default=None)


def ratio(line: dict) -> float | None:
    """Return the speedup over the best baseline."""
    return line["peers"][best_baseline(line)] / line["us"] if line["peers"] and line["us"] else None


def groups_of(lines: Iterable[dict]) -> dict[tuple[str, str], dict[int, dict]]:
    """Group lines by op and shape without rows, then by rows. The last of equal lines counts."""
    groups: dict[tuple[str, str], dict[int, dict]] = {}
    for line in lines:
        case, shape = line["case"], line["shape"]
        if line["op"] == "fused_experts":
            what = ", ".join(case.split()[::2])  # model and weights, without tokens
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


def unmeasured() -> str:
    """Return a sentence that names the GPUs without a measured time, and those with one."""
    timed = set().union(*map(gpus, (*RESULTS.glob("*/*.jsonl"), *RESULTS.glob("*/*-latency.json"))))
    said = untimed(timed, "No time")
    return f"{said} All times are of {', '.join(sorted(timed))}." if timed and said else said


def untimed(timed: set[str], what: str) -> str:
    """Return a sentence that names the products without a time, if these GPUs have one."""
    if not timed:
        return f"{what} was ever measured."
    products = [product for product in archs.PRODUCTS if not any(product in gpu for gpu in timed)]
    *most, last = products or [""]
    return f"**{what} was ever measured on an {', '.join(most)} or {last}.**" if products else ""


def gpus(path: pathlib.Path) -> set[str]:
    """Return the GPUs on which a file has times."""
    if path.suffix == ".json":
        return {(json.loads(path.read_text())["hardware"] or "").partition(" x ")[2]} - {""}
    return {line["gpu"] for line in lines_of(path) if line.get("gpu", "CPU") != "CPU"}


# Text


def time(us: float | None) -> str:
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def times(ratios: Iterable[float | None]) -> str:
    """Return a geometric mean as text, bold below 1."""
    known = [value for value in ratios if value]
    if not known:
        return ""
    mean = round(statistics.geometric_mean(known), 2)
    return f"**{mean:.2f}x**" if mean < 1 else f"{mean:.2f}x"


def links(paths: Iterable[pathlib.Path], folder: str = "") -> str:
    """Return links to files, from a page that has their folder at this address."""
    return ", ".join(f"[{path.name}]({folder}{path.relative_to(RESULTS).as_posix()})" for path in sorted(set(paths)))


def head(lines: list[dict]) -> str:
    """Return the GPU and the versions of a table's lines."""
    versions = {f"{name} {line['versions'][name]}" for line in lines for name in ("torch", "vllm")}
    return f"**{lines[0]['gpu']}**, {', '.join(sorted(versions))}"


def plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


LIBRARIES = "aiter", "torch", "vllm"  # named without their kernels


def baselines_of(lines: Iterable[dict]) -> str:
    """Return the names of the lines' best baselines."""
    names = {name for line in lines if (name := best_baseline(line))}
    return " or ".join(sorted({name.split()[0] if name.split()[0] in LIBRARIES else name for name in names}))


# Ops, for benchmarks.md


def per_gpu(kinds: Iterable[str], table: Callable[[list[dict]], str]) -> str:
    """Return a table for each GPU with results of these kinds, of its newest lines."""
    return joined(table([line for line, _ in newest.values()]) for newest in measured(*kinds))


def single_ops() -> str:
    """Return a table per GPU: geometric means over sizes, by rows or tokens."""

    def named(size: tuple) -> str:
        (op, what), _ = size
        return f"`{op}`{', shuffled' * what.endswith('shuffled')}"

    def table(lines: list[dict]) -> str:
        body = []
        for op, items in grouped(groups_of(lines).items(), named).items():
            sizes = [by_rows for _, by_rows in items]
            cells = (times(ratio(size[rows]) for size in sizes if rows in size) for rows in SUMMARY_ROWS)
            body.append((op, str(len(sizes)), *cells, baselines_of(line for size in sizes for line in size.values())))
        header = ("op", "sizes", *(plural(rows, "row") for rows in SUMMARY_ROWS), "best baseline")
        return f"{head(lines)}:\n\n{markdown(header, body)}"

    return per_gpu(PER_OP, table)


def experts() -> str:
    """Return a table per GPU: the speedup of each rank's experts, by tokens."""

    def table(lines: list[dict]) -> str:
        shown = sorted({rows_of(line) for line in lines})
        body = [
            (case, *(times([ratio(group[m])]) if m in group else "" for m in shown))
            for (_, case), group in groups_of(lines).items()
        ]
        header = ("experts of a layer", *(plural(m, "token") for m in shown))
        return f"{head(lines)}, over the best of vLLM's fused MoE (Triton):\n\n{markdown(header, body)}"

    return per_gpu(["moe"], table)


def regret() -> str:
    """Return a table per GPU: how much slower the default configuration is than the fastest."""

    def table(lines: list[dict]) -> str:
        rows = []
        for name, calls in grouped(lines, lambda line: line["op"]).items():
            regrets = [line["us"][line["chosen"]] / min(line["us"].values()) for line in calls]
            shown = (f"{100 * value - 100:.1f} %" for value in (statistics.geometric_mean(regrets), max(regrets)))
            rows.append((f"`{name}`", str(len(calls)), str(sum(len(line["us"]) for line in calls)), *shown))
        header = "op", "calls", "configurations", "regret, geometric mean", "largest"
        return f"**{lines[0]['gpu']}**:\n\n{markdown(header, rows)}"

    return per_gpu(["configurations"], table)


# Through vLLM's engine

SHOWN_BATCHES = (1, 8, 16, 32, 64, 128)  # in the tables of speedups
BATCH_COLUMNS = tuple(f"batch {batch}" for batch in SHOWN_BATCHES)


def layers_of(model: str) -> int:
    """Return the number of layers of a shipped model."""
    config = model_config.read(str(latency.find_model(model)))
    return config.get("text_config", config)["num_hidden_layers"]


def layers_kept(result: dict) -> int | None:
    """Return the number of layers of a result, None for all of a shipped model."""
    whole = None
    with contextlib.suppress(SystemExit):  # a model that is not shipped
        whole = layers_of(result["model_id"])
    return None if result["num_layers"] == whole else result["num_layers"]


@functools.cache
def options_of(command: str) -> argparse.Namespace:
    """Return the options of a command of latency.py."""
    return latency.parse_arguments(shlex.split(command)[2:])


def backend_of(options: argparse.Namespace) -> str:
    """Return the attention backend that a run asks for, or nothing if vLLM chooses it."""
    return options.engine_args.get("attention_backend", "")


def drafts_of(result: dict) -> str:
    """Return the drafts of a run, after a comma. Its times are per step."""
    drafts = result.get("drafts")
    return drafts and f", {drafts['num_speculative_tokens']} {drafts['method']} drafts, per step" or ""


def seams_of(report: dict) -> str:
    """Return the seams that a run names, or nothing."""
    return report.get("environment", {}).get("VLLM_ROCM_OPS_SEAMS", "")


def parallelism(rank_of: int, options: argparse.Namespace) -> str:
    """Return the ranks of a run, after a comma."""
    sizes = {"TP": options.tensor_parallel_size, "DP": options.data_parallel_size}
    names = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    names += ["EP"] * bool(names and options.engine_args.get("enable_expert_parallel"))
    rank = f", one TP{rank_of} rank, no all-reduce" if rank_of > 1 else ""
    return rank + (", " + " + ".join(names) if names else "")


def lacking(options: argparse.Namespace) -> str:
    """Return the default optimizations that an engine with these options lacked, or nothing."""
    config = options.engine_args.get("compilation_config", {})
    if options.enforce_eager:
        return "eager: neither compiled nor captured in graphs"
    mode = config.get("mode") if isinstance(config, dict) else config
    return "captured in graphs, without compilation" if mode == 0 else ""


def conditions_of(report: dict, prompt: int) -> str:
    """Return a run's conditions: prompt, compilation, vLLM's version and the switches of its kernels."""
    set_here = sorted(report.get("environment", {}).items())
    switches = ", ".join(f"`{name}={value}`" for name, value in set_here if name.startswith("VLLM_USE_"))
    lacks = lacking(options_of(report["command"]))
    compiled = lacks or "vLLM's default compilation and graph capture"
    text = f"Random weights, {plural(prompt, 'token')} of prompt, {compiled}, vLLM {report['versions']['vllm']}"
    text += f" with {switches}." if switches else "."
    return text + " vLLM's compiler would fuse a part of the baseline: expect lower speedups with it." * bool(lacks)


class EngineRun(NamedTuple):
    """A pair of sides through the engine at one batch size, with any other sides and all files.

    Conditions and options belong to the last side.
    """

    model: str
    ranks: str
    layers: str
    hardware: str
    sides: dict[str, list[dict]]
    paths: list[pathlib.Path]
    options: argparse.Namespace
    conditions: str

    @property
    def n(self) -> str:
        """Pairs of engine starts x iterations per start."""
        starts = self.sides["with"]
        return f"{len(starts)} x {len(starts[0]['latencies'])}"


def engine_runs() -> list[EngineRun]:
    """Return the newest pair of each case in the files of latency.py.

    The sides of one commit may be in several files. Runs without some seams are a side of their own.
    """
    newest: dict[tuple, EngineRun] = {}
    pairs: dict[tuple, tuple[dict, list[pathlib.Path]]] = {}
    for path in oldest_first(RESULTS.glob("*/*-latency.json")):
        report = json.loads(path.read_text())
        options = options_of(report["command"])
        for result in report["results"]:
            result["num_layers"] = layers_kept(result)
            kept = ("model_id", "num_layers", "rank_of", "input_len", "output_len", "batch_size")
            case = path.parent.name, *(result[name] for name in kept), backend_of(options), drafts_of(result)
            sides, paths = pairs.setdefault((report.get("commit") or path.name, case), ({}, []))
            sides.setdefault(" ".join(filter(None, (result["side"], seams_of(report)))), []).append(result)
            paths += [path] * (path not in paths)
            if not seams_of(report) and sides.keys() >= latency_report.SIDES.keys():
                ranks = parallelism(result["rank_of"], options) + drafts_of(result)
                named = result["model_id"], ranks, str(result["num_layers"] or "all")
                conditions = conditions_of(report, result["input_len"])
                newest[case] = EngineRun(*named, report["hardware"], sides, paths, options, conditions)
    return [newest[case] for case in sorted(newest, key=str_and_numbers)]


def str_and_numbers(case: tuple) -> tuple:
    """Return a sort key for cases whose numbers may be None."""
    return tuple((value is None, value or 0) if not isinstance(value, str) else value for value in case)


def attention_in_engine() -> str:
    """Return decode times through vLLM's engine: baseline, plugin without attention, plugin."""
    rows: dict[tuple, dict[int, str]] = {}
    for run in engine_runs():
        result, partly = run.sides["with"][0], run.sides.get(f"with {NO_ATTENTION}")
        if partly is not None:
            rank, prompt = f"1 of {result['rank_of']}", str(result["input_len"])
            row = run.model, backend_of(run.options), rank, run.hardware, run.layers, prompt
            baseline, others, plugin = map(latency_report.median_ms, (run.sides["without"], partly, run.sides["with"]))
            cell = f"{baseline:.2f} / {others:.2f} / {plugin:.2f} {times([others / plugin])}"
            rows.setdefault(row, {})[result["batch_size"]] = cell
    batches = sorted(set().union(*rows.values()))
    body = ((*row, *(cells.get(batch, "") for batch in batches)) for row, cells in rows.items())
    return markdown(("model", "backend", "rank", "GPU", "layers", "prompt", *(f"batch {n}" for n in batches)), body)


class EngineCase(NamedTuple):
    """One row of the engine tables: a model on its GPUs, and its runs by batch size."""

    model: str
    gpus: str
    layers: str
    runs: dict[int, EngineRun]

    @property
    def ranks(self) -> tuple[str, str, str]:
        """Model, ranks and layers."""
        return next(iter(self.runs.values()))[:3]

    @property
    def shown(self) -> list[EngineRun]:
        """Runs at the batch sizes that tables show."""
        return [self.runs[batch] for batch in SHOWN_BATCHES if batch in self.runs]

    @property
    def n(self) -> str:
        """Return n of the shown runs."""
        return ", ".join(dict.fromkeys(run.n for run in self.shown))


def engine_cases() -> dict[str, list[EngineCase]]:
    """Return the rows of the engine tables by conditions, vLLM's default compilation first.

    A model with runs of the default compilation is left out of tables of other compilations.
    """
    rows: dict[str, dict[tuple[str, ...], dict[int, EngineRun]]] = {}
    runs = sorted(engine_runs(), key=lambda run: bool(lacking(run.options)))
    compiled = {run.model for run in runs if not lacking(run.options)}
    for run in runs:
        if not lacking(run.options) or run.model not in compiled:
            name = ", ".join(filter(None, (run.model + run.ranks, backend_of(run.options))))
            cases = rows.setdefault(run.conditions, {}).setdefault((name, run.hardware, run.layers), {})
            cases[run.sides["with"][0]["batch_size"]] = run
    return {
        conditions: [EngineCase(*row, dict(sorted(of_row.items()))) for row, of_row in cases.items()]
        for conditions, cases in rows.items()
    }


def speedup_cells(case: EngineCase) -> list[str]:
    """Return a case's speedups with their spreads, at the batch sizes that tables show."""
    cells = []
    for run in map(case.runs.get, SHOWN_BATCHES):
        low, high = latency_report.speedup_spread(run.sides) if run else ("", "")
        cells.append(f"{times([latency_report.speedup(run.sides)])} ({low:.2f} to {high:.2f})" if run else "")
    return cells


def host_loop(case: EngineCase) -> str:
    """Return the host loop's microseconds, baseline / plugin, at the first batch size where it was timed."""
    for run in case.shown:
        timed = [[start["host_us"] for start in run.sides[side] if "host_us" in start] for side in latency_report.SIDES]
        if all(timed):
            return " / ".join(f"{statistics.median(us):.0f}" for us in timed)
    return ""


def engine() -> str:
    """Return a table for each set of conditions: a row for each model, with its speedups."""
    header = ("model", "GPU", "layers", "n", *BATCH_COLUMNS, "host loop us")
    return joined(
        f"{conditions}\n\n{markdown(header, ((*case[:3], case.n, *speedup_cells(case), host_loop(case)) for case in cases))}"
        for conditions, cases in engine_cases().items()
    )


def named(case: EngineCase) -> str:
    """Return a case's model, with its share of the layers if it has fewer than all."""
    whole = case.layers == "all"
    return case.model if whole else f"{case.model}, {case.layers} of {layers_of(case.ranks[0])} layers"


def whole_models() -> tuple[str, list[EngineCase]]:
    """Return the conditions of the models with all layers or several ranks, and the newest row of each.

    Its GPU and attention backend do not count.
    """
    conditions, cases = next(iter(engine_cases().items()), ("", []))
    order = {path: place for place, path in enumerate(oldest_first(RESULTS.glob("*/*-latency.json")))}
    several = ("tensor_parallel_size", "data_parallel_size")
    whole = [
        case
        for case in cases
        if case.layers == "all" or any(vars(run.options)[size] > 1 for run in case.runs.values() for size in several)
    ]
    by_age = sorted(whole, key=lambda case: max(order[path] for run in case.runs.values() for path in run.paths))
    newest = {case.ranks: case for case in by_age}
    return conditions, [case for case in whole if newest[case.ranks] is case]


def models_with_collectives() -> tuple[str, list[EngineCase]]:
    """Return `whole_models` without single ranks of several, which have no collectives."""
    conditions, cases = whole_models()
    return conditions, [case for case in cases if all(run.sides["with"][0]["rank_of"] <= 1 for run in case.shown)]


def whole_models_table() -> str:
    """Return the speedups of the models with their collectives, for README."""
    conditions, cases = models_with_collectives()
    rows = ((named(case), case.gpus, case.n, *speedup_cells(case)) for case in cases)
    table = markdown(("model", "GPU", "n", *BATCH_COLUMNS), rows)
    return f"{conditions}\n\n{table}" if cases else table


def fastest_and_slowest() -> str:
    """Return the range of the speedups in README."""
    runs = [run for case in models_with_collectives()[1] for run in case.shown]
    if not runs:
        return "Nothing was measured."
    ratios = sorted(latency_report.speedup(run.sides) for run in runs)
    products = sorted({path.parent.name.removeprefix("nvidia-").upper() for run in runs for path in run.paths})
    span = f"{times(ratios[:1])} to {times(ratios[-1:])} as fast on {' and '.join(products)}"
    return f"Whole models decode {span}; some host-bound runs lose. On AMD, only predictions exist."


def serving() -> str:
    """Return vLLM's server at each request rate, baseline / plugin, by the newest file of each model, rank and number of layers."""
    newest: dict[tuple, dict[str, dict]] = {}
    for path in oldest_first(RESULTS.glob("*/*-serve.jsonl")):
        for line in lines_of(path):
            model = (line["hardware"], line["model"], line["num_layers"], line["rank_of"])
            newest.setdefault((*model, float(line["request_rate"])), {})[line["side"]] = line
    rows = []
    for case in sorted(newest, key=str_and_numbers):
        hardware, model, layers, rank_of, rate = case
        without, plugin = map(newest[case].get, latency_report.SIDES)
        metrics = (("ttft_ms", "p50"), ("tpot_ms", "p50"), ("itl_ms", "p99"))
        pairs = [[line[name][percentile] for line in (without, plugin)] for name, percentile in metrics]
        pairs.append([line["output_tokens_per_s"] for line in (without, plugin)])
        what = f"{model}, one TP{rank_of} rank" if rank_of > 1 else model
        asked = f"{plugin['num_prompts']} x {plugin['input_len']} + {plugin['output_len']}"
        cells = (" / ".join(f"{value:.{0 if value > 50 else 2}f}" for value in pair) for pair in pairs)
        speedups = (times([pair[0] / pair[1]]) for pair in pairs[:2])
        rows.append((what, hardware, str(layers or "all"), asked, f"{rate:g}", *cells, *speedups))
    header = "model", "GPU", "layers", "prompts x tokens + generated", "requests per s", "TTFT p50 ms", "TPOT p50 ms"
    return markdown((*header, "ITL p99 ms", "tokens/s", "TTFT", "TPOT"), rows)


class ProfiledRun(NamedTuple):
    """Both sides' profiles of a model: {batch size: {side: ranks}}, with the last options and all files."""

    model: str
    name: str
    layers: str
    hardware: str
    batches: dict[str, dict[str, list[dict]]]
    options: argparse.Namespace
    paths: list[pathlib.Path]


def profiled_runs() -> list[ProfiledRun]:
    """Return the newest profiled run of each GPU, model, parallelism, backend, number of layers and batches, oldest first.

    The sides of one commit may be in several files. Runs without some seams do not count.
    """
    newest: dict[tuple, ProfiledRun] = {}
    pairs: dict[tuple, tuple[dict[str, dict[str, list[dict]]], list[pathlib.Path]]] = {}
    for path in oldest_first(RESULTS.glob("*/*-latency.json")):
        report = json.loads(path.read_text())
        options = options_of(report["command"])
        for model, batches in latency_report.profiled(report).items() if not seams_of(report) else ():
            layers = next(
                str(result["num_layers"] or "all") for result in report["results"] if result["model_id"] == model
            )
            name = ", ".join(filter(None, (model + parallelism(options.rank_of, options), backend_of(options))))
            case = path.parent.name, name, layers, *batches
            profiles, paths = pairs.setdefault((report.get("commit") or path.name, case), ({}, []))
            paths.append(path)
            for batch, sides in batches.items():
                profiles.setdefault(batch, {}).update(sides)
            whole = {
                batch: {side: sides[side] for side in latency_report.SIDES}
                for batch, sides in profiles.items()
                if sides.keys() >= latency_report.SIDES.keys()
            }
            if whole:
                newest.pop(case, None)
                newest[case] = ProfiledRun(model, name, layers, report["hardware"], whole, options, paths)
    return list(newest.values())


def weights_us(run: ProfiledRun) -> float:
    """Return the microseconds in which a rank's GPU reads all weights of its linears once, at the bandwidth of a copy."""
    options, folder = run.options, latency.find_model(run.model)
    config = latency.merged(model_config.read(str(folder)), latency.overrides(folder, options.num_layers, 1))
    timed = newest_lines(RESULTS / run.paths[0].parent.name, PER_OP)
    if not timed:
        return 0.0
    copy_gb_s, read_bytes = statistics.median(line["copy_gb_s"] for line, _ in timed.values()), 0
    for call in model_layers.calls(config, options.tensor_parallel_size * options.rank_of):
        if call.op.name.endswith(("mm", "gemm")):
            arguments = call.op.Arguments(*call.case(1).make("meta", None, torch.float8_e4m3fn))
            weight = arguments.weight if hasattr(arguments, "weight") else arguments.b
            read_bytes += call.count * weight.nbytes
    return read_bytes / copy_gb_s / 1e3
