"""Feed a tracker from the store: once, or while a run lasts, in a process of its own.

The process of a flow never waits for a tracker. It starts `python -m flows.track RUN --to NAME --until-closed FD` for
each, which reads the store every few seconds, tries again if the tracker does not answer, and ends after the flow. At
its end it notes in the cache, in `tracking/<tracker>-<key of the run>.json`, where the next process on this machine
goes on. After one that was killed, or failed, the next one logs all points again, since most trackers keep points in
memory for a while; a sink drops those that it has.
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
        self._store, self._run, self._name, self._cache = store, run, name, cache / "tracking"
        self._uri = store.uri(f"runs/{run}")
        self._key = hashlib.sha256(self._uri.encode()).hexdigest()[:16]
        self._note = self._cache / f"{_plain(name)}-{self._key}.json"
        self._next = 0 if again else self._noted()
        self._sink: Sink | None = None

    def catch_up(self, *, last: bool = True) -> int:
        """Log the committed points that were not logged; return their number.

        Args:
            last: also log the newest evaluations of a policy, to which evaluations on other sets may still come.

        Raises:
            Exception: whatever the tracker raises; the points are logged by a later call, all of them again.
        """
        logged, rows = 0, read_rows(self._store, self._run)
        with TemporaryDirectory(prefix="transcripts-") as scratch:
            for point in points(self._store, rows, self._next, Path(scratch), last=last):
                try:
                    self._sink = self._sink or self._open()
                    self._sink.log(point)
                except Exception:
                    self._sink, self._next = None, 0
                    raise
                self._next, logged = point.index + 1, logged + 1
        return logged

    def close(self) -> None:
        """Wait until the tracker has stored everything, and note where the next process goes on."""
        if self._sink:
            self._sink.close()
            self._note.write_text(json.dumps({"next": self._next}))

    def _noted(self) -> int:
        try:
            return int(json.loads(self._note.read_text())["next"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # a sink drops what it has
            return 0

    def _open(self) -> Sink:
        manifest = manifests.find(self._store, layout.run(self._run))
        config = dict(flatten(manifest.settings)) if manifest else {}
        self._cache.mkdir(parents=True, exist_ok=True)
        self._note.unlink(missing_ok=True)  # until `close`
        return SINKS.make(self._name, TrackedRun(self._run, self._uri, self._key, config, self._cache, self._next), {})


def _plain(name: str) -> str:
    """Return the name of a tracker as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


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
    wait_s = LAST_S
    try:
        for name in config.tracking:
            children[name] = child = Child(logs / f"tracking-{_plain(name)}.log")
            child.start(command(config, name, reading), os.environ, pass_fds=[reading])
        yield
    except BaseException as error:
        wait_s = LAST_S if isinstance(error, Exception) else 0.0  # Ctrl-C: the lease must be given back in time
        raise
    finally:
        os.close(writing)
        os.close(reading)
        _wait(children, config.run.name, wait_s)


def _wait(children: dict[str, Child], run: str, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
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
