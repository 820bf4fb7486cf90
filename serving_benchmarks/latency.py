"""Decode latency through vLLM's engine, with the ops and without.

    python serving_benchmarks/latency.py --model tiny-llama llama-3.1-405b-fp8 --num-layers 4 --batch-size 1 8 32

Random weights, no download. For each model, vLLM runs without the plugin and with it, each time in a process of its own with
the same seed, and `--pairs` times, since two starts of an engine differ too; every batch size gets warm-up and measured
iterations of prompts of --input-len tokens that generate --output-len tokens. Reported is the median time per decoded token,
from the engine's time stamps of a request's first and last token, and the median of the pairs' ratios. `--profile` says
where the time goes (decode_profile.py). The engine runs inside the measuring process (VLLM_ENABLE_V1_MULTIPROCESSING=1
gives it its own).

`--rank-of 8` stands in for eight GPUs on one: heads, widths and vocabulary are what one of eight tensor parallel ranks has, and
there are no collectives. On an NVIDIA GPU the ops need VLLM_ROCM_OPS_ON_NVIDIA=1. What failed is reported with its log's end.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import decode_profile

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "vllm_rocm_ops" / "models"
PLUGIN = "rocm_ops"
SIDES = {"without": "vLLM", "with": "vLLM + vllm-rocm-ops"}
SECONDS_TO_END = 30
LINES_OF_A_FAILURE = 40
NO_RATIO = "no kernel ran"
CHARACTERS_PER_INCH = 14  # of a plot's caption
PERCENTILES = (10, 25, 50, 75, 90, 99)  # as in `vllm bench latency`
LEAST = {"batch_size": 1, "input_len": 1, "output_len": 2, "num_iters": 1, "rank_of": 1, "pairs": 1}


DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""What tensor parallel ranks share of a config.json; of key-value heads each has one at least."""


def add_model_arguments(add: Callable) -> None:
    """The options that say which models run, and how."""
    shipped = ", ".join(sorted(path.name for path in CONFIGS.iterdir()))
    add("--model", nargs="+", default=["tiny-llama"], help=f"folders with a config.json, or of: {shipped}")
    add("--num-layers", type=int, help="layers to keep of each model; default: all")
    add("--rank-of", type=int, default=1, help="tensor parallel ranks that the model is one of; default: %(default)s")
    add("--tensor-parallel-size", type=int, default=1, help="GPUs; default: %(default)s")
    add("--dtype", default="auto", help="of activations; default: the model's")
    add("--kv-cache-dtype", default="auto", help="fp8, or by default the model's")
    add("--enforce-eager", action="store_true", help="no compilation, no graph capture")
    add("--seed", type=int, default=0, help="of weights and prompts; default: %(default)s")
    add("--side", nargs="+", choices=list(SIDES), default=list(SIDES), help="with the ops, without, or both (default)")
    add("--random-experts", action="store_true", help="spread tokens over experts; random routers send all to the same")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_model_arguments(add)
    add("--batch-size", type=int, nargs="+", default=[1], help="sequences decoded at a time; default: %(default)s")
    add("--input-len", type=int, default=1, help="tokens of a prompt; default: %(default)s")
    add("--output-len", type=int, default=128, help="tokens to generate, at least 2; default: %(default)s")
    add("--num-iters", type=int, default=30, help="measured iterations; default: %(default)s")
    add("--num-iters-warmup", type=int, default=10, help="iterations before; default: %(default)s")
    add("--pairs", type=int, default=1, help="engine starts of each side, in turn; default: %(default)s")
    add("--profile", type=int, nargs="*", metavar="BATCH", help="profile decode steps of these sizes; default: of all")
    add(
        "--timeout", type=float, default=3600, help="seconds that one start of an engine may take; default: %(default)s"
    )
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    add("--output-json", type=Path, default=HERE / "out" / "latency.json", help="default: %(default)s")
    add("--plot", type=Path, default=HERE / "out" / "latency.png", help="default: %(default)s")
    add("--commit", help="of the code measured, where this is no checkout")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)  # a job of the processes that this one starts
    arguments = parser.parse_args(argv)
    for name, least in LEAST.items():
        values = getattr(arguments, name)
        if min(values if isinstance(values, list) else [values]) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {values}")
    return arguments


