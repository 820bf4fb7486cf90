"""Benchmark decode latency in vLLM's engine, with and without the plugin.

    python serving_benchmarks/latency.py --model tiny-llama llama-3.1-405b-fp8 --num-layers 4 --batch-size 1 8 32

Weights are random; nothing is downloaded. For each model, vLLM runs without and with the plugin, in separate processes with the same
seed, `--pairs` times, as engine starts differ. `--num-starts-warmup 1` starts the plugin once before: the first start times all kernels
(VLLM_ROCM_OPS_MEASURE is 120 s), later ones use all results. Every batch size has warm-up and measured iterations of prompts with
--input-len tokens that generate --output-len tokens. The report has the median time per output token, from the engine's time stamps of
the first and last token of a request, and the median speedup over the pairs; time to first token (prefill: --input-len 2048
--output-len 2); the time of a Python loop, to gauge the host's speed; and time and memory of starts (engine_start.py). `--profile` breaks
down the decode step (decode_profile.py). The engine runs in the measuring process, latency_worker.py
(VLLM_ENABLE_V1_MULTIPROCESSING=1 gives it its own).

`--data-parallel-size 4` starts an engine per rank with the same batches, and reports the first one's. `--rank-of 8` simulates one of
eight tensor parallel ranks on one GPU: its heads, widths and vocabulary, without collectives. `--drafts 3` runs speculative decoding.
vLLM then accepts random drafts, --accepted of a request's in a step on average, as random weights predict nothing; the report has the
steps that the engine ran, too. On an NVIDIA GPU the plugin needs VLLM_ROCM_OPS_ON_NVIDIA=1, on a CPU VLLM_ROCM_OPS_ON_CPU=1. Failures are
reported with the end of their log.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from latency_report import SIDES, json_text, plot, summarize, table

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "vllm_rocm_ops" / "models"
PLUGIN = "rocm_ops"
SECONDS_TO_END = 30
LINES_OF_A_FAILURE = 40
MEASURE_S = "120"  # so that the plugin's first start times all kernels, however slow the compilers are
WORKER = HERE / "latency_worker.py"
MIN = {"output_len": 2, "num_starts_warmup": 0, "drafts": 0}
MIN |= dict.fromkeys(("batch_size", "input_len", "num_iters", "rank_of", "data_parallel_size", "pairs"), 1)
COPIED = (
    *("input_len", "output_len", "num_iters", "num_iters_warmup", "num_layers", "rank_of", "tensor_parallel_size"),
    *(
        "data_parallel_size",
        "dtype",
        "kv_cache_dtype",
        "enforce_eager",
        "seed",
        "random_experts",
        "strided",
        "engine_args",
        "drafts",
        "timeout",
    ),
)
"""Options that a job has under their names."""

DIVIDED = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
DIVIDED += ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size")
"""Sizes in config.json that tensor parallel ranks divide; each rank has at least one KV head."""

LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "attn_type_list")
"""Lists in config.json with an entry per layer."""

METHODS: dict[str, dict] = {
    "mtp": {"method": "mtp"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
}
"""The method of drafting in vLLM's speculative configuration."""


