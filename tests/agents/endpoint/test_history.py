"""What clients send as the history of a conversation has one form, or is refused with the message that is wrong."""

from typing import Any

import pytest

from tasks.agents.endpoint.protocol import EndpointError, check_request

QUESTION = {"role": "user", "content": "What is 1 + 2?", "tool_calls": None, "tool_call_id": None, "name": None}
ADD = {"name": "add", "arguments": '{"a": 1, "b": null}'}
CALL = {"id": "c1", "type": "function", "function": ADD}
RESULT = {"role": "tool", "content": [{"type": "text", "text": "3"}], "tool_call_id": "c1"}


def checked(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return check_request({"model": "policy", "messages": list(messages)}).messages


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": null}', {"a": 1, "b": None}, None, ""])
def test_calls_have_one_form(arguments: Any) -> None:
    """Clients pad with null, and send arguments as JSON, as an object, or not at all."""
    call = CALL | {"function": ADD | {"arguments": arguments}}
    _, said, result = checked(QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT)
    assert said["tool_calls"] == [CALL | {"function": ADD | {"arguments": ADD["arguments"] if arguments else "{}"}}]
    assert result == {"role": "tool", "content": "3", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ['"{\\"a\\": 1}"', '{"a": 1, "b"', "[1]", 1])
def test_arguments_that_are_no_object_are_refused(arguments: Any) -> None:
    """Templates write arguments as an object, so anything else would be shown in another form than it was said."""
    call = CALL | {"function": ADD | {"arguments": arguments}}
    with pytest.raises(EndpointError, match="message 1 has a call whose arguments are no JSON object"):
        checked(QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT)


def test_calls_of_the_old_style_are_kept() -> None:
    """A history with `function_call` shows the policy the call, and not an empty answer with a result."""
    result = {"role": "function", "name": "add", "content": "3"}
    _, said, returned = checked(QUESTION, {"role": "assistant", "content": None, "function_call": ADD}, result)
    assert said == {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": ""}]}
    assert returned == result | {"role": "tool"}
    assert "tool_calls" not in checked({"role": "assistant", "content": "3", "function_call": None}, QUESTION)[0]


@pytest.mark.parametrize("old", ["add", {"arguments": "{}"}, {"name": "add", "arguments": "1 + 2"}])
def test_calls_of_the_old_style_that_cannot_be_read_are_refused(old: Any) -> None:
    with pytest.raises(EndpointError, match="message 1 has a call"):
        checked(QUESTION, {"role": "assistant", "function_call": old}, QUESTION)


def test_a_message_with_calls_of_both_styles_is_refused() -> None:
    with pytest.raises(EndpointError, match="message 1 has both tool_calls and function_call"):
        checked(QUESTION, {"role": "assistant", "function_call": ADD, "tool_calls": [CALL]}, RESULT)
