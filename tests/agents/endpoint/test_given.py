"""What the environment was given, and what an agent says about itself, is recorded with the turn that it is about."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask, Reward
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, Ask, asked, question
from tests.support.tool_calling import call

FINAL = {"type": "function", "function": {"name": "final_result", "parameters": {"type": "object"}}}


def final(answer: object, **more: object) -> str:
    """Return what the policy says to give a structured answer."""
    return call("final_result", answer=answer, **more)


async def ask(task: AgentTask, client: Any, messages: Any = None, **more: Any) -> Any:
    """Return the messages that answer a request."""
    sent = messages or question(task)
    answer = await client.chat.completions.create(model=task.model, messages=sent, tools=[FINAL], **more)
    return [choice.message for choice in answer.choices]


def read(message: Any) -> str:
    """Return the answer in a call, as frameworks do."""
    return str(json.loads(message.tool_calls[0].function.arguments)["answer"])


async def best_of_three(task: AgentTask, client: Any) -> str:
    """Choose the second of three."""
    return read((await ask(task, client, n=3))[1])


async def insist(task: AgentTask, client: Any) -> str:
    """Want a call, and ask again after a plain text, as frameworks do."""
    (plain,) = await ask(task, client)
    again = [*question(task), plain, {"role": "user", "content": "Call final_result."}]
    return read((await ask(task, client, again))[0])


async def look_up(task: AgentTask, client: Any) -> str:
    """Call another tool, which happens to have the answer as an argument, and then say it in other words."""
    (looked,) = await ask(task, client)
    output = {"role": "tool", "tool_call_id": looked.tool_calls[0].id, "content": "yes"}
    await ask(task, client, [*question(task), looked, output])
    return "3"


def returning(answer: str | None) -> Ask:
    async def solve(task: AgentTask, client: Any) -> str | None:
        await ask(task, client)
        return answer

    return solve


GIVEN: dict[str, tuple[Ask, Sequence[str], list[int], list[str | None]]] = {
    "of candidates": (best_of_three, [final(1), final(3), final(4)], [0, 2], [None, "3", None]),
    "not an earlier text": (insist, ["3", final(3)], [0], [None, "3"]),
    "not another tool's": (look_up, [call("is_prime", number="3"), "It is 3."], [0], [None, "3"]),
    "whitespace": (returning(RIGHT), [RIGHT + "\n"], [], []),
    "thoughts": (returning(None), ["<think>\n4?\n</think>\n\n3"], [], ["3"]),
    "calls only": (returning(None), [final(3)], [], [""]),
    "in a call": (returning("3"), [final(3, confidence=0.9)], [], ["3"]),
}
"""The agent, what the policy says, the ungraded turns, and what the environment was given where it is not the text."""


@pytest.mark.parametrize(("agent", "says", "ungraded", "answers"), GIVEN.values(), ids=GIVEN)
def test_an_answer_belongs_to_the_completion_that_gave_it(
    qwen3: Chat, verifier: Verifier, agent: Ask, says: list[str], ungraded: list[int], answers: list[str | None]
) -> None:
    """Without the stored answers the scorer would read `<tool_call>…` as no answer, or as 0.9.

    An agent that returns nothing gives the content of its newest completion.
    """
    (row,) = asked(qwen3, verifier, agent, says)
    assert (row.ungraded, row.answers) == (ungraded, answers)
    assert all(turn.verdict for position, turn in enumerate(row.turns) if position not in ungraded)


@pytest.mark.parametrize(
    ("returned", "verdict"),
    [
        (Reward(1.2, {"correct": 1.0, "format": 0.2}, success=True), "correct"),
        (Reward(0.2, {"correct": 0.0, "format": 0.2}, success=False), "wrong"),
        (Reward(0.2, {"correct": 0.0, "format": 0.2}), ""),
        (0.2, ""),
    ],
)
def test_an_agent_says_what_success_is(chat: Chat, verifier: Verifier, returned: object, verdict: str) -> None:
    """A reward above 0 for the format of a wrong answer is none. An agent that says nothing leaves it to the scorer."""

    async def grade_itself(task: AgentTask, client: Any) -> object:
        await client.chat.completions.create(model=task.model, messages=question(task))
        return returned

    (row,) = asked(chat, verifier, grade_itself, [WRONG])
    assert [turn.verdict for turn in row.turns] == [verdict]
    assert row.reward_parts == ([dict(returned.parts)] if isinstance(returned, Reward) else [])
