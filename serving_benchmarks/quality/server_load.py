"""Test `vllm serve` with the plugin under load: answers as for lone requests, no leaks, no logged errors, clean shutdown.

    python serving_benchmarks/quality/server_load.py [--seconds 300] [--rate 4] [--model llama] [--kind token] [--stage load ...]

The server runs a small random model with a synthetic tokenizer and a LoRA adapter on vLLM's device; compiled on a GPU. The KV cache is
small, so requests wait and are preempted. The stages:

    second   two servers start at the same time with shared folders for caches and measurements, and must answer alike
    load     --rate requests per second for --seconds, up to --at-once in parallel: short, long, LoRA, shared-prefix, aborted and bad
             ones. Each answer must equal a lone run's (load_requests.py), no request may remain in the server, and its memory may grow
             by at most --growth MiB over the last two thirds. On a CPU, oneDNN must not cache a GEMM per batch size, by which a server
             without the plugin grows as much
    emulate  a few concurrent requests whose kernels are --arch's code in the emulator; not on a GPU
    end      SIGTERM during requests: the server ends within --end-within seconds, with all its processes
    kill     SIGKILL to the worker that measures the plugin's kernels: the server ends; the next one measures again, and no op is off

Only bad requests may cause error lines in a log. Prints a line for each stage. Returns 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import re
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator

import aiohttp
import load_requests
import psutil
from load_requests import ADAPTER, Answer, Ask, Client, Wrong, connected
from server_process import KINDS, LONGEST, Server, Session, errors_of

STAGES = "second", "load", "emulate", "end", "kill"
SAMPLE_SECONDS, MIB = 0.5, 1 << 20
PATIENCE = 3.0  # seconds that clients wait for a terminating server
QUIET_WITHIN = 30.0  # seconds until no request may remain in a server


def measured(tables: pathlib.Path) -> dict:
    """Return the only table of measurements, which must be complete, without other files left by a process."""
    files = [
        path for path in tables.rglob("*") if path.is_file() and path.suffix != ".lock" and path.name != "reached.json"
    ]
    if [path.suffix for path in files] != [".json"]:
        raise Wrong(f"the folder of measurements has {sorted(path.name for path in files)}, expected one table")
    return json.loads(files[0].read_text())


# The stages. Each returns its report.


async def second(session: Session) -> str:
    """Start two servers at the same time."""
    servers, begin = (
        [session.start(f"racing-{number}", "second", pair_seconds=0.1) for number in range(2)],
        time.monotonic(),
    )
    await asyncio.gather(*(server.up(session.arguments.start_timeout) for server in servers))
    took, table = time.monotonic() - begin, measured(session.tables("second"))
    if not table["shapes"] or table["off"]:
        raise Wrong(f"two servers measured {len(table['shapes'])} shapes, and {table['off']} is off")
    async with connected(servers[0].url) as one, connected(servers[1].url) as other:
        choices = [await client.call("vllm_rocm_ops_choices") for client in (one, other)]
        if choices[0] != choices[1]:
            raise Wrong(f"two servers chose differently: {choices}")
        for ask in pool_of(session, 1):
            if ask.is_compared:
                answers = [await client.alone(ask) for client in (one, other)]
                load_requests.compare(ask.kind, *answers, session.tie)
    for server in servers:
        check_log(server)
        server.process.terminate()
    ended = [await server.ended(session.arguments.end_within) for server in servers]
    said = f"{len(table['shapes'])} shapes measured once, the same choices and answers"
    return f"second: two servers started in {took:.0f} s, {said}; they ended in {max(ended):.1f} s"


def pool_of(session: Session, of_each: int) -> list[Ask]:
    """Return requests of each kind."""
    generator = random.Random(session.arguments.seed)
    return load_requests.asks(generator, LONGEST, session.config["vocab_size"], of_each)


async def load(session: Session, server: Server, client: Client) -> str:
    """Send requests under load, and check answers and memory."""
    arguments = session.arguments
    pool: dict[Ask, Answer | None] = {}
    for ask in pool_of(session, arguments.of_each):
        pool[ask] = await client.alone(ask) if ask.is_compared else None
    before = await client.metrics()
    samples: list[int] = []
    async with sampled(server, samples):
        seen = await load_requests.load(client, pool, session.tie, arguments)
    for ask, answer in seen.differ:
        try:
            await client.explained(ask, answer, session.tie)
        except Wrong as error:
            seen.wrong.append(str(error))
    metrics = await quiet(client)
    rises = {
        name: metrics[f"{name}_total"] - before[f"{name}_total"] for name in ("prefix_cache_hits", "num_preemptions")
    }
    ran = sum(sum(kernels.values()) for kernels in (await client.call("vllm_rocm_ops_stats"))[0].values())
    if not ran:
        seen.wrong.append("no op ran")
    if not rises["prefix_cache_hits"]:
        seen.wrong.append("no prefix was in the cache")
    growth, most = growth_of(samples)
    if growth > arguments.growth:
        seen.wrong.append(f"memory grew by {growth:.1f} MiB, limit {arguments.growth:g}")
    text = "\n  ".join(
        [
            f"load: {seen.told()}",
            f"{rises['prefix_cache_hits']:.0f} prefix cache hits, {rises['num_preemptions']:.0f} preemptions, {ran} calls of ops",
            f"memory {most:.0f} MiB, grew by {growth:+.1f} MiB in the last two thirds",
        ]
    )
    if seen.wrong:
        raise Wrong("\n  ".join([text, *dict.fromkeys(seen.wrong)]))
    return text


@contextlib.asynccontextmanager
async def sampled(server: Server, samples: list[int]) -> AsyncIterator[None]:
    """Sample a server's memory in bytes within the context."""

    async def sample() -> None:
        while True:
            samples.append(await asyncio.to_thread(server.bytes))
            await asyncio.sleep(SAMPLE_SECONDS)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()


