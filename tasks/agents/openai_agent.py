"""Agents that are written against OpenAI's client: an `async def` of the user's."""

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, cast

from pydantic import AfterValidator

from configs.loader import nearest
from tasks.agents.endpoint.agent import Address, AgentTask, Count, Discount, EndpointAgent
from tasks.agents.endpoint.client import Clients
from tasks.agents.endpoint.completions import Completions
from tasks.agents.interface import AgentContext
from tasks.registry import described_with_place

Solve = Callable[..., Awaitable[object]]
"""async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox)"""


def _checked(entry: str) -> str:
    _import(entry)
    return entry


class OpenAIAgent(EndpointAgent):
    """An agent that is a function: `async def solve(task: AgentTask, client: AsyncOpenAI, tools: Toolbox)`.

    It returns its final answer as a text, for the environment, or a reward (a number or `Reward`), or None if it has
    called `task.step`.

    Args:
        context: the pipeline gives it to every agent.
        entry: `package.module:function`; the default calls tools until the policy answers.
        arguments: further keyword arguments of the function.
        turn_discount, renderer, listen, max_requests: see `EndpointAgent`.
    """

    uses_tools = True

    def __init__(
        self,
        context: AgentContext,
        *,
        entry: Annotated[str, AfterValidator(_checked)] = "tasks.agents.tool_loop:solve",
        arguments: dict[str, Any] | None = None,
        turn_discount: Discount = 1.0,
        renderer: str = "auto",
        listen: Address = "127.0.0.1:0",
        max_requests: Count = 256,
    ) -> None:
        super().__init__(context, turn_discount, renderer, listen, max_requests)
        self._solve, self._arguments, self._open_toolbox = _import(entry), arguments or {}, context.open_toolbox
        self._clients: Clients | None = None

    async def solve(self, task: AgentTask, completions: Completions) -> object:
        """See `EndpointAgent.solve`."""
        self._clients = self._clients or Clients(task.base_url)
        client = self._clients.open(completions, task.api_key)
        async with self._open_toolbox() as tools:
            return await self._solve(task, client, tools, **self._arguments)


def _import(entry: str) -> Solve:
    """Return the function that `package.module:function` names.

    Raises:
        ValueError: there is none, or it is no `async def`.
    """
    module_name, _, name = entry.partition(":")
    if not name:
        raise ValueError(f"{entry!r} names no function: write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # any error of a user's module
        raise ValueError(
            f"{module_name!r} cannot be imported: {described_with_place(error)}; is its folder on PYTHONPATH?"
        ) from error
    functions = [key for key, value in vars(module).items() if inspect.iscoroutinefunction(value)]
    if name not in functions:
        if callable(getattr(module, name, None)):
            raise ValueError(f"{entry} is no `async def`: await what is slow, or run it with asyncio.to_thread")
        raise ValueError(f"{module_name} has no `async def {name}(task, client, tools)`{nearest(name, functions)}")
    solve = cast(Solve, getattr(module, name))
    try:
        inspect.signature(solve).bind_partial("task", "client", "tools")
    except TypeError as error:
        raise ValueError(f"{entry} cannot be called with (task, client, tools): {error}") from None
    return solve
