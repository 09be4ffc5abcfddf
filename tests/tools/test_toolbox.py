"""The tools of an episode: whatever they do, a call ends in time with a text."""

import asyncio
import sys
from typing import Any

import pytest

from configs.agent import Agent, ToolChoice
from tasks.tools import check_tools, open_toolbox
from tasks.tools.interface import FunctionTool, ToolContext
from tasks.tools.sandbox import Sandboxes
from tasks.tools.toolbox import Toolbox


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def hang() -> str:
    await asyncio.sleep(1000)
    return ""


async def leave() -> str:
    sys.exit(3)


async def shout() -> str:
    return "x" * 10_000


async def echo(text: str) -> str:
    return text


def box(*functions: Any, **arguments: Any) -> Toolbox:
    return Toolbox([FunctionTool(function) for function in functions], **arguments)


class Broken:
    """A tool with an error in its code."""

    name, description = "broken", "Break."
    parameters: dict[str, Any] = {"type": "object", "properties": {}}  # noqa: RUF012 - the protocol's type
    closed = 0

    def __init__(self, context: ToolContext, *, times: int = 1) -> None:
        self.times = times

    async def call(self, arguments: dict[str, Any]) -> str:
        raise ZeroDivisionError

    async def close(self) -> None:
        Broken.closed += self.times


@pytest.mark.parametrize(
    ("name", "arguments", "output"),
    [
        ("add", '{"a": 1, "b": 2}', "3"),
        ("add", {"a": 1, "b": 2}, "3"),
        ("ad", "{}", "error: no tool 'ad', did you mean 'add'?; the tools are add, hang, leave, shout"),
        ("add", '{"a": 1', "error: the arguments are not valid JSON: Expecting ',' delimiter"),
        ("add", "[" * 100_000, "error: the arguments are not valid JSON: maximum recursion depth exceeded"),
        ("add", "[1, 2]", "error: the arguments are not a JSON object"),
        ("add", '{"a": 1}', "error: b: Missing required argument"),
        ("hang", "{}", "error: no result within 0.1 s"),
        ("leave", "{}", "error: SystemExit: 3"),
        ("echo", '{"text": "\\ud83d!"}', "?!"),
        ("shout", "{}", "x" * 100 + "\n… 9,800 characters left out …\n" + "x" * 100),
    ],
)
async def test_every_call_ends_with_a_text(name: str, arguments: Any, output: str) -> None:
    """Errors of the policy and of a tool's function cost only the call, in time."""
    toolbox = box(add, hang, leave, shout, echo, call_timeout_s=0.1, output_chars=200)
    assert (await toolbox.call(name, arguments)).startswith(output)
    assert await toolbox.call("add", {"a": 1, "b": 1}) == "2"


async def test_an_error_of_a_tools_own_code_is_no_answer() -> None:
    """The policy must not learn from a programming error: the episode fails. All tools are closed nevertheless."""
    Broken.closed = 0
    with pytest.raises(ZeroDivisionError):
        async with Toolbox([Broken(ToolContext(Sandboxes()))]) as toolbox:
            await toolbox.call("broken", {})
    assert Broken.closed == 1


def test_two_tools_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="tools with the same name: add, add; the policy chooses by name"):
        box(add, add)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "pyton"}, "tool.type='pyton' is not registered, did you mean 'python'"),
        ({"type": "python", "args": {"timeout": 1}}, "tool.args.timeout=1: .*, did you mean 'timeout_s'"),
        ({"type": "python", "args": {"timeout_s": 600}}, "tool.args.timeout_s=600: Input should be less .* to 120"),
    ],
)
def test_a_choice_that_cannot_be_used_is_refused(choice: dict[str, Any], message: str) -> None:
    """The error comes before a run, and names key, value and remedy."""
    with pytest.raises(ValueError, match=message):
        check_tools([ToolChoice.model_validate(choice)])


async def test_a_toolbox_from_a_configuration(sandboxes: Sandboxes) -> None:
    """Tools are chosen by type alone or with arguments; one's own is a class or an `async def`."""
    own = [f"{__name__}:add", {"type": f"{__name__}:Broken", "args": {"times": 2}}]
    agent = Agent.model_validate({"tools": ["calculator", {"type": "python", "args": {"stateful": True}}, *own]})
    Broken.closed = 0
    check_tools(agent.tools)
    async with open_toolbox(agent.tools, ToolContext(sandboxes)) as toolbox:
        names = [schema["function"]["name"] for schema in toolbox.schemas]
        assert names == ["calculator", "python", "add", "broken"]
        assert await toolbox.call("calculator", '{"expression": "1 / 4"}') == "0.25"
        assert await toolbox.call("python", '{"code": "1 / 4"}') == "0.25\n"
        assert await toolbox.call("add", '{"a": 1, "b": 2}') == "3"
    assert Broken.closed == 2