def add_model_arguments(add: Callable) -> None:
    """Add the options that select models and how they run."""
    shipped = ", ".join(sorted(path.parent.name for path in CONFIGS.glob("*/config.json")))
    add("--model", nargs="+", default=["tiny-llama"], help=f"folders with a config.json, or shipped models: {shipped}")
    add("--num-layers", type=int, help="number of layers to keep (default: all)")
    add("--rank-of", type=int, default=1, help="tensor parallel size of which to run one rank (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, help="number of GPUs (default: %(default)s)")
    add("--dtype", default="auto", help="activation dtype (default: the model's)")
    add("--kv-cache-dtype", default="auto", help="KV cache dtype, e.g. fp8 (default: the model's)")
    add("--enforce-eager", action="store_true", help="disable compilation and graph capture")
    add("--seed", type=int, default=0, help="seed of weights and prompts (default: %(default)s)")
    sides = "with the plugin, without it, or both (default)"
    add("--side", nargs="+", choices=list(SIDES), default=list(SIDES), help=sides)
    spread = "random routers that spread tokens over experts (random_experts.py)"
    add("--random-experts", action="store_true", help=spread)
    strided = "MXFP4 weights of triton_kernels in the order of AMD GPUs, on an NVIDIA H200, too; for one GPU"
    add("--strided", action="store_true", help=strided)


def check_least(parser: argparse.ArgumentParser, arguments: argparse.Namespace, least: dict[str, int]) -> None:
    """Refuse numbers, or lists of numbers, that are too small."""
    for name, limit in least.items():
        values = getattr(arguments, name)
        if min(values if isinstance(values, list) else [values]) < limit:
            parser.error(f"--{name.replace('_', '-')} must be at least {limit}, got {values}")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_model_arguments(add)
    ranks = "data parallel ranks of an MoE model, each with its own GPUs and batches (default: %(default)s)"
    add("--data-parallel-size", type=int, default=1, help=ranks)
    add("--batch-size", type=int, nargs="+", default=[1], help="batch sizes, in sequences (default: %(default)s)")
    add("--input-len", type=int, default=1, help="prompt length, in tokens (default: %(default)s)")
    add("--output-len", type=int, default=128, help="output length, in tokens, at least 2 (default: %(default)s)")
    add("--num-iters", type=int, default=30, help="number of measured iterations (default: %(default)s)")
    add("--num-iters-warmup", type=int, default=10, help="number of warm-up iterations (default: %(default)s)")
    add("--pairs", type=int, default=1, help="engine starts per side, alternating (default: %(default)s)")
    warm_up = "engine starts with the plugin before the measured ones (default: %(default)s)"
    add("--num-starts-warmup", type=int, default=0, help=warm_up)
    profile = "profile decode steps at these batch sizes (without values: all)"
    add("--profile", type=int, nargs="*", metavar="BATCH", help=profile)
    add("--drafts", type=int, default=0, help="draft tokens of a request per step (default: no speculative decoding)")
    methods = "the model's MTP layers (default), or n-grams of the request, which gives none before a text repeats"
    add("--draft-method", choices=list(METHODS), default="mtp", help=methods)
    accepted = "mean number of a request's drafts that a step accepts, at random; not on CPU (default: half of them)"
    add("--accepted", type=float, help=accepted)
    add("--timeout", type=float, default=3600, help="time limit per engine start, in seconds (default: %(default)s)")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments for vllm.LLM")
    add("--output-json", type=Path, default=HERE / "out" / "latency.json", help="report file (default: %(default)s)")
    add("--plot", type=Path, default=HERE / "out" / "latency.png", help="plot file (default: %(default)s)")
    add("--commit", help="commit of the measured code (default: this checkout's)")
    arguments = parser.parse_args(argv)
    check_least(parser, arguments, MIN)
    accepted = arguments.drafts / 2 if arguments.accepted is None else arguments.accepted
    if not 0 <= accepted <= arguments.drafts:
        parser.error(f"--accepted must be between 0 and --drafts {arguments.drafts}, got {accepted:g}")
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1 + accepted}
    given = {**METHODS[arguments.draft_method], "num_speculative_tokens": arguments.drafts, **synthetic}
    arguments.drafts = given if arguments.drafts else None
    return arguments


