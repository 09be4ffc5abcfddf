"""Stores that earlier versions of the programs made (`tests/kept_stores/make.py`) are verified, continued, audited."""

import contextlib
import json
import tarfile
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from configs import read_stored
from configs.rollout import Rollout
from configs.schema import Config, Run
from configs.stored import BEFORE
from flows.audit_trajectories import audit_trajectories
from flows.math_mt_ppo import math_mt_ppo
from flows.retrain import retrain
from storage import layout
from storage.logs import catalog
from storage.logs.nights import Nights
from storage.maintenance.verify import check_logs, verify
from storage.objects.store import Store
from storage.version_names import AnnotationsVersion, select
from storage.versions import aliases, checkpoints, datasets, manifests
from storage.versions.drafts import shards
from tasks.audit.record import read_audit
from tasks.inference.engine import Engine
from tests.conftest import INFERENCE, forget
from tests.support.chain_helpers import nonces
from tests.support.paths import ROOT

FOLDER = ROOT / "tests/kept_stores"
KEPT = sorted(path.name.removesuffix(".tar.gz") for path in FOLDER.glob("*.tar.gz"))


class Kept:
    """A kept store, unpacked in another folder than it was made in."""

    def __init__(self, name: str, folder: Path) -> None:
        with tarfile.open(FOLDER / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        self.folder, self.store = folder, Store(str(folder / "store"))

    def settings(self, run: str) -> str:
        """Write the configuration that a run began with to a YAML file; return its path.

        It does not name the knobs whose defaults have changed since, as its file did not.
        """
        path = self.folder / f"{run}.yaml"
        values = read_stored(manifests.read(self.store, layout.run(run)).config, run).model_dump(mode="json")
        for *sections, name in (key.split(".") for key in BEFORE):
            with contextlib.suppress(KeyError):  # another algorithm may lack the knob
                del reduce(getitem, sections, values)[name]
        path.write_text(json.dumps(values))  # YAML, too
        return str(path)

    @property
    def faults(self) -> list[object]:
        """All findings of a deep check of all versions and logs."""
        logs = check_logs(self.store)
        return [*logs.findings, *verify(self.store, logs.versions, deep=True).findings]


@pytest.fixture(scope="module", params=[KEPT[0], *(pytest.param(name, marks=pytest.mark.long) for name in KEPT[1:])])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(request.param, tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def engine(kept: Kept) -> Iterator[Engine]:
    """Yield a server for the smallest policy, which the flows of these tests share."""
    first = checkpoints.open_checkpoint(kept.store, layout.checkpoint("half", 0), kept.folder / "cache")
    with Engine(INFERENCE, Rollout(), kept.folder) as engine:
        engine.serve(first)
        yield engine


@pytest.fixture
def place(kept: Kept, engine: Engine, prefect_api: str) -> list[str]:
    """Return the overrides that a moved store needs: where the flows work."""
    server = engine.servers[0]
    forget(engine)
    return [
        f"storage.root={kept.store.root}",
        f"storage.cache={kept.folder}/cache",
        f"inference.urls=[{server.url}]",
    ]


class NewRun(Run):
    stream: bool = False
    """A knob that a future version might add."""


class NewConfig(Config):
    run: NewRun


@pytest.fixture
def upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the program one knob more than the program that made the store had."""
    for module in ("configs.loader", "configs.stored", "tasks.retrain.planning"):
        monkeypatch.setattr(f"{module}.Config", NewConfig)


def test_it_is_whole(kept: Kept) -> None:
    """Every page, row, weight and log is whole, and its audit can be read."""
    assert kept.faults == []
    (audit,) = {entry.version for entry in catalog.read_all(kept.store) if entry.kind == "audit"}
    result, _ = read_audit(kept.store, audit, kept.folder / "cache")
    assert result.checks
    assert [move.version for move in aliases.history(kept.store, "champion")] == [
        layout.checkpoint("nightly-0001", 0),
        layout.checkpoint("nightly-0001", 1),
    ]


def test_a_run_continues_where_it_was_killed(kept: Kept, place: list[str]) -> None:
    """The run trains on the stored rollout and makes nothing a second time."""
    before, second = nonces(kept.folder), layout.checkpoint("half", 2)
    assert manifests.committed(kept.store, layout.trajectories("half", 1))
    assert not manifests.committed(kept.store, second)
    math_mt_ppo(kept.settings("half"), place)
    assert manifests.committed(kept.store, second)
    assert before.items() <= nonces(kept.folder).items()


@pytest.mark.usefixtures("prefect_api")
def test_a_run_of_an_adapter_continues(kept: Kept) -> None:
    """It trains the same adapter on, of the same base, on its stored rollout."""
    run, second = layout.run("adapter"), layout.checkpoint("adapter", 2)
    if not manifests.committed(kept.store, run):
        pytest.skip("only one program made a run of an adapter alone")
    before = nonces(kept.folder)
    math_mt_ppo(kept.settings("adapter"), [f"storage.root={kept.store.root}", f"storage.cache={kept.folder}/cache"])
    first, last = (manifests.read(kept.store, layout.checkpoint("adapter", number)) for number in (0, 2))
    assert manifests.committed(kept.store, second)
    assert last.base
    assert last.base.version == first.version
    assert before.items() <= nonces(kept.folder).items()


@pytest.mark.usefixtures("prefect_api")
def test_a_run_with_a_teacher_and_a_mixture_continues(kept: Kept) -> None:
    """It learns from what the teacher has said, and asks about nothing again."""
    if not manifests.committed(kept.store, layout.run("taught")):
        pytest.skip("an older program made this store, and had no models beside the policy")
    before, teacher = nonces(kept.folder), kept.store.uri(layout.checkpoint("half", 0))
    place = [f"storage.root={kept.store.root}", f"storage.cache={kept.folder}/cache"]
    math_mt_ppo(kept.settings("taught"), [*place, f"models.teacher.path={teacher}"])
    parents = manifests.read(kept.store, layout.checkpoint("taught", 2)).parent_names
    (taught,) = select(AnnotationsVersion, parents)
    assert any(path.endswith(f"{taught}/manifest.json") for path in before)
    played = datasets.trajectories(kept.store, layout.trajectories("taught", 1), kept.folder)
    assert {row.source for row in played} == {"sums", "more"}
    assert before.items() <= nonces(kept.folder).items()


@pytest.mark.usefixtures("upgraded")
def test_a_killed_rollout_continues_after_an_upgrade(kept: Kept, place: list[str]) -> None:
    """The rollout continues from its two shards, which are not played again."""
    version = layout.trajectories("killed", 0)
    journaled = set(shards(kept.store, version))
    assert len(journaled) == 2
    math_mt_ppo(kept.settings("killed"), [*place, "run.iterations=1"])
    played = manifests.read(kept.store, version)
    assert journaled < {file.path for file in played.files}
    assert played.config["run"]["stream"] is False


@pytest.mark.usefixtures("upgraded")
def test_a_night_continues_after_an_upgrade(kept: Kept, place: list[str]) -> None:
    """The night continues to its end and need not be given up."""
    before = nonces(kept.folder)
    assert [bool(record.end) for record in Nights(kept.store, "nightly").read()] == [True, False]
    assert retrain(kept.settings("nightly-0002"), [*place, "run.name=nightly"]) == "promoted"
    last = Nights(kept.store, "nightly").read()[-1]
    assert last.end
    assert last.night.number == 2
    assert before.items() <= nonces(kept.folder).items()
    champion = aliases.current(kept.store, "champion")
    assert champion
    assert champion.version == layout.checkpoint("nightly-0002", 1)


def test_the_continued_store_is_whole(kept: Kept, place: list[str]) -> None:
    """Old and new versions are audited together and verified."""
    assert audit_trajectories([], "smoke", place, fail_on="never")["verdict"] in ("pass", "warn")
    assert kept.faults == []
