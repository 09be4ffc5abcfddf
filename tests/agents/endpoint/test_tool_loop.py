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
    row = played(qwen3, verifier, "openai", [f"{compute('1 + 2')}\n{compute('2 * 3')}", RIGHT])
    assert (row.status, row.ungraded, row.follows) == ("completed", [0], [-1, 0])
    assert [turn.verdict for turn in row.turns] == ["", "correct"]
    assert the_calls(row) == [
        Call(0, "", "calculator", '{"expression": "1 + 2"}', "3", "answered"),
        Call(0, "", "calculator", '{"expression": "2 * 3"}', "6", "answered"),
    ]
    between = qwen3.tokenizer.decode(row.token_ids[row.turns[0].end : row.turns[1].start])
    assert "<tool_response>\n3\n</tool_response>" in between
    assert not any(row.action_mask[row.turns[0].end : row.turns[1].start])
    assert len(row.sequence_starts) == 1


@pytest.mark.parametrize(
    ("said", "status", "output"),
    [
        (compute("1 / 0"), "failed", "error: "),
        (compute("1", name="calculate"), "failed", "error: no tool 'calculate', did you mean 'calculator'?"),
        ("<tool_call>\n1 + 2\n</tool_call>", "unparsable", ""),
    ],
)
def test_failed_calls(qwen3: Chat, verifier: Verifier, said: str, status: str, output: str) -> None:
    """The policy hears of an error; a call that nobody can read is an answer, and a case for the audit."""
    row = played(qwen3, verifier, "openai", [said, RIGHT])
    (made,) = row.calls
    assert made.status == status
    assert made.output.startswith(output)
