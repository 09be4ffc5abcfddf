"""Who may read: whoever knows the key in the address that `read` prints. Other users of the machine do not."""

import hmac
import secrets
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

_NAME = "key"


def lock(app: FastAPI, port: int) -> str:
    """Let the app answer only who has its new key, from the address or from the cookie it becomes; returns the key.

    Browsers send a cookie to every port of a host: its name says which port, so that two readers work at once. The
    server of another user that somebody opens on this machine is sent it, too.
    """
    key, cookie = secrets.token_urlsafe(16), f"{_NAME}-{port}"

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if _is(key, request.query_params.get(_NAME)):
            response = RedirectResponse(str(request.url.remove_query_params(_NAME)), status_code=303)
            response.set_cookie(cookie, key, httponly=True, samesite="lax")
            return response
        if _is(key, request.cookies.get(cookie)):
            return await answer(request)
        return PlainTextResponse("Open the address that the reader printed: it holds a key.\n", status_code=403)

    return key


def _is(key: str, given: str | None) -> bool:
    return given is not None and hmac.compare_digest(key.encode(), given.encode())
