"""Feed a tracker from the store: once, or while a run lasts, in a process of its own.

The process of a flow never waits for a tracker. It starts `python -m flows.track RUN --to NAME --until-closed FD` for
each, which reads the store every few seconds, tries again if the tracker does not answer, and ends after the flow. At
its end it notes in `runs/<run>/tracking/<name>.json` where the next process goes on. After one that was killed the next
process logs all points again, since most trackers keep points in memory for a while; a sink drops those that it has.
"""

import hashlib
import json
import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from configs import Config, flatten
from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store
from storage.processes.child import Child
from storage.versions import manifests
from tasks.metrics.log import read_rows
from tasks.tracking import SINKS
from tasks.tracking.interface import Sink, TrackedRun
from tasks.tracking.points import points

logger = logging.getLogger(__name__)

POLL_S = 3.0
"""Seconds between two looks at the store."""
RETRY_S = 30.0
"""Seconds until a tracker that failed is tried again."""
LAST_S = 30.0
"""Longest wait of a flow for its trackers, at its end."""


class Feed:
    """What feeds one tracker with the points of one run.

    Args:
        store: the store of the run.
        run: its name.
        name: that of the tracker: registered, or `package.module:Class`.
        cache: folder for files of the tracker, and for copies of a remote root.
        again: log all points, also those that were logged before.
    """

    def __init__(self, store: Store, run: str, name: str, cache: Path, *, again: bool = False) -> None:
        self._store, self._run, self._name, self._cache = store, run, name, cache
        self._key = f"runs/{run}/tracking/{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.json"
        self._next = 0 if again else self._noted()
        self._sink: Sink | None = None

    def catch_up(self) -> int:
        """Log the committed points that were not logged; return their number.

        Raises:
            Exception: whatever the tracker raises; the points are logged by a later call.
        """
        logged, rows = 0, read_rows(self._store, self._run)
        with TemporaryDirectory(prefix="transcripts-") as scratch:
            for point in points(self._store, rows, self._next, Path(scratch)):
                self._sink = self._sink or self._open()
                self._sink.log(point)
                self._next, logged = point.index + 1, logged + 1
        return logged

    def close(self) -> None:
        """Wait until the tracker has stored everything, and note where the next process goes on."""
        if self._sink:
            self._sink.close()
            self._note(self._next)

    def drop(self) -> None:
        """Forget a tracker that failed; the next call opens it again and logs all points again."""
        self._sink, self._next = None, 0

    def _note(self, index: int) -> None:
        self._store.write(self._key, json.dumps({"next": index}).encode())

    def _noted(self) -> int:
        try:
            return int(json.loads(self._store.read(self._key))["next"])
        except FileNotFoundError:
            return 0
        except (ValueError, KeyError, TypeError):
            where = self._store.uri(self._key)
            raise StorageError(f"{where} is damaged: delete it, and all points are logged again") from None

    def _open(self) -> Sink:
        manifest, uri = manifests.find(self._store, layout.run(self._run)), self._store.uri(f"runs/{self._run}")
        self._next -= self._next % 2  # with the evaluations of the iteration
        run = TrackedRun(
            name=self._run,
            uri=uri,
            key=hashlib.sha256(uri.encode()).hexdigest()[:16],
            config=dict(flatten(manifest.settings)) if manifest else {},
            folder=self._cache / "tracking",
            first=self._next,
        )
        self._note(0)  # until `close`
        return SINKS.make(self._name, run, {})


def follow(feed: Feed, closed: int) -> None:
    """Feed a tracker until the descriptor `closed` reaches its end; then once more. Errors are logged and tried again.

    Raises:
        Exception: the last attempt failed.
    """
    wait_s = 0.0
    while not select.select([closed], [], [], wait_s)[0]:
        try:
            feed.catch_up()
            wait_s = POLL_S
        except Exception:  # a tracker may raise anything, and must not be lost by it
            logger.exception("the tracker failed; it is tried again in %g s", RETRY_S)
            feed.drop()
            wait_s = RETRY_S
    feed.catch_up()
    feed.close()


def command(config: Config, name: str, closed: int) -> list[str]:
    """Return the command that follows a run until the descriptor `closed` reaches its end."""
    store = config.storage
    where = ["--root", store.root, "--cache", store.cache]
    return [sys.executable, "-m", "flows.track", config.run.name, "--to", name, *where, "--until-closed", str(closed)]


@contextmanager
def followed(config: Config) -> Iterator[None]:
    """Feed the trackers of a run in the block; at its end they get `LAST_S` to finish, and the log says who did not."""
    children = dict[str, Child]()
    reading, writing = os.pipe()
    logs = Path(config.storage.cache) / "logs" / config.run.name
    try:
        for name in config.tracking:
            children[name] = child = Child(logs / f"tracking-{re.sub(r'[^A-Za-z0-9._-]', '-', name)}.log")
            child.start(command(config, name, reading), os.environ, pass_fds=[reading])
        yield
    finally:
        os.close(writing)
        os.close(reading)
        _wait(children, config.run.name)


def _wait(children: dict[str, Child], run: str) -> None:
    deadline = time.monotonic() + LAST_S
    for name, child in children.items():
        while child.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        if child.status != 0:
            logger.warning(
                "the tracker %s did not get everything (see %s): `python -m flows.track %s --to %s` gives it the rest",
                name, child.log, run, name,
            )  # fmt: skip
        child.close()


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers exist and that their packages are installed.

    Raises:
        ValueError: one is unknown, or lacks its package; the message says what to install.
    """
    from importlib.util import find_spec

    for name in names:
        SINKS.find(name)
        if ":" not in name and find_spec(name) is None:
            raise ValueError(f"tracking: {name} is not installed: pip install {name}")
