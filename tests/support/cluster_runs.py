"""What the tests of runs on a cluster have in common: the run `smoke`, its store, and what must be true of both."""

import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from storage import layout
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import datasets
from tests.support import ray_cluster

OVERLAP = ["run.overlap=true", "rollout.max_head_offpolicyness=2"]


def store_of(settings: list[str]) -> Store:
    """Return the store that the first override names."""
    return Store(settings[0].partition("=")[2])


def kinds(store: Store) -> dict[str, str]:
    """Return the kinds of all versions; names of scores and evaluations end with the hash of a protocol."""
    return {entry.version: entry.kind for entry in catalog.read_all(store) if entry.kind != "alias"}


def check_whole(store: Store, iterations: int, episodes: int = 16) -> None:
    """Check that nothing is lost, doubled or damaged."""
    found = verify(store, list(kinds(store)), deep=True)
    assert found.findings == []
    with tempfile.TemporaryDirectory() as cache:
        for iteration in range(iterations):
            rows = datasets.trajectories(store, layout.trajectories("smoke", iteration), Path(cache))
            ids = [row.trajectory_id for row in rows]
            assert len(set(ids)) == len(ids) == episodes


def no_actor_is_left(seconds: float, *names: str) -> bool:
    deadline = time.monotonic() + seconds
    names = ("ray::WaitingNode", *names)
    while (left := [each for name in names for each in ray_cluster.actors(name)]) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.5)
    return not left


@contextmanager
def told() -> Iterator[list[str]]:
    """Yield a list that gets what flows of this process tell in the block."""
    lines = list[str]()
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("prefect.flow_runs")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
