"""The reader's web app. Every page is a GET request without script, and its address says what it shows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from storage.errors import StorageError
from storage.objects.store import Store
from tasks.audit.database import AuditDatabase
from tasks.audit.reader.library import Library
from tasks.audit.reader.lists import Lists
from tasks.audit.reader.pages import HEADERS, REPORT_POLICY, STYLES, PageError, Pages
from tasks.audit.reader.trajectory import TrajectoryPages
from tasks.audit.record import CASES, REPORT
from tasks.audit.selection import DataSet

HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""The accepted values of the Host header; they stop other sites whose domain resolves to this machine."""

View = Callable[[Mapping[str, str]], Response]


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
        audit: folder with an audit's report.html, audit.json and cases.parquet.
        notes: sentences about data that cannot be shown.
    """
    library = Library(database, audit / CASES if audit else None)
    pages = Pages(root=store.root, has_audit=audit is not None)
    lists = Lists(library, pages, data_sets, audit, notes)
    single = TrajectoryPages(library, pages, store, data_sets, cache)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    for path, view in (
        ("/", lists.listing),
        ("/group", lists.group),
        ("/audit", lists.audit),
        ("/trajectory", single.trajectory),
        ("/text", single.text),
    ):
        app.add_api_route(path, _answer(view), methods=["GET", "HEAD"])
    _add_files(app, audit)
    _add_error_pages(app, pages)
    return app


def _answer(view: View) -> Callable[[Request], Response]:
    """Make a route of a view, which gets only the query parameters and runs in a thread."""

    def answer(request: Request) -> Response:
        return view(request.query_params)

    return answer


def _add_files(app: FastAPI, audit: Path | None) -> None:
    @app.get("/static/{name}")
    def style(name: str) -> Response:
        if name not in STYLES:
            raise PageError(404, "No such file", "The reader serves only its style sheets.")
        return FileResponse(STYLES[name], media_type="text/css", headers=HEADERS)

    @app.get("/report")
    def report() -> Response:
        if audit is None:
            raise PageError(404, "No audit", "The reader was started without an audit.")
        headers = {**HEADERS, "Content-Security-Policy": REPORT_POLICY}
        return FileResponse(audit / REPORT, media_type="text/html", headers=headers)


def _add_error_pages(app: FastAPI, pages: Pages) -> None:
    """Show every error as a page; the terminal shows the traceback of an unexpected error, too."""

    @app.exception_handler(PageError)
    def expected(_: Request, error: PageError) -> Response:
        return pages.failed(error.status, error.title, error.says)

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return pages.failed(404, "No such page", "The reader has no page with this address.")
        return pages.failed(error.status_code, "Not possible", f"The reader refused this request: {error.detail}.")

    @app.exception_handler(StorageError)
    @app.exception_handler(OSError)
    def unreadable(_: Request, error: Exception) -> Response:
        return pages.failed(
            500, "This cannot be read", f"{error}. If files were moved or collected, start the reader again."
        )

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> Response:
        return pages.failed(500, "This cannot be shown", f"{type(error).__name__}: {error}.")
