"""The endpoint's server: keys, addresses, and answers that are errors in OpenAI's form."""

import socket
from typing import Any

import aiohttp
import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.server import EndpointServer
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import Ask, asked

BODY = {"model": "policy", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}


def played(chat: Chat, verifier: Verifier, ask: Ask, episodes: int = 1) -> None:
    """Play, and check that nothing failed."""
    rows = asked(chat, verifier, ask, episodes=episodes)
    assert [(row.status, row.reason) for row in rows] == [("completed", "")] * episodes


async def request(
    task: AgentTask, path: str = "/chat/completions", body: Any = BODY, key: str | None = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {task.api_key if key is None else key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.request("POST" if body else "GET", task.base_url + path, json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


def test_errors_are_in_openais_form(chat: Chat, verifier: Verifier) -> None:
    """Clients show `error.message`, and compare `error.code`; each request here is answered by one."""
    wrong = [
        ({"key": "sk-1234"}, 401, "invalid_api_key"),
        ({"path": "/embeddings"}, 404, "unknown_url"),
        ({"body": {"model": "policy"}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": []}}, 400, "invalid_value"),
        ({"body": {**BODY, "n": 0}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": [{"role": "narrator", "content": "x"}]}}, 400, "invalid_value"),
        ({"body": {**BODY, "messages": [{"role": "assistant", "content": "It is"}]}}, 400, "invalid_value"),
        ({"body": {**BODY, "logit_bias": {"5": 1}}}, 400, "unsupported_parameter"),
        ({"body": {**BODY, "top_logprobs": 3}}, 400, "unsupported_parameter"),
        ({"body": {**BODY, "messages": [{"role": "user", "content": "x" * 99_999}]}}, 400, "context_length_exceeded"),
        ({"path": "/environment/step", "body": {"text": "3"}}, 400, "invalid_value"),
    ]

    async def ask(task: AgentTask, _: Any) -> None:
        for arguments, status, code in wrong:
            found, answer = await request(task, **arguments)  # type: ignore[arg-type]
            assert (found, answer["error"]["code"]) == (status, code), arguments
            assert answer["error"]["message"]
        assert (await request(task))[0] == 200

    played(chat, verifier, ask)


def test_a_key_opens_its_own_episode_only(chat: Chat, verifier: Verifier) -> None:
    """Each episode has another key, and what is asked with it is in this episode's record alone."""
    keys = set[str]()

    async def ask(task: AgentTask, _: Any) -> None:
        keys.add(task.api_key)
        await request(task)

    played(chat, verifier, ask, episodes=4)
    assert len(keys) == 4


async def test_a_taken_port_is_named() -> None:
    """The error says which argument is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"agent.args.listen='{listen}' cannot be listened on"):
            await EndpointServer(listen).__aenter__()
