"""A server of vLLM's with the ops for server_load.py: its command, its processes, their memory, and the errors in its log."""

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
TESTS = ROOT / "tests" / "vllm"
sys.path += [str(ROOT / "serving_benchmarks"), str(TESTS)]
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
"""Lines of vLLM's about a bad request."""


def errors_of(log: str) -> list[str]:
    """The lines of a log that are errors, but for those about bad requests."""
    return [line for line in log.splitlines() if ERROR.search(line) and not REFUSED.search(line)]


class Server:
    """`vllm serve` with its processes and its log."""

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], folder: pathlib.Path, spawn: Callable
    ):
        self.name, self.log, self.port = name, folder / f"{name}.log", serve.free_port()
        self.process = spawn([*command, "--port", str(self.port)], environment, self.log)
        self.url, self.family = f"http://127.0.0.1:{self.port}", {}

    def processes(self) -> list[psutil.Process]:
        """Those of the server that run; all that were ever seen are kept in `family`."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            self.family |= {process.pid: process for process in (root, *root.children(recursive=True))}
        return [process for process in self.family.values() if is_alive(process)]

    def bytes(self) -> int:
        """Of memory that its processes have."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    async def up(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not await asyncio.to_thread(serve.answers, f"{self.url}/health"):
            if self.process.poll() is not None:
                raise Wrong(f"{self.name} ended with exit status {self.process.poll()} before it was up: {self.tail()}")
            if time.monotonic() > end:
                raise Wrong(f"{self.name} was not up after {seconds:g} s: {self.tail()}")
            self.processes()
            await asyncio.sleep(0.2)
        self.processes()

    async def ended(self, seconds: float) -> float:
        """Seconds until all its processes have ended. Raises `Wrong` where that takes longer than it may."""
        start = time.monotonic()
        while self.process.poll() is None or self.processes():
            if time.monotonic() - start > seconds:
                left = ", ".join(f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in self.processes())
                raise Wrong(f"{self.name} has processes after {seconds:g} s: {left}")
            await asyncio.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-30:])


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; init may take a while to reap one that has ended."""
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
    """A folder with a model, and the servers that were started with it."""

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
        self.environment = (
            serve.latency.environment("with")
            | {
                "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, TESTS, serve.named_vllm(folder)))),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(folder / "cache"),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
                "MALLOC_ARENA_MAX": "2",  # so that memory that is freed goes back, and what is left is a leak
                "MALLOC_MMAP_THRESHOLD_": "65536",
                "MALLOC_TRIM_THRESHOLD_": "65536",
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",  # else oneDNN keeps 1024 products, one for each size that batches have
            }
        )
        cpu = {"VLLM_ROCM_OPS_ON_CPU": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        self.environment = (cpu if self.on_cpu else {"VLLM_ROCM_OPS_ON_NVIDIA": "1"}) | self.environment

    def tables(self, stage: str) -> pathlib.Path:
        """Where the servers of a stage keep what they measure."""
        return self.folder / f"tables-{stage}"

    def start(self, name: str, stage: str = "load", pair_seconds: float | None = None) -> Server:
        """A server. On CPU it measures as on a GPU if pairs of kernels are to take so many seconds."""
        logs = self.arguments.logs or self.folder
        logs.mkdir(parents=True, exist_ok=True)
        more = {} if pair_seconds is None else {"SERVER_LOAD_PAIR_SECONDS": str(pair_seconds)}
        more["VLLM_ROCM_OPS_TABLES"] = str(self.tables(stage))
        self.servers.append(Server(name, self.command, self.environment | more, logs, self.spawn))
        return self.servers[-1]
