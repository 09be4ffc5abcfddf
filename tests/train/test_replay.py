"""Checkpoints are made again from stored data, bit for bit; train states that were not kept come back the same way."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from storage import layout
from storage.__main__ import main
from storage.logs import catalog
from storage.maintenance import gc
from storage.records import Exclusion, Score, to_score
from storage.versions import checkpoints, datasets, manifests
from storage.versions.drafts import Provenance
from tasks.problems.exclusions import commit_exclusions
from tasks.train.replay import replay
from tasks.train.version_trainer import VersionTrainer
from tasks.warm_start.task import _state
from tests.support.programs import call_program
from tests.support.training_run import OPTIONS, TrainingRun

EVERY = ["train.state_every=3", "run.iterations=9", "optimizer.schedule=linear"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Return a run of five updates, with critic and moving reference, that keeps the train state of the third only."""
    run = TrainingRun(tmp_path_factory.mktemp("run"), 6, options=[*OPTIONS, *EVERY])
    trainer = VersionTrainer(run.config())
    for iteration in range(5):
        run.train(trainer, iteration)
    return run


@pytest.fixture
def copied(run: TrainingRun, tmp_path: Path) -> TrainingRun:
    shutil.copytree(run.root, tmp_path / "store")
    other = TrainingRun.__new__(TrainingRun)
    other._open(tmp_path, [*OPTIONS, *EVERY])
    return other


def turned(row: dict[str, Any]) -> Score:
    """Turn a verdict round."""
    score = to_score(row)
    return replace(score, reward=1 - score.reward, success=1 - score.success)


def has_state(run: TrainingRun, number: int) -> bool:
    return bool(manifests.read(run.store, run.policy(number)).names_in("state"))


def test_a_checkpoint_is_made_again_bit_for_bit(run: TrainingRun) -> None:
    """Also those between, whose train state was not kept, by the command."""
    given = ["--root", run.root, "verify", "--replay", "smoke@0..5", "--cache", f"{run.folder}/cache"]
    printed, _ = call_program(main, *given)
    assert printed.count("the same bits") == 5


def test_other_verdicts_make_another_policy(copied: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the update had trained on other scores than those in the store, its checkpoint would be found out."""
    monkeypatch.setattr("tasks.train.version_trainer.to_score", turned)
    results = replay(copied.store, "smoke@0..1", f"{copied.folder}/cache", print)
    assert [(each.verdict, each.same) for each in results] == [("ANOTHER POLICY", False)]
    assert (results[0].share or 0) > 0.1


@pytest.mark.parametrize("asked", ["smoke", "smoke@3", "smoke@3..3", "smoke@4..2", "@1..2"])
def test_what_is_no_range_is_refused(run: TrainingRun, asked: str) -> None:
    with pytest.raises(ValueError, match="give RUN@K..N with K below N"):
        replay(run.store, asked, "cache", print)


@pytest.mark.parametrize(("asked", "unknown"), [("smoke@4..9", "smoke/checkpoints/000006"), ("smoek@0..1", "smoek")])
def test_an_unknown_checkpoint_is_refused_before_any_work(run: TrainingRun, asked: str, unknown: str) -> None:
    told = list[str]()
    with pytest.raises(ValueError, match=f"there is no runs/{unknown}"):
        replay(run.store, asked, "cache", told.append)
    assert told == []


def test_a_train_state_that_was_not_kept_comes_back(run: TrainingRun, copied: TrainingRun) -> None:
    """A run that goes on after its fifth update makes the same sixth one as a trainer that never stopped."""
    assert [has_state(run, number) for number in range(6)] == [False, False, False, True, False, False]
    told = list[str]()
    copied.train(VersionTrainer(copied.config("train.state_every=1")), 5, told)
    assert [line.split(" was kept")[0] for line in told if "making it again" in line] == [run.policy(4), run.policy(5)]
    whole = TrainingRun(copied.folder / "whole", 6, options=[*OPTIONS, *EVERY, "train.state_every=1"])
    train_in_turns(whole, [[]] * 6)
    assert_same(copied, whole)


def test_each_update_is_made_again_by_its_own_settings(tmp_path: Path) -> None:
    """A run may go on with other learning rates, be longer than its schedule was, and exclude what it trained on."""
    ours = TrainingRun(tmp_path / "ours", 6, options=[*OPTIONS, *EVERY])
    whole = TrainingRun(tmp_path / "whole", 6, options=[*OPTIONS, *EVERY, "train.state_every=1"])
    data_set = layout.trajectories("smoke", 4)
    row = next(iter(datasets.trajectories(ours.store, data_set, ours.folder)))
    excluded = Exclusion(row.trajectory_id, data_set, "smoke", 4, row.problem_id, "", False, "wrong")
    exclusions = f"problems.exclusions=[{commit_exclusions(ours.store, [excluded])}]"
    changed = ["optimizer.lr=1e-2", "algorithm.critic.lr=2e-3"]
    train_in_turns(ours, [*[[]] * 4, changed, ["run.iterations=20", exclusions]])
    train_in_turns(whole, [*[[]] * 4, changed, ["run.iterations=20"]])
    assert_same(ours, whole)
    results = replay(ours.store, "smoke@3..6", f"{ours.folder}/cache", print)
    assert [each.verdict for each in results] == ["the same bits"] * 3


def train_in_turns(run: TrainingRun, settings: Sequence[Sequence[str]]) -> None:
    """Make an update by each of the settings; other settings than those before need a new trainer."""
    for iteration, knobs in enumerate(settings):
        if not iteration or knobs != settings[iteration - 1]:
            config = run.config(*knobs)
            trainer, run._provenance = VersionTrainer(config), Provenance(config=config.model_dump(mode="json"))
        run.train(trainer, iteration)


def assert_same(run: TrainingRun, other: TrainingRun) -> None:
    ours, theirs = run.tensors(6), other.tensors(6)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_another_policy_than_the_stored_one_is_noticed(copied: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the updates since the kept state now give another policy, its state would be another one, too."""
    monkeypatch.setattr("tasks.train.version_trainer.to_score", turned)
    with pytest.raises(ValueError, match=r"made again, give another policy.*--fork smoke@3"):
        copied.train(VersionTrainer(copied.config()), 5)


def test_a_fork_begins_where_there_is_a_train_state(run: TrainingRun, tmp_path: Path) -> None:
    """The message names the nearest checkpoint that has one."""
    forked = checkpoints.open_checkpoint(run.store, run.policy(4), run.folder / "cache", state=True)
    config = run.config("run.name=fork", "policy={fork: smoke@4}")
    with pytest.raises(
        ValueError, match=r"policy\.fork=smoke@4 has no train state \(train\.state_every=3\): use smoke@3"
    ):
        _state(forked, config, tmp_path / "state")


def test_gc_keeps_what_the_state_is_made_from(copied: TrainingRun) -> None:
    """The newest checkpoint with a train state stays, and the data sets since then."""
    rules = gc.Rules(keep_last=1, kinds=("checkpoint", "trajectories", "scores"), ancestors=False, older_than_s=0)
    gone = {manifest.version for manifest in gc.deletable(copied.store, catalog.read_all(copied.store), rules, "smoke")}
    assert {copied.policy(1), copied.policy(2), layout.trajectories("smoke", 1)} <= gone
    kept = [*map(copied.policy, (0, 3, 4, 5)), *(layout.trajectories("smoke", number) for number in (3, 4, 5))]
    assert not gone.intersection(kept)
