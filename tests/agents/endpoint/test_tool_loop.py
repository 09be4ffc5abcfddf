"""A policy that calls tools: what it called, what came back, and which turns were answers."""

import pytest

from storage.records import Call
from tasks.agents.chat import Chat
from tasks.score.verifier import Verifier
from tests.support.tool_calling import call, played, the_calls

RIGHT = r"\boxed{3}"


def compute(expression: str, name: str = "calculator") -> str:
    return call(name, expression=expression)


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
        ("{'name': 'calculator', 'arguments': {'expression': '1 + 2'}}", NO_JSON),
        ('{"name": "calculator", "arguments": "1 + 2"}', NO_JSON),
        ('{"name": "calculator", "arguments": "[1, 2]"}', NO_OBJECT),
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


def test_calls_without_an_end_or_a_tool_are_no_answers(qwen3: Chat, verifier: Verifier) -> None:
    """So is one that the limit of tokens cut."""
    row = played(qwen3, verifier, "openai", ['<tool_call>\n{"name": "calculator", "arguments": {"expr', RIGHT])
    assert (row.ungraded, [call.status for call in row.calls]) == ([0], ["unparsable"])
    assert row.turns[0].feedback.startswith(NO_JSON)
    row = played(qwen3, verifier, "openai", [compute("1", name="calculate"), RIGHT])
    assert row.calls[0].output.startswith("error: no tool 'calculate', did you mean 'calculator'?")
