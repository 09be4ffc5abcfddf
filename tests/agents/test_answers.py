"""Completions are read as messages: by the package `renderers` where it knows the format, otherwise by their tags."""

import json
from copy import deepcopy
from typing import Any

import pytest

from tasks.agents.answers import AnswerReader, ChatMessage, FamilyReader, open_reader
from tasks.agents.chat import Chat
from tests.support.chat_formats import chat_of, tokenizer_of
from tests.support.tool_calling import call

PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
CHAT, CALL = chat_of("qwen3"), call("add", a=1, b=2)
ADD: dict[str, Any] = {"type": "function", "function": FUNCTION}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "Your answer is wrong. Try again."}


def result(content: str = "3", number: int = 1) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}


@pytest.fixture(params=["qwen3", "template"])
def reader(request: pytest.FixtureRequest) -> AnswerReader:
    return open_reader(CHAT, request.param)


def test_a_known_family_is_found_by_its_tokens() -> None:
    """The name of a model's folder says nothing; calls as its template writes them do."""
    single = deepcopy(tokenizer_of("llama"))
    several = "{% for m in messages if m.tool_calls and m.tool_calls[1:] %}{{ raise_exception('one') }}{% endfor %}"
    single.chat_template = several + str(single.chat_template)
    for known, family in ((CHAT, "qwen3"), (Chat(single), "llama-3")):
        found = open_reader(known)
        assert isinstance(found, FamilyReader)
        assert found.family == family
    tokenizer = deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<tool_call>", "[call]")
    assert type(open_reader(Chat(tokenizer))) is AnswerReader
    with pytest.raises(Exception, match="qwen33"):
        open_reader(CHAT, "qwen33")


TURNS: dict[str, tuple[list[ChatMessage], str, list[ChatMessage], list[dict[str, Any]]]] = {
    "system": ([SYSTEM, QUESTION], "4<|im_end|>", [AGAIN], []),
    "cut": ([QUESTION], "It is", [AGAIN], []),
    "blanks": ([QUESTION], "\n\n It is 4. \n<|im_end|>", [AGAIN], []),
    "call": ([QUESTION], f"{CALL}<|im_end|>", [result()], [ADD]),
    "two calls": ([SYSTEM, QUESTION], f"I add.\n{CALL}\n{CALL}<|im_end|>", [result(), result("4", 2)], [ADD]),
    "broken call": ([QUESTION], "<tool_call>\nadd(1, 2)\n</tool_call><|im_end|>", [AGAIN], [ADD]),
    "thoughts": ([QUESTION], f"<think>\nHm\n</think>\n\n{CALL}<|im_end|>", [result()], [ADD]),
}


@pytest.mark.parametrize(("messages", "said", "new", "tools"), TURNS.values(), ids=TURNS)
def test_a_sequence_goes_on_as_the_library_has_it(
    messages: list[ChatMessage], said: str, new: list[ChatMessage], tools: list[dict[str, Any]]
) -> None:
    """The same tokens follow what was sampled, calls, thoughts and whitespace included."""
    family = open_reader(CHAT, "qwen3")
    assert isinstance(family, FamilyReader)
    prompt, completion = CHAT.prompt(messages, tools), CHAT.encode(said)
    ids = CHAT.continuation(messages, completion, new, tools)
    assert ids is not None
    bridge = family.renderer.bridge_to_next_turn(prompt, completion, new, tools=tools or None)
    assert bridge is None or list(bridge.token_ids) == prompt + completion + ids


@pytest.mark.parametrize(
    ("said", "content", "reasoning", "calls"),
    [
        ("It is 3.<|im_end|>", "It is 3.", "", []),
        (f"I add.\n{CALL}\n{call('sub')}<|im_end|>", "I add.", "", [("add", {"a": 1, "b": 2}), ("sub", {})]),
        (f"<think>\nHm\n</think>\n\n{CALL}<|im_end|>", "", "Hm", [("add", {"a": 1, "b": 2})]),
        (CALL.replace('{"a": 1, "b": 2}', json.dumps('{"a": 1}')) + "<|im_end|>", "", "", [("add", {"a": 1})]),
    ],
)
def test_answers_are_read(
    reader: AnswerReader, said: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    """Contents, thoughts and calls are told apart; arguments may be JSON in a string."""
    answer = reader.read(CHAT.prompt([QUESTION], [ADD]), CHAT.encode(said), [ADD])
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert [(each.name, json.loads(each.arguments)) for each in answer.calls] == calls
    assert {each.status for each in answer.calls} <= {"unanswered"}


def test_broken_calls_are_kept(reader: AnswerReader) -> None:
    """A call that cannot be read is one of the calls, with its text, and raises nothing."""
    for broken in ("<tool_call>\nadd(1, 2)\n</tool_call>", '<tool_call>\n{"name": "add"', "<tool_call>[1]</tool_call>"):
        (found,) = reader.read(CHAT.prompt([QUESTION], [ADD]), CHAT.encode(broken + "<|im_end|>"), [ADD]).calls
        assert found.status == "unparsable"
        assert found.arguments.strip() in broken
