"""The HTTP server of a rollout's process: one for all of its episodes, each of which has a key of its own."""

import json
import logging
import os
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import orjson
from aiohttp import web

from storage.visible import described
from tasks.agents.endpoint.completions import Completions
from tasks.agents.endpoint.protocol import MODELS, ONLY_CHAT, EndpointError, StepError, episode_ended, invalid
from tasks.environments.interface import StepResult

logger = logging.getLogger(__name__)

LARGEST_BODY = 4 * 2**20
"""Bytes of the largest request."""
_UNIX, _LAST_PORT = "unix:", 65535
_REMEMBERED = 10_000
"""Keys of ended episodes that get an answer of their own."""

Step = Callable[[str], Awaitable[StepResult]]
"""Steps the environment of an episode with an answer."""


def check_address(listen: str) -> str:
    """Return an address to listen on, `host:port` or `unix:/path`.

    Raises:
        ValueError: it is neither.
    """
    if listen.startswith(_UNIX):
        if not listen.startswith(f"{_UNIX}/"):
            raise ValueError("give the whole path of a socket, such as unix:/home/me/agents.sock")
        return listen
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise ValueError(f"give host:port with a port up to {_LAST_PORT}, such as 127.0.0.1:0, or unix:/path")
    return listen


def new_key() -> str:
    """Return a key for an episode."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True, slots=True)
class Served:
    """An episode that the server answers."""

    completions: Completions
    step: Step


class EndpointServer:
    """The server; an asynchronous context manager.

    Args:
        listen: `127.0.0.1:0` (any free port of this machine), another host and port, or `unix:/path`.
    """

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        self._listen = listen
        self._episodes: dict[str, Served] = {}
        self._ended: deque[str] = deque(maxlen=_REMEMBERED)
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """The base URL for clients, once the server runs."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_in_form])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/environment/step", self._step)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            self.base_url = await self._open(self._runner)
        except OSError as error:
            await self._runner.cleanup()
            raise ValueError(f"agent.args.listen={self._listen!r} cannot be listened on: {error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner
        await self._runner.cleanup()
        if self._listen.startswith(_UNIX):
            with suppress(FileNotFoundError):
                os.unlink(self._listen.removeprefix(_UNIX))

    async def _open(self, runner: web.AppRunner) -> str:
        """Listen, and return the base URL for clients."""
        if self._listen.startswith(_UNIX):
            path = self._listen.removeprefix(_UNIX)
            await web.UnixSite(runner, path).start()
            os.chmod(path, 0o600)
            return "http://localhost/v1"
        host, _, port = self._listen.rpartition(":")
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        name, number = runner.addresses[0][:2]
        return f"http://{f'[{name}]' if ':' in name else name}:{number}/v1"

    @contextmanager
    def serve(self, key: str, completions: Completions, step: Step) -> Iterator[None]:
        """Answer requests that have the key of an episode, until the block ends."""
        self._episodes[key] = Served(completions, step)
        try:
            yield
        finally:
            del self._episodes[key]
            self._ended.append(key)

    def _served(self, request: web.Request) -> Served:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and key in self._episodes:
            return self._episodes[key]
        if key in self._ended:
            logger.warning("an agent called the endpoint after its episode had ended: it must end what it starts")
            raise episode_ended()
        raise EndpointError(401, "invalid_api_key", "no episode has this key: use OPENAI_API_KEY, or the given client")

    async def _read(self, request: web.Request) -> tuple[Served, bytes]:
        """Return the episode and the body of a request.

        Raises:
            EndpointError: no episode has its key, or it is too large, which the reason of a failed episode will name.
        """
        served = self._served(request)
        try:
            return served, await request.read()
        except web.HTTPRequestEntityTooLarge:
            too_large = EndpointError(413, "request_too_large", f"a request may have {LARGEST_BODY:,} bytes")
            served.completions.refuse(too_large)
            raise too_large from None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        served, body = await self._read(request)
        answered = await served.completions.complete(body)
        decode = served.completions.policy.chat.decode
        if not answered.request.stream:
            return web.json_response(answered.body(decode))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in answered.events(decode):
            await response.write(event)
        await response.write_eof()
        return response

    async def _step(self, request: web.Request) -> web.Response:
        served, body = await self._read(request)
        try:
            action = orjson.loads(body)["action"]
        except (ValueError, KeyError, TypeError):
            action = None
        if not isinstance(action, str):
            raise invalid('send {"action": "…"}, the answer for the environment', "action")
        try:
            said = await served.step(action)
        except StepError as error:
            raise invalid(str(error), code="no_completion") from None
        except Exception as error:
            failed = EndpointError(500, "environment_failed", described(error))
            served.completions.refuse(failed)
            raise failed from error
        result = said._asdict() | {"info": dict(said.info)}
        return web.json_response(result, dumps=partial(json.dumps, default=str))  # `info` may hold anything

    async def _models(self, request: web.Request) -> web.Response:
        self._served(request)
        return web.json_response(MODELS)


@web.middleware
async def _in_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer errors in OpenAI's form."""
    try:
        return await handler(request)
    except EndpointError as error:
        return web.json_response(error.body(), status=error.status)
    except web.HTTPException as error:
        told = EndpointError(
            error.status, "unknown_url", f"{request.method} {request.path}: {error.reason}; {ONLY_CHAT}"
        )
        return web.json_response(told.body(), status=error.status)
