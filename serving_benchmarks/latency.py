"""Benchmark decode latency in vLLM's engine, with and without the plugin.

    python serving_benchmarks/latency.py --model tiny-llama llama-3.1-405b-fp8 --num-layers 4 --batch-size 1 8 32

Weights are random; nothing is downloaded. For each model, vLLM runs without and with the plugin, in separate processes with the same
seed, `--pairs` times, as engine starts differ. Every batch size has warm-up and measured iterations of prompts with --input-len tokens
that generate --output-len tokens. The report has the median time per output token, from the engine's time stamps of the first and last
token of a request, and the median speedup over the pairs; time to first token (prefill: --input-len 2048 --output-len 2); the time of a
Python loop, to gauge the host's speed; and time and memory of starts (engine_start.py). `--profile` breaks down the decode step
(decode_profile.py). The engine runs in the measuring process
(VLLM_ENABLE_V1_MULTIPROCESSING=1 gives it its own).

`--rank-of 8` simulates one of eight tensor parallel ranks on one GPU: its heads, widths and vocabulary, without collectives. On an
NVIDIA GPU the plugin needs VLLM_ROCM_OPS_ON_NVIDIA=1, on a CPU VLLM_ROCM_OPS_ON_CPU=1. Failures are reported with the end of their log.
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
import threading
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import decode_profile
from latency_report import SIDES, plot, summarize, table

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "vllm_rocm_ops" / "models"
PLUGIN = "rocm_ops"
SECONDS_TO_END = 30
LINES_OF_A_FAILURE = 40
MIN = {"batch_size": 1, "input_len": 1, "output_len": 2, "num_iters": 1, "rank_of": 1, "pairs": 1}


DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""Sizes in config.json that tensor parallel ranks divide; each rank has at least one KV head."""


def add_model_arguments(add: Callable) -> None:
    """Add the options that select models and how they run."""
    shipped = ", ".join(sorted(path.name for path in CONFIGS.iterdir()))
    add("--model", nargs="+", default=["tiny-llama"], help=f"folders with a config.json, or shipped models: {shipped}")
    add("--num-layers", type=int, help="number of layers to keep (default: all)")
    add("--rank-of", type=int, default=1, help="tensor parallel size of which to run one rank (default: %(default)s)")
    add("--tensor-parallel-size", type=int, default=1, help="number of GPUs (default: %(default)s)")
    add("--dtype", default="auto", help="activation dtype (default: the model's)")
    add("--kv-cache-dtype", default="auto", help="KV cache dtype, e.g. fp8 (default: the model's)")
    add("--enforce-eager", action="store_true", help="disable compilation and graph capture")
    add("--seed", type=int, default=0, help="seed of weights and prompts (default: %(default)s)")
    add(
        "--side",
        nargs="+",
        choices=list(SIDES),
        default=list(SIDES),
        help="with the plugin, without it, or both (default)",
    )
    add(
        "--random-experts",
        action="store_true",
        help="random routers that spread tokens over experts (random_experts.py)",
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_model_arguments(add)
    add("--batch-size", type=int, nargs="+", default=[1], help="batch sizes, in sequences (default: %(default)s)")
    add("--input-len", type=int, default=1, help="prompt length, in tokens (default: %(default)s)")
    add("--output-len", type=int, default=128, help="output length, in tokens, at least 2 (default: %(default)s)")
    add("--num-iters", type=int, default=30, help="number of measured iterations (default: %(default)s)")
    add("--num-iters-warmup", type=int, default=10, help="number of warm-up iterations (default: %(default)s)")
    add("--pairs", type=int, default=1, help="engine starts per side, alternating (default: %(default)s)")
    add(
        "--profile",
        type=int,
        nargs="*",
        metavar="BATCH",
        help="profile decode steps at these batch sizes (without values: all)",
    )
    add("--timeout", type=float, default=3600, help="time limit per engine start, in seconds (default: %(default)s)")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="further arguments for vllm.LLM")
    add("--output-json", type=Path, default=HERE / "out" / "latency.json", help="report file (default: %(default)s)")
    add("--plot", type=Path, default=HERE / "out" / "latency.png", help="plot file (default: %(default)s)")
    add("--commit", help="commit of the measured code (default: this checkout's)")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)  # a job of a measuring process
    arguments = parser.parse_args(argv)
    for name, least in MIN.items():
        values = getattr(arguments, name)
        if min(values if isinstance(values, list) else [values]) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {values}")
    return arguments


