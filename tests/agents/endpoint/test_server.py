"""The endpoint's server: keys, addresses, and answers that are errors in OpenAI's form."""

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import Ask, asked

SAYS = "called the endpoint after its episode had ended"
BODY = {"model": "policy", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}


def played(chat: Chat, verifier: Verifier, ask: Ask, listen: str = "127.0.0.1:0", episodes: int = 1) -> None:
    """Play, and check that nothing failed."""
    rows = asked(chat, verifier, ask, episodes=episodes, listen=listen)
    assert [(row.status, row.reason) for row in rows] == [("completed", "")] * episodes


async def request(
    task: AgentTask, path: str = "/chat/completions", body: Any = BODY, key: str | None = None, **session: Any
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {task.api_key if key is None else key}"}
    async with (
        aiohttp.ClientSession(**session) as client,
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


def test_the_model_is_listed(chat: Chat, verifier: Verifier) -> None:
    """Clients that look for a model find the one that there is."""

    async def ask(task: AgentTask, _: Any) -> None:
        _, listed = await request(task, "/models", body=None)
        assert [model["id"] for model in listed["data"]] == [task.model]
        await request(task)

    played(chat, verifier, ask)


def test_a_key_opens_its_own_episode_only(chat: Chat, verifier: Verifier) -> None:
    """Each episode has another key, and what is asked with it is in this episode's record alone."""
    keys = set[str]()

    async def ask(task: AgentTask, _: Any) -> None:
        keys.add(task.api_key)
        await request(task)

    played(chat, verifier, ask, episodes=4)
    assert len(keys) == 4


def test_a_call_after_the_end_is_refused(chat: Chat, verifier: Verifier, caplog: pytest.LogCaptureFixture) -> None:
    """A helper of an agent that goes on asking hears that its episode has ended, and the log names the mistake."""
    first: list[AgentTask] = []
    codes: list[str] = []

    async def ask(task: AgentTask, _: Any) -> None:
        first.append(task)
        await request(task)
        if task is first[0]:
            return
        for _ in range(100):  # it has ended at the latest when the log says so
            _, answer = await request(first[0])
            codes.append(answer.get("error", {}).get("code"))
            if SAYS in caplog.text:
                return
            await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING, "tasks.agents"):
        played(chat, verifier, ask, episodes=2)
    assert SAYS in caplog.text
    assert codes[-1] == "episode_ended"


def test_a_unix_socket(chat: Chat, verifier: Verifier, tmp_path: Path) -> None:
    """Where asked, the endpoint listens on a socket in a folder of the user's."""
    path = tmp_path / "endpoint"

    async def ask(task: AgentTask, _: Any) -> None:
        status, _ = await request(task, connector=aiohttp.UnixConnector(str(path)))
        assert status == 200

    played(chat, verifier, ask, f"unix:{path}")


def test_a_taken_port_is_named(chat: Chat, verifier: Verifier) -> None:
    """The error says which argument is wrong."""

    async def ask(task: AgentTask, _: Any) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"agent.args.listen='{listen}' cannot be listened on"):
            played(chat, verifier, ask, listen)