def find_model(name: str) -> Path:
    """The folder of a model's config.json."""
    for folder in (Path(name), CONFIGS / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise SystemExit(f"--model must be a folder with a config.json or a name in {CONFIGS}, got {name}")


def overrides(model: Path, num_layers: int | None, rank_of: int) -> dict[str, int]:
    """What replaces values of a model's config.json: so many layers, and of each the share of one of `rank_of` ranks."""
    config = json.loads((model / "config.json").read_text())
    result = {"num_hidden_layers": num_layers} if num_layers else {}
    if rank_of == 1:
        return result
    for name in DIVIDED:
        if name not in config:
            continue
        share, rest = divmod(config[name], rank_of)
        if name == "num_key_value_heads":
            share, rest = max(share, 1), rest if share else 0
        if rest:
            raise SystemExit(f"--rank-of must divide {name}={config[name]} of {model.name}, got {rank_of}")
        result[name] = share
    if "kv_lora_rank" not in config:  # a head keeps its size, which would follow from the number of heads
        result["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return result


# In the measuring process


def measure(job: dict, report: Callable[[dict], None]) -> None:
    """Runs one model on one side; reports every iteration, every batch size and then what else there is to say."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    with_ops = job["side"] == "with"
    longest = job["input_len"] + job["output_len"]
    settings = {
        "model": job["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # the time stamps come with them
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": max(job["batch_sizes"]),
        "tensor_parallel_size": job["tensor_parallel_size"],
        "dtype": job["dtype"],
        "kv_cache_dtype": job["kv_cache_dtype"],
        "enforce_eager": job["enforce_eager"],
        "seed": job["seed"],
    }
    if job["tensor_parallel_size"] == 1:
        settings["distributed_executor_backend"] = "uni"
    if current_platform.is_cpu():
        settings["gpu_memory_utilization"] = 0.3
    if with_ops:
        settings["worker_extension_cls"] = "vllm_rocm_ops.vllm.worker.Extension"
    settings |= job["engine_args"]
    settings["hf_overrides"] = job["overrides"] | settings.get("hf_overrides", {})
    llm = LLM(**settings)
    if not with_ops and "vllm_rocm_ops" in sys.modules:
        raise RuntimeError("the plugin was loaded on the side without it")

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    sampling = SamplingParams(temperature=0, max_tokens=job["output_len"], ignore_eos=True, detokenize=False)

    def prompts_of(batch_size: int) -> list[dict]:
        tokens = [[(7 * i + 31 * row + 3) % vocabulary for i in range(job["input_len"])] for row in range(batch_size)]
        return [{"prompt_token_ids": row} for row in tokens]

    report({"hardware": hardware(), "versions": versions()})
    for batch_size in job["batch_sizes"]:
        prompts, latencies, decode = prompts_of(batch_size), [], []
        for iteration in range(job["num_iters_warmup"] + job["num_iters"]):
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            latency = time.perf_counter() - start
            spans = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
            per_token = statistics.median(spans) / (job["output_len"] - 1)
            if iteration >= job["num_iters_warmup"]:
                latencies.append(latency)
                decode.append(1e3 * per_token)
            report({"batch_size": batch_size, "decode_ms": 1e3 * per_token})
        report({"batch": {"batch_size": batch_size, "latencies": latencies, "decode_ms": decode}})
    result = {}
    try:
        recorded = ((size, decode_profile.record(llm, prompts_of(size), job["seed"])) for size in job["profile"])
        result["profile"] = {size: ranks for size, ranks in recorded if ranks}
    except Exception as error:  # noqa: BLE001  the rest is as good without
        traceback.print_exc()
        result["profile_error"] = f"{type(error).__name__}: {error}".strip()
    if with_ops:
        result["op_stats"] = llm.collective_rpc("vllm_rocm_ops_stats")[0]
        result["seams"] = llm.collective_rpc("vllm_rocm_ops_seams")[0]
    report({"result": result})


def hardware() -> str:
    """What this ran on."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ": CPU"
    )
    return f"{len(os.sched_getaffinity(0))} cores of {cpu.partition(': ')[2]}"


def versions() -> dict[str, str]:
    """Of what takes part."""
    import importlib.metadata

    import torch
    import vllm

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "vllm": vllm.__version__}
    return found | {"hip": torch.version.hip or "", "vllm_rocm_ops": importlib.metadata.version("vllm-rocm-ops")}


