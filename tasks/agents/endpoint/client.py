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
from typing import Any, Self, TypeVar, cast

import httpx2 as httpx  # the one that openai uses
import openai
import orjson
from openai import AsyncOpenAI
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_message_function_tool_call import Function
from pydantic import BaseModel

from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import MODELS, ONLY_CHAT, EndpointError

Model = TypeVar("Model", bound=BaseModel)

_LONG_WAY = ("stream", "logprobs", "extra_headers", "extra_query", "extra_body")
"""Arguments of requests that go through the transport."""
_JSON = {"Content-Type": "application/json"}


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

    def status_error(self, error: EndpointError) -> openai.APIStatusError:
        """Return the exception that OpenAI's client raises for this error."""
        response = httpx.Response(error.status, json=error.body(), request=self.request_of_errors())
        return self._make_status_error(error.message, body=error.body(), response=response)

    def request_of_errors(self) -> httpx.Request:
        """Return the request that OpenAI's exceptions name."""
        return httpx.Request("POST", f"{self.base_url}chat/completions")

    async def _prepare_request(self, request: httpx.Request) -> None:
        request.extensions["episode"] = self.episode


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    async def create(self, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if _is_given(value)}
        if any(given.get(name) for name in _LONG_WAY):
            return await super().create(**arguments)
        assert isinstance(self._client, EpisodeClient)
        body, episode = {name: _plain(value) for name, value in given.items()}, self._client.episode
        try:
            async with asyncio.timeout(_seconds(body.pop("timeout", None))):
                answered = await episode.complete(body)
        except EndpointError as error:
            raise self._client.status_error(error) from None
        except TimeoutError:
            raise openai.APITimeoutError(self._client.request_of_errors()) from None
        return _as_object(answered.body(episode.policy.chat.decode))


def _seconds(timeout: Any) -> float | None:
    """Return a timeout of OpenAI's client in seconds: a number, or httpx's limits of each step of a request."""
    return timeout.read if isinstance(timeout, httpx.Timeout) else timeout


def _is_given(value: Any) -> bool:
    return not isinstance(value, openai.NotGiven | openai.Omit)


def _plain(value: Any) -> Any:
    """Return a value of a request as JSON has it: messages of earlier answers are objects."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _make(kind: type[Model], values: dict[str, Any]) -> Model:
    """Return an object of OpenAI's without a check of its values; its own `model_construct` looks at each of them."""
    return cast(Model, BaseModel.model_construct.__func__(kind, **values))  # type: ignore[attr-defined]


def _as_object(body: dict[str, Any]) -> ChatCompletion:
    """Return the body of an answer as OpenAI's object; nothing needs to be checked."""
    choices = [_make(Choice, choice | {"message": _message_object(choice["message"])}) for choice in body["choices"]]
    answer = _make(ChatCompletion, body | {"choices": choices, "usage": _make(CompletionUsage, body["usage"])})
    answer._request_id = None
    return answer


def _message_object(message: dict[str, Any]) -> ChatCompletionMessage:
    calls = [
        _make(ChatCompletionMessageFunctionToolCall, call | {"function": _make(Function, call["function"])})
        for call in message.get("tool_calls", ())
    ]
    return _make(ChatCompletionMessage, message | {"tool_calls": calls or None})


class _Direct(httpx.AsyncBaseTransport):
    """A transport that answers requests itself."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        completions = request.extensions["episode"]
        try:
            if request.url.path.endswith("/models"):
                return httpx.Response(200, json=MODELS)
            if not request.url.path.endswith("/chat/completions"):
                raise EndpointError(404, "unknown_url", f"{request.url.path}: {ONLY_CHAT}")
            return await _answer(completions, await request.aread())
        except EndpointError as error:
            return httpx.Response(error.status, json=error.body(), request=request)


async def _answer(completions: Completions, body: bytes) -> httpx.Response:
    answered, decode = await completions.complete(body), completions.policy.chat.decode
    if answered.request.stream:
        stream = b"".join(answered.events(decode))
        return httpx.Response(200, content=stream, headers={"Content-Type": "text/event-stream"})
    return httpx.Response(200, content=orjson.dumps(answered.body(decode)), headers=_JSON)
