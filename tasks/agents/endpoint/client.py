"""An OpenAI client for agents in the rollout's process: the same class, without HTTP between them."""

import json

import httpx2 as httpx  # the one that openai uses
from openai import AsyncOpenAI

from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.errors import EndpointError
from tasks.agents.endpoint.requests import parse_request


class _Direct(httpx.AsyncBaseTransport):
    """A transport that answers requests itself."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            if request.url.path != "/v1/chat/completions":
                raise EndpointError(404, "unknown_url", f"{request.url.path}: only chat completions are answered here")
            return await self._complete(await request.aread())
        except EndpointError as error:
            return httpx.Response(error.status, json=error.body(), request=request)

    async def _complete(self, body: bytes) -> httpx.Response:
        try:
            wanted = parse_request(body)
        except EndpointError as error:
            self._completions.refuse(error)
            raise
        answered = await self._completions.complete(wanted)
        decode = self._completions.policy.chat.decode
        if wanted.stream:
            stream = b"".join(answered.events(decode))
            return httpx.Response(200, content=stream, headers={"Content-Type": "text/event-stream"})
        return httpx.Response(200, content=json.dumps(answered.body(decode)), headers=_JSON)


_JSON = {"Content-Type": "application/json"}


def open_client(completions: Completions, base_url: str, key: str) -> AsyncOpenAI:
    """Return a client of an episode; `base_url` and `key` are those of its server, for code that passes them on."""
    http = httpx.AsyncClient(transport=_Direct(completions), trust_env=False)
    return AsyncOpenAI(api_key=key, base_url=base_url, http_client=http, max_retries=0)
