"""The interface of tools, as OpenAI's function tools have it: a name, a description, a schema and a call."""

from dataclasses import dataclass
from typing import Any, Protocol

from tasks.tools.sandbox import Sandboxes

LONGEST_CALL_S = 120.0
"""Wall-clock limit of every call; a tool's own limits, which give better errors, are not above it."""
LONGEST_OUTPUT = 20_000
"""Most characters that the policy reads of a call; a longer output loses its middle."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The first argument of every tool's constructor; the others are the `args` of its choice in the configuration."""

    sandboxes: Sandboxes


class ToolError(Exception):
    """A call failed, and the episode goes on; the message is for the policy."""


class Tool(Protocol):
    """A tool; every episode gets a new one, and may call it several times at once.

    A constructor does nothing slow, because the tools of a configuration are also made once before a run, to check
    them. A tool that uses sandboxes calls `context.sandboxes.check()` there.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """The JSON schema of the arguments, an object.

    Example: {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    """

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the result of a call. `arguments` are the policy's: they were not compared with the schema.

        Raises:
            ToolError: the call failed.
        """
        ...

    async def close(self) -> None:
        """End whatever the tool keeps for its episode."""
        ...


def shorten(text: str, most: int) -> str:
    r"""Leave out the middle of a text of more than `most` characters, and say so there.

    >>> shorten("1" * 20 + "2" * 500 + "3" * 20, 40)
    '11111111111111111111\n… 500 characters left out …\n33333333333333333333'
    """
    if (rest := len(text) - most) <= 0:
        return text
    half = most // 2
    return f"{text[: most - half]}\n… {rest:,} characters left out …\n{text[len(text) - half :]}"
