"""The HTTP server of a rollout's process: one for all of its episodes, each of which has a key of its own."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import orjson
from aiohttp import web

from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import MODEL, ONLY_CHAT, EndpointError, invalid
from tasks.environments.interface import StepResult

LARGEST_BODY = 4 * 2**20
"""Bytes of the largest request."""
BODY_S = 60.0
"""Most seconds that the body of a request may take."""
IDLE_S = 30.0
"""Most seconds that a connection may take for the headers of a request, and wait for the next one."""

Step = Callable[[str], Awaitable[StepResult]]
"""Steps the environment of an episode with an answer."""


class EndpointServer:
    """The server; an asynchronous context manager.

    Args:
        listen: `127.0.0.1:0` (any free port of this machine), or another host and port.
    """

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._episodes: dict[str, tuple[Completions, Step]] = {}
        self.base_url = ""
        """The base URL for clients, once the server runs."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._in_form])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/environment/step", self._step)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
        )
        await self._runner.setup()
        host, _, port = self._listen.rpartition(":")
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            await self._runner.cleanup()
            raise ValueError(f"agent.args.listen={self._listen!r} cannot be listened on: {error}") from error
        name, number = self._runner.addresses[0][:2]
        self.base_url = f"http://{f'[{name}]' if ':' in name else name}:{number}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @contextmanager
    def serve(self, key: str, completions: Completions, step: Step) -> Iterator[None]:
        """Answer requests that have the key of an episode, until the block ends."""
        self._episodes[key] = completions, step
        try:
            yield
        finally:
            del self._episodes[key]

    def _served(self, request: web.Request) -> tuple[Completions, Step]:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or key not in self._episodes:
            message = "no episode has this key, or it has ended: use OPENAI_API_KEY, or the given client, while it runs"
            raise EndpointError(401, "invalid_api_key", message)
        return self._episodes[key]

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        completions, _ = self._served(request)
        answered = await completions.complete(await request.read())
        if not answered.request.stream:
            return web.json_response(answered.body())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in answered.events():
            await response.write(event)
        await response.write_eof()
        return response

    async def _step(self, request: web.Request) -> web.Response:
        completions, step = self._served(request)
        try:
            action = orjson.loads(await request.read())["action"]
        except (ValueError, KeyError, TypeError):
            action = None
        if not isinstance(action, str):
            raise invalid('send {"action": "…"}, the answer for the environment', "action")
        with completions.noting("environment_failed"):
            result = await step(action)
        dumps = partial(json.dumps, default=str)  # `info` may hold anything
        return web.json_response(result._asdict() | {"info": dict(result.info)}, dumps=dumps)

    async def _models(self, _: web.Request) -> web.Response:
        listed = [{"id": MODEL, "object": "model", "created": 0, "owned_by": "math-mt-ppo"}]
        return web.json_response({"object": "list", "data": listed})

    @web.middleware
    async def _in_form(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer errors in OpenAI's form."""
        try:
            self._served(request)
            async with asyncio.timeout(BODY_S):
                await request.read()  # which keeps it
            return await handler(request)
        except EndpointError as error:
            refusal = error
        except TimeoutError:  # handlers raise none
            refusal = EndpointError(408, "request_timeout", f"the body has not arrived within {BODY_S:g} s")
        except web.HTTPException as error:
            code = "request_too_large" if isinstance(error, web.HTTPRequestEntityTooLarge) else "unknown_url"
            refusal = EndpointError(error.status, code, f"{request.method} {request.path}: {error.reason}; {ONLY_CHAT}")
        return web.json_response(refusal.body(), status=refusal.status)
