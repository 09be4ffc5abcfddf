"""The package `renderers`, which knows the chat formats of many model families, as a renderer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.agents.rendering.interface import (
    ChatMessage,
    ParsedAnswer,
    RenderingError,
    ToolSpec,
    read_call,
)

if TYPE_CHECKING:
    from renderers import Message
    from renderers import ToolSpec as LibrarySpec
    from transformers import PreTrainedTokenizerBase


class LibraryRenderer:
    """A family's renderer of the package `renderers`, by its name there, such as `qwen3`.

    Raises:
        Exception: the tokenizer lacks tokens of the family; the library raises no narrower error.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", family: str) -> None:
        from renderers import config_from_name, create_renderer

        self.name = family
        self._tokenizer = tokenizer
        self._renderer = create_renderer(tokenizer, config_from_name(family))
        self.stop_token_ids = tuple(sorted(self._renderer.get_stop_token_ids()))

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.prompt`."""
        try:
            ids = self._renderer.render_ids(_messages(messages), tools=_specs(tools), add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RenderingError(f"the format of {self.name} refuses the conversation: {error}") from error
        return list(ids)

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
        bridge = self._renderer.bridge_to_next_turn(prompt_ids, completion_ids, _messages(new), tools=_specs(tools))
        if bridge is None or list(bridge.token_ids[: len(before)]) != before:
            return None
        return list(bridge.token_ids[len(before) :])

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """See `Renderer.answer`."""
        try:
            parsed = self._renderer.parse_response(completion_ids, tools=_specs(tools), prompt_ids=prompt_ids)
        except RecursionError:  # thousands of brackets
            return ParsedAnswer("", "", [read_call(None, None, str(self._tokenizer.decode(completion_ids)))])
        # A name that no tool has is the agent's business.
        calls = [read_call(call.name, call.arguments, call.raw) for call in parsed.tool_calls]
        return ParsedAnswer(parsed.content, parsed.reasoning_content or "", calls)


def _messages(messages: Sequence[ChatMessage]) -> "list[Message]":
    converted: Any = list(messages)
    return converted  # type: ignore[no-any-return]  # the library's types are those of OpenAI's messages


def _specs(tools: Sequence[ToolSpec]) -> "list[LibrarySpec] | None":
    specs: Any = list(tools)
    return specs or None
