"""The given client is OpenAI's in all its forms; what it cannot send is refused as the server would.

A history of a conversation has one form, or is refused with the message that is wrong.
"""

import asyncio
import gc
import json
import ssl
from typing import Any
from unittest.mock import patch

import openai
import pytest

from tasks.agents.chat import Chat
from tasks.agents.endpoint.agent import AgentTask
from tasks.agents.endpoint.protocol import EndpointError, parse_request
from tasks.score.verifier import Verifier
from tests.agents.endpoint.asking import RIGHT, asked, question
from tests.support.tool_calling import ADD


def test_all_forms_of_the_client_ask_the_same_episode(chat: Chat, verifier: Verifier) -> None:
    """Copies with other settings, raw and streamed responses; a text at which an answer stops is not in it."""

    async def ask(task: AgentTask, client: Any) -> str:
        messages = question(task)
        assert [model.id async for model in client.models.list()] == [task.model]
        forms = [client.copy(max_retries=1), client.with_options(timeout=5).with_options(max_retries=2)]
        answers = [await form.chat.completions.create(model=task.model, messages=messages) for form in forms]
        raw = await client.chat.completions.with_raw_response.create(model=task.model, messages=messages)
        asked_for = {"messages": messages, "stream_options": {"include_usage": True}}
        async with client.chat.completions.stream(model=task.model, **asked_for) as stream:
            answers += [raw.parse(), await stream.get_final_completion()]
        assert answers[-1].usage == answers[0].usage
        assert answers[-1].choices[0].finish_reason == "stop"
        stopped = await client.chat.completions.create(model=task.model, messages=messages, stop=["}", "3"])
        assert stopped.choices[0].message.content == r"\boxed{"
        assert {answer.choices[0].message.content for answer in answers} == {RIGHT}
        assert answers[0]._request_id is None
        return RIGHT

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason, len(row.turns)) == ("completed", "", 5)


@pytest.mark.parametrize("in_thread", [False, True])
def test_clients_that_an_agent_leaves_open_are_closed(
    chat: Chat, verifier: Verifier, in_thread: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise Python closes them in a later event loop, each with an error; and none reads certificates."""
    made = list[Any]()

    async def create(task: AgentTask) -> Any:
        own = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        made.append(own._client)
        answer = await own.with_options(timeout=9).chat.completions.create(model=task.model, messages=question(task))
        return answer.choices[0].message.content

    async def ask(task: AgentTask, client: Any) -> Any:
        return await (asyncio.to_thread(asyncio.run, create(task)) if in_thread else create(task))

    async def later() -> None:
        gc.collect()

    with patch.object(ssl.SSLContext, "load_verify_locations") as reads:
        rows = asked(chat, verifier, ask, episodes=3)
    assert [row.status for row in rows] == ["completed"] * 3
    assert [each.is_closed for each in made] == [True] * 3
    made.clear()
    asyncio.run(later())
    assert (reads.call_count, [record for record in caplog.records if record.name == "asyncio"]) == (0, [])
    assert not openai.AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="another's").is_closed()


NO_TEXTS: list[Any] = [
    *([part] for part in ({"type": "text"}, {"type": "refusal", "refusal": None}, {"type": "text", "text": {"a": 1}})),
    *([{"type": "image_url", "image_url": {"url": "data:,"}}], 5, False),
]
"""Contents that would show the policy a word of Python, or nothing."""


def test_what_cannot_be_sent_is_a_bad_request(chat: Chat, verifier: Verifier) -> None:
    """The error is OpenAI's, not one of a library below, and names the parameter as OpenAI's API has it."""
    large = ADD | {"function": {"name": "a", "parameters": {"maximum": 10**20}}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"messages": [{"role": "user", "content": "half a pair: \ud800"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": "?"}]}, "messages"),
        *(({"messages": [{"role": "user", "content": content}]}, "messages") for content in NO_TEXTS),
        ({"tools": [large]}, "messages"),
        ({"stop": ["a"] * 17}, "stop"),
    ]

    async def ask(task: AgentTask, client: Any) -> str:
        for arguments, parameter in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{"model": task.model, "messages": question(task)} | arguments)
            assert caught.value.param == parameter
        await client.chat.completions.create(model=task.model, messages=question(task))
        return RIGHT

    (row,) = asked(chat, verifier, ask)
    assert (row.status, row.reason) == ("completed", "")


@pytest.mark.parametrize(("says", "fault"), [("<tool_call>\n1 + 2\n</tool_call>", "policy"), (RIGHT, "set-up")])
def test_an_agent_that_fails_because_no_call_can_be_read(
    qwen3: Chat, verifier: Verifier, says: str, fault: str
) -> None:
    """Otherwise a policy that is about to be wrong could leave its episode out of training by a broken call."""

    async def ask(task: AgentTask, client: Any) -> str:
        answer = await client.chat.completions.create(model=task.model, messages=question(task), tools=[ADD])
        return str(json.loads(answer.choices[0].message.tool_calls[0].function.arguments))

    (row,) = asked(qwen3, verifier, ask, says=[says])
    assert (row.status, row.fault, len(row.turns)) == ("failed", fault, 1)
    assert ("JSONDecodeError" if fault == "policy" else "TypeError") in row.reason


def test_a_policy_that_says_nothing_may_be_asked_again(chat: Chat, verifier: Verifier) -> None:
    """Haystack sends the empty message back, without another one."""

    async def ask(task: AgentTask, client: Any) -> str:
        answer = await client.chat.completions.create(model=task.model, messages=question(task))
        messages = [*question(task), answer.choices[0].message]
        answer = await client.chat.completions.create(model=task.model, messages=messages)
        return str(answer.choices[0].message.content)

    (row,) = asked(chat, verifier, ask, says=["", RIGHT])
    assert (row.follows, len(row.sequence_starts), row.turns[-1].verdict) == ([-1, 0], 1, "correct")


def history(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    """Return a conversation with a call, as a client pads it with null."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?", "tool_calls": None, "tool_call_id": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], **more},
        {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1", "function_call": None},
    ]
    return parse_request({"model": "policy", "messages": messages}).conversation