def worker(job: dict) -> None:
    """The life of a measuring process: results go up a pipe as lines of JSON."""
    with os.fdopen(job["pipe"], "w", buffering=1) as pipe:

        def report(event: dict) -> None:
            pipe.write(json.dumps(event) + "\n")

        try:
            measure(job, report)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is the result
            traceback.print_exc()
            report({"error": f"{type(error).__name__}: {error}".strip()})


# In the process that the user started


def environment(side: str) -> dict[str, str]:
    """The environment of a measuring process. Without the ops: the plugins are all that are installed but ours."""
    defaults = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    result = {**defaults, **os.environ}
    allowed = os.environ.get("VLLM_PLUGINS")
    names = {p.name for g in entry_points().groups if g.startswith("vllm.") for p in entry_points(group=g)}
    names = names if allowed is None else set(allowed.split(","))
    if side == "without":
        result["VLLM_PLUGINS"] = ",".join(sorted(names - {PLUGIN}))
    elif allowed is not None:
        result["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN}))
    return result


def run_side(job: dict, log: Path, on_event: Callable[[dict], None]) -> dict:
    """Runs one measuring process; returns its result or {"error": why}, each with the batch sizes that were measured whole."""
    read_end, write_end = os.pipe()
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps({**job, "pipe": write_end})]
    variables = environment(job["side"])
    if job["random_experts"]:
        variables["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            pass_fds=[write_end],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    os.close(write_end)
    final, measured = {"error": "the process ended early"}, {"batches": []}
    overdue = threading.Timer(job["timeout"], os.killpg, (process.pid, signal.SIGKILL))
    overdue.start()
    try:
        with os.fdopen(read_end) as pipe:
            for line in pipe:
                event = json.loads(line)
                if "result" in event or "error" in event:
                    final = event.get("result", event)
                    break
                if "batch" in event:
                    measured["batches"].append(event["batch"])
                elif "hardware" in event:
                    measured |= event
                else:
                    on_event(event)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    finally:
        overdue.cancel()
        # The next side needs the GPUs: nothing of this one may stay, its workers neither.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if "error" in final:
        final["log_tail"] = tail(log)
    return final | measured


def tail(log: Path) -> list[str]:
    """The last lines of a log."""
    return log.read_text(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]


def summarise(job: dict, batch: dict) -> dict:
    """One batch size of one side, in the form of `vllm bench latency` with what we add."""
    import numpy

    latencies = batch["latencies"]
    return {
        "model_id": job["name"],
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): float(numpy.percentile(latencies, p)) for p in PERCENTILES},
        "side": job["side"],
        "batch_size": batch["batch_size"],
        "input_len": job["input_len"],
        "output_len": job["output_len"],
        "num_layers": job["num_layers"],
        "rank_of": job["rank_of"],
        "pair": job["pair"],
        "decode_ms_per_token": statistics.median(batch["decode_ms"]),
        "decode_ms_percentiles": {str(p): float(numpy.percentile(batch["decode_ms"], p)) for p in PERCENTILES},
    }


