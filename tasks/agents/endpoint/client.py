"""An OpenAI client for agents in the rollout's process: the same class, without HTTP between them.

OpenAI's client needs milliseconds of processor time for a request, mostly to build and to parse HTTP. With hundreds of
episodes in one process this would be the longest part of a rollout. So a plain `chat.completions.create` calls the
endpoint directly; everything else (streams, raw responses, copies of the client, other resources) is sent to the
endpoint's server.
"""

import asyncio
import functools
import os
from contextlib import suppress
from typing import Any

import httpx2 as httpx  # the one that openai uses
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic_core import to_jsonable_python

from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import EndpointError

_SENT = ("stream", "extra_headers", "extra_query", "extra_body")
"""Arguments of requests that are sent."""
_OPENED: dict[str, list[httpx.AsyncClient]] = {}
"""The HTTP clients through which OpenAI's clients send, by the key of the episode."""


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
        given = {
            name: value for name, value in arguments.items() if not isinstance(value, openai.NotGiven | openai.Omit)
        }
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
