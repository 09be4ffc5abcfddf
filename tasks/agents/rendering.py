"""Conversations with tools as token ids, and completions as messages, for agents that speak OpenAI's chat format.

`LibraryRenderer` uses the package `renderers` for the model families that it knows, `TemplateRenderer` the model's own
chat template for all others; `open_renderer` chooses.
"""

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from tasks.agents.chat import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ChatMessage = dict[str, Any]
"""A message as in OpenAI's chat completions: {"role": "user", "content": "…"}; contents are texts."""

ToolSpec = dict[str, Any]
"""A tool as in OpenAI's chat completions: {"type": "function", "function": {"name": …, "parameters": …}}"""


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


_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_OPEN, _CLOSE = "<think>", "</think>"


class TemplateRenderer:
    """The only place where messages become tokens and tokens become messages: by a chat template.

    Attributes:
        stop_token_ids: tokens that end a completion.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the ids of a conversation, up to the point where the assistant's answer begins.

        Raises:
            ValueError: the template refuses the messages, or does not show all of them or of the tools.
        """
        return self._chat.prompt(messages, tools)

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
        return self._chat.continuation(messages, completion_ids, new, tools)

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """Return a completion as a message. A call that cannot be read does not raise: it is one of the calls."""
        thoughts, said = self._thoughts(self._chat.completion_text(completion_ids))
        calls = [_call(body, closed=bool(end)) for body, end in _CALL.findall(said)] if tools else []
        content = _CALL.sub("", said) if tools else said
        return ParsedAnswer(content.strip(), thoughts, calls)

    def _thoughts(self, text: str) -> tuple[str, str]:
        """Return the thoughts with which a completion begins, and the rest of it."""
        thought, closed, said = text.partition(_CLOSE)
        begun = self._chat.opens_thoughts or text.lstrip().startswith(_OPEN)
        if not (begun and closed):
            return "", text
        return thought.strip().removeprefix(_OPEN).strip(), said


def _call(body: str, *, closed: bool) -> ParsedCall:
    """Read the text between the tags of a call."""
    try:
        stated = json.loads(body)
    except (ValueError, RecursionError):
        stated = None
    if closed and isinstance(stated, dict) and isinstance(arguments := stated.get("arguments", {}), dict):
        return read_call(stated.get("name"), arguments, body.strip())
    return ParsedCall("", body.strip(), False)


