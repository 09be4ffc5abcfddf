"""The tools by name. Add one with `register_tool("name", Class)`, or configure it as `package.module:name`.

An `async def` with annotations is a tool, too: `register_tool("name", tool_class(function))`, or its name in a module.
"""

import inspect
from collections.abc import Sequence

from configs.agent import ToolChoice
from tasks.registry import Registry
from tasks.tools.calculator import calculator
from tasks.tools.interface import FunctionTool, Tool, ToolContext, ToolFunction
from tasks.tools.python import PythonTool
from tasks.tools.sandbox import Sandboxes
from tasks.tools.toolbox import Toolbox


class ToolRegistry(Registry[Tool]):
    """A registry whose names may also stand for an `async def`."""

    def _accept(self, found: object) -> type[Tool] | None:
        return tool_class(found) if inspect.isfunction(found) else super()._accept(found)


def tool_class(function: ToolFunction) -> type[Tool]:
    """Return a class of tools that call `function`."""

    class Made(FunctionTool):
        def __init__(self, context: ToolContext) -> None:
            super().__init__(function)

    return Made


TOOLS = ToolRegistry("tool")
register_tool = TOOLS.register

register_tool("python", PythonTool)
register_tool("calculator", tool_class(calculator))


def open_toolbox(choices: Sequence[ToolChoice], context: ToolContext) -> Toolbox:
    """Return the tools of one episode, new ones.

    Raises:
        ValueError: a choice cannot be used, or two tools have the same name.
    """
    return Toolbox([TOOLS.make(choice.type, context, choice.args) for choice in choices])


def check_tools(choices: Sequence[ToolChoice]) -> None:
    """Check what the schema cannot: that all tools can be made on this machine, with their arguments.

    Raises:
        ValueError: one cannot; names the remedy.
    """
    for choice in choices:
        TOOLS.check_arguments(choice.type, choice.args)
    open_toolbox(choices, ToolContext(Sandboxes()))
