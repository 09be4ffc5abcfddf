"""Ids of calls are the client's business: which output belongs to which call counts, and not how a client says so."""

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.tree import number_calls
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, asked, question
from tests.support.tool_calling import call

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CLIENTS: dict[str, tuple[Callable[[str, int], str], Callable[[str, int], str]]] = {
    "rewrites": (lambda given, _: f"fc-{given}", lambda given, _: f"fc-{given}"),
    "drops": (lambda *_: "", lambda *_: ""),
    "drops those of outputs": (lambda given, _: given, lambda *_: ""),
    "numbers each turn": (lambda _, number: f"call_{number}", lambda _, number: f"call_{number}"),
    "names the tool": (lambda *_: "add", lambda *_: "add"),
    "keeps its own": (lambda _, number: f"mine-{number}", lambda given, _: given),
}
"""The ids that clients write in calls and in outputs, made of the given id and the number of the call in its turn."""


@pytest.mark.parametrize(("in_call", "in_output"), CLIENTS.values(), ids=CLIENTS)
def test_a_conversation_goes_on_whatever_ids_a_client_writes(
    qwen3: Chat, verifier: Verifier, in_call: Callable[[str, int], str], in_output: Callable[[str, int], str]
) -> None:
    """Two turns of two calls and an answer are one sequence, and each call has its own output."""

    async def ask(task: AgentTask, client: Any) -> str:
        messages, outputs = question(task), count(1)
        while True:
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=[ADD])
            message = answer.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for number, made in enumerate(message["tool_calls"]):
                assert made["id"].startswith("call_")
                output = {"role": "tool", "content": str(next(outputs)), "tool_call_id": in_output(made["id"], number)}
                messages.append(output)
                made["id"] = in_call(made["id"], number)

    says = [call("add", a=1) + call("add", a=2), call("add", a=1) + call("add", a=1), RIGHT]
    (row,) = asked(qwen3, verifier, ask, says=says)
    assert (row.follows, len(row.sequence_starts)) == ([-1, 0, 1], 1)
    assert [(each.turn, each.output, each.status) for each in row.calls] == [
        (turn, str(2 * turn + number), "answered") for turn in (0, 1) for number in (1, 2)
    ]
    assert len({each.id for each in row.calls}) == 4


def test_outputs_may_come_in_another_order(qwen3: Chat, verifier: Verifier) -> None:
    """Calls run at the same time; the id says whose output it is."""

    async def ask(task: AgentTask, client: Any) -> str:
        answer = await client.chat.completions.create(model=task.model, messages=question(task), tools=[ADD])
        message = answer.choices[0].message
        outputs = [{"role": "tool", "content": f"of {each.id}", "tool_call_id": each.id} for each in message.tool_calls]
        messages = [*question(task), message, *reversed(outputs)]
        await client.chat.completions.create(model=task.model, messages=messages, tools=[ADD])
        return RIGHT

    (row,) = asked(qwen3, verifier, ask, says=[call("add", a=1) + call("add", a=2), RIGHT])
    assert [each.output for each in row.calls] == [f"of {each.id}" for each in row.calls]


KINDS = st.lists(st.sampled_from(["user", "assistant", "calls", "tool"]), max_size=12)
IDS = st.sampled_from(["", "a", "b", "c"])


@given(kinds=KINDS, data=st.data())
def test_numbers_follow_from_positions(kinds: list[str], data: st.DataObject) -> None:
    """Other ids that say the same give the same numbers, and what comes after an answer changes none before it."""

    def conversation(prefix: str) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "content": "", "tool_call_id": prefix + drawn[0]}
            if kind == "tool"
            else {"role": "assistant", "content": "", "tool_calls": [{"id": prefix + name} for name in drawn]}
            if kind == "calls"
            else {"role": kind, "content": ""}
            for kind, drawn in zip(kinds, ids, strict=True)
        ]

    ids = [data.draw(st.lists(IDS, min_size=1, max_size=3)) for _ in kinds]
    numbered, renamed = conversation(""), conversation("other-")
    number_calls(numbered)
    number_calls(renamed)
    assert renamed == numbered
    for position, message in enumerate(numbered):
        if message["role"] == "assistant":
            begun = conversation("")[: position + 1]
            number_calls(begun)
            assert begun == numbered[: position + 1]
    made = [each["id"] for message in numbered for each in message.get("tool_calls", ())]
    assert len(set(made)) == len(made)
    assert all(len(name) == 9 and name.isalnum() for name in made)


def test_numbers_of_many_calls_take_no_time() -> None:
    """A message of 4 MB may not stop all other episodes."""
    calls = [{"id": ""} for _ in range(50_000)]
    outputs = [{"role": "tool", "content": "", "tool_call_id": "x"} for _ in range(50_000)]
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": calls}, *outputs]
    started = time.process_time()
    number_calls(messages)
    assert time.process_time() - started < 2
    assert [output["tool_call_id"] for output in outputs] == [made["id"] for made in calls]
