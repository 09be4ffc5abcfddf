"""The model's own chat template as a renderer, for models whose family no library knows.

Calls of tools are read in the form of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

import json
import re
from collections.abc import Sequence

from tasks.agents.chat import Chat
from tasks.agents.rendering.interface import (
    ChatMessage,
    ParsedAnswer,
    ParsedCall,
    RenderingError,
    ToolSpec,
    read_call,
)

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*+(?:<think>)?+(.*?)</think>\s*", re.DOTALL)


class TemplateRenderer:
    """A chat template that is asked for each conversation."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> list[int]:
        """See `Renderer.prompt`."""
        try:
            return self._chat.conversation(list(messages), list(tools))
        except ValueError as error:
            raise RenderingError(str(error)) from error

    def continuation(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        tools: Sequence[ToolSpec],
    ) -> list[int] | None:
        """See `Renderer.continuation`."""
        return self._chat.continuation(list(messages), completion_ids, list(new), list(tools))

    def answer(self, prompt_ids: list[int], completion_ids: list[int], tools: Sequence[ToolSpec]) -> ParsedAnswer:
        """See `Renderer.answer`."""
        text = self._chat.completion_text(completion_ids)
        thoughts = _THOUGHTS.match(text) if text.lstrip().startswith("<think>") or self._chat.opens_thoughts else None
        said = text[thoughts.end() :] if thoughts else text
        calls = [_call(body, closed=bool(end)) for body, end in _CALL.findall(said)] if tools else []
        content = _CALL.sub("", said) if tools else said
        return ParsedAnswer(content.strip(), thoughts[1].strip() if thoughts else "", calls)


def _call(body: str, *, closed: bool) -> ParsedCall:
    """Read the text between the tags of a call."""
    try:
        stated = json.loads(body)
    except (ValueError, RecursionError):
        stated = None
    if closed and isinstance(stated, dict) and isinstance(arguments := stated.get("arguments", {}), dict):
        return read_call(stated.get("name"), arguments, body.strip())
    return ParsedCall("", body.strip(), False)
