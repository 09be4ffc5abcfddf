"""The lab that benchmarks share: a scratch folder, a briefly trained policy, and one vLLM server."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from configs import Config, load
from storage.objects.store import Store
from storage.versions.checkpoints import Checkpoint, open_checkpoint
from tests.support.paths import ROOT


class Lab:
    """The demo's configuration in the folder `scratch`, with a policy and a server that are made on first use.

    A context manager; leaving it ends the server.

    Args:
        scratch: an empty folder, or one that a lab of the same arguments has left.
    """

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.store = Store(f"{scratch}/store")
        self._stack = ExitStack()
        self.settings = [  # without a server
            "run.name=benchmarks",
            f"storage.root={self.store.root}",
            f"storage.cache={scratch}/cache",
        ]

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._stack.close()

    @cached_property
    def policy(self) -> Checkpoint:
        """Policy version 0 of the demo."""
        from prefect.logging import disable_run_logger

        from flows.run.workspace import Workspace, start_run
        from flows.stages.warm_start import first_policy

        with disable_run_logger():
            workspace = Workspace(load("demo", self.settings))
            start_run.fn(workspace)
            return open_checkpoint(self.store, first_policy.fn(workspace), workspace.cache)

    @cached_property
    def overrides(self) -> list[str]:
        """Overrides that move the demo's configuration to the scratch folder and to one running server, by its URL."""
        from tasks.inference.server import Server

        server = Server(load("demo", self.settings).inference, self.scratch / "vllm.log")
        self._stack.callback(server.close)
        server.start_serving(self.policy.model)
        server.wait_until_healthy()
        return [*self.settings, f"inference.urls=[{server.url}]"]

    def config(self, *overrides: str) -> Config:
        """Return the demo's configuration in this lab."""
        return load("demo", [*self.overrides, *overrides])

    def run_module(self, module: str, *arguments: str) -> Any:
        """Run `python -m tests.benchmarks.<module>`; return the JSON in its last line of output.

        It runs in the scratch folder. Prefect finds no prefect.toml of `make up` there and starts its own server.
        """
        environment = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
        environment |= {"PYTHONPATH": str(ROOT), "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}
        command = [sys.executable, "-m", f"tests.benchmarks.{module}", *arguments]
        return json.loads(run_program(command, self.scratch, environment).splitlines()[-1])


def run_program(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a program in a folder; return its output."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout
