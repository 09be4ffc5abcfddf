"""The client of a vLLM server or another service, against servers that are slow, dead, hostile or broken.

They learn nothing, take no memory, and stop nothing.
"""

import asyncio
import gzip
import json
import tracemalloc
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from storage.records import pack_experts
from tasks.inference import client as clients
from tasks.inference.api import AbortedError, Completion, GenerationConfig, InferenceError
from tasks.inference.client import Client, FailedError, MalformedError

KEY = "sk-0123456789/abc"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Ask = Callable[[Client], Awaitable[object]]
ASKS: dict[str, Ask] = {
    "generate": lambda client: client.generate([1, 2], GenerationConfig(n=2, max_new_tokens=3), 7),
    "prompt_logprobs": lambda client: client.prompt_logprobs([1, 2, 3]),
    "pooled": lambda client: client.pooled([1, 2]),
    "chat": lambda client: client.chat("judge", [{"role": "user", "content": "Is 19 right?"}], {}),
}
"""The requests whose answers are data."""


@asynccontextmanager
async def served(answer: Answer, timeout_s: float = 5, **more: Any) -> AsyncIterator[Client]:
    """Answer all requests of a client in one way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY, timeout_s, 1000, **more) as client:
            yield client
    finally:
        await runner.cleanup()


def ask(answer: Answer, question: Ask, **more: Any) -> Any:
    async def asked() -> object:
        async with served(answer, **more) as client:
            return await question(client)

    return asyncio.run(asked())


def says(body: object, status: int = 200, **more: Any) -> Answer:
    """Answer with bytes, or with something as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=content, status=status, **more)

    return answer


@dataclass
class Slow:
    """A server that samples a token every `token_s` seconds after `queue_s`, and knows how to abort unless `deaf`."""

    token_s: float = 0.05
    queue_s: float = 0.0
    deaf: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    asked: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.path.endswith("abort_requests"):
            if not self.deaf:
                self.aborted.set()
            return web.Response()
        self.asked += 1
        most, sampled, wait_s = body["sampling_params"]["max_tokens"], 0, self.queue_s
        while sampled < most and not self.aborted.is_set():
            try:
                await asyncio.wait_for(self.aborted.wait(), wait_s or self.token_s)
            except TimeoutError:
                sampled, wait_s = sampled + (not wait_s), 0.0
        reason = "abort" if sampled < most else "length"
        made = {"finish_reason": reason, "token_ids": [5] * sampled, **spans(sampled)}
        made["logprobs"] = {"content": [{"logprob": -0.5}] * sampled}
        return web.json_response({"choices": [choice(**made, index=index) for index in (0, 1)]})


