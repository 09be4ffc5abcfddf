"""Protect the reader with a key, which is in the address that `read` prints, from other users of the machine."""

import hmac
import secrets
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

_NAME = "key"


def require_key(app: FastAPI, port: int) -> str:
    """Make the app answer only requests with a new key, in the address or in the cookie; return the key.

    A request with the key in the address gets the cookie. Browsers send a cookie to every port of a host, so its name
    has the port, and two readers work at the same time. Caution: the browser also sends it to servers of other users on
    this machine, if a person opens one.
    """
    key, cookie = secrets.token_urlsafe(16), f"{_NAME}-{port}"

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if _matches(key, request.query_params.get(_NAME)):
            response = RedirectResponse(str(request.url.remove_query_params(_NAME)), status_code=303)
            response.set_cookie(cookie, key, httponly=True, samesite="lax")
            return response
        if _matches(key, request.cookies.get(cookie)):
            return await answer(request)
        return PlainTextResponse("Open the address that the reader printed: it has the key.\n", status_code=403)

    return key


def _matches(key: str, given: str | None) -> bool:
    return given is not None and hmac.compare_digest(key.encode(), given.encode())
