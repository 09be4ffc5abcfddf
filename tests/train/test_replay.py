"""Checkpoints are made again from stored data, bit for bit; train states that were not kept come back the same way."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flows.stages.warm_start import _continued
from storage import layout
from storage.__main__ import main
from storage.logs import catalog
from storage.maintenance import gc
from storage.records import Exclusion, Score, to_score
from storage.versions import checkpoints, datasets, manifests
from storage.versions.drafts import Provenance
from tasks.problems.exclusions import commit_exclusions
from tasks.train.replay import TOLERANCES, replay
from tasks.train.version_trainer import VersionTrainer
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
    return TrainingRun.reopened(tmp_path, [*OPTIONS, *EVERY])


def turned(row: dict[str, Any], name: str | None = None) -> Score:
    """Turn all verdicts round, or the first one of a trajectory."""
    score = to_score(row)
    if name and (score.trajectory_id, score.turn) != (name, 0):
        return score
    return replace(score, reward=1 - score.reward, success=1 - score.success)


def test_a_checkpoint_is_made_again_bit_for_bit(run: TrainingRun) -> None:
    """Also those between, whose train state was not kept, by the command."""
    given = ["--root", run.root, "verify", "--replay", "smoke@0..5", "--cache", f"{run.folder}/cache"]
    printed, _ = call_program(main, *given)
    assert printed.count("the same bits") == 5


@pytest.mark.parametrize("name", ["t101", "t202", "t404"])
def test_one_other_verdict_of_many_makes_another_policy(
    many: TrainingRun, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the update had trained on other scores than those in the store, its checkpoint would be found out."""
    monkeypatch.setattr("tasks.train.version_trainer.to_score", partial(turned, name=name))
    (found,) = replay(many.store, "smoke@0..1", f"{many.folder}/cache", print)
    assert (found.verdict, found.same) == ("ANOTHER POLICY", False)
    assert (found.share or 0) > 10 * TOLERANCES["none"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Return a run with an update on 512 trajectories with 760 verdicts."""
    return updated(tmp_path_factory.mktemp("many"), [], {"problems": 32, "samples": 16})


def updated(folder: Path, options: Sequence[str], data: dict[str, int] | None = None) -> TrainingRun:
    run = TrainingRun(folder, 1, options=["rollout.max_head_offpolicyness=99", *options], data=data)
    run.train(VersionTrainer(run.config()), 0)
    return run


Tensors = dict[str, Tensor]


def noise(kind: str) -> Callable[[Tensors], Tensors]:
    """Return a change of the tensors whose names begin with `kind` to random numbers of the same size."""
    draw = torch.Generator().manual_seed(1)
    return lambda now: {
        name: torch.randn(value.shape, generator=draw) * value.std()
        if name.startswith(kind) and value.numel() > 1
        else value
        for name, value in now.items()
    }


def without(lost: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda now: {name: value for name, value in now.items() if name != lost}


MODEL, OPTIMIZER, NORM = "model/model.safetensors", "state/optimizer.safetensors", "model.norm.weight"
CRITIC, REFERENCE, COUNTS = "state/critic.safetensors", "state/reference.safetensors", "state/state.json"
BIAS, OTHER_DRAWS = "weight/head.bias", {"rng": torch.Generator().manual_seed(7).get_state()}
CORRUPTIONS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "one weight is another": (MODEL, lambda now: now | {NORM: now[NORM] + 1e-5 * (torch.arange(32) == 7)}, "model"),
    "a weight is missing": (MODEL, without(NORM), "model"),
    "half precision": (MODEL, lambda now: {name: value.bfloat16() for name, value in now.items()}, "model"),
    "second moments": (OPTIMIZER, noise("exp_avg_sq"), "optimizer/exp_avg_sq"),
    "generator": (OPTIMIZER, lambda now: now | OTHER_DRAWS, "optimizer/rng"),
    "the bias of the critic's head": (CRITIC, lambda now: now | {BIAS: now[BIAS] / 2}, "critic/weight"),
    "moving reference": (REFERENCE, noise(""), "reference"),
    "steps": (COUNTS, lambda now: now | {"steps": now["steps"] + 1}, "state.json/steps"),
    "no value normaliser": (COUNTS, without("value_norm"), "state.json/value_norm"),
}
"""What a stored checkpoint could have in place of what its update makes: file, change, and the part that shows it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Return a run of one update, with critic and moving reference, and its train state."""
    return updated(tmp_path_factory.mktemp("whole"), OPTIONS)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_another_checkpoint_is_called_so(whole: TrainingRun, tmp_path: Path, corruption: str) -> None:
    """Each part of the files has a share of its own, so right weights do not hide what else is wrong."""
    shutil.copytree(whole.root, tmp_path / "store")
    run = TrainingRun.reopened(tmp_path)
    commit_changed(run, tmp_path / "changed", *CORRUPTIONS[corruption][:2])
    (found,) = replay(run.store, "smoke@0..1", f"{tmp_path}/cache", print)
    assert (found.verdict, found.same, found.part) == ("ANOTHER POLICY", False, CORRUPTIONS[corruption][2])


def commit_changed(run: TrainingRun, folder: Path, file: str, change: Callable[[Any], Any]) -> None:
    """Commit checkpoint 1 again with another file."""
    manifest = manifests.read(run.store, run.policy(1))
    opened = checkpoints.open_checkpoint(run.store, run.policy(1), run.folder / "cache", state=True)
    assert opened.state
    shutil.copytree(opened.model, folder / "model")
    shutil.copytree(opened.state, folder / "state")
    path = folder / file
    if file.endswith(".json"):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        save_file(change(load_file(path)), path, {"format": "pt"})
    shutil.rmtree(Path(run.root) / run.policy(1))
    made = folder / "model", folder / "state", opened.canary
    checkpoints.commit(
        run.store, run.policy(1), *made, Provenance(config=manifest.config), manifest.parent_names, manifest.metrics
    )


ROUNDING = {
    "weights, critic and moving reference": OPTIONS,
    "a learning rate at which a moving reference hardly moves": [*OPTIONS, "optimizer.lr=1e-6"],
    "an adapter": ["policy.lora={}"],
    "half precision": [*OPTIONS, "train.autocast=bfloat16"],
}


@pytest.mark.parametrize("options", ROUNDING.values(), ids=ROUNDING.keys())
def test_rounding_is_called_so(options: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller micro-batches add up in another order, as other ranks and processors do."""
    run = updated(tmp_path, options)
    monkeypatch.setattr("tasks.train.replay._here", lambda *_: run.config("train.micro_batch_tokens=40"))
    (found,) = replay(run.store, "smoke@0..1", f"{tmp_path}/cache", print)
    assert (found.verdict, found.same) == ("the same up to rounding", True)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        *((asked, "give RUN@K..N with K below N") for asked in ("smoke", "smoke@3..3", "smoke@4..2", "@1..2")),
        ("smoke@4..9", "there is no runs/smoke/checkpoints/000006"),
        ("smoek@0..1", "there is no runs/smoek"),
    ],
)
def test_what_is_no_range_of_checkpoints_is_refused_before_any_work(run: TrainingRun, asked: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(run.store, asked, "cache", lambda _: pytest.fail("it began"))


def test_a_train_state_that_was_not_kept_comes_back(run: TrainingRun, copied: TrainingRun) -> None:
    """A run that goes on after its fifth update makes the same sixth one as a trainer that never stopped."""
    assert [number for number in range(6) if manifests.read(run.store, run.policy(number)).names_in("state")] == [3]
    lines = list[str]()
    copied.train(VersionTrainer(copied.config("train.state_every=1")), 5, lines)
    assert [line.split(" was kept")[0] for line in lines if "making it again" in line] == [run.policy(4), run.policy(5)]
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
            trainer = VersionTrainer(config)
        run.train(trainer, iteration, config=config)


def assert_same(run: TrainingRun, other: TrainingRun) -> None:
    ours, theirs = run.tensors(6), other.tensors(6)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_another_policy_than_the_stored_one_is_noticed(copied: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the updates since the kept state now give another policy, its state would be another one, too."""
    monkeypatch.setattr("tasks.train.version_trainer.to_score", turned)
    with pytest.raises(ValueError, match=r"made again, give another policy.*--fork smoke@3"):
        copied.train(VersionTrainer(copied.config()), 5)


def test_a_canary_of_an_older_program_may_be_longer(copied: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is made again is compared with the stored canary as far as both go."""
    monkeypatch.setattr("tasks.train.policy.CANARY_TOKENS", 32)
    copied.train(VersionTrainer(copied.config()), 5)
    last = checkpoints.open_checkpoint(copied.store, copied.policy(6), copied.folder / "cache")
    assert len(last.canary.token_ids) == 32


def test_a_fork_begins_where_there_is_a_train_state(run: TrainingRun, tmp_path: Path) -> None:
    """The message names the nearest checkpoint that has one."""
    forked = checkpoints.open_checkpoint(run.store, run.policy(4), run.folder / "cache", state=True)
    config = run.config("run.name=fork", "policy={fork: smoke@4}")
    with pytest.raises(
        ValueError, match=r"policy\.fork=smoke@4 has no train state \(train\.state_every=3\): use smoke@3"
    ):
        _continued(forked, config, tmp_path)


def test_gc_keeps_what_the_state_is_made_from(copied: TrainingRun) -> None:
    """The newest checkpoint with a train state stays; data sets always do."""
    rules = gc.Rules(keep_last=1, ancestors=False, older_than_s=0)
    gone = {manifest.version for manifest in gc.deletable(copied.store, catalog.read_all(copied.store), rules, "smoke")}
    assert {copied.policy(1), copied.policy(2)} <= gone
    kept = [*map(copied.policy, (0, 3, 4, 5)), *(layout.trajectories("smoke", number) for number in range(6))]
    assert not gone.intersection(kept)