def find_model(name: str) -> Path:
    """Return the folder of a model's config.json."""
    for folder in (Path(name), CONFIGS / name):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise SystemExit(f"--model must be a folder with a config.json or a name in {CONFIGS}, got {name}")


def overrides(model: Path, num_layers: int | None, rank_of: int) -> dict[str, int]:
    """Return the changes to a model's config.json: the number of layers, and the sizes of one of `rank_of` ranks."""
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
    if "kv_lora_rank" not in config:  # keeps the head size, which otherwise follows from the number of heads
        result["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return result


# In the measuring process


def host_us() -> float:
    """Time a fixed Python loop in microseconds, to gauge the host's speed."""
    start = time.perf_counter()
    for _ in range(20_000):
        pass
    return 1e6 * (time.perf_counter() - start)


def measure(job: dict, report: Callable[[dict], None]) -> None:
    """Run one model on one side, and report every iteration, every batch size and the final results."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    with_ops = job["side"] == "with"
    longest = job["input_len"] + job["output_len"]
    settings = {
        "model": job["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # enables the time stamps
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
    settings["worker_extension_cls"] = f"{'random_experts' if job['random_experts'] else 'engine_start'}.Extension"
    settings |= job["engine_args"]
    settings["hf_overrides"] = job["overrides"] | settings.get("hf_overrides", {})
    begin = time.perf_counter()
    llm = LLM(**settings)
    start_s = time.perf_counter() - begin
    if not with_ops and "vllm_rocm_ops" in sys.modules:
        raise RuntimeError("the plugin was loaded on the side without it")

    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def sampling(tokens: int) -> SamplingParams:
        temperature = 1.0 if job["random_experts"] else 0.0
        return SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def prompts_of(batch_size: int) -> list[dict]:
        tokens = [[(7 * i + 31 * row + 3) % vocabulary for i in range(job["input_len"])] for row in range(batch_size)]
        return [{"prompt_token_ids": row} for row in tokens]

    report({"hardware": hardware(), "versions": versions()})
    for batch_size in job["batch_sizes"]:
        prompts, latencies, decode, first, host = prompts_of(batch_size), [], [], [], []
        for iteration in range(job["num_iters_warmup"] + job["num_iters"]):
            loop_us = host_us()
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling(job["output_len"]), use_tqdm=False)
            latency = time.perf_counter() - start
            spans = [output.metrics.last_token_ts - output.metrics.first_token_ts for output in outputs]
            per_token = statistics.median(spans) / (job["output_len"] - 1)
            if iteration >= job["num_iters_warmup"]:
                latencies.append(latency)
                host.append(loop_us)
                decode.append(1e3 * per_token)
                first.append(1e3 * statistics.median(output.metrics.first_token_latency for output in outputs))
            report({"batch_size": batch_size, "decode_ms": 1e3 * per_token})
        times = {"latencies": latencies, "decode_ms": decode, "ttft_ms": first, "host_us": host}
        report({"batch": {"batch_size": batch_size, **times}})
    ranks = llm.collective_rpc("engine_start")
    start = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    result = {"start": {"start_s": start_s, **start, "kv_blocks": blocks}}
    try:
        recorded = ((size, decode_profile.record(llm, prompts_of(size), sampling)) for size in job["profile"])
        result["profile"] = {size: ranks for size, ranks in recorded if ranks}
    except Exception as error:  # noqa: BLE001  the latencies are valid without a profile
        traceback.print_exc()
        result["profile_error"] = f"{type(error).__name__}: {error}".strip()
    if with_ops:
        result["op_stats"] = llm.collective_rpc("vllm_rocm_ops_stats")[0]
        result["seams"] = llm.collective_rpc("vllm_rocm_ops_seams")[0]
        result["reach"] = llm.collective_rpc("vllm_rocm_ops_reach")[0]
    report({"result": result})


def hardware() -> str:
    """Return the hardware."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ": CPU"
    )
    return f"{len(os.sched_getaffinity(0))} cores of {cpu.partition(': ')[2]}"