def find_model(name: str) -> Path:
    """Return the folder of a model's config.json."""
    for folder in (Path(name), CONFIGS / name, HERE / "configs" / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise SystemExit(f"--model must be a folder with a config.json or a name in {CONFIGS}, got {name}")


def merged(config: dict, changes: dict) -> dict:
    """Return a configuration with changes, which may be nested."""
    return config | {
        name: merged(config[name], value) if isinstance(value, dict) and isinstance(config.get(name), dict) else value
        for name, value in changes.items()
    }


def overrides(model: Path, num_layers: int | None, rank_of: int) -> dict:
    """Return the changes to a model's config.json: the layers, and the sizes of one of `rank_of` ranks."""
    config = json.loads((model / "config.json").read_text())
    if "text_config" in config:
        changes = changes_of(config["text_config"], model.name, num_layers, rank_of)
        return {"text_config": changes} if changes else {}
    return changes_of(config, model.name, num_layers, rank_of)


def changes_of(config: dict, name_of_model: str, num_layers: int | None, rank_of: int) -> dict:
    """Return the changes to the configuration of a language model."""
    result = {}
    if num_layers:
        result = {name: config[name][:num_layers] for name in LISTS if config.get(name)}
        if "layer_types" not in result and (interval := config.get("full_attention_interval")):
            kinds = ("full_attention" if i % interval == 0 else "linear_attention" for i in range(1, num_layers + 1))
            result["layer_types"] = list(kinds)
        result["num_hidden_layers"] = num_layers
    if rank_of == 1:
        return result
    for name in DIVIDED:
        if name not in config:
            continue
        share, rest = divmod(config[name], rank_of)
        if name == "num_key_value_heads":
            share, rest = max(share, 1), rest if share else 0
        if rest:
            raise SystemExit(f"--rank-of must divide {name}={config[name]} of {name_of_model}, got {rank_of}")
        result[name] = share
    if "kv_lora_rank" not in config:  # keeps the head size, which otherwise follows from the number of heads
        result["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return result


def environment(side: str) -> dict[str, str]:
    """Return the environment of a measuring process; without the plugin, all other installed plugins stay."""
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


@contextlib.contextmanager
def started(command: list[str], variables: dict[str, str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """Run a command with its output in a log. At the end none of its processes stays, as the next command needs the GPUs."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, env=variables, start_new_session=True, **streams, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_side(job: dict, log: Path, on_event: Callable[[dict], None]) -> dict:
    """Run one measuring process, and return its result or {"error": why}, with the completed batch sizes."""
    read_end, write_end = os.pipe()
    command = [sys.executable, str(WORKER), json.dumps({**job, "pipe": write_end})]
    variables = {"VLLM_ROCM_OPS_MEASURE": MEASURE_S} | environment(job["side"])
    final, measured = {"error": "the process ended early"}, {"batches": []}
    begin = time.monotonic()
    with started(command, variables, log, pass_fds=[write_end]) as process, os.fdopen(read_end) as pipe:
        os.close(write_end)
        overdue = threading.Timer(job["timeout"], os.killpg, (process.pid, signal.SIGKILL))
        overdue.start()
        try:
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
    if "error" in final:
        if process.returncode == -signal.SIGKILL and time.monotonic() - begin >= job["timeout"]:
            final["error"] = f"it took longer than --timeout {job['timeout']:g}"
        final["log_tail"] = tail(log)
    return final | measured


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    return log.read_text(errors="replace").splitlines()[-LINES_OF_A_FAILURE:]


def benchmark(arguments: argparse.Namespace) -> dict:
    """Measure all models on all sides."""
    from tqdm import tqdm

    profiled = [] if arguments.profile is None else arguments.profile or arguments.batch_size
    jobs = [
        {
            "name": Path(name).name,
            "model": str(find_model(name)),
            "side": side,
            "pair": pair,
            "batch_sizes": arguments.batch_size,
            "profile": [] if pair else profiled,
            "overrides": overrides(find_model(name), arguments.num_layers, arguments.rank_of),
            **{option: getattr(arguments, option) for option in COPIED},
        }
        for name in arguments.model
        for pair in range(arguments.pairs)
        # The sides alternate in order, as a host warms up and cools down.
        for side in (reversed(SIDES) if pair % 2 else SIDES)
        if side in arguments.side
    ]
    firsts = {job["name"]: number for number, job in reversed([*enumerate(jobs)])}.values()
    starts = arguments.num_starts_warmup if "with" in arguments.side else 0
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
            bar.set_description(f"{job['name']}, {SIDES[job['side']]}: loading")

            def on_event(event: dict, job=job) -> None:
                bar.set_description(f"{job['name']}, {SIDES[job['side']]}, batch {event['batch_size']}")
                bar.set_postfix_str(f"{event['decode_ms']:.2f} ms/token", refresh=False)
                bar.update()

            logs = arguments.output_json.parent / "logs"
            for warm_up in range(starts if number in firsts else 0):
                once = {"side": "with", "num_iters_warmup": 1, "num_iters": 0, "profile": []}
                run_side(job | once, logs / f"{job['name']}-warmup-{warm_up}.log", lambda event: None)
            start = f"-{job['pair']}" if arguments.pairs > 1 else ""
            log = logs / f"{job['name']}-{job['side']}{start}.log"
            result = run_side(job, log, on_event)
            bar.update((number + 1) * iterations - bar.n)
            run = {"model_id": job["name"], "side": job["side"], "log": f"{log.parent.name}/{log.name}"}
            report |= {name: result[name] for name in ("hardware", "versions") if name in result}
            report["results"] += [summarize(job, batch) for batch in result["batches"]]
            kept = ("error", "log_tail", "start", "op_stats", "seams", "reach", "timings", "profile", "profile_error")
            report["runs"].append(run | {name: result[name] for name in kept if name in result})
            arguments.output_json.write_text(json_text(report) + "\n")  # keeps completed measurements
        bar.set_description("done")
        bar.set_postfix_str("")
    return report


def without_paths(words: list[str]) -> list[str]:
    """Return a command without the output options."""
    outputs = ("--output-json", "--plot")
    return [word for before, word in zip(["", *words], words) if word not in outputs and before not in outputs]


def commit() -> str:
    """Return the commit of this checkout, with `+` if files differ, or "" outside one."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print the report. Returns 1 if a side with the plugin failed."""
    arguments = parse_arguments(argv)
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
