"""Requests of many kinds for a server of vLLM's, and whether its answers are right. For server_load.py.

An answer is right if it is that of the same request alone. Rounding depends on what else is in a batch, so that an answer may
differ where two tokens are as likely: one that differs is read once more, alone, by a request whose prompt is the first's prompt
and the answer. Each of its tokens must then be the most likely one at its place, or less likely by no more than a tie. In all
answers the reported log probabilities must be as near to those of the lone run, up to the first token that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import random
import uuid
from collections.abc import AsyncIterator

import aiohttp

WITHIN = 120.0  # seconds for one answer
BASE, ADAPTER = "base", "adapter"  # the names of the model and of the model with a LoRA adapter
PREFIX = 160  # tokens that prompts share


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: its kind, the tokens of its prompt, how many to generate, and after how many pieces its client goes away."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    model: str = BASE
    leaves_after: int | None = None

    @property
    def is_compared(self) -> bool:
        """Whether it has an answer that a lone run has too."""
        return self.kind != "bad" and self.leaves_after is None

    def body(self, **more) -> dict:
        known = {"model": self.model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0}
        return {**known, "ignore_eos": True, "logprobs": 1, "return_token_ids": True, **more}


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Wrong(Exception):
    """What a server said is not right."""


BAD: dict[str, dict | bytes] = {
    "no JSON": b'{"model": "base", "prompt":',
    "a model that is not there": {"model": "another"},
    "no tokens to generate": {"max_tokens": -1},
    "more tokens than the model has places": {"max_tokens": 10**6},
    "a prompt that is too long": {"prompt": [5] * 10**5},
    "an empty prompt": {"prompt": []},
    "a token beyond the vocabulary": {"prompt": [10**6]},
    "a negative token": {"prompt": [-5]},
    "a temperature that is a word": {"temperature": "hot"},
    "a temperature below 0": {"temperature": -1},
    "too many log probabilities": {"logprobs": 10**4},
    "a bias of a token that is not there": {"logit_bias": {str(10**6): 1}},
}


def asks(generator: random.Random, longest: int, vocabulary: int, of_each: int) -> list[Ask]:
    """Requests of each kind. No prompt with its answer is longer than the model allows."""

    def prompt(least: int, most: int) -> tuple[int, ...]:
        return tuple(generator.randrange(3, vocabulary) for _ in range(generator.randint(least, most)))

    shared = tuple(generator.randrange(3, vocabulary) for _ in range(PREFIX))
    found = []
    for _ in range(of_each):
        found += [
            Ask("short", prompt(1, 16), generator.randint(1, 16)),
            Ask("long prompt", prompt(longest // 2, longest - 16), generator.randint(1, 8)),
            Ask("long answer", prompt(8, 32), generator.randint(48, 96)),
            Ask("shared prefix", shared + prompt(1, 24), generator.randint(4, 12)),
            Ask("LoRA", prompt(4, 48), generator.randint(8, 16), ADAPTER),
            Ask("LoRA, shared prefix", shared + prompt(1, 24), generator.randint(4, 8), ADAPTER),
            Ask("aborted", prompt(8, longest // 3), 128, generator.choice([BASE, ADAPTER]), generator.randint(0, 6)),
            Ask("bad", (5,), 1),
        ]
    return found


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """What asks a server, by a connection for each request: one that is kept may be closed by the server when the next one is sent."""
    limits, connections = aiohttp.ClientTimeout(total=WITHIN), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=limits, connector=connections) as session:
        yield Client(session)


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession):
        self.session = session

    async def post(self, body: dict | bytes, path: str = "/v1/completions") -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            text = await response.text()
        try:
            return response.status, json.loads(text)
        except ValueError:
            raise Wrong(f"{path} answers {response.status} with what is no JSON: {text[:200]}") from None

    async def answer(self, ask: Ask, **more) -> Answer:
        """The whole answer, which is as long as was asked for."""
        status, found = await self.post(ask.body(**more))
        if status != 200:
            raise Wrong(f"a request ({ask.kind}) is answered by {status}: {json.dumps(found)[:300]}")
        [choice] = found["choices"]
        answer = Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
        if choice["finish_reason"] != "length" or not len(answer.tokens) == len(answer.logprobs) == ask.max_tokens:
            raise Wrong(
                f"{len(answer.tokens)} tokens of {ask.max_tokens} ({ask.kind}), which ends by {choice['finish_reason']}"
            )
        if not all(map(math.isfinite, answer.logprobs)):
            raise Wrong(f"log probabilities that are not finite ({ask.kind})")
        return answer

    async def alone(self, ask: Ask) -> Answer:
        """The answer without what other requests left in the prefix cache."""
        return await self.answer(ask, cache_salt=uuid.uuid4().hex)

    async def leave(self, ask: Ask) -> None:
        """Ask for a stream and close it after some pieces of the answer; before the first if it is after none."""
        body = json.dumps(ask.body(stream=True)).encode()
        request = self.session.post("/v1/completions", data=body, headers={"Content-Type": "application/json"})
        if ask.leaves_after == 0:
            begun = asyncio.ensure_future(request.__aenter__())
            await asyncio.sleep(0.05)
            begun.cancel()
            await asyncio.wait([begun])
            return
        response, left = await request, ask.leaves_after
        async for line in response.content:
            left -= line.startswith(b"data:")
            if not left:
                break
        response.close()
        if response.status != 200:
            raise Wrong(f"a stream is answered by {response.status}")

    async def bad(self, what: str) -> None:
        """Ask for what the server must refuse with a reason."""
        body = BAD[what] if isinstance(BAD[what], bytes) else Ask("bad", (5,), 1).body(**BAD[what])
        status, found = await self.post(body)
        if not 400 <= status < 500 or not found.get("error", {}).get("message"):
            raise Wrong(f"{what} is answered by {status}: {json.dumps(found)[:300]}")

    async def explained(self, ask: Ask, answer: Answer, tie: float) -> None:
        """Raises `Wrong` where a token of an answer is not the most likely at its place, but for ties, by a lone run that reads it."""
        body = dataclasses.replace(ask, prompt=ask.prompt + answer.tokens, max_tokens=1).body(prompt_logprobs=1)
        status, found = await self.post({**body, "cache_salt": uuid.uuid4().hex})
        if status != 200:
            raise Wrong(f"an answer ({ask.kind}) is read with {status}: {json.dumps(found)[:300]}")
        places = found["choices"][0]["prompt_logprobs"][len(ask.prompt) :]
        for place, (token, of_place) in enumerate(zip(answer.tokens, places, strict=True)):
            best = max(entry["logprob"] for entry in of_place.values())
            behind = best - of_place[str(token)]["logprob"]
            if not behind <= tie:
                raise Wrong(f"token {place} ({ask.kind}) is {behind:.2f} less likely than the best, at most {tie}")

    async def metrics(self) -> dict[str, float]:
        """The server's counters and gauges, summed over their labels."""
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("vllm:")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    async def call(self, method: str, *arguments) -> list:
        """What a method of the worker's extension returns in each worker."""
        status, found = await self.post({"method": method, "args": list(arguments)}, "/collective_rpc")
        if status != 200:
            raise Wrong(f"{method} is answered by {status}: {json.dumps(found)[:300]}")
        return found["results"]


