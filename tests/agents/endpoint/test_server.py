"""The endpoint's server: keys, addresses, and answers that are errors in OpenAI's form."""

import json
import socket
import threading
from typing import Any

import aiohttp
import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.server import EndpointServer
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import Asking, InTurn, asked
from tests.support.rollout_helpers import play

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


def test_a_response_format_may_be_ignored(chat: Chat, verifier: Verifier) -> None:
    """What the policy says may follow it or not: nothing but its own distribution is sampled from."""

    async def ask(task: AgentTask, _: Any) -> None:
        assert (await request(task, body=BODY | {"response_format": {"type": "json_object"}}))[0] == 200

    (row,) = play(InTurn(chat, lambda *_: ""), Asking(chat, ask, "ignore"), verifier, group_size=1)
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
