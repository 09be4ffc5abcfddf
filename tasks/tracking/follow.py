"""Feed a tracker from the store: once, or while a run lasts, in a process of its own.

The process of a flow never waits for a tracker. It starts `python -m flows.track RUN --to NAME --until-closed FD` for
each, which reads the store every few seconds, tries again if the tracker does not answer, and ends after the flow.
Each such process gives its tracker all points from the first one on, since most trackers keep points in memory for a
while and lose them if they are killed; a sink drops the points that it has.
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
from storage.errors import StorageError
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


def feed(store: Store, run: str, name: str, cache: Path, closed: int | None = None) -> int:
    """Give a tracker all committed points of a run; return their number.

    Args:
        store: the store of the run.
        run: its name.
        name: that of the tracker: registered, or `package.module:Class`.
        cache: folder for files of the tracker.
        closed: a descriptor. New points are given until it reaches its end, then once more.

    Raises:
        StorageError: the store cannot be read.
        Exception: whatever the tracker raises.
    """
    sink: Sink | None = None
    first, given, ended = 0, 0, closed is None
    while True:
        try:
            for point in points(store, read_rows(store, run), first, last=ended):
                sink = sink or _open(store, run, name, cache / "tracking")
                sink.log(point)
                first, given = point.index + 1, given + 1
        except StorageError:  # not the tracker's fault: it keeps what it has
            if sink:
                sink.close()
            raise
        if closed is None or ended:
            if sink:
                sink.close()
            return given
        ended = _ends(closed, POLL_S)


def _ends(descriptor: int, wait_s: float) -> bool:
    """Return whether the other end of a pipe is closed, or will be in `wait_s` seconds."""
    return bool(select.select([descriptor], [], [], wait_s)[0])


def _open(store: Store, run: str, name: str, folder: Path) -> Sink:
    uri, manifest = store.uri(f"runs/{run}"), manifests.find(store, layout.run(run))
    key, settings = hashlib.sha256(uri.encode()).hexdigest()[:16], manifest.settings if manifest else {}
    folder.mkdir(parents=True, exist_ok=True)
    return SINKS.make(name, TrackedRun(run, uri, key, dict(flatten(settings)), folder), {})


def follow(store: Store, run: str, name: str, cache: Path, closed: int) -> None:
    """Feed a tracker until `closed` ends. After an error, which is logged, a new sink gets all points again.

    Raises:
        Exception: the last attempt failed, which began after the end.
    """
    while True:
        ended = _ends(closed, 0)
        try:
            feed(store, run, name, cache, closed)
            return
        except Exception:  # a tracker may raise anything, and must not be lost by it
            if ended:
                raise
            logger.exception("tried again in %g s", RETRY_S)
        _ends(closed, RETRY_S)


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
