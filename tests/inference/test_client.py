"""The client of a vLLM server, against a server that a test scripts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tasks.inference.api import AbortedError, Completion, GenerationConfig, InferenceError
from tasks.inference.client import Client


@dataclass
class Slow:
    """A server that samples a token every `token_s` seconds after `queue_s`, and knows how to abort unless `deaf`."""

    token_s: float = 0.05
    queue_s: float = 0.0
    deaf: bool = False
    asked: list[str] = field(default_factory=list)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["request_id"])
        aborted = self.aborted.setdefault(f"generate-tokens-{body['request_id']}", asyncio.Event())
        most, sampled = body["sampling_params"]["max_tokens"], 0
        wait_s = self.queue_s
        while sampled < most:
            try:
                await asyncio.wait_for(aborted.wait(), wait_s or self.token_s)
                break
            except TimeoutError:
                sampled, wait_s = sampled + (not wait_s), 0.0
        return web.json_response({"choices": [choice(index, sampled, sampled < most) for index in (0, 1)]})

    async def abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if not self.deaf:
                self.aborted[name].set()
        return web.Response()


def choice(index: int, count: int, aborted: bool) -> dict[str, Any]:
    return {
        "index": index,
        "finish_reason": "abort" if aborted else "length",
        "token_ids": list(range(10, 10 + count)),
        "logprobs": {"content": [{"logprob": -0.5}] * count},
        "weight_versions": [{"version": "3", "start": 0, "end": count}],
    }


@asynccontextmanager
async def served(server: Slow, timeout_s: float) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/inference/v1/generate", server.generate)
    app.router.add_post("/inference/v1/abort_requests", server.abort)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}", None, timeout_s, 1000) as client:
        yield client
    await runner.cleanup()


async def ask(client: Client, tokens: int) -> list[Completion]:
    return await client.generate([5], GenerationConfig(n=2, max_new_tokens=tokens), seed=7)


async def test_a_completion_that_takes_too_long_is_cut() -> None:
    """It ends as at the token limit. Sampled again, it would take as long, and its episode would escape."""
    server = Slow()
    async with served(server, timeout_s=0.5) as client:
        completions = await ask(client, tokens=900)
    assert len(server.asked) == 1
    for completion in completions:
        assert completion.finish_reason == "length"
        assert 1 <= len(completion.token_ids) < 100
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)


async def test_a_completion_in_time_is_whole() -> None:
    async with served(Slow(token_s=0.001), timeout_s=30) as client:
        assert [len(completion.token_ids) for completion in await ask(client, tokens=4)] == [4, 4]


async def test_a_request_that_only_waited_is_no_completion() -> None:
    """A full queue is not the policy's doing: the request is sent again."""
    async with served(Slow(queue_s=20), timeout_s=0.3) as client:
        with pytest.raises(AbortedError):
            await ask(client, tokens=900)


async def test_a_server_that_does_not_answer_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose requests cannot be cut: the request is sent again, after a restart of a dead server."""
    monkeypatch.setattr("tasks.inference.client.CUT_S", 0.2)
    async with served(Slow(deaf=True), timeout_s=0.3) as client:
        with pytest.raises(TimeoutError):
            await ask(client, tokens=200)


async def test_a_teachers_logprobs_are_logprobs() -> None:
    """An impossible answer is refused before it is stored: once stored, the question would not be asked again."""

    class Teacher(Slow):
        async def generate(self, request: web.Request) -> web.Response:
            entries = [None, {"6": {"logprob": 1e-5}}, {"7": {"logprob": 0.5}}]
            return web.json_response({"prompt_logprobs": entries})

    async with served(Teacher(), timeout_s=30) as client:
        with pytest.raises(InferenceError, match=r"gave a prompt.s token the logprob 0\.5: is its --logprobs-mode"):
            await client.prompt_logprobs([5, 6, 7])


@dataclass
class Dying:
    """A server like vLLM: when its engine has died, /health says so, and what waits for it stays without an answer."""

    dead: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def wait(self, _: web.Request) -> web.Response:
        self.started.set()
        await asyncio.sleep(600)
        return web.Response()


@asynccontextmanager
async def dying(server: Dying, timeout_s: float = 60) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_post("/pause", server.wait)
    app.router.add_get("/is_sleeping", server.wait)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}", None, timeout_s, 1000) as client:
        yield client
    await runner.cleanup()


async def test_a_swap_ends_when_the_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's process that takes requests lives on, and would leave this one without an answer."""
    monkeypatch.setattr("tasks.inference.client._CHECK_S", 0.05)
    server = Dying()
    async with dying(server) as client:
        swap = asyncio.create_task(client.swap(Path("/model"), 1))
        await server.started.wait()
        await asyncio.sleep(0.2)
        assert not swap.done()
        server.dead = True
        with pytest.raises(
            ConnectionError, match=r"the engine of http://127\.0\.0\.1:\d+ has died before .* POST /pause"
        ):
            await asyncio.wait_for(swap, 10)


async def test_a_silent_server_is_told_with_address_request_and_time() -> None:
    async with dying(Dying(), timeout_s=0.2) as client:
        with pytest.raises(TimeoutError, match=r"http://127\S+ has not answered POST /pause\?mode=keep within 0\.2 s"):
            await client.swap(Path("/model"), 1)
        assert not await client.answers()
