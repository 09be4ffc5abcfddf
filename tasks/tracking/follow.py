"""Feed a tracker from the store: once, or while a run lasts, in a process of its own.

The process of a flow never waits for a tracker. It starts `python -m flows.track RUN --to NAME --until-closed FD` for
each, which reads the store every few seconds, tries again if the tracker does not answer, and ends after the flow.
Each such process gives its tracker all points from the first one on, since most trackers keep points in memory for a
while and lose them if they are killed; a sink drops those that it has.
"""

import hashlib
import logging
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from configs import Config, flatten
from storage import layout
from storage.objects.store import Store
from storage.processes.child import Child
from storage.versions import manifests
from tasks.metrics.log import read_rows
from tasks.tracking import SINKS
from tasks.tracking.points import Sink, TrackedRun, points

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
        cache: folder for files of the tracker.
    """

    def __init__(self, store: Store, run: str, name: str, cache: Path) -> None:
        self._store, self._run, self._name, self._folder = store, run, name, cache / "tracking"
        self._sink: Sink | None = None
        self._next = 0

    def catch_up(self, *, last: bool = True) -> int:
        """Log the committed points that were not logged; return their number.

        Args:
            last: also log the newest evaluations of a policy, to which evaluations on other sets may still come.

        Raises:
            Exception: whatever the tracker raises; the points are logged by a later call, all of them again.
        """
        logged, rows = 0, read_rows(self._store, self._run)
        for point in points(self._store, rows, self._next, last=last):
            try:
                self._sink = self._sink or self._open()
                self._sink.log(point)
            except Exception:
                self._sink, self._next = None, 0
                raise
            self._next, logged = point.index + 1, logged + 1
        return logged

    def close(self) -> None:
        """Wait until the tracker has stored everything."""
        if self._sink:
            self._sink.close()

    def _open(self) -> Sink:
        uri, manifest = self._store.uri(f"runs/{self._run}"), manifests.find(self._store, layout.run(self._run))
        key, settings = hashlib.sha256(uri.encode()).hexdigest()[:16], manifest.settings if manifest else {}
        self._folder.mkdir(parents=True, exist_ok=True)
        return SINKS.make(self._name, TrackedRun(self._run, uri, key, dict(flatten(settings)), self._folder), {})


def follow(feed: Feed, closed: int) -> None:
    """Feed a tracker until the descriptor `closed` reaches its end; then once more. Errors are logged and tried again.

    Raises:
        Exception: the last attempt failed.
    """
    wait_s = 0.0
    while not select.select([closed], [], [], wait_s)[0]:
        try:
            feed.catch_up(last=False)
            wait_s = POLL_S
        except Exception:  # a tracker may raise anything, and must not be lost by it
            logger.exception("tried again in %g s", RETRY_S)
            wait_s = RETRY_S
    feed.catch_up()
    feed.close()


@contextmanager
def followed(config: Config) -> Iterator[None]:
    """Feed the trackers of a run in the block; at its end they get `LAST_S` to finish, and the log says who did not."""
    children, run, wait_s = dict[str, Child](), config.run.name, LAST_S
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "flows.track", run, "--root", config.storage.root, "--cache", config.storage.cache]
    try:
        for name in config.tracking:
            children[name] = Child(Path(config.storage.cache) / "logs" / run / f"tracking-{name}.log")
            arguments = [*command, "--to", name, "--until-closed", str(reading)]
            children[name].start(arguments, os.environ, pass_fds=[reading])
        yield
    except BaseException as error:
        wait_s = LAST_S if isinstance(error, Exception) else 0.0  # Ctrl-C: the lease must be given back in time
        raise
    finally:
        os.close(writing)
        os.close(reading)
        deadline = time.monotonic() + wait_s
        for name, child in children.items():
            while child.alive and time.monotonic() < deadline:
                time.sleep(0.1)
            if child.status != 0:
                again = f"`python -m flows.track {run} --to {name}` gives it the rest"
                logger.warning("the tracker %s did not get everything (see %s): %s", name, child.log, again)
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
