"""Test `vllm serve` with the ops under load, by server_load.py, and that the load finds faults."""

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import load_requests
import processes
import psutil
import pytest
import server_load
from aiohttp import web
from fakes import Fake
from load_requests import Ask, Wrong, connected
from marks import full

FORKED = """
import multiprocessing, sys
sys.argv = ["vllm", *{command!r}]
from vllm.model_executor.models import registry
from vllm.utils import system_utils
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
registry._run_in_subprocess = lambda look: look()
from vllm.entrypoints.cli.main import main
main()
"""
"""Start vLLM's processes by a fork, as on a GPU by default.

On CPU vLLM spawns them, which takes long.
"""


class Forked:
    """`vllm serve` in a fork of a process that has imported most."""

    def __init__(self, command: list[str], environment: dict[str, str], log: pathlib.Path):
        code, path = FORKED.format(command=command), environment["PYTHONPATH"].split(os.pathsep)
        self.process = processes.FORKS.Process(target=processes.begin, args=(code, path, environment, str(log)))
        self.process.start()
        self.pid, self.terminate = self.process.pid, self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode


def session_of(folder: pathlib.Path, *options: str) -> server_load.Session:
    return server_load.Session(server_load.parse([*options]), folder, Forked)


@full
@pytest.mark.slow
def test_a_server_under_load(tmp_path, capsys):
    """It runs for seconds, with emulated kernels for some requests, then with a wrong op, which is found; then SIGTERM."""
    short = ["--seconds", "6", "--rate", "8", "--of-each", "1", "--growth", "500", "--start-timeout", "200"]
    session = session_of(tmp_path, *short)

    async def run() -> list[str]:
        server, said = session.start("server"), []
        try:
            await server.up(session.arguments.start_timeout)
            async with connected(server.url) as client:
                for stage in (server_load.load, server_load.emulate):
                    said.append(await stage(session, server, client))
                ask = Ask("short", (5, 6, 7), 8)
                alone = await client.alone(ask)
                await client.call("load_fault", "silu_and_mul", 0.5)
                with pytest.raises(Wrong, match="the log probability of token|less likely than the best"):
                    load_requests.compare(ask.kind, await client.answer(ask), alone, session.tie)
                    await client.explained(ask, alone, session.tie)
                await client.call("load_fault", "silu_and_mul", 2.0)
                said.append(await server_load.end(session, server, client))
        finally:
            server.kill()
        return said

    said = asyncio.run(run())
    kinds = {ask.kind for ask in server_load.pool_of(session, 1)}
    assert all(f" {kind}" in said[0] for kind in kinds) and " 0 wrong" in said[0]
    assert "scaled_mm" in said[1] and "end: in" in said[2]
    print(*said, sep="\n")


@full
@pytest.mark.slow
def test_the_command(tmp_path):
    """It runs whole, as a user starts it, for a minute instead of five. No variable names the folders that it imports."""
    command = [sys.executable, server_load.__file__, "--seconds", "60", "--logs", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


# Faults that the load finds, with a fake server in place of vLLM's


BEST, BAD = 501, 502


class FakeServer:
    """A server with metrics whose tokens follow from the prompt; `changed` may change the answers."""

    def __init__(self, changed=lambda found, body: found):
        self.changed, self.running, self.asked = changed, 0, []

    def read(self, token: int) -> dict:
        """Return the most likely token after a token of a prompt, and its log probability."""
        return {str(BEST): {"logprob": -0.5}, str(token): {"logprob": -9.0 if token == BAD else -0.5}}

    async def complete(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = {"model": "none"}
        self.asked.append(body)
        prompt = body.get("prompt") or [-1]
        refused = (
            body["model"] not in ("base", "adapter")
            or not 0 < body["max_tokens"] < 10**5
            or len(prompt) > 10**4
            or not 0 <= min(prompt) <= max(prompt) < 10**6
            or body["temperature"] != 0
            or body["logprobs"] > 20
            or "logit_bias" in body
        )
        if refused:
            return web.json_response(self.changed({"error": {"message": "no"}}, body), status=400)
        if body.get("stream"):
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                for _ in range(body["max_tokens"]):
                    await response.write(b"data: {}\n\n")
                    await asyncio.sleep(0.01)
            return response
        tokens = [(sum(prompt) + place) % 500 for place in range(body["max_tokens"])]
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-0.5] * len(tokens)}, "finish_reason": "length"}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *map(self.read, prompt[1:])]
        found = self.changed({"choices": [choice]}, body)
        return web.json_response(found, status=500 if "error" in found else 200)

    async def metrics(self, request: web.Request) -> web.Response:
        names = "prefix_cache_hits_total", "num_preemptions_total", "num_requests_waiting", "kv_cache_usage_perc"
        lines = [f'vllm:{name}{{engine="0"}} {len(self.asked) if "hits" in name else 0.0}' for name in names]
        return web.Response(text="\n".join([*lines, f"vllm:num_requests_running {self.running}"]))

    async def call(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [{"scaled_mm": {"a kernel": 7}}]})


