"""Real Prefect services for tests, on loopback: a server and a process worker.

Each ends with the test run, however that ends, and so does everything that it has started.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort

from flows.launch.prefect_server import HOST, healthy
from storage.processes.child import Child
from tests.support.s3_server import free_port as free_port

PATIENCE_S = 900
"""A guard against hanging. On SQLite Prefect 3.7's server sometimes blocks for 60 s, its busy timeout."""
_PAGE = 200
"""The maximal number of flow runs that a server returns at once."""
_PROMPT_SERVER = {"PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "1"}
# By default a worker claims a run 10 s before its time, and with it the deployment's slot. On a short schedule the run
# before still works then, so the new run would be cancelled although the slot is free at its time.
_PROMPT_WORKER = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"}


class _Service:
    """A process and its log. A context manager that starts it on entry and stops it on exit; it can start again."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._child = Child(log)

    def start(self) -> None:
        """Start the process; return when it answers."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ask the process and its children to end; after some seconds they are killed."""
        self._child.stop()

    def kill(self) -> None:
        """Send SIGKILL to the process and all its descendants, as if the machine lost power."""
        if self._child.alive:
            first = psutil.Process(self._child.pid)
            _apply_to_family(first, psutil.Process.suspend)  # so that none reports another's end or starts a new one
            psutil.wait_procs(_apply_to_family(first, psutil.Process.kill))
        self.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._child.close()

    def _spawn(
        self, command: list[str], environment: Mapping[str, str], folder: Path, ready: Callable[[], bool]
    ) -> None:
        if self._child.alive:
            raise RuntimeError(f"{self.log.stem} is running already")
        self._child.start(command, environment, cwd=folder)
        try:
            self._await(ready)
        except BaseException:
            self.stop()
            raise

    def _await(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if not self._child.alive or time.monotonic() > deadline:
                raise RuntimeError(f"{self.log.stem} did not start; its log ends:\n{self._child.log_tail(40)}")
            time.sleep(0.1)


class PrefectServer(_Service):
    """A Prefect server at `api` with all its files in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "server.log")
        self._port = free_port()
        self.api = f"http://{HOST}:{self._port}/api"
        own = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        self._environment = own | _PROMPT_SERVER

    @property
    def environment(self) -> dict[str, str]:
        """The environment for clients of this server: the test's, without the test's own Prefect settings."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return kept | {"PREFECT_HOME": str(self.log.parent), "PREFECT_API_URL": self.api}

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(self._port)]
        self._spawn(command, self.environment | self._environment, self.log.parent, lambda: healthy(self._port))

    def prefect(self, folder: Path, *arguments: str) -> str:
        """Run a user's `prefect` command in a folder; it must succeed. Return its output."""
        environment = self.environment | {"PWD": str(folder)}  # a shell sets it, and prefect.yaml reads it
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def client(self) -> SyncPrefectClient:
        """Return a client as a context manager, for calls that this class does not have."""
        return SyncPrefectClient(self.api, httpx_settings={"timeout": PATIENCE_S})

    def runs(self, deployment: str) -> list[FlowRun]:
        """Return a deployment's flow runs in the order of their start times, without runs that are still scheduled."""
        named = DeploymentFilter(name=DeploymentFilterName(any_=[deployment]))
        with self.client() as client:
            runs = client.read_flow_runs(deployment_filter=named, sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=_PAGE)
        return [run for run in runs if run.state_name != "Scheduled"]

    def wait(self, deployment: str, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true; after PATIENCE_S raise an error that shows the deployment's runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > deadline:
                states = "\n".join(f"{run.expected_start_time} {run.state!r}" for run in self.runs(deployment))
                raise TimeoutError(f"after {PATIENCE_S} s the runs of {deployment} are\n{states}")
            time.sleep(0.05)


class Worker(_Service):
    """A process worker of `server`; `kill` kills its flow runs, too."""

    def __init__(self, server: PrefectServer, project: Path, pool: str) -> None:
        super().__init__(server.log.parent / f"worker-{secrets.token_hex(4)}.log")
        self._project, self._pool = project, pool
        self._environment = server.environment | _PROMPT_WORKER

    def start(self) -> None:
        self.log.write_text("")
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self._pool, "--type", "process"]
        self._spawn(command, self._environment, self._project, lambda: "started!" in self.log.read_text())


def _apply_to_family(first: psutil.Process, action: Callable[[psutil.Process], None]) -> list[psutil.Process]:
    """Apply `action` to a process and its descendants; return them."""
    family = [first, *first.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)
    return family
