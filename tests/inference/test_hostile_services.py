"""Servers and services that are hostile or broken: they learn nothing, take no memory, and stop nothing."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from storage.records import pack_experts
from tasks.inference import client as clients
from tasks.inference.api import AbortedError, GenerationConfig, InferenceError
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
async def served(answer: Answer, *, experts: bool = False) -> AsyncIterator[Client]:
    """Answer all requests of a client in one way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}", KEY, 5, 64, experts=experts) as client:
            yield client
    finally:
        await runner.cleanup()


def ask(answer: Answer, question: Ask, *, experts: bool = False) -> Any:
    async def asked() -> object:
        async with served(answer, experts=experts) as client:
            return await question(client)

    return asyncio.run(asked())


def says(body: object, status: int = 200) -> Answer:
    """Answer with bytes, or with something as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=content, status=status, content_type="application/json")

    return answer


def choice(**changed: Any) -> dict[str, Any]:
    known = {
        "index": 0, "finish_reason": "stop", "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -0.5}] * 2},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }  # fmt: skip
    return known | changed


def spans(*ends: int) -> dict[str, Any]:
    return {"weight_versions": [{"version": "3", "start": 0, "end": end} for end in ends]}


def completion(content: object) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": "stop"}]}


@pytest.mark.parametrize("question", [*ASKS, "weight_version", "load_adapter"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(question: str, status: int, tmp_path: Any) -> None:
    """Neither problems and solutions nor the key go elsewhere, and the message names where that was."""
    paths = list[str]()

    async def answer(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(
            status=status, headers={"Location": f"http://user:{quote(KEY, safe='')}@localhost:{port(request)}/pause"}
        )

    asked = ASKS.get(question) or {
        "weight_version": lambda client: client.weight_version(),
        "load_adapter": lambda client: client.load_adapter("a", tmp_path),
    }.get(question)
    assert asked
    with pytest.raises(
        InferenceError, match=r"http://127.0.0.1:\d+ redirects, which is not followed|It answered 30"
    ) as refused:
        ask(answer, asked)
    assert "/pause" not in paths
    assert KEY not in str(refused.value)


def port(request: web.Request) -> int:
    assert request.transport
    return int(request.transport.get_extra_info("sockname")[1])


def test_a_server_that_redirects_is_not_healthy() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response() if request.path == "/ok" else web.Response(status=302, headers={"Location": "/ok"})

    assert ask(answer, lambda client: client.health()) == 302
    assert ask(answer, lambda client: client.metrics()) == []


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("question", ASKS)
@pytest.mark.parametrize("status", [200, 404])
def test_answers_have_a_bound(question: str, status: int, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends, or is a bomb when it is decompressed, takes some MB; of an error only the beginning is read."""
    monkeypatch.setattr(clients, "_LARGEST", 2**20)
    piece = b" " * 2**20 if encoding == "identity" else gzip.compress(b" " * 2**25)
    sent = [0]

    async def answer(_: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Encoding": encoding})
        await response.prepare(_)
        for _number in range(200):
            await response.write(piece)
            sent[0] += 1
        return response

    tracemalloc.start()
    try:
        with pytest.raises((MalformedError, InferenceError, AbortedError), match=r"more than .* bytes|answered 404"):
            ask(answer, ASKS[question])
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert sent[0] < 200


HALF = b'{"choices": [{"message": {"content": "Score: 8 \\ud83d"}, "finish_reason": "stop"}]}'
MALFORMED: dict[str, list[object]] = {
    "chat": [
        *(HALF, b"", b"[]", b"null", b'{"choices": [{"mess', b"<html>", b"[" * 100_000, b"\xff\xfe"),
        *({}, {"choices": []}),
        *({"choices": [{}]}, {"choices": {}}, {"choices": [None]}, {"choices": [{"message": "8"}]}),
        *(completion(8), completion(["8"]), completion({"a": 8}), {"choices": completion("8")["choices"] * 2}),
    ],
    "pooled": [
        *(b'{"data": [{"data": [NaN]}]}', b'{"data": [{"data": [1e999]}]}', {"data": [{"data": ["1"]}]}, {"data": []}),
        *({"data": [{"data": [None]}]}, {"data": [{"data": [True]}]}, {"data": [{"data": [1e300]}]}, {"data": 1}),
    ],
    "prompt_logprobs": [
        *({"prompt_logprobs": None}, {"prompt_logprobs": [None]}, {"prompt_logprobs": [None, {"2": {}}, {"3": {}}]}),
        {"prompt_logprobs": [None, {"2": {"logprob": -1}}, {"3": {"logprob": None}}]},
        {"prompt_logprobs": [None, {"9": {"logprob": -1}}, {"3": {"logprob": -1}}]},
    ],
    "generate": [
        *({}, {"choices": None}, {"choices": [{}, {}]}, {"choices": [choice()]}, {"choices": [choice()] * 3}),
        *(
            {"choices": [choice(**changed), choice(index=1)]}
            for changed in (
                *({"index": "0"}, {"token_ids": None}, {"token_ids": [5, "6"]}, {"token_ids": [5, -6]}),
                *({"token_ids": [5, 2**40]}, {"token_ids": [5]}, {"logprobs": None}, {"logprobs": {"content": [1, 2]}}),
                *({"logprobs": {"content": [{"logprob": None}] * 2}}, spans(), spans(1), spans(2, 2), spans(10**12)),
                *(spans(-1, 3), spans(10**12, -(10**12) + 2)),
                {"weight_versions": [{"version": "x", "start": 0, "end": 2}]},
            )
        ),
        {"choices": [choice(**spans(4), token_ids=[5] * 4, logprobs={"content": [{"logprob": -1}] * 4}), choice()]},
    ],
}


@pytest.mark.parametrize(
    ("question", "body"), [(question, body) for question, bodies in MALFORMED.items() for body in bodies]
)
def test_what_cannot_be_read_is_one_kind_of_error(question: str, body: object) -> None:
    """It is told which server gave what, and whoever asked decides what it costs."""
    with pytest.raises(MalformedError, match=r"http://127.0.0.1:\d+ gave an answer that cannot be read"):
        ask(says(body), ASKS[question])


def test_what_is_right_is_read() -> None:
    """The bodies above are refused for what is wrong in them."""
    assert ask(says(completion("8 😀")), ASKS["chat"]) == ("8 😀", "stop")
    assert ask(says(completion(None)), ASKS["chat"]) == ("", "stop")
    assert ask(says({"data": [{"data": [1]}]}), ASKS["pooled"]) == 1.0
    entries = [None, {"2": {"logprob": -1}}, {"3": {"logprob": -0.5}}]
    assert ask(says({"prompt_logprobs": entries}), ASKS["prompt_logprobs"]) == [-1.0, -0.5]
    first, _ = ask(says({"choices": [choice(), choice(index=1)]}), ASKS["generate"])
    assert (first.token_ids, first.logprobs, first.versions) == ([5, 6], [-0.5, -0.5], [3, 3])


def test_experts_that_do_not_belong_to_the_tokens_are_no_answer() -> None:
    from base64 import b64encode

    of_others = b64encode(pack_experts(np.zeros((9, 2, 2), np.int16))).decode()
    for routed in ("%", of_others):
        body = {"choices": [choice(routed_experts=routed), choice(index=1, routed_experts=routed)]}
        with pytest.raises(MalformedError, match="cannot be read"):
            ask(says(body), ASKS["generate"], experts=True)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"HTTP/1.1 two hundred\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "is no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "did not end in time"),
    ],
)
def test_broken_http_is_malformed_too(sent: bytes, said: str) -> None:
    async def asked() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, 0.3, 64) as client:
            await ASKS["chat"](client)

    with pytest.raises(MalformedError, match=said):
        asyncio.run(asked())


@pytest.mark.parametrize("status", [200, 400, 401, 404, 500, 503])
def test_nothing_that_is_told_has_the_key(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services echo keys in errors. A message names the variable instead, and escapes hide no key."""
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    body = json.dumps({"error": f"bad key {KEY}", "padding": "x" * 400}).replace("/", "\\/")
    for sent in (body, body.replace("bad", "bad" + " " * 440)):
        with pytest.raises((InferenceError, aiohttp.ClientError)) as told:
            ask(says(sent.encode(), status), ASKS["chat"])
        assert KEY not in str(told.value)
        assert "0123" not in str(told.value)
    if status == 200:
        assert ask(says(completion(f"{KEY} Score: 8")), ASKS["chat"])[0] == "⟨JUDGE_API_KEY⟩ Score: 8"


def test_a_reason_of_http_is_not_told() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=500, reason=f"no {KEY}")

    with pytest.raises(FailedError) as told:
        ask(answer, ASKS["chat"])
    assert KEY not in str(told.value) + repr(told.value)
