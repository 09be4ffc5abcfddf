"""The tools of an episode: whatever they do, a call ends in time with a text. Tools from functions; the calculator."""

import asyncio
import errno
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from configs.agent import Agent, ToolChoice
from tasks.tools import check_tools, open_toolbox
from tasks.tools.calculator import calculator
from tasks.tools.interface import FunctionTool, ToolContext, ToolError
from tasks.tools.sandbox import Sandboxes
from tasks.tools.toolbox import Toolbox


async def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def hang() -> str:
    await asyncio.sleep(1000)
    return ""


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
        ("ad", "{}", "error: no tool 'ad', did you mean 'add'?; the tools are add, hang, shout, echo, weather, fail"),
        ("add", '{"a": 1', "error: the arguments are not valid JSON: Expecting ',' delimiter"),
        ("add", "[" * 100_000, "error: the arguments are not valid JSON: maximum recursion depth exceeded"),
        ("add", "[1, 2]", "error: the arguments are not a JSON object"),
        ("add", '{"a": 1}', "error: b: Missing required argument"),
        ("weather", {"place": {"city": "a"}, "days": 0}, "error: days: Input should be greater than or equal to 1"),
        ("weather", {"place": {"city": "a"}, "hour": 1}, "error: hour: Unexpected keyword argument"),
        ("fail", {"kind": "key"}, "error: KeyError: 'x'"),
        ("fail", {"kind": "exit"}, "error: SystemExit: 3"),
        ("fail", {"kind": "tool"}, "error: no such city"),
        ("hang", "{}", "error: no result within 0.1 s"),
        ("echo", '{"text": "\\ud83d!"}', "?!"),
        ("shout", "{}", "x" * 100 + "\n… 9,800 characters left out …\n" + "x" * 100),
    ],
)
async def test_every_call_ends_with_a_text(name: str, arguments: Any, output: str) -> None:
    """Errors of the policy and of a tool's function, or its exit, cost only the call, in time and in one line."""
    toolbox = box(add, hang, shout, echo, weather, fail, call_timeout_s=0.1, output_chars=200)
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


class Place(BaseModel):
    city: str


async def weather(place: Place, days: Annotated[int, Field(ge=1)] = 1, *, unit: Literal["C", "F"] = "C") -> Any:
    """Tell the weather."""
    return {"city": place.city, "days": days, "unit": unit}


async def fail(kind: str) -> str:
    """Fail."""
    if kind == "files":
        raise ConnectionError("no answer") from OSError(errno.EMFILE, "Too many open files")
    raise {"key": KeyError("x"), "exit": SystemExit(3), "tool": ToolError("no such city")}[kind]


async def test_the_schema_comes_from_the_signature() -> None:
    """Types, defaults and limits of the annotations reach the policy, and the docstring is the description."""
    tool = FunctionTool(weather)
    assert (tool.name, tool.description) == ("weather", "Tell the weather.")
    assert tool.parameters["required"] == ["place"]
    assert tool.parameters["additionalProperties"] is False
    properties = tool.parameters["properties"]
    assert properties["days"] == {"default": 1, "minimum": 1, "title": "Days", "type": "integer"}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert tool.parameters["$defs"]["Place"]["required"] == ["city"]
    # Arguments arrive as the annotated types, with defaults for those left out; results are texts or JSON.
    assert await tool.call({"place": {"city": "Köln"}}) == '{"city": "Köln", "days": 1, "unit": "C"}'


async def test_an_error_of_the_machine_is_not_told_to_the_policy() -> None:
    """It fails the episode, which is then the set-up's fault."""
    with pytest.raises(ConnectionError, match="no answer"):
        await FunctionTool(fail).call({"kind": "files"})


def blocking(x: int) -> None: ...
async def bare(x): ...  # type: ignore[no-untyped-def]
async def positions(*xs: int) -> None: ...
async def strange(x: asyncio.Queue[int]) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (blocking, "blocking is no `async def`"),
        (bare, "bare: annotate the parameter 'x'"),
        (positions, "positions: the parameter .*xs: int has no name for JSON"),
        (strange, "strange: no JSON schema for its annotations"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function: Any, message: str) -> None:
    """The error comes when the tool is made, before a run."""
    with pytest.raises(ValueError, match=message):
        FunctionTool(function)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("2 * (3 + 4)", "14"), ("0.1 + 0.2", "0.3"), ("10 / 4", "2.5"),
        ("10 / 3", "10/3 (about 3.33333333333333)"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("2 ** -3", "0.125"),
        ("2 ** 100", "1267650600228229401496703205376"), ("+1_000 + 0x10", "1016"),
        ("1e-30", "0.000000000000000000000000000001"),
    ],
)  # fmt: skip
async def test_results_are_exact(expression: str, result: str) -> None:
    """Whole numbers have no decimals, decimals are not rounded as floats are, and other fractions stay fractions."""
    assert await calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "a number has more than 10,000 bits"),
        ("1e-99999999999999999999", "a number has more than 10,000 bits"),
        ("2 ** 0.5", "the exponent 1/2 is not a whole number"),
        ("1 / 0", "division by zero"),
        ("(" * 400, "not an arithmetic expression"),
        ("-" * 990 + "1", "nested too deeply"),
        ("1" + "+1" * 500, "more than 1,000 characters"),
        ("2 ^ 3", r"'2 \^ 3' is not arithmetic: use"),
        ("1,000", "'1,000' is not arithmetic"),
        ("__import__('os')", "is not arithmetic"),
        ("True", "'True' is not arithmetic"),
    ],
)  # fmt: skip
async def test_anything_else_is_refused_at_once(expression: str, message: str) -> None:
    """Large powers are refused before they are computed, and nothing but arithmetic is evaluated."""
    start = time.process_time()
    with pytest.raises(ToolError, match=message):
        await calculator(expression)
    assert time.process_time() - start < 1