def test_calls_have_one_form(qwen3: Chat) -> None:
    """Clients send arguments as JSON, as an object, or not at all. Ids are numbered.

    What cannot be read stays, since the policy may have said so; a template that writes the turn anew gets an object.
    """
    forms = [({"a": 1, "b": None}, '{"a": 1, "b": null}'), (None, "{}"), ("", "{}")]
    unread = [(text, text) for text in ('"a"', '{"a": 1, "b"', "[1]")]
    for arguments, read in [*forms, *unread]:
        messages = history(arguments)
        function = {"name": "add", "arguments": read}
        assert messages[1]["tool_calls"] == [{"id": "call00001", "type": "function", "function": function}]
        assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "call00001"}
        shown = qwen3.tokenizer.decode(qwen3.prompt(messages, [ADD]))
        assert (arguments, read) not in unread or json.dumps({"name": "add", "arguments": {"arguments": read}}) in shown


def test_members_of_other_types_are_no_error() -> None:
    """Ids may be numbers, on both sides; a call has one type; a name or thought that is no text is not there."""
    calls = [{"id": number, "type": None, "function": {"name": "add", "arguments": "{}"}} for number in (7, 8)]
    messages = [
        {"role": "user", "content": "What is 1 + 2?", "name": 5},
        {"role": "assistant", "tool_calls": calls, "reasoning_content": [{"text": "a"}]},
        *({"role": "tool", "content": str(number), "tool_call_id": number} for number in (8, 7)),
    ]
    asked, called, *outputs = parse_request({"model": "policy", "messages": messages}).conversation
    assert asked == {"role": "user", "content": "What is 1 + 2?"}
    assert called.keys() == {"role", "content", "tool_calls"}
    assert [call["id"] for call in called["tool_calls"]] == ["call00001", "call00002"]
    assert {call["type"] for call in called["tool_calls"]} == {"function"}
    assert [output["tool_call_id"] for output in outputs] == ["call00002", "call00001"]


def test_calls_that_no_policy_has_made_are_refused() -> None:
    """Otherwise the policy would see an empty answer with a result."""
    for arguments in (1, [1]):
        with pytest.raises(EndpointError, match="1.tool_calls.0.function.arguments: Input should be a valid string"):
            history(arguments)
    with pytest.raises(EndpointError, match="messages.1.function_call: .*use tool_calls"):
        history("{}", tool_calls=None, function_call={"name": "add", "arguments": "{}"})
