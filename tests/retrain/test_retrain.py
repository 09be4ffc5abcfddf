"""Nights of retraining: promotions, what is kept, and recovery from failures.

Some nights train and evaluate on a real engine. The others, which ask about planning, log and gate, find copies of what
a real night has made.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from configs import Config, load
from flows.retrain import retrain
from flows.run.workspace import Workspace
from flows.stages.retrain import decide
from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.nights import Nights, Record
from storage.objects.store import Store
from storage.version_names import PolicyVersion, ProblemsVersion, ScoresVersion, Version, select
from storage.versions import aliases, datasets, manifests
from storage.versions.aliases import Move
from storage.versions.lineage import trained_on
from tasks.evaluate.protocol import greedy
from tasks.retrain.commands import explain, give_up, nights, retry, roll_back
from tasks.retrain.report import timeline
from tests.conftest import MadeOnce
from tests.support.chain_helpers import nonces

LAX = "margin: 1, max_kl: 1000, max_length_ratio: 1000, max_truncated_gain: 1"
PROMOTE = [f"retrain.gate={{least_gain: -1, {LAX}}}"]
"""A gate that promotes every challenger."""
REJECT = [f"retrain.gate={{least_gain: 1, {LAX}}}"]
"""A gate that rejects every challenger but calls none harmful."""
SAMPLED = ["evaluation.samples=2", "retrain.gate.episodes=sampled"]


def lines_of(numbers: range, wrong_by: int = 0) -> str:
    """Return problems whose operands occur in no held-out problem."""
    rows = ({"prompt": f"What is {n} + 50?", "answer": n + 50 + wrong_by} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


class Place:
    """A store, a folder for new problems, and the flow with settings for a night of seconds."""

    def __init__(self, folder: Path, overrides: list[str], policy: Path) -> None:
        self.incoming = folder / "incoming"
        self.incoming.mkdir()
        source = f"{{kind: jsonl, path: '{self.incoming}/*.jsonl', fields: {{prompt: prompt, solutions: answer}}}}"
        self.overrides = [
            *overrides,
            "run.name=nightly",
            "run.iterations=1",
            f"problems.train={source}",
            f"policy={{path: {policy}}}",
            "evaluation.every=1000",
        ]

    def arrive(self, file: str, numbers: range, wrong_by: int = 0) -> None:
        (self.incoming / f"{file}.jsonl").write_text(lines_of(numbers, wrong_by))

    def night(self, *overrides: str) -> str:
        return retrain("smoke", [*self.overrides, *overrides])

    def broken_night(self, step: str) -> None:
        """Run a night that breaks before a step of the flow."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"flows.retrain.{step}", broken)
            with pytest.raises(RuntimeError, match="power cut"):
                self.night(*PROMOTE)

    def config(self, *overrides: str) -> Config:
        return load("smoke", [*self.overrides, *overrides])

    @property
    def store(self) -> Store:
        return Store(self.config().storage.root)

    @property
    def champion(self) -> Move | None:
        return aliases.current(self.store, "champion")

    @property
    def records(self) -> list[Record]:
        return Nights(self.store, "nightly").read()


@pytest.fixture
def place(overrides: list[str], tmp_path: Path, policy_folder: Path) -> Place:
    return Place(tmp_path, overrides, policy_folder)


class Copied:
    """Stands for training and evaluation: commits the versions of a real night again, under the names of another."""

    def __init__(self, night: Path) -> None:
        self._store, self._run = Store(str(night)), "nightly-0001"

    def learn(self, workspace: Workspace, policy: PolicyVersion, *_: object) -> PolicyVersion:
        challenger, (played, graded) = layout.checkpoint(workspace.name, 1), trained_on(self._store, self._run, 0)
        data = layout.trajectories(workspace.name, 0)
        scores = layout.scores(workspace.name, 0, "5c0e")
        self._commit(workspace, played, data, [policy])
        self._commit(workspace, graded, scores, [data])
        self._commit(workspace, layout.checkpoint(self._run, 1), challenger, [policy, data, scores])
        return challenger

    def evaluate_sets(
        self, workspace: Workspace, _: object, policy: PolicyVersion, sets: dict[str, ProblemsVersion]
    ) -> dict[str, list[ScoresVersion]]:
        (graded,) = {name for name in self._committed("scores") if name.evaluation and name.evaluation.policy.number}
        assert graded.evaluation
        made = {}
        for name, problem_set in sets.items():
            played = greedy(workspace.config, name, problem_set).evaluation(policy)
            made[name] = [layout.evaluation_scores(played, "5c0e")]
            self._commit(workspace, graded.evaluation, played, [policy, problem_set])
            self._commit(workspace, graded, made[name][0], [played])
        return made

    def _committed(self, kind: str) -> list[ScoresVersion]:
        return select(ScoresVersion, (entry.version for entry in catalog.read_all(self._store) if entry.kind == kind))

    def _commit(self, workspace: Workspace, old: str, new: Version, parents: list[str]) -> None:
        manifest = manifests.read(self._store, old)
        with workspace.stage(new) as draft:
            if draft:
                for file in manifest.files:
                    draft.add(Path(self._store.path(file.path)), file.name, file.rows)
                draft.commit(workspace.provenance(), parents, manifest.metrics)


