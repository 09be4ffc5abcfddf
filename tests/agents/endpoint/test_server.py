"""The endpoint's server: keys, addresses, errors in OpenAI's form; requests at once, too late, or from threads."""

import asyncio
import json
import socket
import threading
from typing import Any

import aiohttp
import openai
import pytest

from tasks.agents.answers import open_reader
from tasks.agents.chat import Chat
from tasks.agents.endpoint import server
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.server import EndpointServer
from tasks.agents.openai_agent import open_client
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, Asking, asked
from tests.agents.endpoint.solvers import ask as create
from tests.support.rollout_helpers import ScriptedEngine, context, play

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
    """Clients show `error.message`, and compare `error.code`. A key opens its own episode only."""
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
        keys.add(task.api_key)

    keys = set[str]()
    rows = asked(chat, verifier, ask, episodes=4)  # what is asked with a key is in this episode's record alone
    assert [(row.status, row.reason, len(row.turns)) for row in rows] == [("completed", "", 1)] * 4
    assert len(keys) == 4


def test_requests_that_never_come_whole_end(chat: Chat, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender of half a body is told so; headers that never come end the connection without a word."""
    monkeypatch.setattr(server, "BODY_S", 0.1)
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    headers = "POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n"

    async def answer_to(task: AgentTask, beginning: str) -> bytes:
        host, port = task.base_url.removeprefix("http://").removesuffix("/v1").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(beginning.encode())
        line = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        return line

    async def ask(task: AgentTask, _: Any) -> None:
        key = f"Authorization: Bearer {task.api_key}\r\n"
        assert b" 408 " in await answer_to(task, f"{headers}{key}Content-Length: 9\r\n\r\n{{")
        assert await answer_to(task, headers) == b""
        assert (await request(task))[0] == 200

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason) == ("completed", "")


def test_a_response_format_may_be_ignored(chat: Chat, verifier: Verifier) -> None:
    """What the policy says may follow it or not: nothing but its own distribution is sampled from."""

    async def ask(task: AgentTask, _: Any) -> None:
        assert (await request(task, body=BODY | {"response_format": {"type": "json_object"}}))[0] == 200

    (row,) = play(ScriptedEngine(chat, lambda *_: RIGHT), Asking(chat, ask, "ignore"), verifier, group_size=1)
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


async def test_a_taken_port_is_named() -> None:
    """The error says which argument is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"agent.args.listen='{listen}' cannot be listened on"):
            await EndpointServer(listen).__aenter__()


class Slow(MathVerifyEnvironment):
    """An environment that grades for so long that other completions come meanwhile."""

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0.5)
        return await super().step(action)


def graded(row: Any) -> list[tuple[str, str]]:
    """Return text and verdict of the turns that the environment graded."""
    return [(turn.text, turn.verdict) for position, turn in enumerate(row.turns) if position not in row.ungraded]


def test_a_completion_that_comes_while_the_environment_grades_is_another(chat: Chat, verifier: Verifier) -> None:
    """The verdict stays with the completion that was the newest when the answer was given."""

    async def first_wins(task: AgentTask, client: Any) -> str:
        asking = [asyncio.create_task(create(task, client, seed=seed)) for seed in (1, 2)]
        done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        return f"I say {done.pop().result().choices[0].message.content}"

    (row,) = asked(chat, verifier, first_wins, says=[RIGHT, WRONG], delays=[0, 0.2], environment=Slow)
    assert graded(row) == [(RIGHT, "correct")]
    assert len(row.turns) == 2


def test_what_nobody_waits_for_is_recorded(chat: Chat, verifier: Verifier) -> None:
    """Otherwise the long completions would be missing in training: those at which clients lose patience."""

    async def impatient(task: AgentTask, _: Any) -> str:
        client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
        with pytest.raises(openai.APITimeoutError):
            await create(task, client, timeout=0.2)
        answer = await create(task, client)
        await asyncio.sleep(1)
        return str(answer.choices[0].message.content)

    (row,) = asked(chat, verifier, impatient, says=[WRONG, RIGHT], delays=[0.7, 0])
    assert sorted(turn.text for turn in row.turns) == [RIGHT, WRONG]
    assert graded(row) == [(RIGHT, "correct")]  # not the newest, which nobody has received


async def test_a_request_after_the_end_is_refused(chat: Chat) -> None:
    """Also by the given client: otherwise it would wait until the rollout's end."""
    engine: Any = None
    completions = Completions("q", context(chat), open_reader(chat), 1, engine)
    async with completions.open(), open_client(completions, "http://127.0.0.1/v1", "key") as client:
        pass
    with pytest.raises(openai.APIStatusError, match="has ended"):
        await client.chat.completions.create(model="policy", messages=[])


def test_a_thread_with_an_event_loop_of_its_own_is_answered(chat: Chat, verifier: Verifier) -> None:
    """Synchronous forms of frameworks make one (`Runner.run_sync`); both the client and the task work there."""

    async def ask(task: AgentTask, client: Any) -> None:
        async def inside() -> bool:
            answer = await create(task, client)
            return (await task.step(answer.choices[0].message.content)).terminated

        assert await asyncio.to_thread(asyncio.run, inside())

    (row,) = asked(chat, verifier, ask, delays=[0.05])
    assert (row.status, row.reason) == ("completed", "")
    assert graded(row) == [(RIGHT, "correct")]