class LibraryRenderer(TemplateRenderer):
    """A family's renderer of the package `renderers`, by its name there, such as `qwen3`.

    It makes control tokens of contents that read like them. So these are rendered with a joint in each, see
    `ControlTokens`.

    Raises:
        Exception: the tokenizer lacks tokens of the family; the library raises no narrower error.
    """

    def __init__(self, chat: Chat, family: str) -> None:
        super().__init__(chat)
        self.name = family
        self._renderer = self._make(chat.tokenizer)
        self.stop_token_ids = tuple(sorted(self._renderer.get_stop_token_ids()))

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """See `TemplateRenderer.prompt`."""
        renderer, told, specs = self._apart(messages, tools)
        try:
            ids = renderer.render_ids(told, tools=specs, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the format of {self.name} refuses the conversation: {error}") from error
        return self._without_joints(renderer, ids)

    def continuation(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """See `TemplateRenderer.continuation`."""
        before = prompt_ids + completion_ids
        if self._ends_of_others(completion_ids):
            return None
        renderer, told, specs = self._apart(new, tools)
        bridge = renderer.bridge_to_next_turn(prompt_ids, completion_ids, told, tools=specs)
        if bridge is None or list(bridge.token_ids[: len(before)]) != before:
            return None
        return self._without_joints(renderer, bridge.token_ids[len(before) :])

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """See `TemplateRenderer.answer`."""
        if self._ends_of_others(completion_ids):
            completion_ids = completion_ids[:-1]
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=list(tools) or None, prompt_ids=prompt_ids)
        except RecursionError:  # thousands of brackets
            return ParsedAnswer("", "", [read_call(None, None, str(self._chat.tokenizer.decode(completion_ids)))])
        # A name that no tool has is the agent's business.
        calls = [read_call(call.name, call.arguments, call.raw) for call in parsed.tool_calls]
        return ParsedAnswer(parsed.content, parsed.reasoning_content or "", calls)

    def _ends_of_others(self, completion_ids: Sequence[int]) -> bool:
        """Return whether the token that ended a completion is one that the family does not know as an end."""
        ended = len(self._chat.without_end(completion_ids)) < len(completion_ids)
        return ended and completion_ids[-1] not in self.stop_token_ids

    def _apart(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> tuple[Any, list[ChatMessage], list[ToolSpec] | None]:
        """Return the renderer for messages and tools, and these with joints: without a joint it is the usual one."""
        told, described = self._chat.control.apart(messages), self._chat.control.tools_apart(tools)
        usual = told == list(messages) and described == list(tools)
        return self._renderer if usual else self._joining, told, described or None

    def _without_joints(self, renderer: Any, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids) if renderer is self._renderer else self._chat.control.without_joints(token_ids)

    @cached_property
    def _joining(self) -> Any:
        """The renderer of contents with joints."""
        return self._make(self._chat.control.joining)

    def _make(self, tokenizer: "PreTrainedTokenizerBase") -> Any:
        from renderers import config_from_name, create_renderer

        return create_renderer(tokenizer, config_from_name(self.name))


logger = logging.getLogger(__name__)

_FAMILIES = (
    *("qwen3", "prime-qwen3", "llama-3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "deepseek-v3", "deepseek-r1"),
    *("minimax-m2", "kimi-k2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5", "hy3"),
)
"""Families of text models in the package `renderers`, in the order in which they are tried."""

_HARMONY = ("gpt-oss", "<|channel|>")
"""The family that fetches a vocabulary from the network unless it is in the cache, and a token that only it has."""

_TOOLS: list[ToolSpec] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
]


@lru_cache(maxsize=4)
def open_renderer(chat: Chat, family: str = "auto") -> TemplateRenderer:
    """Return the renderer for a tokenizer.

    Args:
        chat: the tokenizer and its template.
        family: `template`: the tokenizer's chat template; a name such as `qwen3`: this family of the package
            `renderers`; `auto`: the family that gives exactly the tokens of the chat template in trial conversations
            with and without tools, or the template if there is none.

    Raises:
        ValueError: there is no such family, or the tokenizer lacks its tokens.
    """
    if family == "template":
        return TemplateRenderer(chat)
    if family != "auto":
        try:
            return LibraryRenderer(chat, family)
        except Exception as error:
            raise ValueError(
                f"agent.args.renderer={family!r} cannot render for this tokenizer: {error}; use auto or template"
            ) from error
    harmony, mark = _HARMONY
    template = TemplateRenderer(chat)
    for name in (*_FAMILIES, *((harmony,) if mark in chat.tokenizer.get_vocab() else ())):
        try:
            renderer = LibraryRenderer(chat, name)
        except Exception:  # noqa: BLE001 - the tokenizer lacks tokens of this family; the library has no narrower error
            continue
        with suppress(ValueError):  # one of them refuses a conversation
            if all(renderer.prompt(*trial) == template.prompt(*trial) for trial in _trials()):
                logger.info("conversations are rendered by the package `renderers`, as %s", name)
                return renderer
    return template


def _trials() -> list[tuple[list[ChatMessage], list[ToolSpec]]]:
    question: ChatMessage = {"role": "user", "content": "What is 1 + 2?"}
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    called: list[ChatMessage] = [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "name": "add", "content": "3"},
    ]
    answered: list[ChatMessage] = [question, {"role": "assistant", "content": "It is 4."}, question]
    system: ChatMessage = {"role": "system", "content": "Be brief."}
    return [
        *(([*first, *rest], []) for first in ([], [system]) for rest in ([question], answered)),
        *(([*first, *rest], _TOOLS) for first in ([], [system]) for rest in ([question], called)),
    ]
