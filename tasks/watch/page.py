"""The web app of the live page: one page that loads itself again, and pictures of curves for light and dark."""

from functools import lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from storage.errors import StorageError
from storage.objects.store import Store
from tasks.audit.reader.serving import HEADERS, create_site
from tasks.metrics.line import duration
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row
from tasks.metrics.show import plot, shown
from tasks.tracking.interface import Transcript
from tasks.tracking.points import read_transcripts
from tasks.watch.state import State

REFRESH_S = 5
"""Seconds after which the page loads itself again."""
_PICTURES = 64
"""Drawn curves that are kept: those of one state of a run, light and dark."""


def create_app(store: Store, run: str, per_hour: float | None = None) -> FastAPI:
    """Create the app that shows one run. It only reads the store.

    Args:
        store: the store of the run.
        run: its name.
        per_hour: price of an hour; None: the run's `cost.per_hour`.
    """
    drawing = Lock()  # requests are answered in threads, and matplotlib's style is global
    app, render = create_site(
        [Path(__file__).parent], "", root=store.root, run=run, refresh_s=REFRESH_S, duration=duration
    )

    @lru_cache(maxsize=1)
    def transcripts(data_set: str) -> list[Transcript]:
        return read_transcripts(store, data_set)

    @app.api_route("/", methods=["GET", "HEAD"])
    def watch(request: Request) -> Response:
        state = State(store, run, per_hour)
        return render(
            "page.html",
            state=state,
            names=shown({run: state.rows}),
            transcripts=transcripts(state.data_sets[-1]) if state.data_sets else [],
            refresh_s=0 if "still" in request.query_params else REFRESH_S,
        )

    @lru_cache(maxsize=1)
    def rows_of(_state: int) -> list[Row]:
        return read_rows(store, run)

    @lru_cache(maxsize=_PICTURES)
    def drawn(name: str, dark: bool, rows: int) -> bytes:
        plot({run: rows_of(rows)}, [name], made := BytesIO(), dark=dark)
        return made.getvalue()

    @app.get("/curve")
    def curve(name: str, rows: int, dark: bool = False) -> Response:
        """Draw a metric; the address has the number of `rows`, so that it is drawn once for each state of the run."""
        with drawing:
            if name not in shown({run: rows_of(rows)}):
                raise HTTPException(404, f"The run has no metric {name[:200]!r}.")
            picture = drawn(name, dark, rows)
        headers = HEADERS | {"Cache-Control": "private, max-age=3600"}
        return Response(picture, media_type="image/svg+xml", headers=headers)

    @app.exception_handler(StorageError)
    def unreadable(_: Request, error: StorageError) -> Response:
        """Show what the store answers; the page is loaded again meanwhile."""
        return render("failed.html", 503, says=str(error))

    return app
