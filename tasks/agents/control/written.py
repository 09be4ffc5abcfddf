"""Find what a chat template itself writes between and around messages, with toy conversations."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
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
        in_calls=['<tool_call>{"name": "look", "arguments": {"x": "', '"}}</tool_call>'],
        end_of_calls="",
    )
    """

    after: dict[str, str]  # by the role of the next message, between a completion without calls and that message
    around: list[str]  # before and after messages, first what begins a conversation; not within the assistant's turns
    around_output: list[str]  # before and after the output of a tool
    in_calls: list[str]  # before, between and after calls, within the assistant's turn
    end_of_calls: str  # the token that ends a turn with calls; "" if it is one of those in `after`, or there is none


def find_written(render: Render, lead: str, marks: Mapping[str, bool]) -> Written:
    """Return what a template writes.

    Args:
        render: renders toy conversations.
        lead: what the template writes at the beginning of the assistant's answer.
        marks: the texts of tokens that may be control tokens, and whether the tokenizer calls them special.
    """
    after, around, around_output = dict[str, str](), list[str](), list[str]()
    for role in _ROLES:
        text = render(_before(role, lead), []) or ""
        gap, follows, closing = text.partition(_SAID)[2].partition(_NEXT)
        if not follows:
            continue
        after[role] = gap
        texts = [text.partition(_ASKED)[0], gap, closing.removesuffix(lead)]
        within_users = role == "tool" and gap.startswith(after.get("user", gap))
        if role != "assistant" and not within_users:
            around.extend(texts)
        if role == "tool":
            around_output.extend(texts[1:])
    # Templates may refuse system messages elsewhere than at the beginning, and outputs of tools without calls.
    around.append((render(_begun(), []) or "").partition(_ASKED)[0])
    in_calls, after_call, outputs = _find_calls(render, lead)
    closing, end, gap = _split(after_call, "\n".join(in_calls), after.values(), "\n".join(around), marks)
    around_output.extend([end + gap, *outputs])
    if not (end + gap).startswith(after.get("user", end + gap)):
        around.extend([end + gap, *outputs])
    return Written(after, around, around_output, [*in_calls, closing], end)


def toys() -> list[list[dict[str, Any]]]:
    """Return the toy conversations."""
    return [*(_before(role, "") for role in _ROLES), _begun(), *(_with_calls(ids, "") for ids in (_IDS, _IDS[:1]))]


def _find_calls(render: Render, lead: str) -> tuple[list[str], str, list[str]]:
    """Return the texts before and between calls, after them, and after outputs.

    They are those of two calls, or of one if the template refuses two.
    """
    for ids in (_IDS, _IDS[:1]):
        text = render(_with_calls(ids, lead), _TOOLS) or ""
        before, *others = text.partition(_NEXT)[0].split(_GIVEN)
        if others:
            *between, after = others
            return [before.partition(_SAID)[2], *between], after, text.removesuffix(lead).split(_NEXT)[1:]
    return [], "", []


def _split(
    after_call: str, calls: str, gaps: Iterable[str], around: str, marks: Mapping[str, bool]
) -> tuple[str, str, str]:
    """Return what closes the last call, the token that ends its turn unless it also begins a gap, and the rest."""
    mark = re.compile("|".join(re.escape(text) for text in sorted(marks, key=len, reverse=True)))
    ends = {found[0] for gap in gaps if (found := mark.search(gap))}
    places = [place for place in mark.finditer(after_call) if place[0] in around or place[0] not in calls]
    known = [place for place in places if place[0] in ends]
    before = list(takewhile(lambda place: place[0] not in around, places))
    if known or not before:
        start = (known or places)[0].start() if places else len(after_call)
        return after_call[:start], "", after_call[start:]
    end = ([place for place in before if marks[place[0]]] or before)[-1]  # closing tags of calls stand before it
    return after_call[: end.start()], end[0], after_call[end.end() :]


def _before(role: str, lead: str) -> list[dict[str, Any]]:
    """Return a conversation in which a message of `role` follows a completion."""
    return [_message("user", _ASKED), _message("assistant", lead + _SAID), _message(role, _NEXT)]


def _begun() -> list[dict[str, Any]]:
    """Return a conversation that begins with a system message."""
    return [_message("system", _NEXT), _message("user", _ASKED)]


def _with_calls(ids: Sequence[str], lead: str) -> list[dict[str, Any]]:
    """Return a conversation in which outputs of tools follow calls with these ids."""
    function = {"name": "look", "arguments": {"x": _GIVEN}}
    calls = [{"id": number, "type": "function", "function": function} for number in ids]
    results = [_message("tool", _NEXT) | {"name": "look", "tool_call_id": number} for number in ids]
    return [_message("user", _ASKED), _message("assistant", lead + _SAID) | {"tool_calls": calls}, *results]


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
