"""Run vLLM servers with the plugin for server_load.py: command, processes, memory, and errors in the log."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import torch
from load_requests import ADAPTER, BASE, Wrong

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS = [ROOT / "tests", ROOT / "tests" / "vllm"]
sys.path += map(str, (ROOT / "serving_benchmarks", *TESTS))
import checkpoints
import serve

del sys.path[-2:]
KINDS = tuple(checkpoints.QUANTIZATION)
LONGEST = 1024  # tokens of a request with its answer
OPTIONS = (
    f"--host 127.0.0.1 --served-model-name {BASE} --dtype bfloat16 --seed 0 --max-model-len {LONGEST} "
    "--max-num-seqs 16 --max-num-batched-tokens 256 --enable-prefix-caching --block-size 32 --num-gpu-blocks-override 64 "
    "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes 268435456 --distributed-executor-backend uni "
    "--enable-lora --max-loras 2 --max-lora-rank 8 --worker-extension-cls server_worker.Extension"
)
ERROR = re.compile(
    r"\b(ERROR|CRITICAL|FATAL)\b|Traceback|Segmentation fault|Exception ignored|never awaited|WARNING.*vllm-rocm-ops"
)
REFUSED = re.compile(r"\[(validation|exception)\.py:\d+\]")
"""Lines of vLLM's log about a bad request."""


def errors_of(log: str) -> list[str]:
    """Return the error lines of a log, except those about bad requests."""
    return [line for line in log.splitlines() if ERROR.search(line) and not REFUSED.search(line)]


class Server:
    """Run `vllm serve`, with its processes and its log."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], folder: pathlib.Path, spawn: Callable
    ):
        self.name, self.log, self.port = name, folder / f"{name}.log", serve.free_port()
        self.process = spawn([*command, "--port", str(self.port)], environment, self.log)
        self.url, self.family = f"http://127.0.0.1:{self.port}", {}

    def processes(self) -> list[psutil.Process]:
        """Return the server's running processes; `family` keeps all that were ever seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self.family |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return [process for process in self.family.values() if is_alive(process)]

    def bytes(self) -> int:
        """Return the memory of its processes in bytes."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    async def up(self, seconds: float) -> None:
        """Wait until the server is up. Raises `Wrong`."""
        end = time.monotonic() + seconds
        while not await asyncio.to_thread(serve.answers, f"{self.url}/health"):
            if self.process.poll() is not None:
                raise Wrong(f"{self.name} exited with status {self.process.poll()} during startup: {self.tail()}")
            if time.monotonic() > end:
                raise Wrong(f"{self.name} was not up after {seconds:g} s: {self.tail()}")
            self.processes()
            await asyncio.sleep(0.2)
        self.processes()

    async def ended(self, seconds: float) -> float:
        """Return the seconds until all its processes have ended. Raises `Wrong` after `seconds`."""
        start = time.monotonic()
        while self.process.poll() is None or self.processes():
            if time.monotonic() - start > seconds:
                left = ", ".join(f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in self.processes())
                raise Wrong(f"{self.name} has processes after {seconds:g} s: {left}")
            await asyncio.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def text(self) -> str:
        """Return the log."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.text().splitlines()[-30:])


def is_alive(process: psutil.Process) -> bool:
    """True if a process runs; init may take a while to reap an ended one."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def spawn(command: list[str], environment: dict[str, str], log: pathlib.Path) -> subprocess.Popen:
    """Start a command of vLLM's."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [*serve.VLLM, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class Session:
    """A folder with a model, and its servers."""

    def __init__(self, arguments: argparse.Namespace, folder: pathlib.Path, spawn: Callable = spawn):
        self.arguments, self.folder, self.spawn, self.servers = arguments, folder, spawn, []
        self.on_cpu = not torch.cuda.is_available()
        self.tie = arguments.tie or (0.3 if self.on_cpu else 3.0)
        model = checkpoints.build(
            folder / "model", arguments.model, arguments.kind, max_position_embeddings=2 * LONGEST
        )
        self.config = json.loads((model / "config.json").read_text())
        serve.save_tokenizer(model, self.config["vocab_size"])
        adapter = checkpoints.build_adapter(folder / "adapter", self.config)
        self.command = ["serve", str(model), *shlex.split(OPTIONS), "--lora-modules", f"{ADAPTER}={adapter}"]
        self.command += ["--enforce-eager"] * self.on_cpu + arguments.server_args
        self.environment = serve.latency.environment("with") | {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, *TESTS, serve.named_vllm(folder)))),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
            "MALLOC_ARENA_MAX": "2",  # so that freed memory returns to the system, and growth is a leak
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",  # else oneDNN caches 1024 GEMMs, one per batch size
        }
        cpu = {"VLLM_ROCM_OPS_ON_CPU": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        self.environment = (cpu if self.on_cpu else {"VLLM_ROCM_OPS_ON_NVIDIA": "1"}) | self.environment

    def tables(self, stage: str) -> pathlib.Path:
        """Return the folder of measurements for a stage's servers."""
        return self.folder / f"tables-{stage}"

    def start(self, name: str, stage: str = "load", pair_seconds: float | None = None) -> Server:
        """Start a server. On a CPU it measures as on a GPU if `pair_seconds` is given, the time per pair of kernels."""
        logs = self.arguments.logs or self.folder
        logs.mkdir(parents=True, exist_ok=True)
        more = {} if pair_seconds is None else {"SERVER_LOAD_PAIR_SECONDS": str(pair_seconds)}
        more["VLLM_ROCM_OPS_TABLES"] = str(self.tables(stage))
        self.servers.append(Server(name, self.command, self.environment | more, logs, self.spawn))
        return self.servers[-1]
