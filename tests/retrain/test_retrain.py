"""Nights of retraining, end to end on a real engine: what is promoted, what is kept, and what a failure leaves."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from configs import Config, load
from flows.retrain import retrain
from storage import layout
from storage.errors import LeaseHeldError, StorageError
from storage.logs.leases import Lease
from storage.logs.nights import Night, Nights, Record
from storage.objects.store import Store
from storage.versions import aliases, datasets, manifests
from storage.versions.aliases import Move
from tasks.retrain.commands import explain, give_up, nights, retry, roll_back
from tasks.retrain.gate_task import crown_first, decide
from tasks.retrain.timeline import read_timeline
from tasks.run.workspace import Workspace
from tests.support.paths import ROOT

PROMOTE = ["retrain.gate={least_gain: -1, margin: 1, max_kl: 1000, max_length_ratio: 1000, max_truncated_gain: 1}"]
"""A gate that lets everything through."""
REJECT = ["retrain.gate={least_gain: 1, margin: 1, max_kl: 1000, max_length_ratio: 1000, max_truncated_gain: 1}"]
"""One that finds nothing good enough, and nothing harmful."""


class Place:
    """A store, a folder where problems arrive, and the flow with the settings of a night of seconds."""

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
        """Problems with operands that no held-out problem has."""
        lines = [json.dumps({"prompt": f"What is {n} + 50?", "answer": n + 50 + wrong_by}) for n in numbers]
        (self.incoming / f"{file}.jsonl").write_text("\n".join(lines) + "\n")

    def night(self, *overrides: str) -> str:
        return retrain("smoke", [*self.overrides, *overrides])

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


def test_nights_in_order(place: Place, tmp_path: Path) -> None:
    """First champion, promoted, nothing new, rejected and waiting, promoted with what waited, rolled back twice."""
    assert place.night(*PROMOTE) == "nothing new"  # no file has come yet
    assert place.champion is None
    place.arrive("a", range(8))
    assert place.night(*PROMOTE) == "promoted"
    moves = aliases.history(place.store, "champion")
    assert [move.version for move in moves] == [layout.checkpoint("nightly-0001", n) for n in (0, 1)]

    assert place.night(*PROMOTE) == "nothing new"
    assert len(place.records) == 1

    place.arrive("b", range(8, 16))
    assert place.night(*REJECT) == "rejected"
    assert place.champion == moves[1]
    assert manifests.committed(place.store, layout.checkpoint("nightly-0002", 1))  # kept for study

    place.arrive("c", range(16, 20))
    assert place.night(*PROMOTE) == "promoted"
    last = place.records[-1]
    assert last.night.champion == moves[1].version
    assert last.night.counts == {"new": 4, "waiting": 8, "replayed": 8, "dropped": 0}
    parents = {parent.version for parent in manifests.read(place.store, layout.checkpoint("nightly-0003", 0)).parents}
    assert moves[1].version in parents  # lineage leads through the nights
    assert manifests.read(place.store, last.end.accepted if last.end and last.end.accepted else "").rows == 20

    told = explain(place.config())
    assert told.startswith("night 3: promoted")
    assert "ok │ better: held-out" in told
    assert f"nightly-0003/checkpoints/000001 -> {moves[1].version}" in roll_back(place.config())
    assert "nightly-0001/checkpoints/000001 -> runs/nightly-0001/checkpoints/000000" in roll_back(place.config())
    with pytest.raises(StorageError, match="no champion before the present one"):
        roll_back(place.config())
    events = read_timeline(place.store, place.config())
    assert [event.label for event in events] == ["first", "night 1", "night 2", "night 3", "move 3", "move 4"]
    assert "roll back of move 2" in nights(place.config())
    report = tmp_path / "var/retraining/nightly/report"
    assert {path.name for path in report.iterdir()} >= {"champion.png", "nights.json", "night-0002.md"}
    assert "# Night 2: rejected" in (report / "night-0002.md").read_text()


def test_sampled_episodes_decide(place: Place) -> None:
    """The gate compares them and says so, and the accuracies of the nights are theirs."""
    sampled = ["evaluation.samples=2", "retrain.gate.episodes=sampled"]
    place.arrive("a", range(8))
    place.night(*PROMOTE, *sampled)
    decision = manifests.read(place.store, layout.decision("nightly-0001")).metrics
    assert decision["checks"][0]["says"].startswith("first turn, sampled ")
    first, after = read_timeline(place.store, place.config(*sampled))
    measured = decision["accuracy"][after.champion]["held-out"]
    assert measured["sampled_episodes"] == 2 * measured["episodes"]
    assert after.accuracy == measured["sampled"]["first_turn"]
    assert first.accuracy
    assert after.accuracy
    comparison = decision["comparisons"]["held-out"]["first_turn"]
    assert (comparison["before"], comparison["after"]) == (first.accuracy["value"], after.accuracy["value"])


STEPS = ["crown_first", "learn", "end_training", "measure_distance", "evaluate_sets", "decide", "promote", "end_night"]
STEPS += ["report_night"]


def test_a_night_that_breaks_is_continued(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken before each of its steps in turn, one night comes to its end, once: one promotion, nothing made twice."""
    place.arrive("a", range(8))
    before: dict[str, str] = {}
    for step in STEPS:
        with monkeypatch.context() as patch:
            patch.setattr(f"flows.retrain.{step}", broken)
            with pytest.raises(RuntimeError, match="power cut"):
                place.night(*PROMOTE)
        found = {str(path): json.loads(path.read_text())["nonce"] for path in tmp_path.rglob("manifest.json")}
        assert before.items() <= found.items()
        before = found
        place.arrive("b", range(8, 12))  # comes too late for this night
    assert not place.store.exists(f"{layout.retraining('nightly')}/report/night-0001.md")
    assert place.night(*PROMOTE) == "promoted"  # night 1 had ended: this is the next
    assert place.store.exists(f"{layout.retraining('nightly')}/report/night-0001.md")  # told by the next
    assert [record.night.counts["new"] for record in place.records] == [8, 4]
    assert [move.version for move in aliases.history(place.store, "champion")] == [
        layout.checkpoint("nightly-0001", 0),
        layout.checkpoint("nightly-0001", 1),
        layout.checkpoint("nightly-0002", 1),
    ]


