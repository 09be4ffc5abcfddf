"""What the local web apps of this project share: pages without scripts, on this machine only, protected by a key.

Templates escape every text, and headers forbid the browser to run anything.
"""

import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from storage.errors import counted
from storage.processes.peers import only_own
from storage.visible import visible
from tasks.audit.report import page, wording

ADDRESS = "127.0.0.1"
"""The pages show everything in the store, so other machines cannot reach them, nor can other users of this machine but
root; where the kernel does not tell whose a connection is, they need the key."""
HOSTS = [ADDRESS, "localhost", "[::1]"]
"""The accepted values of the Host header; they stop other sites whose domain resolves to this machine."""
LONGEST = 200_000
"""The most characters of one text on a page."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'; "
    "style-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TEMPLATES = Path(__file__).parent / "templates"
_STYLES = {name: page.TEMPLATES / name for name in page.STYLES} | {"reader.css": TEMPLATES / "reader.css"}

Render = Callable[..., Response]
"""Makes a page from the name of its template, its status and values."""


def create_site(folders: Sequence[Path], unexpected: str, **shared: Any) -> tuple[FastAPI, Render]:
    """Create an app that serves the style sheets and shows errors as pages; return it and what renders its pages.

    Args:
        folders: folders of the templates, in addition to those of the reader.
        unexpected: a sentence that follows an unexpected error, which the terminal shows with its traceback.
        shared: values of all templates.
    """
    templates = page.environment([*folders, TEMPLATES])
    templates.filters |= {"seen": visible, "line": line, "moment": moment}
    templates.filters |= {"number": wording.decimal, "share": wording.share, "counted": counted}
    templates.globals |= {"LONGEST": LONGEST, "words": wording, "refresh_s": 0, **shared}

    def render(template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(templates.get_template(template).render(values), status, headers=HEADERS)

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)

    @app.get("/static/{name}")
    def style(name: str) -> Response:
        if name not in _STYLES:
            raise HTTPException(404)
        return FileResponse(_STYLES[name], media_type="text/css", headers=HEADERS)

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> Response:
        return render("failed.html", error.status_code, says=error.detail)

    @app.exception_handler(Exception)
    def failed(_: Request, error: Exception) -> Response:
        return render("failed.html", 500, says=f"{type(error).__name__}: {error}. {unexpected}")

    return app, render


def serve(app: FastAPI, listener: socket.socket, name: str) -> None:
    """Serve an app with a new key until Ctrl-C, and print its address."""
    from uvicorn import Config, Server

    port = listener.getsockname()[1]
    print(f"{name} is on http://{ADDRESS}:{port}/?key={require_key(app, port)} until Ctrl-C", flush=True)
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    Server(Config(app, http=only_own(), timeout_graceful_shutdown=3, **quiet)).run([listener])


def require_key(app: FastAPI, port: int) -> str:
    """Make the app answer only requests with a new key, in the address or in the cookie; return the key.

    It protects the app from other users of the machine. A request with the key in the address gets the cookie.
    Browsers send a cookie to every port of a host, so its name has the port, and two apps work at the same time.
    Caution: the browser also sends it to servers of other users on this machine, if a person opens one.
    """
    key, cookie = secrets.token_urlsafe(16), f"key-{port}"

    def matches(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(key.encode(), given.encode())

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if matches(request.query_params.get("key")):
            response = RedirectResponse(str(request.url.remove_query_params("key")), status_code=303)
            response.set_cookie(cookie, key, httponly=True, samesite="lax")
            return response
        if matches(request.cookies.get(cookie)):
            return await answer(request)
        return PlainTextResponse("Open the address that the terminal shows: it has the key.\n", status_code=403)

    return key


def line(text: str | None, most: int = 100) -> str:
    r"""Return the first line that is not empty.

    >>> line("\n  first\nsecond")
    'first …'
    """
    whole = (text or "").strip()
    first = whole.partition("\n")[0]
    shown = visible(first[:most])
    return shown if len(whole) == len(first[:most]) else f"{shown} …"


def moment(seconds: float) -> str:
    """Write a time in seconds since the epoch as a date.

    >>> moment(0.0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
