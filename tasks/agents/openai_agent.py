"""Agents that are written against OpenAI's client: an `async def` of the user's."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from tasks.agents.endpoint.agent import AgentTask, EndpointAgent
from tasks.agents.endpoint.client import open_client
from tasks.agents.endpoint.completions import Completions
from tasks.own_code import import_own
from tasks.registry import described_with_place

Solve = Callable[..., Awaitable[object]]
"""async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox)"""


def _import(entry: str) -> Solve:
    """Return the function that `package.module:function` names.

    Raises:
        ValueError: there is none, or it is no `async def`.
    """
    try:
        solve = getattr(import_own(entry), entry.partition(":")[2])
    except (Exception, SystemExit) as error:  # any error of a user's module
        told = f"{described_with_place(error)}; write package.module:function, and have its folder on PYTHONPATH"
        raise ValueError(f"{entry!r} cannot be imported: {told}") from error
    if not inspect.iscoroutinefunction(solve):
        raise ValueError(f"{entry} is no `async def`: await what is slow, or run it with asyncio.to_thread")
    try:
        inspect.signature(solve).bind_partial("task", "client", "tools")
    except TypeError as error:
        raise ValueError(f"{entry} cannot be called with (task, client, tools): {error}") from None
    return cast(Solve, solve)


@dataclass(eq=False, repr=False, kw_only=True)
class OpenAIAgent(EndpointAgent):
    """An agent that is a function: `async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox)`.

    It returns its final answer as a text, for the environment, or a reward (a number or `Reward`), or None if it has
    called `task.step`.

    Args:
        context: the pipeline gives it to every agent.
        entry: `package.module:function`; the default calls tools until the policy answers.
        arguments: further keyword arguments of the function.
        turn_discount, renderer, listen, max_requests, response_format: see `EndpointAgent`.
    """

    uses_tools = True

    entry: Annotated[str, AfterValidator(_import)] = "tasks.agents.tool_loop:solve"
    arguments: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._solve = _import(self.entry)

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """See `EndpointAgent.solve`."""
        client = open_client(completions, task.base_url, task.api_key)
        async with client, self.context.open_toolbox() as tools:
            return await self._solve(task, client, tools, **(self.arguments or {}))
