"""The interface of tools, as OpenAI's function tools have it, and the tool that any `async def` with annotations is.

A tool has a name, a description, a schema and a call. A function has them as its name, docstring and signature.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from storage.processes.limits import is_hosts
from storage.visible import described
from tasks.tools.sandbox import SandboxError, Sandboxes

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

    async def close(self) -> None:
        """End whatever the tool keeps for its episode."""


def shorten(text: str, most: int) -> str:
    r"""Leave out the middle of a text of more than `most` characters, and say so there.

    >>> shorten("1" * 20 + "2" * 500 + "3" * 20, 40)
    '11111111111111111111\n… 500 characters left out …\n33333333333333333333'
    """
    if (rest := len(text) - most) <= 0:
        return text
    half = most // 2
    return f"{text[: most - half]}\n… {rest:,} characters left out …\n{text[len(text) - half :]}"


ToolFunction = Callable[..., Awaitable[Any]]


class FunctionTool:
    """The tool of an `async def`.

    Its arguments are validated before each call. What it returns becomes JSON, unless it is a text. If it raises an
    exception, that is a `ToolError`.

    Example: of `async def weather(city: str, days: int = 1) -> str: …` the parameters are {"type": "object",
    "properties": {"city": {"type": "string", …}, "days": {"type": "integer", "default": 1, …}}, "required": ["city"],
    "additionalProperties": False}.

    Raises:
        ValueError: it is no `async def`, or a parameter is not one that JSON can give by its name.
    """

    def __init__(self, function: ToolFunction) -> None:
        self.name = name = getattr(function, "__name__", repr(function))
        self.description = inspect.getdoc(function) or ""
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"{name} is no `async def`: a tool is awaited, so that others can work meanwhile")
        for each in inspect.signature(function).parameters.values():
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                raise ValueError(f"{name}: the parameter {each} has no name for JSON: list every argument by its name")
            if each.annotation is each.empty:
                raise ValueError(f"{name}: annotate the parameter {each.name!r}, so that the policy knows its type")
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
            self.parameters: dict[str, Any] = self._adapter.json_schema()
        except (PydanticUserError, NameError) as error:
            raise ValueError(f"{name}: no JSON schema for its annotations: {described(error)}") from error

    async def call(self, arguments: dict[str, Any]) -> str:
        """Call the function; return its result as text.

        Raises:
            ToolError: an argument is wrong, or the function raised an exception or returned what JSON cannot hold.
            SandboxError: it needed a sandbox, which could not be made; that is not the policy's fault.
            Exception: this machine has no more open files, memory or room on a disk; nor is that.
        """
        try:
            running = self._adapter.validate_python(ArgsKwargs((), arguments))
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
            raise ToolError("; ".join(wrong)) from None
        try:
            result = await running
            return result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
        except (ToolError, SandboxError):
            raise
        except (Exception, SystemExit) as error:
            if is_hosts(error):
                raise
            raise ToolError(described(error)) from error

    async def close(self) -> None:
        """Do nothing: it keeps nothing."""
