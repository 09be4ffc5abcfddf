"""What an agent had when it asked, got and gave is recorded, so that credit can follow causes.

The episodes are those of tests/support/trees.py: `tests/train` says what their turns are paid.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from storage.records import Trajectory
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask, Reward
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, Ask, asked, question
from tests.support.trees import TREES

Messages = list[Any]
MORE = {"role": "user", "content": "Go on."}


async def ask(task: AgentTask, client: Any, messages: Messages, **more: Any) -> list[str]:
    """Return the texts that answer a request."""
    answer = await client.chat.completions.create(model=task.model, messages=messages, **more)
    return [str(choice.message.content) for choice in answer.choices]


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def after(messages: Messages, said: str) -> Messages:
    """Return the conversation in which the agent asks for more."""
    return [*messages, {"role": "assistant", "content": said}, MORE]


async def candidates(task: AgentTask, client: Any) -> str:
    """Choose the second of three."""
    return (await ask(task, client, question(task), n=3))[1]


async def candidate_that_goes_on(task: AgentTask, client: Any) -> str:
    """Go on with the first of three."""
    first, *_ = await ask(task, client, question(task), n=3)
    return (await ask(task, client, after(question(task), first)))[0]


async def planner_and_workers(task: AgentTask, client: Any) -> None:
    """Plan, let two conversations work at once, and end the plan."""
    (plan,) = await ask(task, client, question(task))
    done = await asyncio.gather(*(ask(task, client, user(f"Part {part} of {plan}")) for part in (1, 2)))
    for (said,) in done:
        await task.step(said)
    await ask(task, client, after(question(task), plan))


async def two_sub_agents(task: AgentTask, client: Any) -> None:
    """Let two conversations of two turns go on at once, each graded at its end."""

    async def sub_agent(name: str) -> None:
        (first,) = await ask(task, client, user(name))
        (second,) = await ask(task, client, after(user(name), first))
        await task.step(second)

    await asyncio.gather(sub_agent("a"), sub_agent("b"))


async def nobody_waited(task: AgentTask, client: Any) -> str:
    """Lose patience, and ask again."""
    with pytest.raises(openai.APITimeoutError):
        await ask(task, client, question(task), timeout=0.1)
    (said,) = await ask(task, client, question(task))
    await asyncio.sleep(0.6)
    return said


EPISODES: dict[str, tuple[Ask, Sequence[str], Sequence[float]]] = {
    "candidates": (candidates, ["one", RIGHT, "three"], [0]),
    "candidate that goes on": (candidate_that_goes_on, ["one", "two", "three", RIGHT], [0]),
    "planner and workers": (planner_and_workers, ["plan", RIGHT, WRONG, "end"], [0]),
    "two sub-agents": (two_sub_agents, ["one", "two", RIGHT, WRONG], [0.05, 0.1, 0.15, 0.15]),
    "nobody waited": (nobody_waited, ["late", RIGHT], [0.4, 0]),
}
"""What the agent does, what the engine says to one request after another, and how long it takes."""


def shown(row: Trajectory) -> dict[str, Any]:
    columns = ("follows", "ungraded", "received", "asked", "paid")
    rewards = [turn.reward for turn in row.turns]
    sequences = [sum(turn.start > start for turn in row.turns) for start in row.sequence_starts]
    return {name: getattr(row, name) for name in columns} | {"rewards": rewards, "sequences": sequences}


@pytest.mark.parametrize("name", EPISODES)
def test_trees(chat: Chat, verifier: Verifier, name: str) -> None:
    """Each is recorded as the table has it."""
    ask_so, says, delays = EPISODES[name]
    (row,) = asked(chat, verifier, ask_so, says, delays)
    assert (row.status, row.reason) == ("completed", "")
    assert shown(row) == shown(TREES[name].trajectory())


def test_who_waits_for_a_slot_has_asked_before(chat: Chat, verifier: Verifier) -> None:
    """Of 70 requests at once 64 are answered at the same time; the others know no more when their time comes."""

    async def ask_often(task: AgentTask, client: Any) -> None:
        await asyncio.gather(*(ask(task, client, question(task), seed=seed) for seed in range(70)))

    (row,) = asked(chat, verifier, ask_often, delays=[0.05])
    assert row.asked == [0] * 70
    assert sorted(row.received) == list(range(70))


@pytest.mark.parametrize("returned", [RIGHT, 1.0, Reward(1.0), "stepped"], ids=str)
def test_what_is_returned_is_paid_with_all_that_came(chat: Chat, verifier: Verifier, returned: object) -> None:
    """The answer of the first of two turns is given after the second.

    If it was given to the environment before, too, it is not graded again: the second would be paid for the first.
    """

    async def say_it_late(task: AgentTask, client: Any) -> object:
        (first,) = await ask(task, client, question(task))
        if returned == "stepped":
            await task.step(first)
        await ask(task, client, after(question(task), first))
        return first if returned == "stepped" else returned

    (row,) = asked(chat, verifier, say_it_late, says=[RIGHT, "two"])
    paid, ungraded = {RIGHT: ([2, 0], [1]), "stepped": ([], [1])}.get(str(returned), ([], [0]))
    assert (row.paid, row.ungraded) == (paid, ungraded)
    assert [turn.reward for turn in row.turns] == ([0.0, 1.0] if ungraded == [0] else [1.0, 0.0])


def test_nobody_goes_on_from_what_nobody_got(chat: Chat, verifier: Verifier) -> None:
    """Where an equal completion came too late, the next request goes on from the one that the agent has."""

    async def impatient(task: AgentTask, client: Any) -> str:
        said = await nobody_waited(task, client)
        return (await ask(task, client, after(question(task), said)))[0]

    (row,) = asked(chat, verifier, impatient, says=["one", "one", RIGHT], delays=[0.4, 0, 0])
    assert [turn.text for turn in row.turns] == ["one", "one", RIGHT]
    assert row.received == [-1, 0, 1]
    assert row.follows == [-1, -1, 1]