def benchmark(arguments: argparse.Namespace) -> dict:
    """Measures all models on all sides, one after the other."""
    from tqdm import tqdm

    jobs = [
        {
            "name": Path(name).name,
            "model": str(find_model(name)),
            "side": side,
            "pair": pair,
            "batch_sizes": arguments.batch_size,
            "profile": (arguments.profile or arguments.batch_size)
            if arguments.profile is not None and not pair
            else [],
            "overrides": overrides(find_model(name), arguments.num_layers, arguments.rank_of),
            **{
                key: getattr(arguments, key)
                for key in (
                    *("input_len", "output_len", "num_iters", "num_iters_warmup", "num_layers", "rank_of"),
                    *(
                        "tensor_parallel_size",
                        "dtype",
                        "kv_cache_dtype",
                        "enforce_eager",
                        "seed",
                        "random_experts",
                        "engine_args",
                        "timeout",
                    ),
                )
            },
        }
        for name in arguments.model
        for pair in range(arguments.pairs)
        for side in SIDES
        if side in arguments.side
    ]
    iterations = len(arguments.batch_size) * (arguments.num_iters_warmup + arguments.num_iters)
    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *without_paths(sys.argv)]),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("VLLM_")},
        "commit": arguments.commit or commit(),
        "hardware": None,
        "versions": {},
        "results": [],
        "runs": [],
    }
    with tqdm(total=len(jobs) * iterations, unit="iter", dynamic_ncols=True, smoothing=0) as bar:
        for number, job in enumerate(jobs):
            bar.set_description(f"{job['name']} {job['side']} the ops: loading")

            def on_event(event: dict, job=job) -> None:
                bar.set_description(f"{job['name']} {job['side']} the ops, batch {event['batch_size']}")
                bar.set_postfix_str(f"{event['decode_ms']:.2f} ms/token", refresh=False)
                bar.update()

            start = f"-{job['pair']}" if arguments.pairs > 1 else ""
            log = arguments.output_json.parent / "logs" / f"{job['name']}-{job['side']}{start}.log"
            found = run_side(job, log, on_event)
            bar.update((number + 1) * iterations - bar.n)
            run = {"model_id": job["name"], "side": job["side"], "log": f"{log.parent.name}/{log.name}"}
            report |= {name: found[name] for name in ("hardware", "versions") if name in found}
            report["results"] += [summarise(job, batch) for batch in found["batches"]]
            kept = ("error", "log_tail", "op_stats", "seams", "profile", "profile_error")
            report["runs"].append(run | {k: found[k] for k in kept if k in found})
            arguments.output_json.write_text(json.dumps(report, indent=1) + "\n")  # what is measured stays measured
        bar.set_description("done")
        bar.set_postfix_str("")
    return report


def without_paths(words: list[str]) -> list[str]:
    """A command without the options that only say where results go."""
    outputs = ("--output-json", "--plot")
    return [word for before, word in zip(["", *words], words) if word not in outputs and before not in outputs]


def commit() -> str:
    """The commit of this checkout, `+` if files differ from it, or nothing outside one."""
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + "+" * bool(changed)


def pairs(report: dict) -> list[tuple[str, int, dict[str, list[dict]]]]:
    """(model, batch size, {side: results of its starts}), in the order of measurement."""
    found: dict[tuple[str, int], dict[str, list[dict]]] = {}
    failed = [run["model_id"] for run in report["runs"] if "error" in run]
    for result in report["results"]:
        sides = found.setdefault((result["model_id"], result["batch_size"]), {})
        sides.setdefault(result["side"], []).append(result)
    for model in failed:
        if not any(model == key[0] for key in found):
            found[model, 0] = {}
    return [(model, batch_size, sides) for (model, batch_size), sides in found.items()]


def median_ms(starts: list[dict]) -> float:
    """Milliseconds per token: the median of the starts' medians."""
    return statistics.median(start["decode_ms_per_token"] for start in starts)


