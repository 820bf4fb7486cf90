"""Send requests of many kinds to a vLLM server, and check the answers, for server_load.py.

An answer is correct if it equals the answer to the same request alone. Rounding depends on the rest of the batch, so an answer may differ
where two tokens are almost equally likely: a different answer is evaluated once more, alone, by a request whose prompt is the original
prompt and the answer. Each of its tokens must then be the most likely one, or within a tie of it. In all answers the reported log
probabilities must be within a tie of the lone run's, up to the first different token.
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

WITHIN = 120.0  # time limit per answer, in seconds
BASE, ADAPTER = "base", "adapter"  # names of the model and of the model with a LoRA adapter
PREFIX = 160  # tokens of the shared prefix


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request: its kind, prompt tokens, tokens to generate, and after how many chunks its client disconnects."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    model: str = BASE
    leaves_after: int | None = None

    @property
    def is_compared(self) -> bool:
        """True if its answer is compared with a lone run's."""
        return self.kind != "bad" and self.leaves_after is None

    def body(self, **more) -> dict:
        """Return the request's JSON body."""
        known = {"model": self.model, "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0}
        return {**known, "ignore_eos": True, "logprobs": 1, "return_token_ids": True, **more}


@dataclasses.dataclass(frozen=True)
class Answer:
    """The tokens of an answer and their log probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Wrong(Exception):
    """Signal a wrong answer of a server."""


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
    """Return requests of each kind. Prompts with their answers fit the model's length."""

    def prompt(least: int, most: int) -> tuple[int, ...]:
        return tuple(generator.randrange(3, vocabulary) for _ in range(generator.randint(least, most)))

    shared = tuple(generator.randrange(3, vocabulary) for _ in range(PREFIX))
    requests = []
    for _ in range(of_each):
        requests += [
            Ask("short", prompt(1, 16), generator.randint(1, 16)),
            Ask("long prompt", prompt(longest // 2, longest - 16), generator.randint(1, 8)),
            Ask("long answer", prompt(8, 32), generator.randint(48, 96)),
            Ask("shared prefix", shared + prompt(1, 24), generator.randint(4, 12)),
            Ask("LoRA", prompt(4, 48), generator.randint(8, 16), ADAPTER),
            Ask("LoRA, shared prefix", shared + prompt(1, 24), generator.randint(4, 8), ADAPTER),
            Ask("aborted", prompt(8, longest // 3), 128, generator.choice([BASE, ADAPTER]), generator.randint(0, 6)),
            Ask("bad", (5,), 1),
        ]
    return requests


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """Connect to a server with a new connection per request: the server may close a kept one while the next request is sent."""
    limits, connections = aiohttp.ClientTimeout(total=WITHIN), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=limits, connector=connections) as session:
        yield Client(session)


class Client:
    """Send requests to one server."""

    def __init__(self, session: aiohttp.ClientSession):
        self.session = session

    async def post(self, body: dict | bytes, path: str = "/v1/completions") -> tuple[int, dict]:
        """Send a request, and return the status and the JSON response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
            text = await response.text()
        try:
            return response.status, json.loads(text)
        except ValueError:
            raise Wrong(f"{path} answers {response.status} without JSON: {text[:200]}") from None

    async def answer(self, ask: Ask, **more) -> Answer:
        """Return the whole answer, which must have the requested length."""
        status, response = await self.post(ask.body(**more))
        if status != 200:
            raise Wrong(f"a request ({ask.kind}) is answered by {status}: {json.dumps(response)[:300]}")
        [choice] = response["choices"]
        answer = Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))
        if choice["finish_reason"] != "length" or not len(answer.tokens) == len(answer.logprobs) == ask.max_tokens:
            raise Wrong(
                f"{len(answer.tokens)} of {ask.max_tokens} tokens ({ask.kind}), which ends by {choice['finish_reason']}"
            )
        if not all(map(math.isfinite, answer.logprobs)):
            raise Wrong(f"log probabilities are not finite ({ask.kind})")
        return answer

    async def alone(self, ask: Ask) -> Answer:
        """Return the answer without the prefix cache of other requests."""
        return await self.answer(ask, cache_salt=uuid.uuid4().hex)

    async def leave(self, ask: Ask) -> None:
        """Request a stream, and disconnect after some chunks of the answer, or before the first one."""
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
        """Send a request that the server must refuse with a reason."""
        body = BAD[what] if isinstance(BAD[what], bytes) else Ask("bad", (5,), 1).body(**BAD[what])
        status, response = await self.post(body)
        if not 400 <= status < 500 or not response.get("error", {}).get("message"):
            raise Wrong(f"{what} is answered by {status}: {json.dumps(response)[:300]}")

    async def explained(self, ask: Ask, answer: Answer, tie: float) -> None:
        """Check with a lone run that each token of an answer is the most likely one, or within a tie. Raises `Wrong`."""
        body = dataclasses.replace(ask, prompt=ask.prompt + answer.tokens, max_tokens=1).body(prompt_logprobs=1)
        status, response = await self.post({**body, "cache_salt": uuid.uuid4().hex})
        if status != 200:
            raise Wrong(f"evaluating an answer ({ask.kind}) gives {status}: {json.dumps(response)[:300]}")
        places = response["choices"][0]["prompt_logprobs"][len(ask.prompt) :]
        for place, (token, of_place) in enumerate(zip(answer.tokens, places, strict=True)):
            best = max(entry["logprob"] for entry in of_place.values())
            behind = best - of_place[str(token)]["logprob"]
            if not behind <= tie:
                raise Wrong(f"token {place} ({ask.kind}) is {behind:.2f} less likely than the best, limit {tie}")

    async def metrics(self) -> dict[str, float]:
        """Return the server's counters and gauges, summed over their labels."""
        async with self.session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        values: dict[str, float] = {}
        for line in lines:
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0].removeprefix("vllm:")
                values[name] = values.get(name, 0.0) + float(value)
        return values

    async def call(self, method: str, *arguments) -> list:
        """Return the result of a worker extension's method in each worker."""
        status, response = await self.post({"method": method, "args": list(arguments)}, "/collective_rpc")
        if status != 200:
            raise Wrong(f"{method} is answered by {status}: {json.dumps(response)[:300]}")
        return response["results"]


def first_difference(answer: Answer, alone: Answer) -> int:
    """Return the number of equal tokens before the first difference."""
    pairs = zip(answer.tokens, alone.tokens, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(alone.tokens))


def compare(kind: str, answer: Answer, alone: Answer, tie: float) -> tuple[bool, float]:
    """Return whether all tokens equal the lone run's, and the largest difference of log probabilities before the first difference.

    Raises `Wrong` if that is above a tie.
    """
    equal, largest = first_difference(answer, alone), 0.0
    for place, (here, there) in enumerate(zip(answer.logprobs[:equal], alone.logprobs[:equal])):
        largest = max(largest, abs(here - there))
        if not largest <= tie:
            raise Wrong(f"the log probability of token {place} ({kind}) is {here:.3f}, alone it is {there:.3f}")
    return equal == len(alone.tokens), largest


@dataclasses.dataclass
class Seen:
    """Count requests by kind, and collect faults and different answers, which must be explained."""

    done: dict[str, int] = dataclasses.field(default_factory=dict)
    wrong: list[str] = dataclasses.field(default_factory=list)
    differ: dict[tuple[Ask, Answer], int] = dataclasses.field(default_factory=dict)
    max_at_once: int = 0
    noise: float = 0.0  # the largest difference of a log probability

    def told(self) -> str:
        """Format the counts."""
        total, apart = sum(self.done.values()), sum(self.differ.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.done.items()))
        text = f"{total} requests ({kinds}), up to {self.max_at_once} at once"
        return f"{text}; {apart} answers differ at a tie; log probabilities differ by at most {self.noise:.3f}; {len(self.wrong)} wrong"


async def load(client: Client, pool: dict[Ask, Answer | None], tie: float, arguments: argparse.Namespace) -> Seen:
    """Send requests at a limited rate and concurrency, and check each answer against a lone run's."""
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
    end, due, number = loop.time() + arguments.seconds, loop.time(), 0
    while loop.time() < end:
        kinds = sorted(of_kind)
        kind = kinds[number % len(kinds)] if number < 2 * len(kinds) else generator.choice(kinds)
        task = asyncio.create_task(one(generator.choice(of_kind[kind])))
        running.add(task)
        task.add_done_callback(running.discard)
        seen.max_at_once, number, due = max(seen.max_at_once, len(running)), number + 1, due + 1 / arguments.rate
        if len(running) >= arguments.at_once:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(max(0.0, due - loop.time()))
        due = max(due, loop.time())
    if running:
        await asyncio.wait(running)
    return seen
