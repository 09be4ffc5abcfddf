"""The choice of a renderer for a policy's tokenizer."""

import logging
from functools import lru_cache

from tasks.agents.chat import Chat
from tasks.agents.rendering.interface import ChatMessage, Renderer, RenderingError, ToolSpec
from tasks.agents.rendering.library import LibraryRenderer
from tasks.agents.rendering.template import TemplateRenderer

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
def open_renderer(chat: Chat, family: str = "auto") -> Renderer:
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
        return _open_family(chat, family)
    harmony, mark = _HARMONY
    for name in (*_FAMILIES, *((harmony,) if mark in chat.tokenizer.get_vocab() else ())):
        try:
            renderer = LibraryRenderer(chat, name)
        except Exception:  # noqa: BLE001 - the tokenizer lacks tokens of this family; the library has no narrower error
            continue
        if _agree(renderer, TemplateRenderer(chat)):
            logger.info("conversations are rendered by the package `renderers`, as %s", name)
            return renderer
    return TemplateRenderer(chat)


def _open_family(chat: Chat, family: str) -> LibraryRenderer:
    try:
        return LibraryRenderer(chat, family)
    except Exception as error:
        raise ValueError(
            f"agent.args.renderer={family!r} cannot render for this tokenizer: {error}; use auto or template"
        ) from error


def _agree(first: Renderer, second: Renderer) -> bool:
    """Return whether two renderers give the same ids for all trial conversations."""
    try:
        return all(
            first.prompt(messages, tools) == second.prompt(messages, tools) for messages, tools in _conversations()
        )
    except RenderingError:
        return False


def _conversations() -> list[tuple[list[ChatMessage], list[ToolSpec]]]:
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
