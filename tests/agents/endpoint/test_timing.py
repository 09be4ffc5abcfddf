"""Requests at the same time, too late, from another thread, and requests that nobody waits for any more."""

import asyncio
from typing import Any

import openai
import pytest

from tasks.agents.answers import open_reader
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.completions import Completions
from tasks.agents.openai_agent import open_client
from tasks.environments.math_verify import MathVerifyEnvironment
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, asked, question
from tests.support.rollout_helpers import context


class Slow(MathVerifyEnvironment):
    """An environment that grades for so long that other completions come meanwhile."""

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0.5)
        return await super().step(action)


def create(task: AgentTask, client: Any, **more: Any) -> Any:
    return client.chat.completions.create(model=task.model, messages=question(task), **more)


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


@pytest.mark.parametrize("over_http", [False, True])
def test_what_nobody_waits_for_is_recorded(chat: Chat, verifier: Verifier, over_http: bool) -> None:
    """Otherwise the long completions would be missing in training: those at which clients lose patience."""

    async def impatient(task: AgentTask, client: Any) -> str:
        if over_http:
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
