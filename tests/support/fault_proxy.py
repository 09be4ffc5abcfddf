"""A proxy for an S3 server that spoils a share of the requests, like a bad network or an overloaded server."""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from http import HTTPStatus
from typing import Self

import aiohttp
from aiohttp import web
from yarl import URL

# The status and code of faults that are answers.
_ERRORS = {
    "500": (HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError"),
    "503": (HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable"),
    "slow-down": (HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown"),
    "late-500": (HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError"),
}
_SILENT = ("reset", "hang")  # happen before the request is read
_DONE = ("lost", "late-500")  # the server does the request, but the client does not get its answer
ALL = ("500", "503", "slow-down", *_SILENT, *_DONE)

# These headers belong to the connection, not to the request. None of them is signed.
_HOP_BY_HOP = ("Connection", "Expect", "Keep-Alive", "Transfer-Encoding")


class FaultProxy:
    """Passes requests on unchanged to `target`, except for a share of them. A context manager with its own thread.

    Faults: `500`, `503` and `slow-down` are answered and not passed on. `reset` resets the connection at once, `hang`
    closes it after `hang_s` of silence. `lost` passes the request on and closes the connection instead of an answer.
    `late-500` passes it on and answers 500. If the target is dead, the connection is closed as well.

    Attributes:
        endpoint: the URL for clients.
        counts: number of requests by fault, `passed` or `dead`.
    """

    def __init__(self, target: str, share: float, seed: int, hang_s: float, faults: Sequence[str] = ALL) -> None:
        assert set(faults) <= set(ALL)
        self.endpoint = ""
        self.counts: Counter[str] = Counter()
        self._target, self._share, self._hang_s, self._faults = target.rstrip("/"), share, hang_s, list(faults)
        self._random = random.Random(seed)
        self._started: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.endpoint = self._started.result(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # a kept connection may be dead by the next request
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as self._session:
            # aiohttp sends a PUT again if the target dies during it, and there is no public switch.
            self._session._retry_connection = False
            server = web.Server(self._answer, auto_decompress=False, access_log=None)
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self._started.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
                await self._stop.wait()
            finally:
                await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        fault = self._random.choice(self._faults) if self._random.random() < self._share else "passed"
        if fault in _SILENT:
            self.counts[fault] += 1
            await asyncio.sleep(self._hang_s if fault == "hang" else 0)
            return _hang_up(request, reset=fault == "reset")
        body = await request.content.read()
        answer = None
        if fault in ("passed", *_DONE):
            try:
                answer = await self._pass_on(request, body)
            except (aiohttp.ClientError, OSError):
                fault = "dead"
        self.counts[fault] += 1
        if fault == "passed" and answer is not None:
            return answer
        return _error(*_ERRORS[fault]) if fault in _ERRORS else _hang_up(request)

    async def _pass_on(self, request: web.BaseRequest, body: bytes) -> web.Response:
        url = URL(self._target + request.raw_path, encoded=True)
        headers = request.headers.copy()
        for name in _HOP_BY_HOP:
            headers.popall(name, None)
        chunked = True if "Transfer-Encoding" in request.headers else None
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, chunked=chunked, allow_redirects=False
        ) as answer:
            headers = answer.headers.copy()
            for name in _HOP_BY_HOP:
                headers.popall(name, None)
            # An empty body is None, so that the Content-Length of an answer to HEAD stays.
            return web.Response(
                status=answer.status, reason=answer.reason, headers=headers, body=await answer.read() or None
            )


def _error(status: HTTPStatus, code: str) -> web.Response:
    xml = (
        f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>made up by a test</Message></Error>'
    )
    return web.Response(status=status, text=xml, content_type="application/xml")


def _hang_up(request: web.BaseRequest, reset: bool = False) -> web.Response:
    """Close the connection; the returned response is never sent."""
    transport = request.transport
    if transport is not None:
        if reset:
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    return web.Response()