def spread_ms(starts: list[dict]) -> tuple[float, float]:
    """The least 10th and the largest 90th percentile of the starts."""
    spreads = [start["decode_ms_percentiles"] for start in starts]
    return min(spread["10"] for spread in spreads), max(spread["90"] for spread in spreads)


def speedup(sides: dict[str, list[dict]]) -> float:
    """How many times as fast it is with the ops: the median over pairs of starts."""
    of_pairs = zip(*(sides[side] for side in SIDES))
    return statistics.median(
        without["decode_ms_per_token"] / with_ops["decode_ms_per_token"] for without, with_ops in of_pairs
    )


def op_stats(report: dict) -> dict[str, dict]:
    """By model: how often each op ran what."""
    return {run["model_id"]: run["op_stats"] for run in report["runs"] if "op_stats" in run}


def kernels(stats: dict[str, dict[str, int]]) -> set[str]:
    """The kernels that ran, of what `vllm_rocm_ops.stats()` gives."""
    ran = {kernel for op in stats.values() for kernel in op}
    return {kernel for kernel in ran if not kernel.startswith(("fallback", "nothing"))}


def ratio(report: dict, model: str, sides: dict[str, list[dict]]) -> str:
    """How many times as fast a model is with the ops; `NO_RATIO` where they are plain PyTorch, whose time says nothing of their
    kernels; nothing where a side is missing."""
    if len(sides) < len(SIDES):
        return ""
    if not kernels(op_stats(report)[model]):
        return NO_RATIO
    return f"{speedup(sides):.2f}x"


def table(report: dict) -> str:
    """The results, and under them why some are missing."""
    measured = [side for side in SIDES if any(run["side"] == side for run in report["runs"])]
    rows = [["model", "batch", *(f"{side} the ops" for side in measured), *(["ratio"] if len(measured) == 2 else [])]]
    for model, batch_size, sides in pairs(report):
        row = [model, str(batch_size or "-")]
        for side in measured:
            if side in sides:
                row.append("{:.2f} ({:.2f}-{:.2f})".format(median_ms(sides[side]), *spread_ms(sides[side])))
            else:
                row.append(f"not runnable {side}")
        if len(measured) == 2:
            row.append(ratio(report, model, sides))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines = ["Decode, ms per token: median (10th-90th percentile)", "", *lines]
    for run in report["runs"]:
        if "error" in run:
            why = textwrap.shorten(run["error"], 300)
            lines += ["", f"{run['model_id']} is not runnable {run['side']} the ops: {why}", f"  {run['log']}"]
        if "profile_error" in run:
            why = textwrap.shorten(run["profile_error"], 300)
            lines += ["", f"{run['model_id']} could not be profiled {run['side']} the ops: {why}", f"  {run['log']}"]
    for model, stats in op_stats(report).items():
        if not stats:
            lines += ["", f"{model}: vLLM called none of the ops; `vllm-rocm-ops doctor` says why"]
        elif not kernels(stats):
            why = "on this machine they are plain PyTorch, and the times say nothing of a GPU's"
            lines += ["", f"{model}: no kernel of the ops ran: {why}."]
    for model, batches in profiled(report).items():
        header, body = decode_profile.table(batches)
        lines += ["", f"{model}: microseconds of a decode step, {' / '.join(next(iter(batches.values())))} the ops", ""]
        lines += [f"{row[0]:48}" + "".join(f"  {cell:>30}" for cell in row[1:]) for row in (header, *body)]
    return "\n".join(lines)


def profiled(report: dict) -> dict[str, dict[str, dict[str, list[dict]]]]:
    """What was profiled: {model: {batch size: {side: ranks}}}."""
    found: dict[str, dict[str, dict[str, list[dict]]]] = {}
    for run in report["runs"]:
        for batch_size, ranks in run.get("profile", {}).items():
            found.setdefault(run["model_id"], {}).setdefault(str(batch_size), {})[run["side"]] = ranks
    return found


