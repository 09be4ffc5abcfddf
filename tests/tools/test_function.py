"""Tools from functions: their schema, and what may go wrong."""

import asyncio
import errno
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tasks.tools.interface import FunctionTool, ToolError


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


def call(function: Any, arguments: dict[str, Any]) -> str:
    return asyncio.run(FunctionTool(function).call(arguments))


def test_the_schema_comes_from_the_signature() -> None:
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
    assert call(weather, {"place": {"city": "Köln"}}) == '{"city": "Köln", "days": 1, "unit": "C"}'


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (weather, {}, "place: Missing required argument"),
        (weather, {"place": {"city": "a"}, "days": 0}, "days: Input should be greater than or equal to 1"),
        (weather, {"place": {"city": "a"}, "hour": 1}, "hour: Unexpected keyword argument"),
        (fail, {"kind": "key"}, "KeyError: 'x'"),
        (fail, {"kind": "exit"}, "SystemExit: 3"),
        (fail, {"kind": "tool"}, "no such city"),
    ],
)
def test_what_goes_wrong_is_an_error_for_the_policy(function: Any, arguments: dict[str, Any], message: str) -> None:
    """It reads which argument is wrong, in one line. A function that raises, or exits, costs its call."""
    with pytest.raises(ToolError, match=f"^{message}$"):
        call(function, arguments)


def test_an_error_of_the_machine_is_not_told_to_the_policy() -> None:
    """It fails the episode, which is then the set-up's fault."""
    with pytest.raises(ConnectionError, match="no answer"):
        call(fail, {"kind": "files"})


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
