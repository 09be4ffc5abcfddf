"""An episode of another program, and how its messages and numbers are read. Whatever is wrong is a `RowError`."""

import json
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.records import Status
from tasks.problems.columns import as_text, present
from tasks.problems.problem_set import Row, RowError

LARGEST = 3e38
"""Rewards are stored in 32 bits."""
_ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles, in older and newer files of OpenAI."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one completion.

    Example: Tokens(prompt_ids=[5, 6], completion_ids=[7, 8], logprobs=[-0.4, -0.1])
    """

    prompt_ids: list[int]  # the whole prompt of the completion
    completion_ids: list[int]  # N
    logprobs: list[float] | None  # N; None: unknown


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Example: Message("assistant", "Let me add.", sampled=True, calls=[{"id": "call_1", "type": "function", "function":
    {"name": "add", "arguments": '{"a": 1}'}}])
    """

    role: str  # system | user | assistant | tool
    text: str
    sampled: bool = False  # a completion of the policy; messages of an example in the prompt are none
    calls: list[dict[str, Any]] = field(default_factory=list)  # as in OpenAI's chat completions
    call_id: str = ""  # of a tool's message: the call that it answers
    reward: float | None = None  # its own; None: it has none
    tokens: Tokens | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        more = {"tool_calls": self.calls} if self.calls else {}
        return {
            "role": self.role,
            "content": self.text,
            **more,
            **({"tool_call_id": self.call_id} if self.call_id else {}),
        }


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode. Its turns are the sampled messages; the messages before the first of them are the prompt.

    Example: Rollout([Message("user", "1 + 2?"), Message("assistant", "3", sampled=True)], reward=1.0, golds=["3"])
    """

    messages: list[Message]
    reward: float | None = None  # of the whole episode; None: unknown
    parts: dict[str, float] = field(default_factory=dict)  # of the reward
    golds: list[str] = field(default_factory=list)  # gold answers
    problem_id: str = ""  # empty: problems are told apart by prompt and gold answers
    step: int = 0  # of the training; each step is a data set
    source: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] = field(default_factory=list)  # as in OpenAI's chat completions
    status: Status | None = None  # None: unknown
    reason: str = ""  # why the status is not `completed`


def read_messages(value: Any, column: str, *, sampled: bool = True) -> list[Message]:
    """Return the messages in a column, which may be one text: of the user, or of the assistant if it is `sampled`.

    Messages of the assistant are turns if `sampled` says so, and unless their weight is 0: those are not trained on.
    """
    if isinstance(value, str):
        return [Message("assistant" if sampled else "user", clean(value, column), sampled)]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RowError(f"column {column!r} is neither text nor a list of messages: {reprlib.repr(value)}")
    return [_message(item, f"{column}[{number}]", sampled) for number, item in enumerate(value)]


def _message(item: Row, name: str, sampled: bool) -> Message:
    role = _ROLES.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise RowError(f"{name} has the role {reprlib.repr(item.get('role'))}: give system, user, assistant or tool")
    text = _content(item.get("content"), name)
    if thoughts := item.get("reasoning_content"):
        text = f"<think>\n{clean(thoughts, name)}\n</think>\n\n{text}"
    called = item.get("tool_calls") or ([{"function": item["function_call"]}] if item.get("function_call") else [])
    if not isinstance(called, list):
        raise RowError(f"{name}.tool_calls is not a list: {reprlib.repr(called)}")
    is_turn = sampled and role == "assistant" and item.get("weight") != 0
    return Message(
        role=role,
        text=text,
        sampled=is_turn,
        calls=[_call(call, f"{name}.tool_calls[{number}]", number) for number, call in enumerate(called)],
        call_id=clean(item.get("tool_call_id") or "", name),
        reward=number(item, "reward"),
        tokens=read_tokens(item, "prompt_token_ids", "token_ids", "logprobs") if is_turn else None,
    )


def _content(value: Any, name: str) -> str:
    """Return the content of a message, which may have several parts of text."""
    parts = value if isinstance(value, list) else [{"type": "text", "text": value or ""}]
    kinds = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
    if set(kinds) - {"text"}:
        raise RowError(f"{name} has a content of {', '.join(map(str, kinds))}: only text can be stored")
    return "\n".join(clean(part.get("text") or "", name) for part in parts)


def _call(item: Any, name: str, number: int) -> dict[str, Any]:
    """Return a call of a tool in OpenAI's form; verifiers writes calls as JSON texts."""
    if isinstance(item, str):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name} is not JSON: {error}") from None
    called = (item.get("function") or item) if isinstance(item, dict) else None
    if not isinstance(called, dict) or not isinstance(called.get("name"), str):
        raise RowError(f"{name} is not a call with a name: {reprlib.repr(item)}")
    arguments = called.get("arguments") or ""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {"name": clean(called["name"], name), "arguments": clean(written, name)}
    return {"id": clean(item.get("id") or f"call_{number}", name), "type": "function", "function": function}


