"""The web app of the live page: one page that loads itself again, and pictures of curves for light and dark."""

from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from storage.errors import StorageError
from storage.objects.store import Store
from tasks.audit.reader.serving import HEADERS, create_site
from tasks.metrics.line import duration
from tasks.metrics.rows import Row
from tasks.metrics.show import plot, shown
from tasks.tracking.interface import Transcript
from tasks.tracking.points import read_transcripts
from tasks.watch.state import State, read_state

REFRESH_S = 5
"""Seconds after which the page loads itself again."""
MOST_ALARMS = 10
_HERE = Path(__file__).parent


class Watched:
    """A run that is looked at, with what was made for its newest state: reading and drawing take time."""

    def __init__(self, store: Store, run: str, per_hour: float | None) -> None:
        self._store, self._run, self._per_hour = store, run, per_hour
        self._lock = Lock()  # requests are answered in threads, and matplotlib's style is global
        self._rows: list[Row] = []
        self._pictures: dict[tuple[int, str, bool], bytes] = {}
        self._transcripts: tuple[str | None, list[Transcript]] = (None, [])

    def state(self) -> State:
        """Read the run's state; the pictures are of the newest one."""
        state = read_state(self._store, self._run, self._per_hour)
        self._rows = state.rows
        return state

    def transcripts(self, data_set: str | None) -> list[Transcript]:
        """Read some trajectories of a data set, once."""
        with self._lock:
            if data_set and data_set != self._transcripts[0]:
                with TemporaryDirectory(prefix="transcripts-") as scratch:
                    self._transcripts = data_set, read_transcripts(self._store, data_set, Path(scratch))
            return self._transcripts[1]

    def picture(self, name: str, *, dark: bool) -> bytes:
        """Draw the curve of a metric, as it was when the page was read, as SVG, once for each state.

        Raises:
            HTTPException: the run has no such metric.
        """
        rows = self._rows
        if name not in shown({self._run: rows}):
            raise HTTPException(404, f"The run has no metric {name[:200]!r}.")
        with self._lock:
            key = len(rows), name, dark
            if key not in self._pictures:
                self._pictures = {known: svg for known, svg in self._pictures.items() if known[0] == len(rows)}
                plot({self._run: rows}, [name], made := BytesIO(), dark=dark)
                self._pictures[key] = made.getvalue()
            return self._pictures[key]


def create_app(store: Store, run: str, per_hour: float | None = None) -> FastAPI:
    """Create the app that shows one run. It only reads the store.

    Args:
        store: the store of the run.
        run: its name.
        per_hour: price of an hour; None: the run's `cost.per_hour`.
    """
    watched = Watched(store, run, per_hour)
    app, render = create_site([_HERE], "", root=store.root, run=run, refresh_s=REFRESH_S, duration=duration)

    @app.api_route("/", methods=["GET", "HEAD"])
    def watch(request: Request) -> Response:
        state = watched.state()
        return render(
            "page.html",
            state=state,
            names=shown({run: state.rows}) if state.rows else [],
            transcripts=watched.transcripts(state.data_set),
            most_alarms=MOST_ALARMS,
            refresh_s=0 if "still" in request.query_params else REFRESH_S,
        )

    @app.get("/curve")
    def curve(name: str, dark: bool = False) -> Response:
        headers = HEADERS | {"Cache-Control": "private, max-age=3600"}  # its address has the number of rows
        return Response(watched.picture(name, dark=dark), media_type="image/svg+xml", headers=headers)

    @app.exception_handler(StorageError)
    def unreadable(_: Request, error: StorageError) -> Response:
        """Show what the store answers; the page is loaded again meanwhile."""
        return render("failed.html", 503, says=str(error))

    return app
