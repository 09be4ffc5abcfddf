"""The package `renderers`, which knows the chat formats of many model families, as a renderer."""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tasks.agents.chat import Chat
from tasks.agents.rendering.interface import (
    ChatMessage,
    ParsedAnswer,
    RenderingError,
    ToolSpec,
    read_call,
)

if TYPE_CHECKING:
    from renderers import Message
    from renderers import Renderer as FamilyRenderer
    from renderers import ToolSpec as LibrarySpec
    from transformers import PreTrainedTokenizerBase


class LibraryRenderer:
    """A family's renderer of the package `renderers`, by its name there, such as `qwen3`.

    It makes control tokens of contents that read like them. So these are rendered with a joint in each, see
    `ControlTokens`.

    Raises:
        Exception: the tokenizer lacks tokens of the family; the library raises no narrower error.
    """

    def __init__(self, chat: Chat, family: str) -> None:
        self.name = family
        self._chat = chat
        self._renderer = self._make(chat.tokenizer)
        self.stop_token_ids = tuple(sorted(self._renderer.get_stop_token_ids()))

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.prompt`."""
        renderer, told, specs = self._apart(messages, tools)
        try:
            ids = renderer.render_ids(told, tools=specs, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RenderingError(f"the format of {self.name} refuses the conversation: {error}") from error
        return self._without_joints(renderer, ids)

    def continuation(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """See `Renderer.continuation`."""
        before = prompt_ids + completion_ids
        if self._ends_of_others(completion_ids):
            return None
        renderer, told, specs = self._apart(new, tools)
        bridge = renderer.bridge_to_next_turn(prompt_ids, completion_ids, told, tools=specs)
        if bridge is None or list(bridge.token_ids[: len(before)]) != before:
            return None
        return self._without_joints(renderer, bridge.token_ids[len(before) :])

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """See `Renderer.answer`."""
        if self._ends_of_others(completion_ids):
            completion_ids = completion_ids[:-1]
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=_specs(tools), prompt_ids=prompt_ids)
        except RecursionError:  # thousands of brackets
            return ParsedAnswer("", "", [read_call(None, None, str(self._chat.tokenizer.decode(completion_ids)))])
        # A name that no tool has is the agent's business.
        calls = [read_call(call.name, call.arguments, call.raw) for call in parsed.tool_calls]
        return ParsedAnswer(parsed.content, parsed.reasoning_content or "", calls)

    def _ends_of_others(self, completion_ids: Sequence[int]) -> bool:
        """Return whether the token that ended a completion is one that the family does not know as an end."""
        last = completion_ids[-1:]
        return len(self._chat.without_end(completion_ids)) < len(completion_ids) and last[0] not in self.stop_token_ids

    def _apart(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]
    ) -> "tuple[FamilyRenderer, list[Message], list[LibrarySpec] | None]":
        """Return messages and tools with joints, and the renderer for them: without a joint it is the usual one."""
        told, described = self._chat.control.apart(messages), self._chat.control.tools_apart(tools)
        usual = told == list(messages) and described == list(tools)
        return self._renderer if usual else self._joining, _messages(told), _specs(described)

    def _without_joints(self, renderer: "FamilyRenderer", token_ids: Sequence[int]) -> list[int]:
        return list(token_ids) if renderer is self._renderer else self._chat.control.without_joints(token_ids)

    @cached_property
    def _joining(self) -> "FamilyRenderer":
        """The renderer of contents with joints."""
        return self._make(self._chat.control.joining)

    def _make(self, tokenizer: "PreTrainedTokenizerBase") -> "FamilyRenderer":
        from renderers import config_from_name, create_renderer

        return create_renderer(tokenizer, config_from_name(self.name))


def _messages(messages: Sequence[ChatMessage]) -> "list[Message]":
    converted: Any = list(messages)
    return converted  # type: ignore[no-any-return]  # the library's types are those of OpenAI's messages


def _specs(tools: Sequence[ToolSpec]) -> "list[LibrarySpec] | None":
    specs: Any = list(tools)
    return specs or None
