"""Completions read as messages, with their thoughts and calls of tools, for agents that speak OpenAI's chat format.

`FamilyReader` reads the formats of the model families that the package `renderers` knows, `AnswerReader` that of Hermes
and Qwen for all other models; `open_reader` chooses. Prompts are always rendered by the model's chat template.
"""

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from storage.records import Call
from tasks.agents.chat import Chat
from tasks.agents.control import TOY_CALL, TOY_TOOLS
from tasks.thoughts import split

ChatMessage = dict[str, Any]
"""A message as in OpenAI's chat completions: {"role": "user", "content": "…"}; contents are texts."""

ToolSpec = dict[str, Any]
"""A tool as in OpenAI's chat completions: {"type": "function", "function": {"name": …, "parameters": …}}"""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A completion as a message.

    Its calls have no id and no turn yet. The arguments of one that cannot be read are the text in their place or, where
    that is not known, its whole text.

    Example: ParsedAnswer(content="Let me compute.", reasoning="", calls=[Call(…)])
    """

    content: str
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def read_arguments(given: Any) -> str | None:
    """Return the arguments of a call, a mapping or JSON of one, as JSON; None if they are not.

    Some models and clients write the JSON once more as JSON, in a string.

    >>> read_arguments('{"a":1}'), read_arguments({"a": "ü"}), read_arguments("[1]"), read_arguments('{"a": NaN}')
    ('{"a": 1}', '{"a": "ü"}', None, None)
    >>> read_arguments(json.dumps('{"a": 1}'))
    '{"a": 1}'
    """
    try:
        stated = json.loads(given) if isinstance(given, str) else given
        stated = json.loads(stated) if isinstance(stated, str) else stated
        written = json.dumps(stated, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    return written if isinstance(stated, dict) and _is_text(written) else None


def read_call(name: object, arguments: Any, text: str) -> Call:
    """Return a call with this name and these arguments; `text` is that of the whole call, should it not be readable."""
    named = name if isinstance(name, str) and _is_text(name) else ""
    read = read_arguments(arguments) if named else None
    written = arguments if named and isinstance(arguments, str) and _is_text(arguments) else text
    return Call(-1, "", named, written if read is None else read, "", "unparsable" if read is None else "unanswered")


def _is_text(text: str) -> bool:
    """Return whether UTF-8 can hold a text: no half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class AnswerReader:
    """Reads calls as JSON between `<tool_call>` and `</tool_call>`, and thoughts as `tasks.thoughts` knows them."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def read(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """Return a completion as a message. A call that cannot be read does not raise: it is one of the calls."""
        # Special tokens included: they may be the tags.
        thought, content = split(self._chat.opening_of(prompt_ids) + self._chat.completion_text(completion_ids))
        if not tools:
            return ParsedAnswer(content.strip(), thought)
        calls = [_call(body, closed=bool(end)) for body, end in _CALL.findall(content)]
        return ParsedAnswer(_CALL.sub("", content).strip(), thought, calls)


def _call(body: str, *, closed: bool) -> Call:
    """Read the text between the tags of a call."""
    stated: Any = None
    with suppress(ValueError, RecursionError):
        stated = json.loads(body)
    call = stated if closed and isinstance(stated, dict) else {}
    return read_call(call.get("name"), call.get("arguments", {}), body.strip())


class FamilyReader(AnswerReader):
    """Reads completions as the package `renderers` does for a model family, by its name there, such as `qwen3`.

    Raises:
        Exception: the tokenizer lacks tokens of the family; the library raises no narrower error.
    """

    def __init__(self, chat: Chat, family: str) -> None:
        from renderers import config_from_name, create_renderer

        super().__init__(chat)
        self.family = family
        self.renderer: Any = create_renderer(chat.tokenizer, config_from_name(family))
        self._ends = frozenset(self.renderer.get_stop_token_ids())

    def read(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """See `AnswerReader.read`."""
        family_ends = bool(completion_ids) and completion_ids[-1] in self._ends
        ids = completion_ids if family_ends else self._chat.without_end(completion_ids)
        try:
            parsed = self.renderer.parse_response(ids, tools=list(tools) or None, prompt_ids=prompt_ids)
        except RecursionError:  # thousands of brackets
            return ParsedAnswer("", "", [read_call(None, None, str(self._chat.tokenizer.decode(ids)))])
        # A name that no tool has is the agent's business.
        calls = [read_call(call.name, call.arguments, call.raw) for call in parsed.tool_calls]
        plain = super().read(prompt_ids, completion_ids, tools)
        if plain.reasoning and not parsed.reasoning_content:  # the library does not see that the prompt opened it
            return replace(plain, calls=calls)
        return ParsedAnswer(parsed.content, parsed.reasoning_content or "", calls)


logger = logging.getLogger(__name__)

_FAMILIES = (
    *("qwen3", "prime-qwen3", "llama-3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "deepseek-v3", "deepseek-r1"),
    *("minimax-m2", "kimi-k2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "hy3"),
)
"""Families of text models in the package `renderers`, in the order in which they are tried."""


@lru_cache(maxsize=4)
def open_reader(chat: Chat, family: str = "auto") -> AnswerReader:
    """Return the reader of a model's completions.

    Args:
        chat: the tokenizer and its template.
        family: `template`: calls between the tags of Hermes and Qwen; a name such as `qwen3`: this family of the
            package `renderers`; `auto`: the family that reads the calls which the chat template writes, or `template`
            if there is none.

    Raises:
        Exception: there is no such family, or the tokenizer lacks its tokens; the library has no narrower error.
    """
    if family == "template":
        return AnswerReader(chat)
    if family != "auto":
        return FamilyReader(chat, family)
    # The vocabulary of gpt-oss is fetched from the network: only for a tokenizer with a token that no other has.
    for name in (*_FAMILIES, *(["gpt-oss"] if "<|channel|>" in chat.tokenizer.get_vocab() else [])):
        with suppress(Exception):  # the tokenizer lacks tokens of the family; the library has no narrower error
            reader = FamilyReader(chat, name)
            calls = reader.read([], chat.toy_calls, TOY_TOOLS).calls
            if calls and all(json.loads(call.arguments) == TOY_CALL["arguments"] for call in calls):
                logger.info("completions are read by the package `renderers`, as %s", name)
                return reader
    return AnswerReader(chat)