def choice(**changed: Any) -> dict[str, Any]:
    known = {"index": 0, "finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -0.5}] * 2}}
    return known | spans(2) | changed


def spans(*ends: int) -> dict[str, Any]:
    return {"weight_versions": [{"version": "3", "start": 0, "end": end} for end in ends]}


async def completions(server: Slow, timeout_s: float, tokens: int) -> list[Completion]:
    async with served(server.answer, timeout_s) as client:
        return await client.generate([5], GenerationConfig(n=2, max_new_tokens=tokens), seed=7)


async def test_a_completion_that_takes_too_long_is_cut() -> None:
    """It ends as at the token limit. Sampled again, it would take as long, and its episode would escape."""
    for completion in await completions(server := Slow(), 0.5, tokens=900):
        assert completion.finish_reason == "length"
        assert 1 <= len(completion.token_ids) < 100
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
    assert server.asked == 1
    assert [len(whole.token_ids) for whole in await completions(Slow(token_s=0.001), 30, tokens=4)] == [4, 4]


async def test_what_only_waited_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue is not the policy's doing, and a server that does not even abort may have to be restarted."""
    monkeypatch.setattr(clients, "CUT_S", 0.2)
    with pytest.raises(AbortedError):
        await completions(Slow(queue_s=20), 0.3, tokens=900)
    with pytest.raises(TimeoutError):
        await completions(Slow(deaf=True), 0.3, tokens=200)


async def test_a_swap_ends_when_the_engine_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's process that takes requests lives on, and would leave this one without an answer.

    A silent engine is told with address, request and time.
    """
    monkeypatch.setattr(clients, "_CHECK_S", 0.05)
    started, dead = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response(status=503 if dead.is_set() else 200)
        started.set()
        await asyncio.sleep(600)
        return web.Response()

    async with served(answer, 60) as client:
        swap = asyncio.create_task(client.swap(Path("/model"), 1))
        await started.wait()
        await asyncio.sleep(0.2)
        assert not swap.done()
        dead.set()
        with pytest.raises(ConnectionError, match=r"the engine of http://127\.\S+ has died before .* /pause"):
            await asyncio.wait_for(swap, 10)
    dead.clear()
    async with served(answer, 0.2) as client:
        with pytest.raises(TimeoutError, match=r"http://127\S+ has not answered POST /pause\?mode=keep within 0\.2 s"):
            await client.swap(Path("/model"), 1)
        assert not await client.answers()


@pytest.mark.parametrize("question", ASKS)
def test_redirects_are_not_followed(question: str) -> None:
    """Neither problems and solutions nor the key go elsewhere; a server that redirects is not healthy."""
    paths = list[str]()

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        where = f"http://user:{quote(KEY, safe='')}@{request.host}/elsewhere"
        return web.Response(status=307, headers={"Location": where})

    with pytest.raises(InferenceError, match=r"127.0.0.1:\d+ redirects, which is not followed") as refused:
        ask(answer, ASKS[question])
    assert KEY not in str(refused.value)
    assert ask(answer, lambda client: client.health()) == 307
    assert ask(answer, lambda client: client.metrics()) == []
    assert "/elsewhere" not in paths


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("status", [200, 404])
def test_answers_have_a_bound(status: int, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends, or is a bomb when it is decompressed, takes some MB; of an error only the beginning is read."""
    monkeypatch.setattr(clients, "_LARGEST", 2**20)
    piece = b" " * 2**20 if encoding == "identity" else gzip.compress(b" " * 2**25)
    sent = [0]

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Encoding": encoding})
        await response.prepare(request)
        for _ in range(200):
            await response.write(piece)
            sent[0] += 1
        return response

    for question in ASKS.values():
        sent[0] = 0
        tracemalloc.start()
        try:
            with pytest.raises((MalformedError, InferenceError, AbortedError), match="more than .* bytes|answered 404"):
                ask(answer, question)
            assert tracemalloc.get_traced_memory()[1] < 2**25
        finally:
            tracemalloc.stop()
        assert sent[0] < 200


def completion(content: object) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}


def logprobs(*entries: object) -> dict[str, Any]:
    return {"prompt_logprobs": [None, *entries]}


HALF = b'{"choices": [{"message": {"content": "Score: 8 \\ud83d"}, "finish_reason": "stop"}]}'
MALFORMED: dict[str, list[object]] = {
    "chat": [
        *(HALF, b"", b"[]", b"null", b'{"choices": [{"mess', b"<html>", b"[" * 100_000, b"\xff\xfe"),
        *({"choices": []}, {"choices": [{}]}, {"choices": {}}, {"choices": [None]}, {"choices": [{"message": 8}]}),
        *(completion(8), {"choices": completion("8")["choices"] * 2}),
    ],
    "pooled": [
        *(b'{"data": [{"data": [NaN]}]}', {"data": [{"data": [True]}]}, {"data": [{"data": [1e300]}]}, {"data": 1}),
    ],
    "prompt_logprobs": [
        *({"prompt_logprobs": None}, logprobs(), logprobs({"2": {}}, {"3": {}})),
        logprobs({"2": {"logprob": -1}}, {"3": {"logprob": None}}),
        logprobs({"9": {"logprob": -1}}, {"3": {"logprob": -1}}),
    ],
    "generate": [
        *({}, {"choices": None}, {"choices": [{}, {}]}, {"choices": [choice()]}, {"choices": [choice()] * 3}),
        *(
            {"choices": [choice(**changed), choice(index=1)]}
            for changed in (
                *({"index": "0"}, {"token_ids": None}, {"token_ids": [5, "6"]}, {"token_ids": [5, -6]}),
                *({"token_ids": [5, 2**40]}, {"token_ids": [5]}, {"logprobs": None}, {"logprobs": {"content": [1, 2]}}),
                *({"logprobs": {"content": [{"logprob": None}] * 2}}, spans(), spans(1), spans(2, 2), spans(10**12)),
                *(spans(-1, 3), {"weight_versions": [{"version": "x", "start": 0, "end": 2}]}),
            )
        ),
    ],
}