def read_tokens(item: Row, prompt: str, completion: str, logprobs: str) -> Tokens | None:
    """Return the tokens in three columns; None without ids, or if the prompt's are missing."""
    if item.get(completion) is None or item.get(prompt) is None:
        return None
    ids = [_numbers(item[name], name, int, 0, 2**31 - 1) for name in (prompt, completion)]
    known = None if item.get(logprobs) is None else _numbers(item[logprobs], logprobs, float, -LARGEST, LARGEST)
    if known is not None and len(known) != len(ids[1]):
        raise RowError(f"{completion} has {len(ids[1])} tokens, and {logprobs} {len(known)} numbers")
    return Tokens(*ids, known)


def _numbers(values: Any, name: str, kind: type[int] | type[float], low: float, high: float) -> list[Any]:
    kinds = (int,) if kind is int else (int, float)
    if not isinstance(values, list) or not all(type(value) in kinds and low <= value <= high for value in values):
        raise RowError(f"{name} is not a list of {'token ids' if kind is int else 'finite numbers'}")
    return [kind(value) for value in values]


def number(row: Row, column: str, *, may_be_nan: bool = False) -> float | None:
    """Return the number in a column; None if there is none, or if it is NaN where that means so."""
    value = row.get(column)
    if value is None or (may_be_nan and isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise RowError(f"column {column!r} is not a finite number: {reprlib.repr(value)}")
    return float(value)


def numbers(row: Row, columns: Sequence[str]) -> dict[str, float]:
    """Return the columns that have a number, by name."""
    given = [(name, row.get(name)) for name in columns]
    found = {name: number(row, name, may_be_nan=True) for name, value in given if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if value is not None}


def step(row: Row) -> int:
    """Return the step of the training in which a row was sampled; 0 if the row does not say."""
    value = row.get("step")
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value < 10**6:
        raise RowError(f"column 'step' is not a number of a step, from 0 to 999,999: {reprlib.repr(value)}")
    return value


def clean(value: Any, name: str) -> str:
    """Return a text, which may be blank, or refuse what is none or cannot be stored."""
    return value if isinstance(value, str) and not value.strip() else as_text(value, name)


_CHATML = re.compile(r"(?:<\|im_start\|>)?(system|user|assistant|tool)\n")
_END = re.compile(r"(?:<\|im_end\|>)?\s*$")


def read_rendered(row: Row, column: str) -> list[Message]:
    r"""Return the messages of a prompt that is one text, as the template ChatML renders it, with its marks or without.

    A text of any other form is one message of the user.

    >>> [(each.role, each.text) for each in read_rendered({"input": "system\nAdd.\nuser\n1 + 2?\nassistant\n"}, "input")]
    [('system', 'Add.'), ('user', '1 + 2?')]
    """
    text = as_text(present(row, column), column)
    pieces = re.split(rf"(?:^|(?<=\n)){_CHATML.pattern}", text)
    roles = pieces[1::2]
    if pieces[0].strip() or roles[-1:] != ["assistant"] or "user" not in roles:
        return [Message("user", text)]
    return [Message(role, _END.sub("", said)) for role, said in zip(roles, pieces[2::2], strict=True)][:-1]
