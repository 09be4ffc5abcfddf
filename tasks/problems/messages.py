"""Prompts that are messages, as data sets for chat models have them."""

import json
import reprlib
from typing import Any

from storage.records import Problem
from tasks.problems.columns import as_text, present
from tasks.problems.problem_set import Row, RowError

Message = dict[str, str]
"""{"role": "user", "content": "…"}"""

MESSAGES = "prompt_messages"
"""The key of a problem's metadata with its messages, unless the prompt is a single message of the user."""


def read_prompt(row: Row, column: str) -> tuple[str, dict[str, list[Message]]]:
    """Return the text of a prompt and, if it is more than one message of the user, its messages as metadata.

    The text is what the problem asks, without instructions of the system: by it problems are compared. Messages are
    those of a system (first, or absent), and of user and assistant; the last one is the user's.

    >>> read_prompt({"ask": "1 + 2?"}, "ask"), read_prompt({"ask": [{"role": "user", "content": "1 + 2?"}]}, "ask")
    (('1 + 2?', {}), ('1 + 2?', {}))
    >>> read_prompt({"ask": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2?"}]}, "ask")
    ('1 + 2?', {'prompt_messages': [{'role': 'system', 'content': 'Add.'}, {'role': 'user', 'content': '1 + 2?'}]})
    """
    value = present(row, column)
    if not isinstance(value, list):
        return as_text(value, column), {}
    messages = [_message(item, column) for item in value]
    roles = [message["role"] for message in messages]
    asked = [message["content"] for message in messages if message["role"] != "system"]
    if roles[-1:] != ["user"] or "system" in roles[1:]:
        raise RowError(f"column {column!r} has messages of {roles}: one of the system may be first, the user's is last")
    return "\n\n".join(asked), {MESSAGES: messages} if len(messages) > 1 else {}


def first_messages(problem: Problem, question: str) -> list[Message]:
    """Return the messages with which an episode begins.

    They are those of the problem's row or, without such, the question as the user's. What an environment adds to the
    problem's prompt is added to the last message; if it asks something else, that is the only message.

    Args:
        problem: the problem.
        question: what the environment asks.
    """
    messages: list[Message] = json.loads(problem.metadata).get(MESSAGES) or []
    if not messages or not question.startswith(problem.prompt):
        return [{"role": "user", "content": question}]
    *before, last = messages
    return [*before, last | {"content": last["content"] + question.removeprefix(problem.prompt)}]


def with_instructions(messages: list[Message], system_prompt: str = "", instruction: str = "") -> list[Message]:
    r"""Return messages with an agent's own system prompt before that of the problem, and an instruction at the end.

    >>> with_instructions([{"role": "user", "content": "1 + 2?"}], "Be brief.", "Box it.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1 + 2?\nBox it.'}]
    """
    *before, last = messages
    if system_prompt and before and before[0]["role"] == "system":
        before[0] = before[0] | {"content": f"{system_prompt}\n\n{before[0]['content']}"}
    elif system_prompt:
        before = [{"role": "system", "content": system_prompt}, *before]
    return [*before, last | {"content": f"{last['content']}\n{instruction}"} if instruction else last]


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ("system", "user", "assistant"):
        raise RowError(
            f"column {column!r} has a message that is not of system, user or assistant: {reprlib.repr(item)}"
        )
    if more := [name for name, value in item.items() if name not in ("role", "content") and value]:
        raise RowError(f"column {column!r} has a message with {', '.join(map(str, more))}: only content is read")
    return {"role": item["role"], "content": as_text(item.get("content"), f"{column}.content")}
