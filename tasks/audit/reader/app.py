"""The reader's web app. Every page is a GET request without script, and its address says what it shows.

Templates escape every text, and headers forbid the browser to run anything.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from storage.objects.store import Store
from storage.visible import visible
from tasks.audit.data_sets import DataSet
from tasks.audit.database import AuditDatabase
from tasks.audit.reader.library import Library
from tasks.audit.reader.views import HEADERS, LONGEST, Views
from tasks.audit.record import CASES, REPORT
from tasks.audit.report import page, wording

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""The accepted values of the Host header; they stop other sites whose domain resolves to this machine."""
_HERE = Path(__file__).parent / "templates"
_STYLES = {name: page.TEMPLATES / name for name in page.STYLES} | {"reader.css": _HERE / "reader.css"}
_REPORT_CSP = (
    "default-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; sandbox allow-scripts"
)
"""The report is one file with its own style and scripts, which sort tables; the sandbox hides other pages from them."""


def create_app(
    store: Store,
    data_sets: Sequence[DataSet],
    database: AuditDatabase,
    cache: Path,
    audit: Path | None = None,
    notes: Sequence[str] = (),
) -> FastAPI:
    """Create the app for the data sets in `database`, and add the reader's tables to it.

    Args:
        store: the store of the tokenizers.
        data_sets: the data sets in the order of their numbers.
        database: the tables; it must stay open as long as the app runs.
        cache: local folder for files of a remote store.
        audit: folder with an audit's report.html and cases.parquet.
        notes: sentences about data that cannot be shown.
    """
    templates = page.environment(_HERE)
    templates.filters |= {"seen": visible, "line": line, "moment": moment}
    templates.filters |= {"number": wording.decimal, "counted": wording.counted}
    templates.globals |= {"LONGEST": LONGEST, "words": wording, "root": store.root, "has_audit": audit is not None}

    def render(template: str, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(templates.get_template(template).render(values), status, headers=HEADERS)

    library = Library(database, audit / CASES if audit else None)
    views = Views(library, render, store, data_sets, cache, notes)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    pages = {"/": views.listing, "/group": views.group, "/trajectory": views.trajectory}
    for path, view in pages.items():
        app.add_api_route(path, view, methods=["GET", "HEAD"])

    @app.get("/static/{name}")
    def style(name: str) -> Response:
        if name not in _STYLES:
            raise HTTPException(404)
        return FileResponse(_STYLES[name], media_type="text/css", headers=HEADERS)

    @app.get("/report")
    def report() -> Response:
        if audit is None:
            raise HTTPException(404, "The reader was started without an audit.")
        headers = {**HEADERS, "Content-Security-Policy": _REPORT_CSP}
        return FileResponse(audit / REPORT, media_type="text/html", headers=headers)

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> Response:
        return render("failed.html", error.status_code, says=error.detail)

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> Response:
        """Show the error as a page; the terminal shows its traceback."""
        says = f"{type(error).__name__}: {error}. If files were moved or collected, start the reader again."
        return render("failed.html", 500, says=says)

    return app


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
