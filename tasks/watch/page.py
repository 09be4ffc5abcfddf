"""The web app of the live page: one page that loads itself again, and pictures of curves for light and dark."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from threading import Lock

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from storage import layout
from storage.errors import StorageError
from storage.logs.leases import tenures
from storage.objects.store import Store
from storage.versions import manifests
from storage.versions.drafts import shards
from storage.versions.manifests import Manifest
from tasks.audit.reader.serving import HEADERS, create_site
from tasks.metrics.log import read_rows
from tasks.metrics.rows import Row, by_iteration, spent
from tasks.metrics.show import duration, paid_for_something_else, plot, seconds_left, shown
from tasks.rollout.outcomes import FaultAlarm
from tasks.tracking.points import Transcript, read_transcripts

REFRESH_S = 5
"""Seconds after which the page loads itself again."""
_PICTURES = 64
"""Drawn curves that are kept: those of one state of a run, light and dark."""


def create_app(store: Store, run: str, per_hour: float | None = None) -> FastAPI:
    """Create the app that shows one run. It only reads the store.

    Args:
        store: the store of the run.
        run: its name.
        per_hour: price of an hour of work, in any currency; None: unknown.
    """
    drawing = Lock()  # requests are answered in threads, and matplotlib's style is global
    shared = {"root": store.root, "run": run, "refresh_s": REFRESH_S, "duration": duration}
    app, render = create_site([Path(__file__).parent], "", **shared)

    @lru_cache(maxsize=1)
    def transcripts(data_set: str) -> list[Transcript]:
        return read_transcripts(store, data_set)

    @app.api_route("/", methods=["GET", "HEAD"])
    def watch(request: Request) -> Response:
        state = State(store, run)
        return render(
            "page.html",
            state=state,
            per_hour=per_hour,
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


class State:
    """A run as the store shows it at one moment.

    Raises:
        StorageError: there is no such run, or something of it is damaged.
    """

    def __init__(self, store: Store, run: str) -> None:
        begun = manifests.find(store, layout.run(run))
        if begun is None:
            raise StorageError(f"{store.uri(f'runs/{run}')} is no run: check the name and --root")
        self.rows = read_rows(store, run)
        merged = by_iteration(self.rows)
        iterations, stages = [*merged.values()], [row["version"] for row in self.rows if row["stage"] != "evaluate"]
        newest = manifests.read(store, stages[-1]) if stages else begun  # some knobs change while a run lasts
        self.total = int(newest.number("run.iterations"))
        self.done = max((row["iteration"] + 1 for row in iterations if row["stage"] == "train"), default=0)
        self.stage = _stage(store, run, self.rows, self.done, self.total, int(newest.number("evaluation.every")))
        """The stage that is going on or comes next."""
        self.data_sets = [row["version"] for row in self.rows if row["stage"] == "rollout"]
        self.stored, self.expected = _unfinished(store, run, len(self.data_sets), newest)
        held = [tenure for tenure in tenures(store, run) if tenure.label != "gc"]
        self.holder = held[-1] if held else None
        """The newest flow run."""
        self.is_working = self.holder is not None and not self.holder.ended
        left = (seconds_left(tenure.begun, iterations, max(0, self.total - self.done)) for tenure in reversed(held))
        self.left_s = next((seconds for seconds in left if seconds is not None), None)
        self.worked_s = sum(tenure.seconds for tenure in held)
        self.spent = spent(iterations)
        own_s = sum(each["total_s"] for each in self.spent.values())
        self.other_s = 0.0 if newest.knob("run.overlap") else max(0.0, self.worked_s - own_s)
        """Worked seconds of no stage."""
        self.alarms = sorted(_alarms(merged), key=lambda alarm: -alarm[0])
        """Iterations and sentences, newest first."""


def _stage(store: Store, run: str, rows: list[Row], done: int, total: int, every: int) -> str:
    """Name the stage that follows from what is committed."""
    here = {row["stage"] for row in rows if row["iteration"] == done}
    if not done and not manifests.committed(store, layout.checkpoint(run, 0)):
        return "policy version 0"
    if "score" in here or "rollout" in here:
        return "train" if "score" in here else "score"
    if "evaluate" not in here and (done % every == 0 or done >= total):
        return "evaluation"
    return "report" if done >= total else "rollout"


def _unfinished(store: Store, run: str, iteration: int, newest: Manifest) -> tuple[int, int]:
    """Count the episodes of the next data set that are in finished shards, and all that it will have."""
    finished = shards(store, layout.trajectories(run, iteration)).values()
    size = newest.knob("rollout.generation_size") or newest.number("rollout.group_size")
    expected = int(newest.number("rollout.problems_per_iteration") * size)
    return sum(shard.file.rows or 0 for shard in finished), expected


def _alarms(merged: Mapping[int, Row]) -> Iterator[tuple[int, str]]:
    """Yield the alarms of all iterations, as the console has them.

    Each is raised where it begins, and not again while it lasts.
    """
    faults, before, rows = FaultAlarm(), dict[str, str](), list[Row]()
    for number, row in merged.items():
        rows.append(row)
        shares = {name.removeprefix("faults/"): row[name] for name in row if name.startswith("faults/")}
        yield from ((number, f"{alarm}.") for alarm in faults.raised_by({"faults": shares}))
        now = dict[str, str]()
        if row.get("trajectories") == 0:
            now["idle"] = "Nothing was left to train on."
        if row.get("reward/all_minimal"):
            now["wrong"] = "No turn is right, so there is nothing to learn yet."
        if alarm := paid_for_something_else(rows):
            now["paid"] = f"{alarm[0].upper()}{alarm[1:]}."
        yield from ((number, text) for what, text in now.items() if what not in before)
        before = now
