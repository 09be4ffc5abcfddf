"""The tools of one episode. Whatever a tool does, a call ends in time, with a text for the policy."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from configs.knobs import nearest
from storage.visible import described
from tasks.tools.interface import LONGEST_CALL_S, LONGEST_OUTPUT, Tool, ToolError, shorten


class Toolbox(AbstractAsyncContextManager["Toolbox"]):
    """The tools of one episode; an asynchronous context manager, which closes them.

    Args:
        tools: they have different names.
        call_timeout_s: wall-clock limit of every call, and of closing a tool.
        output_chars: a longer output loses its middle.

    Attributes:
        schemas: the tools as OpenAI's chat completions have them.

    Raises:
        ValueError: two tools have the same name.
    """

    def __init__(
        self, tools: Sequence[Tool], call_timeout_s: float = LONGEST_CALL_S, output_chars: int = LONGEST_OUTPUT
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = ", ".join(tool.name for tool in tools)
            raise ValueError(f"tools with the same name: {names}; the policy chooses by name, so leave one out")
        self._call_timeout_s, self._output_chars = call_timeout_s, output_chars
        shown = "name", "description", "parameters"
        self.schemas: list[dict[str, Any]] = [
            {"type": "function", "function": {name: getattr(tool, name) for name in shown}} for tool in tools
        ]

    async def __aexit__(self, *_: object) -> None:
        """Close all tools, even if one fails or hangs; then raise its error."""
        closing = [asyncio.wait_for(tool.close(), self._call_timeout_s) for tool in self._tools.values()]
        errors = await asyncio.gather(*closing, return_exceptions=True)
        for error in filter(None, errors):
            raise RuntimeError(f"a tool was not closed: {described(error)}") from error

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Call a tool with arguments as the policy wrote them, JSON or a mapping; return what the policy reads.

        An unknown tool, wrong arguments, a failure, a time-out or an `exit` are a text that begins with `error: `. Any
        other exception of a tool is an error of its code, and is raised.
        """
        try:
            async with asyncio.timeout(self._call_timeout_s) as limit:
                parsed = _parse(arguments)  # first: a call that cannot be read may have no name
                if name not in self._tools:
                    unknown = f"no tool {shorten(repr(name), 100)}{nearest(name, self._tools)}"
                    raise ToolError(f"{unknown}; the tools are {', '.join(self._tools) or 'none'}")
                output = await self._tools[name].call(parsed)
            return self._readable(output)
        except (ToolError, SystemExit, TimeoutError) as error:
            if isinstance(error, TimeoutError) and not limit.expired():  # the tool's own
                raise
            reason = f"no result within {self._call_timeout_s:g} s" if limit.expired() else str(error)
            return f"error: {self._readable(reason)}"

    async def results(self, calls: Iterable[Any]) -> list[dict[str, Any]]:
        """Call what an assistant's message of OpenAI's client asks for; return the messages that answer it.

        Args:
            calls: `message.tool_calls`; they run at the same time.
        """
        asked = list(calls)
        outputs = await asyncio.gather(*(self.call(each.function.name, each.function.arguments) for each in asked))
        return [
            {"role": "tool", "tool_call_id": each.id, "content": output}
            for each, output in zip(asked, outputs, strict=True)
        ]

    def _readable(self, output: str) -> str:
        """Return an output for the policy, without halves of surrogate pairs, which no request could hold."""
        return shorten(output, self._output_chars).encode("utf-8", "replace").decode()


def _parse(arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments, str):
        return dict(arguments)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ToolError("the arguments are not a JSON object")
    return parsed
