"""The interface of renderers, and the messages that they read and write."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

ChatMessage = dict[str, Any]
"""A message as in OpenAI's chat completions: {"role": "user", "content": "…"}; contents are texts."""

ToolSpec = dict[str, Any]
"""A tool as in OpenAI's chat completions: {"type": "function", "function": {"name": …, "parameters": …}}"""


class RenderingError(ValueError):
    """A conversation that the model's chat template cannot show; the message says why."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool, as the policy wrote it.

    Example: ParsedCall(name="calculator", arguments='{"expression": "12 + 7"}', readable=True)
    """

    name: str
    arguments: str  # JSON of an object; the whole text of a call that is not readable
    readable: bool


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion as a message.

    Example: ParsedAnswer(content="Let me compute.", reasoning="", calls=[ParsedCall(…)])
    """

    content: str
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def read_arguments(given: Any) -> str | None:
    """Return the arguments of a call, a mapping or JSON of one, as JSON; None if they are not.

    >>> read_arguments('{"a":1}'), read_arguments({"a": "ü"}), read_arguments("[1]"), read_arguments('{"a": NaN}')
    ('{"a": 1}', '{"a": "ü"}', None, None)
    """
    try:
        stated = json.loads(given) if isinstance(given, str) else given
        written = json.dumps(stated, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return written if isinstance(stated, dict) and _is_text(written) else None


def read_call(name: object, arguments: Any, text: str) -> ParsedCall:
    """Return a call with this name and these arguments; `text` is that of the whole call, should it not be readable."""
    named = name if isinstance(name, str) and _is_text(name) else ""
    read = read_arguments(arguments)
    return ParsedCall(named, read, True) if named and read is not None else ParsedCall(named, text, False)


def _is_text(text: str) -> bool:
    """Return whether UTF-8 can hold a text: no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


class Renderer(Protocol):
    """The only place where messages become tokens and tokens become messages."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a completion."""

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, up to the point where the assistant's answer begins.

        Raises:
            RenderingError: the template refuses the messages, or does not show all of them or of the tools.
        """
        ...

    def continuation(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """Return the ids that follow a completion when `new` messages answer it.

        The prompt of the next completion is `prompt_ids + completion_ids + these`: what was sampled is never encoded
        again. None if the template rewrites what came before; then the next prompt is that of the whole conversation.

        Args:
            prompt_ids: the prompt of the completion.
            completion_ids: what the policy sampled.
            messages: the conversation of which `prompt_ids` is the prompt.
            new: the messages after the completion, 1 or more.
            tools: the tools that the conversation began with.
        """
        ...

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """Return a completion as a message. A call that cannot be read does not raise: it is one of the calls."""
        ...
