import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from configs.score import Reward
from storage import layout
from storage.errors import DamagedError, StorageError
from storage.objects.store import Store
from storage.records import Fault, Status
from storage.versions import aliases, manifests
from tasks.problems.problem_set import key
from tasks.provenance.questions import impact, results, training_data
from tasks.score.verdict import LIMIT_MET
from tasks.train.samples import build_samples, within_staleness
from tests.support.chain_helpers import commit_rows, commit_text
from tests.support.provenance_helpers import ONE, OTHER, TWO, Place, Played, caller, two_runs
from tests.support.train_helpers import make_scores, make_trajectory

A = [layout.checkpoint("a", number) for number in range(4)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(Store(str(tmp_path / "store")))


@pytest.fixture
def family(place: Place) -> Place:
    return two_runs(place)


def test_questions_of_a_store_anywhere(any_store: Store, tmp_path: Path) -> None:
    """The questions are answered for any kind of store."""
    place = Place(any_store)
    place.begin("a")
    place.iterate("a", 0, place.problems(ONE), Played(ONE))
    assert [use["trained"] for use in impact(any_store, "1", tmp_path / "cache").uses] == [1]


def test_checkpoints_that_were_trained_on_a_problem(family: Place, tmp_path: Path) -> None:
    """The answer names the updates with counts, and the first affected checkpoint of each run.

    Later checkpoints of the run, and runs that began from them, are affected from their version 0 on; earlier
    checkpoints are not.
    """
    answer = impact(family.store, key(ONE), tmp_path)
    assert asdict(answer.problem) == {"key": key(ONE), "problem_ids": ["1"], "prompt": ONE.prompt, "solutions": ["2"]}
    uses = [(use["checkpoint"], use["iteration"], use["episodes"], use["trained"]) for use in answer.uses]
    assert uses == [(A[2], 1, 3, 3), (A[3], 2, 1, 0)]
    assert answer.first == [
        {"run": "a", "checkpoint": A[2], "checkpoints": 2, "clean": A[1]},
        {"run": "c", "checkpoint": layout.checkpoint("c", 0), "checkpoints": 1, "clean": ""},
    ]
    assert (answer.doubtful, answer.unknown) == ([], {})
    first = [(each["checkpoint"], each["checkpoints"]) for each in impact(family.store, "2", tmp_path).first]
    assert first == [(A[1], 3), (layout.checkpoint("b", 0), 2), (layout.checkpoint("c", 0), 1)]


def test_a_problem_is_named_by_its_id_its_key_or_its_prompt(family: Place, tmp_path: Path) -> None:
    """Ids may be row numbers: an id of several problems asks for the key. A part of a prompt names no problem."""
    with pytest.raises(ValueError, match="'1' means 2 different problems: give the key of one") as refused:
        impact(family.store, "1", tmp_path)
    assert f"{key(ONE)}  1: What is 1 + 1? -> 2" in str(refused.value)
    assert f"{key(OTHER)}  1: What is 5 + 5? -> 10" in str(refused.value)
    for text in (key(OTHER), OTHER.prompt):
        answer = impact(family.store, text, tmp_path)
        assert answer.problem.prompt == OTHER.prompt
        assert [use["checkpoint"] for use in answer.uses] == [layout.checkpoint("b", 1)]
    with pytest.raises(ValueError, match="none of the 3 known problems has '3'"):
        impact(family.store, "3", tmp_path)
    family.problems(ONE, replace(ONE, problem_id="3", prompt=ONE.prompt + "1"))
    family.problems(replace(ONE, problem_id="z"))
    assert impact(family.store, ONE.prompt, tmp_path).problem.problem_ids == ["1", "z"]


def test_trained_trajectories_are_those_the_trainer_takes(place: Place, tmp_path: Path) -> None:
    """Status, fault, staleness and tokens decide as in the trainer. Older programs took other faults."""
    cases = list(itertools.product(get_args(Status), range(4), range(3), get_args(Fault)))
    played = [Played(ONE, [1.0] * turns, status, version, fault) for status, version, turns, fault in cases]
    rows = [
        replace(make_trajectory(str(number), [[7, 8]] * turns, status=status, version=version), fault=fault)
        for number, (status, version, turns, fault) in enumerate(cases)
    ]
    scores = [score for row in rows for score in make_scores(row.trajectory_id, *[1.0] * len(row.turns))]
    samples = build_samples(rows, scores, Reward())
    commit_text(place.store, layout.checkpoint("r", 3))
    data_set, _ = place.play("r", 3, place.problems(ONE), *played)
    for lag in range(5):
        config = {"release": 1, "rollout": {"max_head_offpolicyness": lag}}
        commit_text(place.store, layout.checkpoint(f"lag{lag}", 4), data_set, config=config)
    found = [(use["run"], use["episodes"], use["trained"]) for use in impact(place.store, "1", tmp_path).uses]
    assert found == [(f"lag{lag}", len(cases), len(within_staleness(samples, 3, lag))) for lag in range(5)]
    assert (found[0][2], found[4][2]) == (10, 40)
    older = {"rollout": {"max_head_offpolicyness": 4}}
    commit_text(place.store, layout.checkpoint("older", 4), data_set, config=older)
    assert [use["trained"] for use in impact(place.store, "1", tmp_path).uses if use["run"] == "older"] == [48]


def test_trajectories_that_an_update_left_out(place: Place, tmp_path: Path) -> None:
    """Updates leave out unknown returns, unless they have a critic, and failed verdicts. Older ones did not.

    An answer that met a limit was trained on.
    """
    place.begin("a")
    commit_text(place.store, layout.checkpoint("a", 1))
    problem_set, slow = place.problems(ONE), Played(ONE, timeout=f"{LIMIT_MET} 5 s of processor time")
    cut, _ = place.play("a", 0, problem_set, Played(ONE), Played(ONE, status="truncated"))
    failed = place.play("a", 1, problem_set, Played(ONE), slow, Played(ONE, timeout="no answer"))
    unknown_return = {"trajectories/unknown_return": 1.0}
    updates: dict[str, tuple[list[str], dict[str, Any], dict[str, float]]] = {
        "old": ([cut], {}, {}),
        "critic": ([cut], {"ppo": {"critic": {}}}, unknown_return),
        "group": ([cut], {"ppo": {"critic": None}}, unknown_return),
        "new": ([cut], {"reward": {"unfinished": "least"}}, unknown_return),
        "before": ([*failed], {}, {}),
        "after": ([*failed], {}, {"trajectories/failed_verdict": 1.0}),
    }
    for run, (parents, config, metrics) in updates.items():
        version = layout.checkpoint(run, 1 + (parents != [cut]))
        commit_text(place.store, version, *parents, config=config, metrics=metrics)
    trained = {use["run"]: use["trained"] for use in impact(place.store, "1", tmp_path).uses}
    assert trained == {"old": 2, "critic": 2, "group": 1, "new": 2, "before": 3, "after": 2}


def test_a_warm_start_of_an_older_program_is_doubtful(place: Place, tmp_path: Path) -> None:
    """It trained on generated problems, which are not stored: no checkpoint after it is called free of a problem."""
    place.begin("w", config={"policy": {"warm_start": {"teaches": None}}})
    place.begin("x", config={"policy": {"path": "elsewhere"}})
    place.problems(ONE)
    answer, first = impact(place.store, "1", tmp_path), layout.checkpoint("w", 0)
    assert (answer.doubtful, answer.unknown) == ([first], {first: "an older program taught it generated problems"})
    began = [training_data(place.store, layout.checkpoint(run, 0), tmp_path).began for run in ("w", "x")]
    assert began == [[f"{first}: warm start"], [f"{layout.checkpoint('x', 0)}: elsewhere"]]


def test_collected_data_are_unknown(family: Place, tmp_path: Path) -> None:
    """An update with collected data, and all after it, are doubtful, unless its problem sets lack the problem."""
    gone = layout.trajectories("a", 1)
    family.collect(gone)
    answer = impact(family.store, key(ONE), tmp_path)
    assert answer.unknown == {gone: "its data were collected by gc"}
    assert answer.doubtful == [A[2], A[3], layout.checkpoint("c", 0)]
    assert answer.first == []
    assert impact(family.store, key(OTHER), tmp_path).unknown == {}
    seen = training_data(family.store, A[3], tmp_path)
    assert [*seen.unknown] == [gone]
    assert (seen.updates, seen.trajectories) == (3, 4)
    family.collect(layout.trajectories("a", 0))
    (first, *_) = impact(family.store, key(TWO), tmp_path).first
    assert (first["checkpoint"], first["clean"]) == (A[3], A[0])  # no doubtful one is called clean
    family.collect(A[0])  # and none without weights
    (first, *_) = impact(family.store, key(TWO), tmp_path).first
    assert first["clean"] == ""


def damage(store: Store, version: str) -> None:
    """Change the first file of a data set, or the manifest of another version."""
    path = layout.manifest(version) if version in A else manifests.read(store, version).files[0].path
    store.write(path, b"damaged")


@pytest.mark.parametrize(("damaged", "loaded"), [(A[2], 4), (layout.trajectories("a", 1), 1)])
def test_damage_is_reported_and_skipped(family: Place, tmp_path: Path, damaged: str, loaded: int) -> None:
    """Unreadable versions are reported as unknown, the rest is answered, and the catalog supplies the lineage.

    The rows in the other files of a damaged data set are not loaded.
    """
    damage(family.store, damaged)
    answer = impact(family.store, key(ONE), tmp_path)
    assert [version for version, why in answer.unknown.items() if why] == [damaged]
    assert len(answer.trajectories) == loaded
    assert A[3] in {use["checkpoint"] for use in answer.uses}
    assert layout.checkpoint("c", 0) in {first["checkpoint"] for first in answer.first} | set(answer.doubtful)


def test_what_a_checkpoint_was_trained_on(family: Place, tmp_path: Path) -> None:
    """The answer covers the whole lineage over all runs: per problem, newest first, and in total."""
    aliases.move(family.store, "mine", layout.checkpoint("b", 1), None)
    seen = training_data(family.store, "mine", tmp_path)
    assert seen.lineage == [layout.checkpoint("b", 1), layout.checkpoint("b", 0), A[1], A[0]]
    assert (seen.updates, seen.trajectories, seen.trained, seen.tokens) == (2, 4, 4, 2 + 4 + 2 + 2)
    assert seen.problem_sets == sorted([family.problems(ONE, TWO), family.problems(OTHER)])
    rows = [(row["prompt"], row["episodes"], row["updates"], row["first"]) for row in seen.problems]
    assert rows == [(OTHER.prompt, 2, 1, "b/000000"), (TWO.prompt, 2, 1, "a/000000")]
    assert seen == training_data(family.store, family.store.uri(layout.checkpoint("b", 1)), tmp_path)

    seen = training_data(family.store, layout.checkpoint("c", 0), tmp_path)
    names = ("episodes", "trained", "updates", "first", "last")
    assert {row["prompt"]: tuple(row[name] for name in names) for row in seen.problems} == {
        TWO.prompt: (4, 4, 3, "a/000000", "a/000002"),
        ONE.prompt: (4, 3, 1, "a/000001", "a/000002"),
    }
    with pytest.raises(StorageError, match="is a trajectories version, not a checkpoint: name a checkpoint"):
        training_data(family.store, layout.trajectories("a", 0), tmp_path)


def test_what_a_wrong_gold_answer_affects(family: Place, tmp_path: Path) -> None:
    """A wrong gold answer affects trajectories, evaluations, checkpoints and the aliases of these checkpoints."""
    family.play("b", 1, family.problems(ONE), Played(ONE))  # not trained on yet
    exam = family.evaluate(A[0], "hard", family.problems(ONE))
    family.evaluate(A[0], "held-out", family.problems(OTHER))
    aliases.move(family.store, "champion", A[3], None)
    aliases.move(family.store, "before", A[1], None)
    answer = impact(family.store, key(ONE), tmp_path)
    assert [(row["trajectory_id"], row["outcome"], row["trained"]) for row in answer.trajectories] == [
        ("a/000001/1/0", "right", [A[2]]),
        ("a/000001/1/1", "right", [A[2]]),
        ("a/000001/1/2", "wrong", [A[2]]),
        ("a/000002/1/0", "right", []),
        ("b/000001/1/0", "right", []),
    ]
    assert [(each["version"], each["name"]) for each in answer.evaluations] == [(exam, "hard")]
    assert answer.problem_sets == sorted([family.problems(ONE, TWO), family.problems(ONE)])
    assert answer.checkpoints == [A[2], A[3], layout.checkpoint("c", 0)]
    assert answer.aliases == {"champion": A[3]}

    family.collect(layout.scores("a", 1, "5c0e"))
    answer = impact(family.store, key(ONE), tmp_path)
    assert [row["outcome"] for row in answer.trajectories] == [*["unscored"] * 3, "right", "right"]
    assert [*answer.unknown] == [layout.scores("a", 1, "5c0e")]


def test_how_often_problems_were_solved(family: Place, tmp_path: Path) -> None:
    """The newest whole iterations count, of all runs but one, and the newest checkpoint of each is named.

    An episode that the policy ended is not solved; other failures, and data sets without scores, say nothing.
    """
    ended, broken = (Played(ONE, [0.0], "failed", fault="policy"), Played(ONE, status="failed", fault="set-up"))
    family.play("c", 0, family.problems(ONE), Played(ONE), Played(ONE, [0.0, 0.0]), ended, broken)
    commit_rows(family.store, layout.trajectories("c", 1), "trajectories", [make_trajectory("t", [[7]])], [])
    one, two, other = map(key, (ONE, TWO, OTHER))
    counts, newest = results(family.store, tmp_path, leave_out="", most=64)
    assert counts == {one: (7, 4), two: (4, 3), other: (2, 1)}
    assert newest == [A[3], layout.checkpoint("b", 1), layout.checkpoint("c", 0)]
    assert results(family.store, tmp_path, leave_out="", most=2)[0] == {one: (3, 1), two: (2, 2), other: (2, 1)}
    assert results(family.store, tmp_path, leave_out="a", most=64)[0] == {one: (3, 1), other: (2, 1)}


def test_what_counts_for_the_curriculum_is_whole(family: Place, tmp_path: Path) -> None:
    """Imports have no checkpoint and do not count, nor what gc collected; damage is an error, but in the run itself."""
    two, other = key(TWO), key(OTHER)
    family.play("imported", 0, family.problems(OTHER), Played(OTHER))
    family.collect(layout.scores("a", 1, "5c0e"))
    counts, newest = results(family.store, tmp_path, leave_out="", most=64)
    assert (counts[two], counts[other]) == ((3, 2), (2, 1))
    assert newest == [A[3], layout.checkpoint("b", 1)]
    for version in (layout.scores("a", 0, "5c0e"), layout.trajectories("a", 0)):
        damage(family.store, version)
        with pytest.raises(DamagedError, match=f"{version} cannot be read"):
            results(family.store, tmp_path, leave_out="", most=64)
    assert results(family.store, tmp_path, leave_out="a", most=64)[0] == {other: (2, 1)}


def test_commands_answer_people_and_scripts(family: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are cut, JSON is complete: there unknown versions have reasons, and trajectories run and iteration."""
    call = caller(family.store)
    printed = call("impact", ONE.prompt)
    assert f"{A[2]}   runs/a/trajectories/000001   3          3" in printed
    assert "affected: 4 trajectories (3 scored right, 1 scored wrong), 0 evaluations and 3 checkpoints" in printed
    assert f"exclude {key(ONE)} --reason" in printed
    assert "policy.path=" in printed
    monkeypatch.setattr("tasks.provenance.__main__._MOST_ROWS", 1)
    assert "… and 1 more: --json" in call("training-data", A[3])
    assert "was never committed" in call("training-data", "nobody", status=1)
    family.collect(scores := layout.scores("a", 1, "5c0e"))
    answer = json.loads(call("--json", "impact", key(ONE)))
    assert answer["uses"][0]["checkpoint"] == A[2]
    assert answer["unknown"] == [{"version": scores, "why": "its data were collected by gc"}]
    assert {(row["run"], row["iteration"]) for row in answer["trajectories"]} == {("a", 1), ("a", 2)}
