"""Real Prefect services for tests, on loopback: a server and a process worker.

Each ends with the test run, however that ends, and so does everything that it has started.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort

from flows.launch import prefect_server
from storage.processes.child import Child

PATIENCE_S = 900
"""A guard against hanging. On SQLite Prefect 3.7's server sometimes blocks for 60 s, its busy timeout."""
_PROMPT = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "1",
    # By default a worker claims a run 10 s before its time, and with it the deployment's slot. On a short schedule the
    # run before still works then, so the new run would be cancelled although the slot is free at its time.
    **{"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"},
}


class PrefectServer:
    """A Prefect server with all its files in `folder`, until `child` is closed; `environment` is for its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.child, self._password = folder, Child(folder / "server.log"), prefect_server.new_password()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        own = {"PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
        with prefect_server.listen() as listener:
            self.api = f"http://{prefect_server.HOST}:{listener.getsockname()[1]}/api"
            client = {"PREFECT_API_URL": self.api, "PREFECT_API_AUTH_STRING": self._password}
            self.environment = kept | own | client | _PROMPT
            prefect_server.start(self.child, listener, self._password, self.environment)

    def prefect(self, folder: Path, *arguments: str) -> str:
        """Run a user's `prefect` command in a folder; it must succeed. Return its output."""
        environment = self.environment | {"PWD": str(folder)}  # a shell sets it, and prefect.yaml reads it
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    def client(self) -> SyncPrefectClient:
        """Return a client as a context manager, for calls that this class does not have."""
        settings = {"timeout": PATIENCE_S}
        return SyncPrefectClient(self.api, auth_string=self._password, httpx_settings=settings)

    def runs(self) -> list[FlowRun]:
        """Return the flow runs in the order of their start times, without runs that are still scheduled."""
        with self.client() as client:  # which returns 200 at most
            runs = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=200)
        return [run for run in runs if run.state_name != "Scheduled"]

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true; after PATIENCE_S raise an error that shows the runs."""
        deadline = time.monotonic() + PATIENCE_S
        while not ready():
            assert time.monotonic() < deadline, self.runs()
            time.sleep(0.05)


class Worker:
    """A process worker of `server`, until the block ends; `kill` kills its flow runs, too."""

    def __init__(self, server: PrefectServer, project: Path, pool: str) -> None:
        self._server, self._project, self._pool = server, project, pool
        self._child = Child(server.folder / f"worker-{secrets.token_hex(4)}.log")

    def start(self) -> None:
        """Start the worker; return when it is ready."""
        self._child.log.write_text("")
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", self._pool, "--type", "process"]
        self._child.start(command, self._server.environment, cwd=self._project)
        while "started!" not in self._child.log.read_text():
            assert self._child.alive, self._child.log_tail(40)
            time.sleep(0.1)

    def kill(self) -> None:
        """Send SIGKILL to the worker and all its descendants, as if the machine lost power."""
        first = psutil.Process(self._child.pid)
        _apply_to_family(first, psutil.Process.suspend)  # so that none reports another's end or starts a new one
        psutil.wait_procs(_apply_to_family(first, psutil.Process.kill))
        self._child.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()


def _apply_to_family(first: psutil.Process, action: Callable[[psutil.Process], None]) -> list[psutil.Process]:
    """Apply `action` to a process and its descendants; return them."""
    family = [first, *first.children(recursive=True)]
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            action(process)
    return family
