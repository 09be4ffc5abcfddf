"""`make up` and `make down`: a server and a worker that stay, and what ends them."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from storage import layout
from storage.logs import leases
from storage.objects.store import Store
from storage.versions import manifests
from tests.flows.test_other_users import check_protected
from tests.support.paths import ROOT
from tests.support.s3_server import free_port
from tests.support.sandbox_helpers import wait_gone

pytestmark = pytest.mark.slow

LOCAL_SERVER = ("-m", "flows.launch.local_server")


PROMPT = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_WORKER_PREFETCH_SECONDS": "1"}
"""Settings of a worker that claims a run, and with it the deployment's slot, 1 s before its time. By default it does so
10 s before: on a short schedule the run before still works then, and the new one would be cancelled."""


def begin(project: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start a Python command in the project without the tests' own Prefect settings."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=project,
        env=environment | {"PYTHONUNBUFFERED": "1", "PWD": str(project)} | PROMPT,  # prefect.yaml reads PWD
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(command: "subprocess.Popen[str]", status: int = 0) -> str:
    """Wait for the command to end with `status`; return its output."""
    printed, _ = command.communicate(timeout=900)
    assert command.returncode == status, printed
    assert "Traceback" not in printed
    return printed


def copy_project(project: Path, prefect_database: Path) -> Path:
    """Copy the project into a folder, so that its processes and files are there."""
    for name in ("flows", "tasks", "storage", "configs"):
        shutil.copytree(ROOT / name, project / name)  # compiled modules, too
    for name in ("prefect.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, project / name)
    (project / "var/prefect").mkdir(parents=True)
    shutil.copy(prefect_database, project / "var/prefect")
    return project


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, prefect_database: Path) -> Path:
    return copy_project(tmp_path_factory.mktemp("project"), prefect_database)


def up(project: Path) -> str:
    return ended(begin(project, *LOCAL_SERVER, "up", "--port", str(free_port())))


def lose_power(project: Path) -> None:
    """Kill the process behind server and worker, and wait for the end of all its descendants."""
    background = psutil.Process(int((project / "var/prefect/background.pid").read_text()))
    family = background.children(recursive=True)
    background.kill()
    wait_gone(family)


@pytest.fixture(scope="module")
def served(project: Path) -> Iterator[Path]:
    """Yield the project with the server and worker of `make up`; end them with the command of `make down`."""
    try:
        printed = up(project)
        assert "Prefect runs on" in printed
        assert "paused" in printed
        yield project
    finally:
        ended(begin(project, *LOCAL_SERVER, "down"))
        assert not (project / "prefect.toml").exists()


def test_the_users_own_settings_stay(project: Path) -> None:
    """`up` reports the user's file and starts nothing, because it would write the same file. `down` leaves it."""
    settings = project / "prefect.toml"
    settings.write_text("[logging]\nlevel = 'DEBUG'\n")
    assert f"error: {settings} is not of `make up`" in ended(begin(project, *LOCAL_SERVER, "up"), status=1)
    assert not ended(begin(project, *LOCAL_SERVER, "down"))
    assert settings.read_text() == "[logging]\nlevel = 'DEBUG'\n"
    settings.unlink()


def test_only_one_up_or_down_works_at_a_time(project: Path) -> None:
    """The second one says so, and does nothing."""
    with (project / "var/prefect/make.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = begin(project, *LOCAL_SERVER, "down")
        assert "another `make up` or `make down` is at work" in ended(second, status=1)


def prefect(project: Path, *arguments: str) -> str:
    return ended(begin(project, "-m", "prefect", *arguments))


def test_the_deployment_runs_the_job(served: Path, overrides: list[str], tmp_path: Path) -> None:
    """A real server and worker run `prefect deployment run math-mt-ppo/math-mt-ppo` with overrides."""
    parameters = ["-p", 'config="smoke"', "-p", f"overrides={json.dumps([*overrides, 'run.iterations=0'])}"]
    watched = prefect(served, "deployment", "run", "math-mt-ppo/math-mt-ppo", "--watch", *parameters)
    assert "run smoke begins in" in watched  # the flow run's own line
    assert manifests.committed(Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 0))
    settings = served / "prefect.toml"
    assert settings.stat().st_mode & 0o777 == 0o600
    if os.geteuid() == 0:  # only root can become another user
        check_protected(tomllib.loads(settings.read_text())["api"]["url"], settings)


def test_the_nightly_schedule_is_resumed_as_up_says(served: Path) -> None:
    """It is paused until then, and the command names no id."""
    shown = ("deployment", "schedule", "ls", "retrain/retrain")
    assert "False" in prefect(served, *shown)
    assert "Resumed 1 deployment schedule(s)" in prefect(
        served, "--no-prompt", "deployment", "schedule", "resume", "--all"
    )
    assert "True" in prefect(served, *shown)


@pytest.mark.long
def test_a_cancelled_run_is_cancelled_and_a_kill_leaves_nothing(
    served: Path, overrides: list[str], tmp_path: Path
) -> None:
    """`prefect flow-run cancel` ends the run's process, and the server gets the state Cancelled.

    If the process behind server and worker is killed, both end, and `up` begins again.
    """
    parameters = ["-p", 'config="smoke"', "-p", f"overrides={json.dumps([*overrides, 'run.iterations=100000'])}"]
    asked = prefect(served, "deployment", "run", "math-mt-ppo/math-mt-ppo", *parameters)
    (run,) = set(re.findall(r"[0-9a-f]{8}-[0-9a-f-]{27}", asked))
    while not manifests.committed(Store(f"{tmp_path}/var"), layout.checkpoint("smoke", 1)):
        time.sleep(0.1)
    prefect(served, "flow-run", "cancel", run)
    while leases.is_held(Store(f"{tmp_path}/var"), "smoke"):  # until its process has ended
        time.sleep(0.1)
    deadline = time.monotonic() + 120
    while "Cancelled" not in prefect(served, "flow-run", "inspect", run):
        assert time.monotonic() < deadline
    lose_power(served)
    assert "Prefect runs on" in up(served)
