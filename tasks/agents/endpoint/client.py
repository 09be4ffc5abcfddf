"""An OpenAI client for agents in the rollout's process: the same class, without HTTP between them.

OpenAI's client needs milliseconds of processor time for a request, mostly to build and to parse HTTP. With hundreds of
episodes in one process this would be the longest part of a rollout. So a plain `chat.completions.create` calls the
endpoint directly; everything else (streams, raw responses, other resources) goes the long way, through a transport that
answers here.
"""

import asyncio
import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Self

import httpx2 as httpx  # the one that openai uses
import openai
from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import MODELS, ONLY_CHAT, EndpointError

_LONG_WAY = ("stream", "logprobs", "extra_headers", "extra_query", "extra_body")
"""Arguments of requests that go through the transport."""


class Clients:
    """Maker of the clients of episodes, which share all but the key.

    Args:
        base_url: of the endpoint, for code that passes it on.
    """

    def __init__(self, base_url: str) -> None:
        self._prototype = EpisodeClient(
            api_key="none", base_url=base_url, http_client=httpx.AsyncClient(transport=_Direct()), max_retries=0
        )

    def open(self, completions: Completions, key: str) -> AsyncOpenAI:
        """Return the client of an episode."""
        client = copy.copy(self._prototype)
        client.api_key, client.episode = key, completions
        return client


class EpisodeClient(AsyncOpenAI):
    """A client that asks the completions of one episode."""

    episode: Completions

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)

    def copy(self, *arguments: Any, **named: Any) -> Self:
        """Return a client of the same episode with other settings."""
        copied = super().copy(*arguments, **named)
        copied.episode = self.episode
        return copied

    with_options = copy

    async def close(self) -> None:
        """Do nothing: the clients of all episodes share what could be closed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _prepare_request(self, request: httpx.Request) -> None:
        request.extensions["episode"] = self.episode


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **arguments: Any) -> Any:
        given = {
            name: value for name, value in arguments.items() if not isinstance(value, openai.NotGiven | openai.Omit)
        }
        if any(given.get(name) for name in _LONG_WAY):
            return await super().create(**arguments)
        client = self._client
        assert isinstance(client, EpisodeClient)
        body, episode = {name: _plain(value) for name, value in given.items()}, client.episode
        limit = body.pop("timeout", None)  # a number, or httpx's limits of each step of a request
        request = httpx.Request("POST", f"{client.base_url}chat/completions")  # OpenAI's exceptions name it
        try:
            async with asyncio.timeout(limit.read if isinstance(limit, httpx.Timeout) else limit):
                answered = await episode.complete(body)
        except EndpointError as error:
            response = httpx.Response(error.status, json=error.body(), request=request)
            raise client._make_status_error(error.message, body=error.body(), response=response) from None
        except TimeoutError:
            raise openai.APITimeoutError(request) from None
        answer = ChatCompletion.model_validate(answered.body(episode.policy.chat.decode))
        answer._request_id = None
        return answer


def _plain(value: Any) -> Any:
    """Return a value of a request as JSON has it: messages of earlier answers are objects."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Direct(httpx.AsyncBaseTransport):
    """A transport that answers requests itself."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        completions: Completions = request.extensions["episode"]
        decode = completions.policy.chat.decode
        try:
            if request.url.path.endswith("/models"):
                return httpx.Response(200, json=MODELS)
            if not request.url.path.endswith("/chat/completions"):
                raise EndpointError(404, "unknown_url", f"{request.url.path}: {ONLY_CHAT}")
            answered = await completions.complete(await request.aread())
        except EndpointError as error:
            return httpx.Response(error.status, json=error.body(), request=request)
        if answered.request.stream:
            stream = b"".join(answered.events(decode))
            return httpx.Response(200, content=stream, headers={"Content-Type": "text/event-stream"})
        return httpx.Response(200, json=answered.body(decode))