@pytest.fixture
def quick(place: Place, tmp_path: Path, made_once: MadeOnce, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a retraining whose nights only copy what one real night has made, which is in `tmp_path`/night."""
    place.arrive("a", range(8))
    made_once("first night", tmp_path / "var", lambda: place.night(*PROMOTE))
    (tmp_path / "var").rename(tmp_path / "night")
    copied = Copied(tmp_path / "night")
    monkeypatch.setattr("flows.retrain.learn", copied.learn)
    monkeypatch.setattr("flows.retrain.evaluate_sets", copied.evaluate_sets)
    monkeypatch.setattr("flows.retrain.nightly.measure_distance", lambda *_: 0.1)
    for name in ("open_trainer", "open_workers"):
        monkeypatch.setattr(f"flows.retrain.{name}", lambda _: nullcontext())
    return place


@pytest.fixture
def promoted(quick: Place, tmp_path: Path) -> Place:
    """Return a retraining after its first night."""
    shutil.copytree(tmp_path / "night", tmp_path / "var")
    return quick


def test_nights_in_order(place: Place, tmp_path: Path) -> None:
    """Nights in sequence: first champion, promotion, nothing new, rejection, promotion with waiting problems.

    Sampled episodes decide them. Two rollbacks follow, and a third is refused.
    """
    promote, reject = [*PROMOTE, *SAMPLED], [*REJECT, *SAMPLED]
    assert place.night(*promote) == "nothing new"  # there is no file yet
    assert place.champion is None
    place.arrive("a", range(8))
    assert place.night(*promote) == "promoted"
    moves = aliases.history(place.store, "champion")
    assert [move.version for move in moves] == [layout.checkpoint("nightly-0001", n) for n in (0, 1)]

    assert place.night(*promote) == "nothing new"
    assert len(place.records) == 1

    place.arrive("b", range(8, 16))
    assert place.night(*reject) == "rejected"
    assert place.champion == moves[1]
    assert manifests.committed(place.store, layout.checkpoint("nightly-0002", 1))  # kept for analysis

    place.arrive("c", range(16, 20))
    assert place.night(*promote) == "promoted"
    last = place.records[-1]
    assert last.night.champion == moves[1].version
    assert last.night.counts == {"new": 4, "waiting": 8, "replayed": 8, "dropped": 0}
    parents = {parent.version for parent in manifests.read(place.store, layout.checkpoint("nightly-0003", 0)).parents}
    assert moves[1].version in parents  # the lineage connects the nights
    assert manifests.read(place.store, last.end.accepted if last.end and last.end.accepted else "").rows == 20

    explanation = explain(place.config())
    assert explanation.startswith("# Night 3: promoted")
    assert "| ok  | better: held-out" in explanation
    assert "(look 2 since a promotion)" in explanation
    assert f"nightly-0003/checkpoints/000001 -> {moves[1].version}" in roll_back(place.config())
    assert "nightly-0001/checkpoints/000001 -> runs/nightly-0001/checkpoints/000000" in roll_back(place.config())
    with pytest.raises(StorageError, match="no champion before the present one"):
        roll_back(place.config())
    decision = manifests.read(place.store, layout.decision("nightly-0001")).metrics
    assert decision["checks"][0]["says"].startswith("first turn, sampled ")
    rows = timeline(place.store, place.config())
    assert [row[""] for row in rows] == ["first", "night 1", "night 2", "night 3", "move 3", "move 4"]
    assert [row["gate"].rpartition(" (")[2] for row in rows[1:4]] == [f"look {n} since a promotion)" for n in (1, 1, 2)]
    assert "roll back of move 2" in nights(place.config())
    report = tmp_path / "var/retraining/nightly/report"
    assert "# Night 2: rejected" in (report / "night-0002.md").read_text()


STEPS = ["nightly.crown_first", "learn", "nightly.end_training", "nightly.measure_distance", "evaluate_sets"]
STEPS += ["nightly.decide", "nightly.promote", "nightly.end_night", "nightly.report_night"]


def test_a_night_that_breaks_is_continued(quick: Place, tmp_path: Path) -> None:
    """A night broken before each of its steps still ends once, with one promotion and no version made twice."""
    quick.arrive("a", range(8))
    before: dict[str, str] = {}
    for step in STEPS:
        quick.broken_night(step)
        found = nonces(tmp_path)
        assert before.items() <= found.items()
        before = found
        quick.arrive("b", range(8, 12))  # too late for this night
    assert not quick.store.exists(f"{layout.retraining('nightly')}/report/night-0001.md")
    assert quick.night(*PROMOTE) == "promoted"  # night 1 had ended: this is the next
    assert quick.store.exists(f"{layout.retraining('nightly')}/report/night-0001.md")  # written by the next night
    assert [record.night.counts["new"] for record in quick.records] == [8, 4]
    assert [move.version for move in aliases.history(quick.store, "champion")] == [
        layout.checkpoint("nightly-0001", 0),
        layout.checkpoint("nightly-0001", 1),
        layout.checkpoint("nightly-0002", 1),
    ]


def broken(*_: object) -> None:
    raise RuntimeError("power cut")


def test_a_night_is_continued_as_it_was_begun(quick: Place) -> None:
    """A killed night keeps its settings; changed settings count from the next night on.

    One that always fails can be given up by hand; its problems wait for the next night.
    """
    quick.arrive("a", range(8))
    quick.broken_night("learn")
    assert give_up(quick.config()) == "night 1 is given up; its 8 new problems wait for the next night"
    assert "nothing to give up" in give_up(quick.config())
    quick.arrive("b", range(8, 12))
    quick.broken_night("evaluate_sets")
    assert "has not ended: the next flow run continues it" in explain(quick.config())
    assert quick.night(*REJECT, "optimizer.lr=0.5") == "promoted"
    assert quick.records[-1].night.counts == {"new": 4, "waiting": 8, "replayed": 0, "dropped": 0}


def test_a_night_goes_on_under_another_verifier(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate measures the distance on the scores of the old verifier, which the update was made from."""
    place.arrive("a", range(8))
    with monkeypatch.context() as patch:
        patch.setattr("tasks.score.scoring._RULES", 1)
        place.broken_night("nightly.measure_distance")
    assert place.night(*PROMOTE) == "promoted"


def test_what_did_harm_is_set_aside(promoted: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of a harmful night, and those that waited with them, are not used again until `--retry` names it."""
    promoted.arrive("b", range(8, 12))
    assert promoted.night(*REJECT) == "rejected"  # its problems wait
    promoted.arrive("c", range(12, 20), wrong_by=7)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.retrain.gate._is_worse", lambda *_: True)
        assert promoted.night(*REJECT) == "rejected"
    promoted.arrive("d", range(20, 24))
    assert promoted.night(*PROMOTE) == "promoted"
    assert promoted.records[-1].night.counts == {"new": 4, "waiting": 0, "replayed": 4, "dropped": 0}
    assert retry(promoted.config(), 3) == "the 12 problems of night 3 wait for the next night"
    with pytest.raises(StorageError, match="has no night 9; nights so far: 4"):
        retry(promoted.config(), 9)
    assert promoted.night(*PROMOTE) == "promoted"  # without new problems
    assert promoted.records[-1].night.counts == {"new": 0, "waiting": 12, "replayed": 12, "dropped": 0}


def test_a_corrected_problem_replaces_the_wrong_one(quick: Place) -> None:
    """A prompt with a corrected answer is new; the old version is neither replayed nor trained on with it."""
    quick.arrive("a", range(8), wrong_by=1)
    quick.night(*PROMOTE)
    quick.arrive("b", range(4))
    assert quick.night(*REJECT) == "rejected"
    quick.arrive("c", range(8, 10))
    assert quick.night(*PROMOTE) == "promoted"
    night = quick.records[-1].night
    rows = list(datasets.rows(quick.store, night.problems, Path("/")))
    assert night.counts == {"new": 2, "waiting": 4, "replayed": 4, "dropped": 0}
    assert len({row["prompt"] for row in rows}) == len(rows) == 10


def test_a_roll_back_is_remembered(promoted: Place) -> None:
    """After a rollback the next night begins with the older champion and replays no problem of the undone night."""
    promoted.arrive("b", range(8, 16))
    promoted.night(*PROMOTE)
    assert "undone: move 2 by" in roll_back(promoted.config())
    promoted.arrive("c", range(16, 32))
    assert promoted.night(*PROMOTE) == "promoted"
    night = promoted.records[-1].night
    assert night.champion == layout.checkpoint("nightly-0001", 1)
    assert night.counts == {"new": 16, "waiting": 0, "replayed": 8, "dropped": 0}
    rows = timeline(promoted.store, promoted.config())
    assert [row[""] for row in rows] == ["first", "night 1", "night 2", "move 3", "night 3"]


def test_a_champion_moved_by_hand_during_a_night_stays(promoted: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A champion moved by hand during a night stays: the challenger was compared with another one.

    The next night begins with the champion set by hand.
    """
    first = layout.checkpoint("nightly-0001", 0)

    def decide_after_a_move(*arguments: Any) -> Any:
        aliases.move(promoted.store, "champion", first, 1, "I know better", "ada")
        return decide(*arguments)

    promoted.arrive("b", range(8, 12))
    with monkeypatch.context() as patch:
        patch.setattr("flows.retrain.nightly.decide", decide_after_a_move)
        assert promoted.night(*PROMOTE) == "overtaken"
    assert promoted.champion is not None
    assert (promoted.champion.version, promoted.champion.by) == (first, "ada")
    promoted.arrive("c", range(12, 16))
    assert promoted.night(*PROMOTE) == "promoted"
    assert promoted.records[-1].night.champion == first
    assert promoted.records[-1].night.counts["waiting"] == 4


def test_an_evaluation_set_that_changed(promoted: Place) -> None:
    """A changed evaluation set makes nights incomparable: the night stops and names the setting that accepts it."""
    before = promoted.champion
    promoted.arrive("b", range(8, 12))
    changed = "problems.held_out={kind: arithmetic, split: held-out, low: 0, high: 9, count: 9}"
    with pytest.raises(
        ValueError, match=r"held-out: problems/\w+ -> problems/\w+\n.*evaluation.fingerprints="
    ) as error:
        promoted.night(*PROMOTE, changed)
    assert promoted.champion == before
    accept = str(error.value).rpartition("set ")[2].replace("'", "")
    more = "evaluation.sets={own: {kind: arithmetic, split: held-out, low: 0, high: 9, count: 4}}"
    assert promoted.night(*PROMOTE, changed, accept, more) == "promoted"
    promoted.arrive("c", range(12, 16))
    with pytest.raises(ValueError, match=r"own: problems/\w+ -> removed"):  # a removed set must be accepted, too
        promoted.night(*PROMOTE, changed)
    assert promoted.night(*PROMOTE, changed, "evaluation.fingerprints={own: removed}") == "promoted"


def test_training_problems_that_are_evaluated_on(
    promoted: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Contaminated training problems are left out of the night, and the log names them."""
    promoted.arrive("b", range(8, 12))
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "what is 9+50", "answer": 59}\n')
    sets = f"evaluation.sets={{own: {{kind: jsonl, path: {own}, fields: {{prompt: prompt, solutions: answer}}}}}}"
    assert promoted.night(*PROMOTE, sets) == "promoted"
    assert "1 training problem is also in evaluation sets: b/000002 is 000001 of 'own'" in caplog.text
    assert promoted.records[-1].night.counts == {"new": 3, "waiting": 0, "replayed": 3, "dropped": 1}


@contextmanager
def hidden(path: Path) -> Iterator[None]:
    elsewhere = path.rename(path.with_name("hidden"))
    yield
    elsewhere.rename(path)


def test_what_stops_a_night_before_it_begins(promoted: Place, tmp_path: Path) -> None:
    """Champion and log stay as they are. Without its log a retraining would train on problems twice."""
    before, count = promoted.champion, len(promoted.records)
    assert before
    promoted.arrive("b", range(8, 12))
    for override, message in {
        "evaluation.sets={own: {kind: stored, version: problems/01}}": "problems/01 was never committed",
        "problems.train=[{name: sums, source: {kind: arithmetic}}]": "problems.train is a mixture, but a night trains",
    }.items():
        with pytest.raises(ValueError, match=message):
            promoted.night(*PROMOTE, override)
    unusable = r"alias 'champion' points at a champion that cannot be used: .*alias rollback"
    with hidden(tmp_path / "var" / before.version / "manifest.json"), pytest.raises(StorageError, match=unusable):
        promoted.night(*PROMOTE)
    entry = tmp_path / "var/retraining/nightly/00000000.json"
    lost = "the run 'nightly-0001' exists, but the log .* knows no such night"
    with hidden(entry), pytest.raises(StorageError, match=lost):
        promoted.night(*PROMOTE)
    assert (promoted.champion, len(promoted.records)) == (before, count)
