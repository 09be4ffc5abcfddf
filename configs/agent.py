"""The knobs of what plays an episode: the agent, its tools and its environment."""

from typing import Any

from pydantic import model_validator

from configs.knobs import Knobs


class ToolChoice(Knobs):
    """A tool; its type alone is enough: `agent.tools=[python]`."""

    type: str
    """`python`, `calculator`, or `package.module:name` for your own class or `async def`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the tool's constructor; they are checked before anything starts."""

    @model_validator(mode="before")
    @classmethod
    def _type_alone(cls, values: Any) -> Any:
        return {"type": values} if isinstance(values, str) else values


class Agent(Knobs):
    type: str = "math-multi-turn"
    """Registered name, or `package.module:Class` for your own class."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; they are checked before anything starts."""
    tools: list[ToolChoice] = []
    """Tools that the policy may call, for agents that offer them, such as `[python, calculator]` or
    `[{type: python, args: {stateful: true}}]`."""


class Environment(Knobs):
    type: str = "math-verify"
    """Registered name, or `package.module:Class` for your own class."""
    args: dict[str, Any] = {}
    """Keyword arguments of its constructor; they are checked before anything starts."""
