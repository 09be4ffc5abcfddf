"""A policy that calls tools: what it called, what came back, and which turns were answers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from configs.schema import ToolChoice
from storage.records import TRAJECTORY_SCHEMA, Call, Trajectory, to_table
from tasks.agents.chat import Chat
from tasks.agents.openai_agent import OpenAIAgent
from tasks.score.verifier import Verifier
from tasks.tools import open_toolbox
from tasks.tools.interface import ToolContext
from tasks.tools.sandbox import Sandboxes
from tests.support.qwen3_tokenizer import build_qwen3_tokenizer
from tests.support.rollout_helpers import ScriptedEngine, context, play

RIGHT = r"\boxed{3}"


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(build_qwen3_tokenizer())


def call(expression: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def played(chat: Chat, verifier: Verifier, reply: Callable[[int, int], str]) -> Trajectory:
    engine = ScriptedEngine(chat, reply)
    toolbox = partial(open_toolbox, [ToolChoice(type="calculator")], ToolContext(Sandboxes()))
    agent = OpenAIAgent(replace(context(chat, 4096), open_toolbox=toolbox))
    (row,) = play(engine, agent, verifier, group_size=1)
    to_table([row], TRAJECTORY_SCHEMA)
    return row


def the_calls(row: Trajectory) -> list[Call]:
    return [replace(each, id="") for each in row.calls]


def test_calls_are_answered_and_recorded(chat: Chat, verifier: Verifier) -> None:
    """A turn with calls is no answer; its outputs are in the record and in the tokens, outside of the loss."""
    row = played(chat, verifier, lambda turn, _: [f"{call('1 + 2')}\n{call('2 * 3')}", RIGHT][turn])
    assert (row.status, row.ungraded, row.follows) == ("completed", [0], [-1, 0])
    assert [turn.verdict for turn in row.turns] == ["", "correct"]
    assert the_calls(row) == [
        Call(0, "", "calculator", '{"expression": "1 + 2"}', "3", "answered"),
        Call(0, "", "calculator", '{"expression": "2 * 3"}', "6", "answered"),
    ]
    between = chat.tokenizer.decode(row.token_ids[row.turns[0].end : row.turns[1].start])
    assert "<tool_response>\n3\n</tool_response>" in between
    assert not any(row.action_mask[row.turns[0].end : row.turns[1].start])
    assert len(row.sequence_starts) == 1


@pytest.mark.parametrize(
    ("said", "status", "output"),
    [
        (call("1 / 0"), "failed", "error: "),
        (call("1", name="calculate"), "failed", "error: no tool 'calculate', did you mean 'calculator'?"),
        ("<tool_call>\n1 + 2\n</tool_call>", "unparsable", ""),
    ],
)
def test_failed_calls(chat: Chat, verifier: Verifier, said: str, status: str, output: str) -> None:
    """The policy hears of an error; a call that nobody can read is an answer, and a case for the audit."""
    row = played(chat, verifier, lambda turn, _: [said, RIGHT][turn])
    (made,) = row.calls
    assert made.status == status
    assert made.output.startswith(output)