def growth_of(samples: list[int]) -> tuple[float, float]:
    """Return the growth of median memory from the second to the last third of the samples, and the maximum, in MiB."""
    third = len(samples) // 3
    before, after = statistics.median(samples[third : 2 * third]), statistics.median(samples[-third:])
    return (after - before) / MIB, max(samples) / MIB


async def quiet(client: Client) -> dict[str, float]:
    """Return a server's metrics once no request remains in it."""
    end = time.monotonic() + QUIET_WITHIN
    while True:
        metrics = await client.metrics()
        left = {name: metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
        if not any(left.values()):
            return metrics
        if time.monotonic() > end:
            raise Wrong(f"requests remain in the server after {QUIET_WITHIN:g} s: {left}")
        await asyncio.sleep(0.2)


async def emulate(session: Session, server: Server, client: Client) -> str:
    """Send a few parallel requests to a server whose ops run in the emulator."""
    if not session.on_cpu:
        return "emulate: not on a GPU"
    base = Ask("emulated", (7, 11, 13), 2)
    asks = [base, Ask("emulated, LoRA", (17, 19), 2, ADAPTER)]
    alone = [await client.alone(ask) for ask in asks]
    await client.call("vllm_rocm_ops_reset_stats")
    await client.call("load_emulate", session.arguments.arch)
    begin = time.monotonic()
    answers = await asyncio.gather(*map(client.answer, asks))
    took, [stats] = time.monotonic() - begin, await client.call("vllm_rocm_ops_stats")
    await client.call("load_emulate", None)
    for ask, answer, wanted in zip(asks, answers, alone):
        equal, _ = load_requests.compare(ask.kind, answer, wanted, session.tie)
        if not equal:
            await client.explained(ask, answer, session.tie)
    ran = {op: n for op, kernels in stats.items() if (n := sum(c for k, c in kernels.items() if "fallback" not in k))}
    if not ran:
        raise Wrong(f"emulate: no kernel ran: {stats}")
    return f"emulate: {len(asks)} requests in {took:.1f} s by {sum(ran.values())} calls of {', '.join(sorted(ran))}"


async def end(session: Session, server: Server, client: Client) -> str:
    """Send SIGTERM during requests. Complete answers must be correct."""
    asks = [ask for ask in pool_of(session, 2) if ask.kind == "short"]
    alone = {ask: await client.alone(ask) for ask in asks}
    endless = Ask("endless", (23, 29), LONGEST // 2)
    outcomes = {"answered": 0, "cut off": 0}

    async def one(ask: Ask) -> None:
        try:
            answer = await client.answer(ask)
            outcomes["answered"] += 1
            if ask in alone and not load_requests.compare(ask.kind, answer, alone[ask], session.tie)[0]:
                raise Wrong(f"end: an answer ({ask.kind}) differs")
        except (aiohttp.ClientError, OSError):
            outcomes["cut off"] += 1
        except Wrong as error:
            if not re.search("answered by 5|answers 5|ends by abort", str(error)):
                raise
            outcomes["cut off"] += 1

    check_log(server)
    errors = len(server.text())
    running = [asyncio.create_task(one(ask)) for ask in (*asks, *[endless] * 12)]
    while (await client.metrics())["num_requests_running"] < 4:
        await asyncio.sleep(0.05)
    server.processes()
    server.process.terminate()
    begin = time.monotonic()
    _, waiting = await asyncio.wait(running, timeout=PATIENCE)
    for task in waiting:  # vLLM's front end waits for its clients
        task.cancel()
    await server.ended(session.arguments.end_within)
    seconds, status = time.monotonic() - begin, server.process.poll()
    for task in set(running) - waiting:
        task.result()
    if not waiting and not outcomes["cut off"]:
        raise Wrong("end: no request was running anymore")
    if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
        raise Wrong(f"end: exit status {status}: {server.tail()}")
    plugin = [line for line in errors_of(server.text()[errors:]) if "vllm_rocm_ops" in line or "vllm-rocm-ops" in line]
    if plugin:
        raise Wrong("\n  ".join(["end: errors of the plugin after SIGTERM:", *plugin[:20]]))
    cut = f"{outcomes['answered']} requests answered, {outcomes['cut off']} cut off, {len(waiting)} left waiting"
    return f"end: in {seconds:.1f} s with exit status {status}, {cut}"


def check_log(server: Server) -> None:
    """Raise `Wrong` if a log has an error line so far."""
    errors = errors_of(server.text())
    if errors:
        raise Wrong("\n  ".join([f"the log of {server.name} has {len(errors)} error lines:", *errors[:20]]))


async def kill(session: Session) -> str:
    """Kill the worker that holds the tables' lock during a measurement, and start another server."""
    server = session.start("killed", "kill", pair_seconds=1.0)
    (await stopped_while_it_measures(server, session)).kill()
    seconds = await server.ended(session.arguments.end_within)
    status = server.process.poll()
    if status == 0:
        raise Wrong("kill: a server whose worker was killed exits with status 0")
    again = session.start("again", "kill", pair_seconds=0.0)
    await again.up(session.arguments.start_timeout)
    table = measured(session.tables("kill"))
    async with connected(again.url) as client:
        states = [choice["state"] for choice in (await client.call("vllm_rocm_ops_choices"))[0]]
        await client.alone(Ask("short", (5, 6, 7), 4))
    if table["off"] or "off" in states or "measured" not in states:
        raise Wrong(f"kill: {table['off']} is off, the choices are {states}")
    said = errors_of(again.text())
    if len(said) != 1 or "a process died while timing" not in said[0]:
        raise Wrong("\n  ".join(["kill: the log of the next server must have only a warning of that:", *said[:20]]))
    again.process.terminate()
    await again.ended(session.arguments.end_within)
    shapes = f"the next measured {len(table['shapes'])} shapes"
    return f"kill: the server ended {seconds:.1f} s after its worker with exit status {status}; {shapes}"


async def stopped_while_it_measures(server: Server, session: Session) -> psutil.Process:
    """Return a server's process, suspended while it times a pair of kernels.

    On a GPU that takes milliseconds, so the holder of the tables' lock is found in advance.
    """
    end, tables = time.monotonic() + session.arguments.start_timeout, session.tables("kill")
    process = None
    while server.process.poll() is None and time.monotonic() < end:
        if process is None:
            locks = [*tables.rglob("*.lock")]
            processes = server.processes() if locks else ()
            process = next((child for lock in locks for child in processes if has_open(child, lock)), None)
        for mark in tables.rglob("*.running") if process else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
                await asyncio.sleep(0.05)
                if mark.exists():
                    return process
                process.resume()
        await asyncio.sleep(0.001)
    raise Wrong(f"kill: no process of the server was seen measuring: {server.tail()}")


def has_open(process: psutil.Process, path: pathlib.Path) -> bool:
    """True if a process has a file open, as the measuring one has the tables' lock."""
    try:
        return any(pathlib.Path(file.path).samefile(path) for file in process.open_files())
    except (psutil.Error, OSError):
        return False


async def run(session: Session) -> bool:
    """Run the stages and print their reports. Returns whether all passed."""
    stages, well = session.arguments.stage, True

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        if "second" in stages:
            say(await second(session))
        if {"load", "emulate", "end"} & {*stages}:
            server, begin = session.start("server"), time.monotonic()
            await server.up(session.arguments.start_timeout)
            say(f"start: {time.monotonic() - begin:.0f} s")
            async with connected(server.url) as client:
                for stage in (stage for stage in (load, emulate, end) if stage.__name__ in stages):
                    try:
                        say(await stage(session, server, client))
                        if stage is not end:
                            check_log(server)
                    except Wrong as error:
                        well = False
                        say(f"{error}\nFAILED: {stage.__name__}")
            server.kill()
        if "kill" in stages:
            say(await kill(session))
    except Wrong as error:
        well = False
        say(f"FAILED: {error}")
    finally:
        for server in session.servers:
            server.kill()
    return well


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="llama", choices=["llama"], help="model of checkpoints.py (default: %(default)s)")
    add("--kind", default="token", choices=KINDS, help="quantization (default: %(default)s)")
    add("--arch", default="gfx950", choices=["gfx942", "gfx950"], help="architecture to emulate (default: %(default)s)")
    add("--seconds", type=float, default=300, help="duration of the load stage, in seconds (default: %(default)s)")
    add("--rate", type=float, default=4, help="requests per second (default: %(default)s)")
    add("--at-once", type=int, default=32, help="maximum number of concurrent requests (default: %(default)s)")
    add("--of-each", type=int, default=4, help="distinct requests of each kind (default: %(default)s)")
    add("--stage", nargs="+", choices=STAGES, default=list(STAGES), help="stages to run (default: all)")
    add("--tie", type=float, help="log probability tolerance for rounding (default: 0.3 on a CPU, 3 on a GPU)")
    add("--growth", type=float, default=24, help="maximum memory growth, in MiB (default: %(default)s)")
    add("--end-within", type=float, default=30, help="time limit for a shutdown, in seconds (default: %(default)s)")
    add("--start-timeout", type=float, default=600, help="time limit for a start, in seconds (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the requests (default: %(default)s)")
    add("--server-args", type=shlex.split, default=[], metavar="TEXT", help="further arguments for vllm serve")
    add("--logs", type=pathlib.Path, help="folder to keep server logs in")
    arguments = parser.parse_args(argv)
    for name in ("seconds", "rate", "at_once", "of_each"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(arguments, name)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the stages. Returns 1 if one failed."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        return int(not asyncio.run(run(Session(arguments, pathlib.Path(folder)))))


if __name__ == "__main__":
    sys.exit(main())
