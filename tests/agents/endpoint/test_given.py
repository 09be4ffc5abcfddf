"""What the environment was given, and what an agent says about itself, is recorded with the turn that it is about."""

from typing import Any

import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask, Reward
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, WRONG, asked, question
from tests.support.tool_calling import call

FINAL = {"type": "function", "function": {"name": "final_result", "parameters": {"type": "object"}}}


def final(answer: object, **more: object) -> str:
    """Return what the policy says to give a structured answer."""
    return call("final_result", answer=answer, **more)


async def ask(task: AgentTask, client: Any, messages: Any = None, **more: Any) -> Any:
    """Return the messages that answer a request."""
    answer = await client.chat.completions.create(
        model=task.model, messages=messages or question(task), tools=[FINAL], **more
    )
    return [choice.message for choice in answer.choices]


def read(message: Any) -> str:
    """Return the answer in a call, as frameworks do."""
    import orjson

    return str(orjson.loads(message.tool_calls[0].function.arguments)["answer"])


def test_a_structured_answer_belongs_to_the_candidate_that_gave_it(qwen3: Chat, verifier: Verifier) -> None:
    """Not to the newest one."""

    async def best_of_three(task: AgentTask, client: Any) -> str:
        return read((await ask(task, client, n=3))[1])

    (row,) = asked(qwen3, verifier, best_of_three, [final(1), final(3), final(4)])
    assert [turn.verdict for turn in row.turns] == ["", "correct", ""]
    assert row.answers == [None, "3", None]


def test_a_structured_answer_belongs_to_its_call_and_not_to_an_earlier_text(qwen3: Chat, verifier: Verifier) -> None:
    """A framework that wants a call asks again after a plain text."""

    async def insist(task: AgentTask, client: Any) -> str:
        (plain,) = await ask(task, client)
        again = [*question(task), plain, {"role": "user", "content": "Call final_result."}]
        return read((await ask(task, client, again))[0])

    (row,) = asked(qwen3, verifier, insist, ["3", final(3)])
    assert (row.ungraded, row.answers) == ([0], [None, "3"])


def test_arguments_of_other_tools_are_no_answers(qwen3: Chat, verifier: Verifier) -> None:
    """The newest completion has the answer in other words; an earlier call happens to have it as an argument."""

    async def look_up(task: AgentTask, client: Any) -> str:
        (looked,) = await ask(task, client)
        output = {"role": "tool", "tool_call_id": looked.tool_calls[0].id, "content": "yes"}
        await ask(task, client, [*question(task), looked, output])
        return "3"

    (row,) = asked(qwen3, verifier, look_up, [call("is_prime", number="3"), "It is 3."])
    assert (row.ungraded, row.answers) == ([0], [None, "3"])


@pytest.mark.parametrize(
    ("says", "returned", "answers"),
    [
        (RIGHT, None, []),
        (RIGHT + "\n", RIGHT, []),
        ("<think>\n4?\n</think>\n\n3", None, ["3"]),
        (final(3), None, [""]),
        (final(3, confidence=0.9), "3", ["3"]),
    ],
    ids=["text", "whitespace", "thoughts", "calls only", "in a call"],
)
def test_what_is_not_the_text_is_stored(
    qwen3: Chat, verifier: Verifier, says: str, returned: str | None, answers: list[str]
) -> None:
    """An agent that returns nothing gives the content of its newest completion.

    The scorer would read `<tool_call>…` as no answer, or as 0.9.
    """

    async def answer(task: AgentTask, client: Any) -> str | None:
        await ask(task, client)
        return returned

    (row,) = asked(qwen3, verifier, answer, [says])
    assert row.answers == answers


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
