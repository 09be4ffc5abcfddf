"""The endpoint's server: keys, addresses, and answers that are errors in OpenAI's form."""

import asyncio
import json
import socket
import threading
from typing import Any

import aiohttp
import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint import server
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.server import EndpointServer
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import asked

BODY = {"model": "policy", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

TOOL = {"type": "function", "function": {"name": "look"}}


async def request(
    task: AgentTask, path: str = "/chat/completions", body: Any = BODY, key: str | None = None
) -> tuple[int, Any]:
    """Post a body, which is JSON unless it is a text."""
    headers = {"Authorization": f"Bearer {key or task.api_key}"}
    data = body if isinstance(body, str) else json.dumps(body)
    async with (
        aiohttp.ClientSession() as client,
        client.post(task.base_url + path, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


def test_errors_are_in_openais_form(chat: Chat, verifier: Verifier) -> None:
    """Clients show `error.message`, and compare `error.code`; each request here is answered by one."""
    wrong = [
        ({"key": "sk-1234"}, 401, "invalid_api_key"),
        ({"path": "/responses"}, 404, "unknown_url"),
        ({"body": "x" * 10**7}, 413, "request_too_large"),
        ({"body": "{model: policy}"}, 400, "invalid_json"),
        ({"body": {**BODY, "model": "gpt-4o"}}, 404, "model_not_found"),
        ({"body": {**BODY, "messages": [{"role": "user", "content": [PICTURE]}]}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": []}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": [{"role": "user", "content": "?"}] * 2049}}, 400, "invalid_value"),
        ({"body": {**BODY, "tools": [TOOL] * 129}}, 400, "invalid_value"),
        ({"body": {**BODY, "n": 0}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": [{"role": "narrator", "content": "x"}]}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": [{"role": "assistant", "content": "It is"}]}}, 400, "invalid_value"),
        ({"body": {**BODY, "logit_bias": {"5": 1}}}, 400, "unsupported_parameter"),
        ({"body": {**BODY, "logprobs": True}}, 400, "unsupported_parameter"),
        ({"body": {**BODY, "response_format": {"type": "json_object"}}}, 400, "unsupported_parameter"),
        ({"body": {**BODY, "messages": [{"role": "user", "content": "x" * 99_999}]}}, 400, "context_length_exceeded"),
        ({"path": "/environment/step", "body": {"text": "3"}}, 400, "invalid_value"),
    ]

    async def ask(task: AgentTask, _: Any) -> None:
        for arguments, status, code in wrong:
            found, answer = await request(task, **arguments)  # type: ignore[arg-type]
            assert (found, answer["error"]["code"]) == (status, code), arguments
            assert answer["error"]["message"]
        assert (await request(task))[0] == 200

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason) == ("completed", "")


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def silent(task: AgentTask, head: str, many: int = 1) -> list[Streams]:
    """Open connections that send the beginning of a request; they close when nobody holds them any more."""
    host, port = task.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(many)]
    for _, writer in opened:
        writer.write(head.encode())
    return opened


HEADERS = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n"


@pytest.mark.parametrize("head", ["", HEADERS, f"{HEADERS}Authorization: Bearer KEY\r\nContent-Length: 9\r\n\r\n{{"])
def test_half_open_connections_make_room(
    head: str, chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has a number of connections at most, whatever is opened; who asks is answered nevertheless."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 20)

    async def ask(task: AgentTask, _: Any) -> None:
        opened = await silent(task, head.replace("KEY", task.api_key), 60)
        assert (await request(task))[0] == 200
        await asyncio.sleep(0.1)
        assert sum(not reader.at_eof() for reader, _ in opened) <= 20

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason) == ("completed", "")


def test_where_all_connections_ask_a_new_one_is_closed(
    chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that ask are answered."""
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 5)

    async def ask(task: AgentTask, _: Any) -> None:
        asking = [asyncio.create_task(request(task)) for _ in range(5)]
        await asyncio.sleep(0.2)
        with pytest.raises(aiohttp.ClientConnectionError):
            await request(task)
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 5

    (row,) = asked(chat, verifier, ask, delays=[1.0])
    assert (row.status, row.reason) == ("completed", "")


def test_a_body_that_never_comes_is_refused(chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender is told so; headers that never come end the connection without a word."""
    monkeypatch.setattr(server, "BODY_S", 0.1)
    monkeypatch.setattr(server, "IDLE_S", 0.2)

    async def ask(task: AgentTask, _: Any) -> None:
        ((body, _body),) = await silent(
            task, f"{HEADERS}Authorization: Bearer {task.api_key}\r\nContent-Length: 9\r\n\r\n{{"
        )
        assert b"408" in await body.readline()
        ((headers, _headers),) = await silent(task, HEADERS)
        assert await headers.read() == b""
        assert (await request(task))[0] == 200

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason) == ("completed", "")


def test_a_large_request_lets_the_others_go_on(chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is rendered in another thread than that of all episodes."""
    threads = list[bool]()
    prompt = Chat.prompt

    def noted(self: Chat, *arguments: Any) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return prompt(self, *arguments)

    monkeypatch.setattr(Chat, "prompt", noted)

    async def ask(task: AgentTask, _: Any) -> None:
        for many in (1, 200_000):
            await request(task, body={**BODY, "messages": [{"role": "user", "content": "x" * many}]})

    asked(chat, verifier, ask)
    assert threads == [True, False]


def test_a_key_opens_its_own_episode_only(chat: Chat, verifier: Verifier) -> None:
    """Each episode has another key, and what is asked with it is in this episode's record alone."""
    keys = set[str]()

    async def ask(task: AgentTask, _: Any) -> None:
        keys.add(task.api_key)
        await request(task)

    assert [len(row.turns) for row in asked(chat, verifier, ask, episodes=4)] == [1] * 4
    assert len(keys) == 4


async def test_a_taken_port_is_named() -> None:
    """The error says which argument is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"agent.args.listen='{listen}' cannot be listened on"):
            await EndpointServer(listen).__aenter__()