def figure(report: dict):
    """Bars of the median with the 10th to 90th percentile; one panel per model. None where nothing was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"without": "#9aa5b1", "with": "#c8102e"}
    label = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
    by_model: dict[str, list] = {}
    for model, batch_size, sides in pairs(report):
        if sides:
            by_model.setdefault(model, []).append((batch_size, sides))
    if not by_model:
        return None
    inches = max(6.0, 1.5 + 3.1 * len(by_model))
    drawn, axes = pyplot.subplots(1, len(by_model), figsize=(inches, 4.8), squeeze=False, layout="constrained")
    asked = [side for side in SIDES if any(run["side"] == side for run in report["runs"])]
    width = 0.8 / len(asked)
    for axis, (model, batches) in zip(axes[0], by_model.items()):
        ratios = [ratio(report, model, sides) for _, sides in batches]
        hatch = "//" if NO_RATIO in ratios else ""
        for index, (_, sides) in enumerate(batches):
            for place, side in enumerate(asked):
                x = index + (place - (len(asked) - 1) / 2) * width
                if side not in sides:
                    axis.annotate("not runnable", (x, 0), (0, 6), rotation=90, **label, color="#777777")
                    continue
                value, (low, high) = median_ms(sides[side]), spread_ms(sides[side])
                error = [[max(value - low, 0)], [max(high - value, 0)]]
                axis.bar(x, value, width * 0.92, color=colors[side], hatch=hatch, edgecolor="white", linewidth=0)
                axis.errorbar(x, value, yerr=error, color="#333333", capsize=3, linewidth=1)
                axis.annotate(f"{value:.2f}", (x, max(value, high)), (0, 4), **label)
        shown = ["" if hatch else f"\n{text}" for text in ratios]
        axis.set_xticks(range(len(batches)), [f"{batch[0]}{text}".strip() for batch, text in zip(batches, shown)])
        axis.set_xlim(-0.5, len(batches) - 0.5)
        axis.set_xlabel("batch size, and how many times as fast" if any(ratios) and not hatch else "batch size")
        axis.set_title(f"{model}\nno kernel of the ops ran: no ratio" if hatch else model, fontsize=10)
        axis.margins(y=0.12)
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("decode, ms per token")
    drawn.suptitle("Decode latency: median, 10th to 90th percentile", fontsize=12, fontweight="bold")
    result, versions = report["results"][0], report["versions"]
    number = len({run["pair"] for run in report["results"] if "pair" in run})
    starts = f" in each of {number} starts" if number > 1 else ""
    rank = f", as one of {result['rank_of']} ranks without collectives" if result["rank_of"] > 1 else ""
    caption = (
        f"{report['hardware']}{rank}; vLLM {versions['vllm']}, torch {versions['torch']}; input {result['input_len']}, "
        f"output {result['output_len']}, {len(result['latencies'])} iterations{starts}; random weights"
    )
    drawn.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colors[side]) for side in asked],
        [SIDES[side] for side in asked],
        title=textwrap.fill(caption, int(CHARACTERS_PER_INCH * inches)),
        title_fontproperties={"size": 8},
        loc="outside lower center",
        ncols=len(asked),
        frameon=False,
    )
    return drawn


def plot(report: dict, path: Path) -> bool:
    """Writes the figure as PNG; whether there was anything to draw."""
    drawn = figure(report)
    if drawn is None:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)
    return True


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if arguments.worker:
        worker(arguments.worker)
        return 0
    report = benchmark(arguments)
    print(table(report))
    print()
    print(*filter(None, (report["hardware"], arguments.output_json)), sep="\n")
    try:
        if plot(report, arguments.plot):
            print(arguments.plot)
    except ImportError as error:
        print(f"no plot: {error}")
    return int(any("error" in run and run["side"] == "with" for run in report["runs"]))


if __name__ == "__main__":
    sys.exit(main())
