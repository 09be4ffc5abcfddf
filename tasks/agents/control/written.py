"""Find what a chat template itself writes between and around messages, with toy conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ASKED, _SAID, _GIVEN, _NEXT = "(asked)", "(said)", "(given)", "(next)"
_FUNCTION = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_IDS = "look00001", "look00002"
_ROLES = "user", "tool", "system", "assistant"

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str | None]
"""Returns the text of messages and tools with the assistant's next header, or None if the template refuses them."""


@dataclass(frozen=True, slots=True)
class Written:
    """The texts that a template writes.

    Example, of ChatML with calls in the form of Hermes, shortened: Written(
        after={"user": "<|im_end|><|im_start|>user", "tool": "<|im_end|><|im_start|>tool"},
        around=["<|im_start|>user", "<|im_end|><|im_start|>user", "<|im_end|><|im_start|>assistant"],
        around_output=["<|im_end|><|im_start|>tool", "<|im_end|><|im_start|>assistant"],
        in_calls=['<tool_call>{"name": "look", "arguments": {"x": "'],
        after_call='"}}</tool_call><|im_end|><|im_start|>tool',
    )
    """

    after: dict[str, str]  # by the role of the next message, between a completion without calls and that message
    around: list[str]  # before and after messages, first what begins a conversation; not within the assistant's turns
    around_output: list[str]  # before and after the output of a tool
    in_calls: list[str]  # before and between calls, within the assistant's turn
    after_call: str  # between the arguments of the last call and the output of the tool; "" if there are no calls


def find_written(render: Render, lead: str) -> Written:
    """Return what a template writes. `lead` is what it writes at the beginning of the assistant's answer."""
    written = Written({}, [], [], *_find_calls(render, lead))
    for role in _ROLES:
        text = render(_before(role, lead), []) or ""
        gap, follows, closing = text.partition(_SAID)[2].partition(_NEXT)
        if not follows:
            continue
        written.after[role] = gap
        texts = [text.partition(_ASKED)[0], gap, closing.removesuffix(lead)]
        within_users = role == "tool" and gap.startswith(written.after.get("user", gap))
        if role != "assistant" and not within_users:
            written.around.extend(texts)
        if role == "tool":
            written.around_output.extend(texts[1:])
    return written


def toys() -> list[list[dict[str, Any]]]:
    """Return the toy conversations."""
    return [*(_before(role, "") for role in _ROLES), *(_with_calls(ids, "") for ids in (_IDS, _IDS[:1]))]


def _find_calls(render: Render, lead: str) -> tuple[list[str], str]:
    """Return the texts before, between and after calls: of two, or of one if the template refuses two."""
    for ids in (_IDS, _IDS[:1]):
        text = render(_with_calls(ids, lead), _TOOLS) or ""
        before, *others = text.partition(_NEXT)[0].split(_GIVEN)
        if others:
            *between, after = others
            return [before.partition(_SAID)[2], *between], after
    return [], ""


def _before(role: str, lead: str) -> list[dict[str, Any]]:
    """Return a conversation in which a message of `role` follows a completion."""
    return [_message("user", _ASKED), _message("assistant", lead + _SAID), _message(role, _NEXT)]


def _with_calls(ids: Sequence[str], lead: str) -> list[dict[str, Any]]:
    """Return a conversation in which outputs of tools follow calls with these ids."""
    function = {"name": "look", "arguments": {"x": _GIVEN}}
    calls = [{"id": number, "type": "function", "function": function} for number in ids]
    results = [_message("tool", _NEXT) | {"name": "look", "tool_call_id": number} for number in ids]
    return [_message("user", _ASKED), _message("assistant", lead + _SAID) | {"tool_calls": calls}, *results]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
