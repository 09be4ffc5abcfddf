"""The package `renderers` and the probing of chat templates agree, for a family that both can render."""

import json
import time
from functools import lru_cache
from typing import Any

import pytest

from tasks.agents.chat import Chat
from tasks.agents.rendering import ChatMessage, LibraryRenderer, TemplateRenderer, open_renderer
from tests.support.qwen3_tokenizer import build_qwen3_tokenizer

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 1 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {"role": "user", "content": "Your answer is wrong. Try again."}


def call(name: str = "add", arguments: str = '{"a": 1, "b": 2}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def result(content: str = "3", number: int = 1) -> ChatMessage:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": content}


@lru_cache(maxsize=1)
def chat() -> Chat:
    return Chat(build_qwen3_tokenizer())


@pytest.fixture(params=["qwen3", "template"])
def renderer(request: pytest.FixtureRequest) -> TemplateRenderer:
    return open_renderer(chat(), request.param)


def test_a_known_family_is_found_by_its_tokens() -> None:
    """The name of a model's folder says nothing; the tokens of trial conversations do."""
    found = open_renderer(chat())
    assert isinstance(found, LibraryRenderer)
    assert found.name == "qwen3"


def test_an_unknown_template_is_probed() -> None:
    """A template that differs from every family's is asked itself."""
    tokenizer = build_qwen3_tokenizer()
    tokenizer.chat_template = str(tokenizer.chat_template).replace("Be", "Do").replace("# Tools", "# Functions")
    assert type(open_renderer(Chat(tokenizer))) is TemplateRenderer


def test_an_unknown_family_is_refused() -> None:
    """The message names what was asked for and what to do."""
    with pytest.raises(ValueError, match="renderer='qwen33' cannot render.*use auto or template"):
        open_renderer(chat(), "qwen33")


TURNS: list[tuple[str, list[ChatMessage], str, list[ChatMessage], list[dict[str, Any]]]] = [
    ("plain", [QUESTION], r"\boxed{4}<|im_end|>", [AGAIN], []),
    ("system", [SYSTEM, QUESTION], "4<|im_end|>", [AGAIN], []),
    ("cut", [QUESTION], "It is", [AGAIN], []),
    ("call", [QUESTION], f"{call()}<|im_end|>", [result()], [ADD]),
    ("two calls", [SYSTEM, QUESTION], f"I add.\n{call()}\n{call()}<|im_end|>", [result(), result("4", 2)], [ADD]),
    ("broken call", [QUESTION], "<tool_call>\nadd(1, 2)\n</tool_call><|im_end|>", [AGAIN], [ADD]),
    ("thoughts", [QUESTION], f"<think>\nHm\n</think>\n\n{call()}<|im_end|>", [result()], [ADD]),
]


@pytest.mark.parametrize(("messages", "said", "new", "tools"), [turn[1:] for turn in TURNS], ids=[t[0] for t in TURNS])
def test_both_continue_with_the_same_tokens(
    messages: list[ChatMessage], said: str, new: list[ChatMessage], tools: list[dict[str, Any]]
) -> None:
    """The same conversation has the same prompt, and the same tokens follow what was sampled.

    Where the library asks for the whole prompt, this begins with the tokens that were sampled all the same.
    """
    follow = {name: follows(open_renderer(chat(), name), messages, said, new, tools) for name in ("qwen3", "template")}
    assert follow["qwen3"] == follow["template"]


def follows(
    renderer: TemplateRenderer,
    messages: list[ChatMessage],
    said: str,
    new: list[ChatMessage],
    tools: list[dict[str, Any]],
) -> tuple[list[int], str]:
    """Return the prompt of the completion `said`, and the text of what follows it."""
    prompt, completion = renderer.prompt(messages, tools), chat().encode(said)
    rest = renderer.continuation(prompt, completion, messages, new, tools)
    if rest is None:
        content = chat().completion_text(completion)
        whole = renderer.prompt([*messages, {"role": "assistant", "content": content}, *new], tools)
        assert whole[: len(prompt + completion)] == prompt + completion
        rest = whole[len(prompt + completion) :]
    return prompt, str(chat().tokenizer.decode(rest))


def test_thoughts_before_a_new_question_begin_a_sequence(renderer: TemplateRenderer) -> None:
    """The format drops thoughts of earlier turns, so the prompt cannot go on with them."""
    completion = chat().encode("<think>\nHm\n</think>\n\n4<|im_end|>")
    prompt = renderer.prompt([QUESTION], [])
    assert renderer.continuation(prompt, completion, [QUESTION], [AGAIN], []) is None


@pytest.mark.parametrize(
    ("said", "content", "reasoning", "calls"),
    [
        ("It is 3.<|im_end|>", "It is 3.", "", []),
        (f"{call()}<|im_end|>", "", "", [("add", {"a": 1, "b": 2})]),
        (f"I add.\n{call()}\n{call('sub', '{}')}<|im_end|>", "I add.", "", [("add", {"a": 1, "b": 2}), ("sub", {})]),
        (f"<think>\nHm\n</think>\n\n{call()}<|im_end|>", "", "Hm", [("add", {"a": 1, "b": 2})]),
    ],
)
def test_answers_are_read(
    renderer: TemplateRenderer, said: str, content: str, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    """Contents, thoughts and calls are told apart."""
    answer = renderer.answer(renderer.prompt([QUESTION], [ADD]), chat().encode(said), [ADD])
    assert (answer.content, answer.reasoning) == (content, reasoning)
    assert [(each.name, json.loads(each.arguments), each.readable) for each in answer.calls] == [
        (name, arguments, True) for name, arguments in calls
    ]


@pytest.mark.parametrize(
    "broken",
    ["<tool_call>\nadd(1, 2)\n</tool_call>", '<tool_call>\n{"name": "add"', "<tool_call>[1]</tool_call>"],
)
def test_broken_calls_are_kept(renderer: TemplateRenderer, broken: str) -> None:
    """A call that cannot be read is one of the calls, with its text, and raises nothing."""
    answer = renderer.answer(renderer.prompt([QUESTION], [ADD]), chat().encode(broken + "<|im_end|>"), [ADD])
    (found,) = answer.calls
    assert not found.readable
    assert found.arguments.strip() in broken


@pytest.mark.parametrize("hostile", [" ", "\n", "<think>", "</think>", "<tool_call>", "<tool_call></tool_call>"])
def test_hostile_answers_are_read_in_linear_time(hostile: str) -> None:
    """Each doubling of a policy's words may not quadruple the time in which all other episodes wait."""
    renderer, text = TemplateRenderer(chat()), hostile * (100_000 // len(hostile))
    completion = chat().encode(text)
    started = time.process_time()
    renderer.answer([], completion, [ADD])
    assert time.process_time() - started < 2


def test_a_template_without_tools_is_refused() -> None:
    """A policy that would never see its tools is an error of the request, and not silence."""
    tokenizer = build_qwen3_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    with pytest.raises(ValueError, match="does not show the tool 'add'"):
        TemplateRenderer(Chat(tokenizer)).prompt([QUESTION], [ADD])