def versions() -> dict[str, str]:
    """Return the versions of Python, torch, vLLM, HIP and the plugin."""
    import importlib.metadata

    import torch
    import vllm

    found = {"python": sys.version.split()[0], "torch": torch.__version__, "vllm": vllm.__version__}
    return found | {"hip": torch.version.hip or "", "vllm_rocm_ops": importlib.metadata.version("vllm-rocm-ops")}


def worker(job: dict) -> None:
    """Run a job in a measuring process; events go through a pipe as lines of JSON."""
    with os.fdopen(job["pipe"], "w", buffering=1) as pipe:

        def report(event: dict) -> None:
            pipe.write(json.dumps(event) + "\n")

        try:
            measure(job, report)
        except BaseException as error:  # noqa: BLE001  any failure is the result
            traceback.print_exc()
            report({"error": f"{type(error).__name__}: {error}".strip()})


# In the process that the user started


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


def run_side(job: dict, log: Path, on_event: Callable[[dict], None]) -> dict:
    """Run one measuring process, and return its result or {"error": why}, with the completed batch sizes."""
    read_end, write_end = os.pipe()
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps({**job, "pipe": write_end})]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment(job["side"]),
            pass_fds=[write_end],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    os.close(write_end)
    final, measured = {"error": "the process ended early"}, {"batches": []}
    overdue = threading.Timer(job["timeout"], os.killpg, (process.pid, signal.SIGKILL))
    begin = time.monotonic()
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
        # The next side needs the GPUs: no process of this one may stay, including workers.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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
        # The sides alternate in order, as a host warms up and cools down.
        for side in (reversed(SIDES) if pair % 2 else SIDES)
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
            bar.set_description(f"{job['name']}, {SIDES[job['side']]}: loading")

            def on_event(event: dict, job=job) -> None:
                bar.set_description(f"{job['name']}, {SIDES[job['side']]}, batch {event['batch_size']}")
                bar.set_postfix_str(f"{event['decode_ms']:.2f} ms/token", refresh=False)
                bar.update()

            start = f"-{job['pair']}" if arguments.pairs > 1 else ""
            log = arguments.output_json.parent / "logs" / f"{job['name']}-{job['side']}{start}.log"
            found = run_side(job, log, on_event)
            bar.update((number + 1) * iterations - bar.n)
            run = {"model_id": job["name"], "side": job["side"], "log": f"{log.parent.name}/{log.name}"}
            report |= {name: found[name] for name in ("hardware", "versions") if name in found}
            report["results"] += [summarize(job, batch) for batch in found["batches"]]
            kept = ("error", "log_tail", "start", "op_stats", "seams", "reach", "profile", "profile_error")
            report["runs"].append(run | {k: found[k] for k in kept if k in found})
            arguments.output_json.write_text(json.dumps(report, indent=1) + "\n")  # keeps completed measurements
        bar.set_description("done")
        bar.set_postfix_str("")
    return report


def without_paths(words: list[str]) -> list[str]:
    """Return a command without the output options."""
    outputs = ("--output-json", "--plot")
    return [word for before, word in zip(["", *words], words) if word not in outputs and before not in outputs]


def commit() -> str:
    """Return the commit of this checkout, with `+` if files differ, or "" outside one."""
    try:
        git = ["git", "-C", str(HERE)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + "+" * bool(changed)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print the report. Returns 1 if a side with the plugin failed."""
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
