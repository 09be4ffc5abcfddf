"""What the tests of runs with Ray have in common: the run `smoke` in a process, and what must be true of its store."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from storage import layout
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.store import Store
from storage.versions import datasets, manifests
from tests.support.ray_cluster import running

PATIENCE_S = 600
ACTORS = ("ray::WaitingNode", "ray::NodeWorker", "ray::TrainerRank")
BESIDE = "sleep 123456"
"""The program of a process that a worker starts as others start vLLM's: here the engine only waits."""
OVERLAP = ["run.overlap=true", "rollout.max_head_offpolicyness=2"]


def store_of(settings: list[str]) -> Store:
    """Return the store that the first override names."""
    return Store(settings[0].partition("=")[2])


def kinds(store: Store) -> dict[str, str]:
    """Return the kinds of all versions; names of scores and evaluations end with the hash of a protocol."""
    return {entry.version: entry.kind for entry in catalog.read_all(store)}


def check_whole(store: Store, iterations: int) -> None:
    """Check that nothing is lost, doubled or damaged."""
    assert verify(store, list(kinds(store)), deep=True).findings == []
    with tempfile.TemporaryDirectory() as cache:
        for iteration in range(iterations):
            rows = datasets.trajectories(store, layout.trajectories("smoke", iteration), Path(cache))
            ids = [row.trajectory_id for row in rows]
            assert len(set(ids)) == len(ids) == 16


def no_actor_is_left(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := [each for name in ACTORS for each in running(name)]) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.5)
    return not left


class Flow(AbstractContextManager["Flow"]):
    """The flow in a process that may be killed and started again; a context manager that ends it.

    Args:
        settings: overrides; the first one is the store's root.
        log: file that receives its output.
        module: the module that is run.
        scratch: its TMPDIR.

    Attributes:
        store: the store of its run.
    """

    def __init__(self, settings: list[str], log: Path, module: str, scratch: Path) -> None:
        self._command = [sys.executable, "-m", module, "smoke", *settings]
        self._environment = os.environ | {"PREFECT_LOGGING_LEVEL": "INFO", "TMPDIR": str(scratch)}
        self._log, self.store = log, store_of(settings)
        self._newest = -1
        self.start()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def start(self) -> None:
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=output, stderr=output)

    def wait_for(self, policy: int) -> None:
        """Wait for a policy version."""
        deadline = time.monotonic() + PATIENCE_S
        while self.newest() < policy:
            if self.process.poll() and "Start the flow again: it continues" in self.tail():  # a rank was lost
                self.start()
            assert self.process.poll() in (None, 0), self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.05)

    def newest(self) -> int:
        """Return the number of the newest policy version; -1: there is none."""
        while manifests.committed(self.store, layout.checkpoint("smoke", self._newest + 1)):
            self._newest += 1
        return self._newest

    def interrupt(self) -> None:
        """Interrupt it, and wait for its end."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 130, self.tail()

    def tail(self) -> str:
        return self._log.read_text()[-6000:]