class Growing:
    """A server without processes, whose memory grows by some MiB with each reading."""

    def __init__(self, by: float):
        self.by, self.size = by, 100.0

    def bytes(self) -> int:
        self.size += self.by
        return int(self.size * server_load.MIB)


def under_load(fake: FakeServer, growing: float = 0.0) -> str:
    """Return the stage's report on a fake server."""
    options = ["--seconds", "0.8", "--rate", "100", "--of-each", "1", "--growth", "5"]
    session = Fake(arguments=server_load.parse(options), config={"vocab_size": 512}, tie=0.5)

    async def run() -> str:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", fake.complete), web.get("/metrics", fake.metrics)])
        app.add_routes([web.post("/collective_rpc", fake.call)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = site._server.sockets[0].getsockname()[1]
            async with connected(f"http://127.0.0.1:{port}") as client:
                return await server_load.load(session, Growing(growing), client)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """Shorten the load for fake servers."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(server_load, "SAMPLE_SECONDS", 0.02)
        monkeypatch.setattr(server_load, "QUIET_WITHIN", 0.3)


def of_some(tokens=list, logprobs=list, reason: str = "length") -> FakeServer:
    """Return a server that changes its answers to whole requests after the lone runs."""
    seen = []

    def changed(found: dict, body: dict) -> dict:
        seen.append(body)
        if len(seen) > 12 and "choices" in found and "prompt_logprobs" not in body:
            [choice] = found["choices"]
            said = {"token_logprobs": logprobs(choice["logprobs"]["token_logprobs"])}
            choice.update(token_ids=tokens(choice["token_ids"]), logprobs=said, finish_reason=reason)
        return found

    return FakeServer(changed)


def test_a_server_that_is_right_is_right():
    fake = FakeServer()
    said = under_load(fake)
    assert " 0 wrong" in said and " 0 answers differ" in said and "7 calls of ops" in said
    streams = sum("stream" in body for body in fake.asked)
    assert streams and {body["model"] for body in fake.asked} >= {"base", "adapter", "another", "none"}


@pytest.mark.parametrize(
    ("fake", "growing", "wrong"),
    [
        (of_some(tokens=lambda found: [BAD] * len(found)), 0, r"is 8\.50 less likely than the best, limit 0\.5"),
        (
            of_some(logprobs=lambda found: [*found[:-1], -1.1]),
            0,
            r"of token \d+ \(.*\) is -1\.100, alone it is -0\.500",
        ),
        (of_some(tokens=lambda found: found[:-1]), 0, r"\d+ of \d+ tokens \("),
        (of_some(reason="abort"), 0, "which ends by abort"),
        (of_some(logprobs=lambda found: [float("nan")] * len(found)), 0, "not finite"),
        (FakeServer(lambda found, body: {} if "error" in found else found), 0, "is answered by 400: {}"),
        (FakeServer(), 1.0, r"memory grew by \d+\.\d MiB, limit 5"),
    ],
    ids=["tokens", "log probabilities", "too few", "aborted", "NaN", "no reason", "a leak"],
)
def test_faults_of_a_server_are_found_under_load(fake, growing, wrong):
    with pytest.raises(Wrong, match=wrong):
        under_load(fake, growing)


def test_requests_that_are_left_are_seen():
    fake = FakeServer()
    fake.running = 1
    with pytest.raises(Wrong, match="requests remain in the server after 0.3 s: {'num_requests_running': 1.0"):
        under_load(fake)


LOG = """
(APIServer pid=1) INFO 11-22 23:46:33 [api_utils.py:286] non-default args: {'log_level': 'error'}
(APIServer pid=1) ERROR 11-22 23:48:21 [validation.py:151] Traceback (most recent call last):
(APIServer pid=1) ERROR 11-22 23:48:21 [exception.py:16] Exception caught. Request id: cmpl-91d6045c0893d550
(APIServer pid=1) WARNING 11-22 23:46:33 [vllm.py:1703] Enforce eager set
INFO:     127.0.0.1:34442 - "POST /v1/completions HTTP/1.1" 400 Bad Request
"""
BAD_LINES = [
    "(EngineCore pid=2) ERROR 11-22 23:48:21 [core.py:1454] EngineCore encountered a fatal error.",
    "Traceback (most recent call last):",
    "(Worker pid=3) WARNING 11-22 23:46:56 [kernel_timing.py:249] vllm-rocm-ops: scaled_mm is off on this GPU",
    "Exception ignored in: <function f at 0x7f>",
    "sys:1: RuntimeWarning: coroutine 'f' was never awaited",
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_errors_in_a_log(line):
    assert server_load.errors_of(LOG) == []
    assert server_load.errors_of(LOG + line + "\n") == [line]


LEAVES = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"])
time.sleep(60)
"""


def test_a_process_that_is_left_is_seen(tmp_path):
    """This holds if its parent has ended, too."""

    def spawn(command, environment, log):
        return subprocess.Popen([sys.executable, "-c", LEAVES])

    server = server_load.Server("server", [], {}, tmp_path, spawn)
    while len(server.processes()) < 2:
        time.sleep(0.02)
    server.process.terminate()
    with pytest.raises(Wrong, match=r"server has processes after 0.5 s: \d+ .*signal.SIG_IGN"):
        asyncio.run(server.ended(0.5))
    server.kill()
    assert asyncio.run(server.ended(5)) < 5


def test_the_holder_of_a_lock_is_found(tmp_path):
    """It is found until its end."""
    code = "import sys, time; file = open(sys.argv[1], 'a'); print('open', flush=True); time.sleep(60)"
    lock = tmp_path / "a.lock"
    lock.touch()
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    other = psutil.Process(process.pid)
    try:
        process.stdout.readline()
        assert server_load.has_open(other, lock) and not server_load.has_open(psutil.Process(), lock)
    finally:
        process.kill()
        process.wait()
    assert not server_load.has_open(other, lock)


MEASURING = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
lock = open(folder / "a.lock", "a")
for _ in range(40):
    time.sleep(0.12)
    (folder / "a.running").write_text("it")
    time.sleep(0.03)
    (folder / "a.running").unlink()
"""


def test_a_process_is_stopped_where_it_measures_for_milliseconds(tmp_path, monkeypatch):
    """The many files that it has open take longer to inspect."""
    has_open = server_load.has_open
    monkeypatch.setattr(server_load, "has_open", lambda *of: time.sleep(0.06) or has_open(*of))

    def spawn(command, environment, log):
        log.touch()
        return subprocess.Popen([sys.executable, "-c", MEASURING, str(tmp_path / "tables")])

    server = server_load.Server("server", [], {}, tmp_path, spawn)
    options = Fake(start_timeout=20)
    session = Fake(arguments=options, tables=lambda stage: tmp_path / "tables")
    process = asyncio.run(server_load.stopped_while_it_measures(server, session))
    try:
        assert process.pid == server.process.pid and process.status() == psutil.STATUS_STOPPED
        assert (tmp_path / "tables" / "a.running").exists()
    finally:
        server.kill()
    assert asyncio.run(server.ended(5)) < 5 and (tmp_path / "tables" / "a.running").exists()


@pytest.mark.parametrize(
    ("files", "fits"),
    [
        (["a/measured-1.json", "a/measured-1.lock"], True),
        (["a/measured-1.json", "a/measured-1.lock", "a/measured-1.running"], False),
        (["a/measured-1.json", "a/measured-1.4711"], False),
        (["a/measured-1.json", "a/measured-2.json"], False),
        ([], False),
    ],
)
def test_the_folder_of_tables_has_one_table(tmp_path, files, fits):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"off": {}}')
    if fits:
        assert server_load.measured(tmp_path) == {"off": {}}
    else:
        with pytest.raises(Wrong, match="expected one table"):
            server_load.measured(tmp_path)
