"""Agents that are written against OpenAI's client: an `async def` of the user's, and the client that it gets."""

import asyncio
import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, cast

import httpx2 as httpx  # the one that openai uses
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import AfterValidator
from pydantic_core import to_jsonable_python

from tasks.agents.endpoint.agent import AgentTask, EndpointAgent
from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import EndpointError
from tasks.registry import described_with_place, import_own

_SENT = ("stream", "extra_headers", "extra_query", "extra_body")
"""Arguments of requests that are sent."""
_OPENED: dict[str, list[httpx.AsyncClient]] = {}
"""The HTTP clients through which OpenAI's clients send, by the key of the episode."""

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
        cause = f"{described_with_place(error)}; write package.module:function, and have its folder on PYTHONPATH"
        raise ValueError(f"{entry!r} cannot be imported: {cause}") from error
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


@functools.cache
def _note_clients() -> None:
    """Let OpenAI's clients with the key of an episode send with what its end closes.

    Agents make clients and leave them open. Python would close these when it finds them, in whichever event loop runs
    then. And each would take 20 ms to read certificates, which the endpoint does not use.
    """
    init = AsyncOpenAI.__init__

    @functools.wraps(init)
    def init_noted(self: AsyncOpenAI, **arguments: Any) -> None:
        opened = _OPENED.get(arguments.get("api_key") or os.environ.get("OPENAI_API_KEY", ""))
        if opened is not None and not arguments.get("http_client"):
            arguments["http_client"] = _without_proxies()
            opened.append(arguments["http_client"])
        init(self, **arguments)

    AsyncOpenAI.__init__ = init_noted  # type: ignore[method-assign]


def _without_proxies() -> httpx.AsyncClient:
    return openai.DefaultAsyncHttpxClient(trust_env=False, verify=False, follow_redirects=False)


def open_client(completions: Completions, base_url: str, key: str) -> AsyncOpenAI:
    """Return the client of one episode, whose requests have its key; use it as a context manager.

    It is OpenAI's class without HTTP. That needs milliseconds of processor time for a request, mostly to build and to
    parse HTTP: with hundreds of episodes in one process, the longest part of a rollout. So a plain
    `chat.completions.create` calls the endpoint directly. Everything else (streams, raw responses, copies of the
    client, other resources) is sent to the endpoint's server.

    Its end closes all clients with this key.
    """
    _note_clients()
    _OPENED[key] = [_without_proxies()]
    client = AsyncOpenAI(api_key=key, base_url=base_url, max_retries=0, http_client=_OPENED[key][0])

    async def close() -> None:
        for opened in _OPENED.pop(key, ()):
            with suppress(RuntimeError):  # it was used in another event loop, which has ended
                await opened.aclose()

    client.close = close  # type: ignore[method-assign]
    send = client.chat.completions.create
    request = httpx.Request("POST", f"{client.base_url}chat/completions")  # OpenAI's exceptions name it

    async def create(**arguments: Any) -> Any:
        absent = (openai.NotGiven, openai.Omit)
        given = {name: value for name, value in arguments.items() if not isinstance(value, absent)}
        if any(given.get(name) for name in _SENT):
            return await send(**arguments)
        limit = given.pop("timeout", None)  # a number, or httpx's limits of each step of a request
        try:
            async with asyncio.timeout(limit.read if isinstance(limit, httpx.Timeout) else limit):
                answered = await completions.complete(to_jsonable_python(given, exclude_none=True))
        except EndpointError as error:
            response = httpx.Response(error.status, json=error.body(), request=request)
            raise client._make_status_error(error.message, body=error.body(), response=response) from None
        except TimeoutError:
            raise openai.APITimeoutError(request) from None
        answer = ChatCompletion.model_validate(answered.body())
        answer._request_id = None
        return answer

    client.chat.completions.create = create  # type: ignore[method-assign]
    return client