def first_difference(answer: Answer, alone: Answer) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = zip(answer.tokens, alone.tokens, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(alone.tokens))


def compare(kind: str, answer: Answer, alone: Answer, tie: float) -> tuple[bool, float]:
    """Whether all tokens are those of the lone run, and the largest difference of a log probability before the first that is not.
    Raises `Wrong` where that is too large."""
    equal, largest = first_difference(answer, alone), 0.0
    for place, (here, there) in enumerate(zip(answer.logprobs[:equal], alone.logprobs[:equal])):
        largest = max(largest, abs(here - there))
        if not largest <= tie:
            raise Wrong(f"the log probability of token {place} ({kind}) is {here:.3f}, alone it is {there:.3f}")
    return equal == len(alone.tokens), largest


@dataclasses.dataclass
class Seen:
    """What became of requests, by kind; what was wrong; answers that differ from those of lone runs, to be explained."""

    done: dict[str, int] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    differ: dict[tuple[Ask, Answer], int] = dataclasses.field(default_factory=dict)
    most_at_once: int = 0
    noise: float = 0.0  # the largest difference of a log probability

    def told(self) -> str:
        total, apart = sum(self.done.values()), sum(self.differ.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.done.items()))
        text = f"{total} requests ({kinds}), up to {self.most_at_once} at once"
        return f"{text}; {apart} answers differ at a tie; log probabilities by at most {self.noise:.3f}; {len(self.wrong)} wrong"


async def load(client: Client, pool: dict[Ask, Answer | None], tie: float, arguments: argparse.Namespace) -> Seen:
    """Ask at a bounded rate, with at most so many requests at a time, and check each answer against that of a lone run."""
    generator, seen, running = random.Random(arguments.seed), Seen(), set()
    of_kind: dict[str, list[Ask]] = {}
    for ask in pool:
        of_kind.setdefault(ask.kind, []).append(ask)
    bad = itertools.cycle(BAD)

    async def one(ask: Ask) -> None:
        try:
            if ask.kind == "bad":
                await client.bad(next(bad))
            elif ask.leaves_after is not None:
                await client.leave(ask)
            else:
                answer = await client.answer(ask)
                equal, noise = compare(ask.kind, answer, pool[ask], tie)
                seen.noise = max(seen.noise, noise)
                if not equal:
                    seen.differ[ask, answer] = seen.differ.get((ask, answer), 0) + 1
        except Wrong as error:
            seen.wrong.append(str(error))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            seen.wrong.append(f"no answer ({ask.kind}): {type(error).__name__}: {error}")
        seen.done[ask.kind] = seen.done.get(ask.kind, 0) + 1

    loop = asyncio.get_running_loop()
    end, at, number = loop.time() + arguments.seconds, loop.time(), 0
    while loop.time() < end:
        kinds = sorted(of_kind)
        kind = kinds[number % len(kinds)] if number < 2 * len(kinds) else generator.choice(kinds)
        task = asyncio.create_task(one(generator.choice(of_kind[kind])))
        running.add(task)
        task.add_done_callback(running.discard)
        seen.most_at_once, number, at = max(seen.most_at_once, len(running)), number + 1, at + 1 / arguments.rate
        if len(running) >= arguments.at_once:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(max(0.0, at - loop.time()))
        at = max(at, loop.time())
    if running:
        await asyncio.wait(running)
    return seen
