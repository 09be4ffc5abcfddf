"""Retraining in operation: a real Prefect server, a worker, a schedule, and a machine that loses power."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.states import Crashed

from configs import load
from storage import layout
from storage.logs.nights import Nights
from storage.objects.store import Store
from storage.versions import aliases, manifests
from tasks.retrain.commands import explain
from tests.retrain.test_retrain import PROMOTE, Place, lines_of
from tests.support.paths import ROOT
from tests.support.prefect_services import PrefectServer, Worker

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    yield server
    server.child.close()


@pytest.fixture
def project(tmp_path: Path, overrides: list[str], policy_folder: Path) -> Path:
    """The project with its prefect.yaml, where only schedule and parameters of `retrain` are changed."""
    project = tmp_path / "project"
    for name in ("flows", "tasks", "storage", "configs"):
        shutil.copytree(ROOT / name, project / name)  # compiled modules, too
    shutil.copy(ROOT / "pyproject.toml", project)
    settings: dict[str, Any] = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (deployment,) = [entry for entry in settings["deployments"] if entry["name"] == "retrain"]
    place = Place(tmp_path, overrides, policy_folder)
    deployment["parameters"] = {"config": "smoke", "overrides": [*place.overrides, *PROMOTE]}
    deployment["schedules"] = [{"interval": 5, "active": True}]
    settings["deployments"] = [deployment]
    (project / "prefect.yaml").write_text(yaml.safe_dump(settings))
    return project


def mark_as_crashed(server: PrefectServer) -> None:
    """Mark the running flow runs as crashed; the server alone would take up to 5 minutes."""
    with server.client() as client:
        for run in server.runs():
            if run.state_name in ("Pending", "Running"):
                client.set_flow_run_state(run.id, Crashed(message="its worker lost power"), force=True)


def run_states(server: PrefectServer) -> list[str | None]:
    return [run.state_name for run in server.runs()]


@pytest.mark.timeout(3600)
def test_nights_on_a_schedule(server: PrefectServer, project: Path, overrides: list[str], tmp_path: Path) -> None:
    """Every night ends exactly once and in order, with new problems, a schedule and one power failure."""
    config = load("smoke", [*overrides, "run.name=nightly"])
    store = Store(config.storage.root)
    log = Nights(store, "nightly")

    def arrive(file: str, numbers: range) -> None:
        (tmp_path / file).write_text(lines_of(numbers))
        (tmp_path / file).rename(tmp_path / "incoming" / file)  # another test covers files that are being written

    def ended(count: int) -> bool:
        return sum(record.end is not None for record in log.read()) >= count

    arrive("a.jsonl", range(8))
    server.prefect(project, "work-pool", "create", "local", "--type", "process")
    server.prefect(project, "deploy", "--all")
    with Worker(server, project, "local") as worker:
        server.wait(lambda: ended(1))
        arrive("b.jsonl", range(8, 16))
        # Only the store is asked: Prefect's server may answer later than the night ends.
        server.wait(lambda: manifests.committed(store, layout.run("nightly-0002")))
        worker.kill()  # in the middle of night 2
        assert not ended(2)
        mark_as_crashed(server)
        worker.start()
        server.wait(lambda: ended(2))
        before = len(server.runs())
        # Any of them, not the newest: runs that start while another one lasts are cancelled.
        server.wait(lambda: "Completed" in run_states(server)[before:])
        states = run_states(server)

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
    with server.client() as client:
        artifacts = client.read_artifacts()
    assert {"night", "nights"} <= {artifact.key for artifact in artifacts}
