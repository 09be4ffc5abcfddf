"""A policy that calls tools: what it called, what came back, and which turns were answers.

Ids of calls are the client's business: which output belongs to which call counts, and not how a client says so.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.records import Call
from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.tree import number_calls
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, asked, question
from tests.support.tool_calling import ADD, call, played, the_calls


def compute(expression: str) -> str:
    return call("calculator", expression=expression)


def test_calls_are_answered_and_recorded(qwen3: Chat, verifier: Verifier) -> None:
    """A turn with calls is no answer; its outputs are recorded, and in the tokens that follow, outside the loss."""
    row = played(qwen3, verifier, "openai", [f"{compute('1 + 2')}\n{compute('1 / 0')}", RIGHT])
    assert (row.status, row.ungraded, row.follows) == ("completed", [0], [-1, 0])
    assert [turn.verdict for turn in row.turns] == ["", "correct"]
    assert the_calls(row) == [
        Call(0, "", "calculator", '{"expression": "1 + 2"}', "3", "answered"),
        Call(0, "", "calculator", '{"expression": "1 / 0"}', "error: division by zero", "failed"),
    ]
    between = qwen3.tokenizer.decode(row.token_ids[row.turns[0].end : row.turns[1].start])
    assert "<tool_response>\n3\n</tool_response>" in between
    assert not any(row.action_mask[row.turns[0].end : row.turns[1].start])
    assert len(row.sequence_starts) == 1


NO_JSON, NO_OBJECT = "error: the arguments are not valid JSON: ", "error: the arguments are not a JSON object"


@pytest.mark.parametrize("renderer", ["auto", "template"])
@pytest.mark.parametrize(
    ("body", "output"),
    [
        ('{"name": "calculator", "arguments": {"expression": "1 + 2",}}', NO_JSON),
        ('{"name": "calculator", "arguments": "1 + 2"}', NO_JSON),
        ('{"name": "calculator", "arguments": [1, 2]}', "error: "),
        ('{"name": "calculator", "arguments": {"expression": NaN}}', "error: "),
        ('{"name": "calculator", "arguments": {"expression": "\\ud83d"}}', "error: "),
        ('[{"name": "calculator", "arguments": {"expression": "1 + 2"}}]', NO_OBJECT),
        ('{"arguments": {"expression": "1 + 2"}}', "error: no tool '';"),
        ("[" * 3000, NO_JSON),
        ("", "error: no tool '';"),
    ],
)
def test_calls_that_cannot_be_read(qwen3: Chat, verifier: Verifier, body: str, output: str, renderer: str) -> None:
    """The policy hears the error of JSON as the tool's output; its turn is no answer, and a case for the audit."""
    says = [f"<tool_call>\n{body}\n</tool_call>\n{compute('1 + 2')}", RIGHT]
    row = played(qwen3, verifier, "openai", says, {"renderer": renderer})
    assert (row.status, row.ungraded, [turn.verdict for turn in row.turns]) == ("completed", [0], ["", "correct"])
    broken, *others = row.calls
    assert (broken.status, broken.output.startswith(output)) == ("unparsable", True)
    lost = renderer == "auto" and body.startswith("[[")  # the library reads nothing of a completion that is so deep
    assert [(whole.status, whole.output) for whole in others] == ([] if lost else [("answered", "3")])
    assert row.turns[0].feedback == "\n".join(each.output for each in row.calls)
    assert len(row.sequence_starts) == 1


Write = Callable[[str, int], str]
CLIENTS: dict[str, tuple[Write, Write, str | None]] = {
    "rewrites": (lambda given, _: f"fc-{given}", lambda given, _: f"fc-{given}", None),
    "drops": (lambda *_: "", lambda *_: "", None),
    "drops those of outputs": (lambda given, _: given, lambda *_: "", None),
    "numbers each turn": (lambda _, number: f"call_{number}", lambda _, number: f"call_{number}", None),
    "names the tool": (lambda *_: "add", lambda *_: "add", None),
    "keeps its own": (lambda _, number: f"mine-{number}", lambda given, _: given, None),
    "other order of members": (lambda given, _: given, lambda given, _: given, '{"b":[2],"a":1.0}'),
    "JSON in a string": (lambda given, _: given, lambda given, _: given, '"{\\"b\\": [2], \\"a\\": 1.0}"'),
}
"""The ids that clients write in calls and in outputs, made of the given id and the number of the call in its turn.

Then the arguments as other languages and libraries write them; None: as they were."""


@pytest.mark.parametrize(("in_call", "in_output", "form"), CLIENTS.values(), ids=CLIENTS)
def test_a_conversation_goes_on_whatever_a_client_writes(
    qwen3: Chat, verifier: Verifier, in_call: Write, in_output: Write, form: str | None
) -> None:
    """Two turns of two calls and an answer are one sequence, and each call has its own output.

    Where they keep their ids, outputs may come in another order.
    """
    turned = form is not None

    async def ask(task: AgentTask, client: Any) -> str:
        messages, outputs = question(task), count(1)
        while True:
            answer = await client.chat.completions.create(model=task.model, messages=messages, tools=[ADD])
            message = answer.choices[0].message.model_dump(exclude_none=True)
            messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            results = list[Any]()
            for number, made in enumerate(message["tool_calls"]):
                assert made["id"].startswith("call_")
                output = {"role": "tool", "content": str(next(outputs)), "tool_call_id": in_output(made["id"], number)}
                results.append(output)
                made["id"] = in_call(made["id"], number)
                made["function"]["arguments"] = form or made["function"]["arguments"]
            messages += results[::-1] if turned else results

    says = [call("add", a=1.0, b=[2]) * 2, call("add", a=1.0, b=[2]) * 2, RIGHT]
    (row,) = asked(qwen3, verifier, ask, says=says)
    assert (row.follows, len(row.sequence_starts)) == ([-1, 0, 1], 1)
    assert [(each.turn, each.output, each.status) for each in row.calls] == [
        (turn, str(2 * turn + number), "answered") for turn in (0, 1) for number in (1, 2)
    ]
    assert len({each.id for each in row.calls}) == 4


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
    for length in (position + 1 for position, kind in enumerate(kinds) if kind in ("assistant", "calls")):
        number_calls(begun := conversation("")[:length])
        assert begun == numbered[:length]
    made = [each["id"] for message in numbered for each in message.get("tool_calls", ())]
    assert len(set(made)) == len(made)
    assert all(len(name) == 9 and name.isalnum() for name in made)
