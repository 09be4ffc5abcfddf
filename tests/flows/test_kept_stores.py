"""Stores that earlier versions of the programs made (`tests/kept_stores/make.py`) are read and forked."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import ConfigError, load, read_stored
from configs.rollout import Rollout
from configs.stored import lost
from flows.audit_trajectories import audit_trajectories
from flows.evaluate import evaluate
from flows.fit import fit
from flows.math_mt_ppo import math_mt_ppo
from flows.retrain import retrain
from flows.score import score
from storage import layout
from storage.logs import catalog, leases
from storage.logs.nights import Nights
from storage.maintenance.verify import check_logs, verify
from storage.versions import aliases, checkpoints, manifests
from tasks.audit.run import read_audit
from tasks.inference.engine import Engine
from tasks.retrain.commands import give_up
from tests.conftest import INFERENCE, forget
from tests.support.chain_helpers import nonces
from tests.support.kept import KEPT, unpack_kept

NAMES = sorted(path.name.removesuffix(".tar.gz") for path in KEPT.glob("*.tar.gz"))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 2 seconds for a sign of life of whoever was killed on the machine where a store was made, not 60."""
    monkeypatch.setattr(leases, "TTL_S", 2.0)
    monkeypatch.setattr(leases, "LONGEST_TTL_S", 2.0)  # their leases say 60


class Kept:
    """A kept store, unpacked in another folder than it was made in."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder, self.store = folder, unpack_kept(name, folder)
        self.place = [f"storage.root={self.store.root}", f"storage.cache={folder}/cache"]

    def settings(self, run: str) -> str:
        """Write what a run began with, as far as there is a choice today, to a YAML file; return its path."""
        path = self.folder / f"{run}.yaml"
        values = read_stored(manifests.read(self.store, layout.run(run)).config, run).model_dump(mode="json")
        path.write_text(json.dumps(values))  # YAML, too
        return str(path)

    @property
    def faults(self) -> list[object]:
        """All findings of a deep check of all versions and logs."""
        logs = check_logs(self.store)
        return [*logs.findings, *verify(self.store, logs.versions, deep=True).findings]


@pytest.fixture(scope="module", params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.long) for name in NAMES[1:])])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(request.param, tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yield a server for the smallest policy, which the policies of all stores are."""
    oldest = Kept(NAMES[0], tmp_path_factory.mktemp("oldest"))
    first = checkpoints.open_checkpoint(oldest.store, layout.checkpoint("half", 0), oldest.folder / "cache")
    with Engine(INFERENCE, Rollout(), oldest.folder) as engine:
        engine.serve(first)
        yield engine


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


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize(("run", "remedy"), [("half", "--fork half@1 run.name=half-fork"), ("killed", "run.name=…")])
def test_a_run_is_not_continued(kept: Kept, run: str, remedy: str) -> None:
    """One sentence names what this program lacks, and what to do; a killed rollout is refused, too."""
    before = nonces(kept.folder)
    with pytest.raises(ConfigError, match=r"older program, with settings .*:\n(.*\n)*  reward\.failed: 'least'") as no:
        math_mt_ppo(kept.settings(run), kept.place)
    assert remedy in str(no.value)
    assert nonces(kept.folder) == before


@pytest.mark.usefixtures("prefect_api")
def test_a_night_is_given_up(kept: Kept) -> None:
    """The refusal says how; the problems wait for a night of this program."""
    settings, name = kept.settings("nightly-0002"), "run.name=nightly"
    with pytest.raises(ConfigError, match="night 2 was begun by an older program, .* end it with --give-up"):
        retrain(settings, [*kept.place, name])
    assert give_up(load(settings, [*kept.place, name])).startswith("night 2 is given up")
    last = Nights(kept.store, "nightly").read()[-1]
    assert last.end
    assert last.end.waiting == last.night.fresh


@pytest.fixture
def place(kept: Kept, engine: Engine, prefect_api: str) -> list[str]:
    """Return where the flows work."""
    server = engine.servers[0]
    forget(engine)
    return [*kept.place, f"inference.urls=[{server.url}]"]


def test_a_fork_trains_on_what_was_played(kept: Kept, place: list[str]) -> None:
    """It goes on from the newest checkpoint with its optimizer; old answers get scores of this program before."""
    settings, fork = kept.settings("half"), [*place, "policy={fork: half@1}", "run.name=forked"]
    if any(line.startswith("score.") for line in lost(manifests.read(kept.store, layout.run("half")).config)):
        with pytest.raises(ValueError, match="was scored by another scorer .*, score it again"):
            fit(settings, fork, ["half"])
        for iteration in (0, 1):
            score(settings, place, iteration=iteration)
    fit(settings, fork, ["half"])
    first, last = (manifests.read(kept.store, layout.checkpoint("forked", number)) for number in (0, 1))
    assert layout.checkpoint("half", 1) in first.parent_names
    assert layout.trajectories("half", 1) in last.parent_names
    assert last.metrics["trajectories"] > 0


def test_a_checkpoint_is_evaluated(kept: Kept, place: list[str]) -> None:
    """With the settings of its run; the answers of before are audited with those of now, and all is whole."""
    assert evaluate(kept.settings("half"), place, policy=layout.checkpoint("half", 1))
    assert audit_trajectories([], "smoke", kept.place, fail_on="never")["verdict"] in ("pass", "warn")
    assert kept.faults == []
