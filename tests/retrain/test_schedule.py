"""Retraining in operation: a real Prefect server, a worker, a schedule, and a machine that loses power."""

import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import Crashed

from configs import load
from storage import layout
from storage.logs.nights import Nights
from storage.objects.store import Store
from storage.versions import aliases, manifests
from tasks.retrain.commands import explain
from tests.flows.test_local_server import LOCAL_SERVER, begin, copy_project, ended, lose_power, up
from tests.retrain.test_retrain import PROMOTE, Place, lines_of

pytestmark = pytest.mark.long

PATIENCE_S = 900
"""A guard against hanging. On SQLite Prefect 3.7's server sometimes blocks for 60 s, its busy timeout."""


@pytest.fixture
def project(tmp_path: Path, overrides: list[str], policy_folder: Path, prefect_database: Path) -> Iterator[Path]:
    """Yield the project with its prefect.yaml, where only schedule and parameters of `retrain` are changed."""
    project = copy_project(tmp_path / "project", prefect_database)
    settings: dict[str, Any] = yaml.safe_load((project / "prefect.yaml").read_text())
    (deployment,) = [entry for entry in settings["deployments"] if entry["name"] == "retrain"]
    place = Place(tmp_path, overrides, policy_folder)
    deployment["parameters"] = {"config": "smoke", "overrides": [*place.overrides, *PROMOTE]}
    deployment["schedules"] = [{"interval": 5, "active": True}]
    settings["deployments"] = [deployment]
    (project / "prefect.yaml").write_text(yaml.safe_dump(settings))
    yield project
    ended(begin(project, *LOCAL_SERVER, "down"))


def client_of(project: Path) -> SyncPrefectClient:
    api = tomllib.loads((project / "prefect.toml").read_text())["api"]
    return SyncPrefectClient(api["url"], auth_string=api["auth_string"], httpx_settings={"timeout": PATIENCE_S})


def runs(project: Path) -> list[FlowRun]:
    """Return the flow runs in the order of their start times, without runs that are still scheduled."""
    with client_of(project) as client:  # which returns 200 at most
        found = client.read_flow_runs(sort=FlowRunSort.EXPECTED_START_TIME_ASC, limit=200)
    return [run for run in found if run.state_name != "Scheduled"]


def mark_as_crashed(project: Path) -> None:
    """Mark the running flow runs as crashed; the server alone would take up to 5 minutes."""
    with client_of(project) as client:
        for run in runs(project):
            if run.state_name in ("Pending", "Running"):
                client.set_flow_run_state(run.id, Crashed(message="its machine lost power"), force=True)


def wait(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(3600)
def test_nights_on_a_schedule(project: Path, overrides: list[str], tmp_path: Path) -> None:
    """Every night ends exactly once and in order, with new problems, a schedule and one power failure."""
    config = load("smoke", [*overrides, "run.name=nightly"])
    store = Store(config.storage.root)
    log = Nights(store, "nightly")

    def arrive(file: str, numbers: range) -> None:
        (tmp_path / file).write_text(lines_of(numbers))
        (tmp_path / file).rename(tmp_path / "incoming" / file)  # another test covers files that are being written

    def nights_ended(count: int) -> bool:
        return sum(record.end is not None for record in log.read()) >= count

    arrive("a.jsonl", range(8))
    up(project)
    wait(lambda: nights_ended(1))
    arrive("b.jsonl", range(8, 16))
    # Only the store is asked: Prefect's server may answer later than the night ends.
    wait(lambda: manifests.committed(store, layout.run("nightly-0002")))
    lose_power(project)  # in the middle of night 2
    assert not nights_ended(2)
    up(project)
    mark_as_crashed(project)
    wait(lambda: nights_ended(2))
    before = len(runs(project))
    # Any of them, not the newest: runs that start while another one lasts are cancelled.
    wait(lambda: "Completed" in [run.state_name for run in runs(project)[before:]])
    states = [run.state_name for run in runs(project)]

    assert states.count("Completed") >= 3  # both nights and one run without new problems
    assert "Cancelled" in states  # a run that started during another
    assert not {"Failed", "TimedOut"} & set(states)
    assert states.count("Crashed") == 1
    records = log.read()
    assert [(record.night.number, record.night.counts["new"]) for record in records] == [(1, 8), (2, 8)]
    assert manifests.read(store, records[-1].night.seen).rows == 16
    assert [record.end.outcome for record in records if record.end] == ["promoted"] * 2
    champions = [move.version for move in aliases.history(store, "champion")]
    made = [("nightly-0001", 0), ("nightly-0001", 1), ("nightly-0002", 1)]
    assert champions == [layout.checkpoint(run, number) for run, number in made]
    assert explain(config).startswith("# Night 2: promoted")
    with client_of(project) as client:
        artifacts = client.read_artifacts()
    assert {"night", "nights"} <= {artifact.key for artifact in artifacts}
