"""The reader's web app. Every page is a GET request without script, and its address says what it shows."""

from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from storage.objects.store import Store
from tasks.audit.data_sets import DataSet
from tasks.audit.database import AuditDatabase
from tasks.audit.reader.library import Library
from tasks.audit.reader.serving import HEADERS, create_site
from tasks.audit.reader.views import Views
from tasks.audit.record import CASES, REPORT

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
    moved = "If files were moved or collected, start the reader again."
    app, render = create_site([], moved, root=store.root, has_audit=audit is not None)
    library = Library(database, audit / CASES if audit else None)
    views = Views(library, render, store, data_sets, cache, notes)
    pages = {"/": views.listing, "/group": views.group, "/trajectory": views.trajectory}
    for path, view in pages.items():
        app.add_api_route(path, view, methods=["GET", "HEAD"])

    @app.get("/report")
    def report() -> Response:
        if audit is None:
            raise HTTPException(404, "The reader was started without an audit.")
        headers = {**HEADERS, "Content-Security-Policy": _REPORT_CSP}
        return FileResponse(audit / REPORT, media_type="text/html", headers=headers)

    return app