def broken(*_: object) -> None:
    raise RuntimeError("power cut")


def test_a_night_is_continued_as_it_was_begun(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that change overnight count from the next night on: the one that was killed keeps its own."""
    place.arrive("a", range(8))
    with monkeypatch.context() as patch:
        patch.setattr("flows.retrain.evaluate_sets", broken)
        with pytest.raises(RuntimeError):
            place.night(*PROMOTE)
    assert "has not ended: the next flow run goes on with it" in explain(place.config())
    assert place.night(*REJECT, "optimizer.lr=0.5") == "promoted"


def test_a_night_goes_on_under_another_judge(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older judge scored, and the update was made from, stays what the gate measures the distance on."""
    place.arrive("a", range(8))
    with monkeypatch.context() as patch:
        patch.setattr("tasks.score.scoring._RULES", 1)
        patch.setattr("flows.retrain.measure_distance", broken)
        with pytest.raises(RuntimeError):
            place.night(*PROMOTE)
    assert place.night(*PROMOTE) == "promoted"


def test_a_hopeless_night_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, where it fails for ever; its problems are not lost."""
    place.arrive("a", range(8))
    with monkeypatch.context() as patch:
        patch.setattr("flows.retrain.learn", broken)
        with pytest.raises(RuntimeError):
            place.night(*PROMOTE)
    assert give_up(place.config()) == "night 1 is given up; its 8 new problems wait for the next night"
    assert "nothing to give up" in give_up(place.config())
    place.arrive("b", range(8, 12))
    assert place.night(*PROMOTE) == "promoted"
    assert place.records[-1].night.counts == {"new": 4, "waiting": 8, "replayed": 0, "dropped": 0}


def test_what_did_harm_is_set_aside(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tried again nor replayed, with what waited beside it; until somebody asks for it."""
    place.arrive("a", range(8))
    place.night(*PROMOTE)
    place.arrive("b", range(8, 12))
    assert place.night(*REJECT) == "rejected"  # and waits
    place.arrive("c", range(12, 20), wrong_by=7)
    with monkeypatch.context() as patch:
        patch.setattr("tasks.retrain.gate._is_worse", lambda *_: True)
        assert place.night(*REJECT) == "rejected"
    place.arrive("d", range(20, 24))
    assert place.night(*PROMOTE) == "promoted"
    assert place.records[-1].night.counts == {"new": 4, "waiting": 0, "replayed": 4, "dropped": 0}
    assert retry(place.config(), 3) == "the 12 problems of night 3 wait for the next night"
    with pytest.raises(StorageError, match="has had 4 nights, but no night 9"):
        retry(place.config(), 9)
    assert place.night(*PROMOTE) == "promoted"  # though nothing is new
    assert place.records[-1].night.counts == {"new": 0, "waiting": 12, "replayed": 12, "dropped": 0}


def test_an_alarm_rejects_and_is_told(place: Place) -> None:
    """Further from the champion than allowed, by the logprobs of both: rejected, and the report says why."""
    place.arrive("a", range(8))
    alarm = ["retrain.gate={least_gain: -1, margin: 1, max_kl: 1e-9}", "ppo.entropy_coefficient=1"]
    assert place.night(*alarm) == "rejected"
    report = place.store.read(f"{layout.retraining('nightly')}/report/night-0001.md").decode()
    assert "| NO | no alarm: KL |" in report


def test_a_correction_takes_the_place_of_what_it_corrects(place: Place) -> None:
    """The same prompt with another answer is new; the old one is neither replayed nor trained on beside it."""
    place.arrive("a", range(8), wrong_by=1)
    place.night(*PROMOTE)
    place.arrive("b", range(4))
    assert place.night(*REJECT) == "rejected"
    place.arrive("c", range(8, 10))
    assert place.night(*PROMOTE) == "promoted"
    night = place.records[-1].night
    rows = list(datasets.rows(place.store, night.problems, Path("/")))
    assert night.counts == {"new": 2, "waiting": 4, "replayed": 4, "dropped": 0}
    assert len({row["prompt"] for row in rows}) == len(rows) == 10


def test_a_roll_back_is_remembered(place: Place) -> None:
    """What the undone night learnt from is not replayed by the next one, which begins with the older champion."""
    place.arrive("a", range(8))
    place.night(*PROMOTE)
    place.arrive("b", range(8, 16))
    place.night(*PROMOTE)
    assert "the problems of night 2 are set aside" in roll_back(place.config())
    place.arrive("c", range(16, 32))
    assert place.night(*PROMOTE) == "promoted"
    night = place.records[-1].night
    assert night.champion == layout.checkpoint("nightly-0001", 1)
    assert night.counts == {"new": 16, "waiting": 0, "replayed": 8, "dropped": 0}
    assert [event.label for event in read_timeline(place.store, place.config())] == [
        "first", "night 1", "night 2", "move 3", "night 3"
    ]  # fmt: skip


def test_who_made_a_champion_during_the_first_night_keeps_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was none at first: the challenger has not been compared with theirs."""
    place.arrive("a", range(8))
    theirs = layout.checkpoint("nightly-0001", 0)

    def crowned(workspace: Workspace, night: Night) -> str:
        champion = crown_first(workspace, night)
        aliases.move(place.store, "champion", theirs, 0, "mine", "ada")
        return str(champion)

    with monkeypatch.context() as patch:
        patch.setattr("flows.retrain.crown_first", crowned)
        assert place.night(*PROMOTE) == "overtaken"
    assert place.champion
    assert place.champion.by == "ada"


def test_who_moves_the_champion_meanwhile_wins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The challenger was compared with another champion: it is not promoted, and the next night begins with theirs."""
    place.arrive("a", range(8))
    place.night(*PROMOTE)
    first = layout.checkpoint("nightly-0001", 0)

    def and_somebody(decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(*arguments: Any) -> Any:
            aliases.move(place.store, "champion", first, 1, "I know better", "ada")
            return decide(*arguments)

        return decided

    place.arrive("b", range(8, 12))
    with monkeypatch.context() as patch:
        patch.setattr("flows.retrain.decide", and_somebody(decide))
        assert place.night(*PROMOTE) == "overtaken"
    assert place.champion is not None
    assert (place.champion.version, place.champion.by) == (first, "ada")
    place.arrive("c", range(12, 16))
    assert place.night(*PROMOTE) == "promoted"
    assert place.records[-1].night.champion == first
    assert place.records[-1].night.counts["waiting"] == 4


def test_one_flow_run_at_a_time(place: Place) -> None:
    """Also where no server's limit stands before it: the store's lease holds."""
    place.arrive("a", range(8))
    with (
        Lease(place.store, "nightly", label="flow run early-eagle"),
        pytest.raises(LeaseHeldError, match="'nightly' is being written by flow run early-eagle"),
    ):
        place.night()
    assert place.champion is None


@pytest.fixture
def promoted(place: Place) -> Place:
    """After a first night."""
    place.arrive("a", range(8))
    place.night(*PROMOTE)
    return place


@pytest.fixture
def untouched(promoted: Place) -> Iterator[Place]:
    """Whatever a test does to the next night: the champion stays, no night is begun, and the night after it works."""
    before, count = promoted.champion, len(promoted.records)
    promoted.arrive("b", range(8, 12))
    yield promoted
    assert promoted.champion == before
    assert len(promoted.records) == count


def test_an_evaluation_set_that_vanished(untouched: Place) -> None:
    missing = "evaluation.sets={own: {kind: jsonl, path: /nowhere/own.jsonl, preset: gsm8k}}"
    with pytest.raises(ValueError, match="/nowhere/own.jsonl cannot be read"):
        untouched.night(*PROMOTE, missing)
    gone = "evaluation.sets={own: {kind: stored, version: problems/0123456789abcdef}}"
    with pytest.raises(StorageError, match="problems/0123456789abcdef was never committed"):
        untouched.night(*PROMOTE, gone)


def test_an_evaluation_set_that_changed(promoted: Place) -> None:
    """Nights would not be comparable: it stops and says how to accept the change, and that works."""
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
    with pytest.raises(ValueError, match=r"own: problems/\w+ -> removed"):  # a guard that is gone is no detail
        promoted.night(*PROMOTE, changed)
    assert promoted.night(*PROMOTE, changed, "evaluation.fingerprints={own: removed}") == "promoted"


def test_training_problems_that_are_evaluated_on(promoted: Place, tmp_path: Path) -> None:
    """They stop the night by default, and name themselves; or are left out."""
    before = promoted.champion
    promoted.arrive("b", range(8, 12))
    own = tmp_path / "own.jsonl"
    own.write_text('{"prompt": "what is 9+50", "answer": 59}\n')
    sets = f"evaluation.sets={{own: {{kind: jsonl, path: {own}, fields: {{prompt: prompt, solutions: answer}}}}}}"
    with pytest.raises(ValueError, match=r"1 training problem stands in evaluation sets: b/000002 is 000001 of 'own'"):
        promoted.night(*PROMOTE, sets)
    assert promoted.champion == before
    assert promoted.night(*PROMOTE, sets, "evaluation.contamination=drop") == "promoted"
    assert promoted.records[-1].night.counts == {"new": 3, "waiting": 0, "replayed": 3, "dropped": 1}


def test_a_champion_that_was_deleted(untouched: Place, tmp_path: Path) -> None:
    assert untouched.champion
    manifest = tmp_path / "var" / untouched.champion.version / "manifest.json"
    hidden = manifest.rename(tmp_path / "hidden")
    with pytest.raises(
        StorageError, match=r"alias 'champion' points at a champion that cannot be used: .*alias rollback"
    ):
        untouched.night(*PROMOTE)
    hidden.rename(manifest)
    untouched.store.write(layout.tombstone(untouched.champion.version), b"{}")
    with pytest.raises(StorageError, match="was collected by gc"):
        untouched.night(*PROMOTE)


def test_a_log_that_lost_an_entry(untouched: Place, tmp_path: Path) -> None:
    """It is the watermark: without it problems would be trained on twice."""
    entry = tmp_path / "var/retraining/nightly/00000001.json"
    whole = entry.read_bytes()
    entry.write_bytes(whole.replace(b"trained", b"trainee"))
    with pytest.raises(StorageError, match="00000001.json"):
        untouched.night(*PROMOTE)
    entry.write_bytes(whole)
    first = entry.with_name("00000000.json")
    hidden = first.rename(tmp_path / "hidden")  # then the log looks empty
    with pytest.raises(StorageError, match="the run 'nightly-0001' exists, but the log .* knows no such night"):
        untouched.night(*PROMOTE)
    hidden.rename(first)


def test_a_store_that_is_away(place: Place, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that fires during an outage ends in an error that says so; the next one goes on as if nothing was."""
    place.overrides += [f"storage.root=s3://{bucket}/root"]
    place.arrive("a", range(8))
    assert place.night(*PROMOTE) == "promoted"
    before = place.champion
    place.arrive("b", range(8, 12))
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        forget_connections()
        with pytest.raises(StorageError, match="cannot be reached|did not answer|Could not connect"):
            place.night(*PROMOTE, "storage.patience_s=1", "storage.request_timeout_s=1")
    forget_connections()
    assert place.champion == before
    assert place.night(*PROMOTE) == "promoted"


def forget_connections() -> None:
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()


def test_a_clock_that_jumps(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided by a clock that somebody sets: a year back between two nights changes times, no order."""
    place.arrive("a", range(8))
    place.night(*PROMOTE)
    place.arrive("b", range(8, 12))
    now = time.time
    monkeypatch.setattr("storage.logs.nights.now", lambda: "2001-01-01T00:00:00+00:00")
    monkeypatch.setattr("tasks.retrain.night_task.now", lambda: "2001-01-01T00:00:00+00:00")
    monkeypatch.setattr(time, "time", lambda: now() - 365 * 86400)
    assert place.night(*PROMOTE, "run.max_minutes=60") == "promoted"
    assert [event.label for event in read_timeline(place.store, place.config())] == ["first", "night 1", "night 2"]
    monkeypatch.undo()
    assert place.night(*PROMOTE) == "nothing new"


def test_the_command_line(place: Place) -> None:
    """The commands take the place of a night; what cannot be done ends with status 1 and one line."""

    def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "flows.retrain", "smoke", *place.overrides, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = call("--retry", "1")  # its lease is the first object of the store
    assert done.returncode == 1
    assert done.stderr == "error: retraining 'nightly' has had 0 nights, but no night 1\n"
    done = call("--explain")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("retraining 'nightly' has had no night yet")