@pytest.mark.parametrize("question", MALFORMED)
def test_what_cannot_be_read_is_one_kind_of_error(question: str) -> None:
    """It is told which server gave what, and whoever asked decides what it costs."""
    for body in MALFORMED[question]:
        with pytest.raises(MalformedError, match=r"http://127.0.0.1:\d+ gave an answer that cannot be read"):
            ask(says(body), ASKS[question])


def test_what_is_right_is_read() -> None:
    """The bodies above are refused for what is wrong in them."""
    assert ask(says(completion("8 😀")), ASKS["chat"]) == ("8 😀", "stop")
    assert ask(says(completion(None)), ASKS["chat"]) == ("", "stop")
    assert ask(says({"data": [{"data": [1]}]}), ASKS["pooled"]) == 1.0
    entries = logprobs({"2": {"logprob": -1}}, {"3": {"logprob": -0.5}})
    assert ask(says(entries), ASKS["prompt_logprobs"]) == [-1.0, -0.5]
    first, _ = ask(says({"choices": [choice(), choice(index=1)]}), ASKS["generate"])
    assert (first.token_ids, first.logprobs, first.versions) == ([5, 6], [-0.5, -0.5], [3, 3])


def test_what_is_impossible_is_refused_before_it_is_stored() -> None:
    """Once stored, a teacher would not be asked again. Experts belong to the tokens of their completion."""
    with pytest.raises(InferenceError, match=r"gave a prompt.s token the logprob 0\.5: is its --logprobs-mode"):
        ask(says(logprobs({"2": {"logprob": 1e-5}}, {"3": {"logprob": 0.5}})), ASKS["prompt_logprobs"])
    of_others = b64encode(pack_experts(np.zeros((9, 2, 2), np.int16))).decode()
    for routed in ("%", of_others):
        body = {"choices": [choice(routed_experts=routed), choice(index=1, routed_experts=routed)]}
        with pytest.raises(MalformedError, match="cannot be read"):
            ask(says(body), ASKS["generate"], experts=True)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 two hundred\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "did not end in time"),
    ],
)
async def test_broken_http_is_malformed_too(sent: bytes, said: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 0.3, 64) as client:
        with pytest.raises(MalformedError, match=said):
            await ASKS["chat"](client)


@pytest.mark.parametrize("status", [200, 400, 401, 404, 500, 503])
def test_nothing_that_is_told_has_the_key(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services echo keys in errors. A message names the variable instead, and escapes hide no key."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    body = json.dumps({"error": f"bad key {KEY}", "padding": "x" * 400}).replace("/", "\\/")
    for sent in (body, body.replace("bad", "bad" + " " * 440)):
        with pytest.raises((InferenceError, aiohttp.ClientError)) as told:
            ask(says(sent.encode(), status), ASKS["chat"])
        assert "0123" not in str(told.value)
    if status == 200:
        assert ask(says(completion(f"{KEY} Score: 8")), ASKS["chat"])[0] == "⟨JUDGE_API_KEY⟩ Score: 8"
    with pytest.raises(FailedError) as told:
        ask(says(b"", 500, reason=f"no {KEY}"), ASKS["chat"])
    assert KEY not in str(told.value) + repr(told.value)
