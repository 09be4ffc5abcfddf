import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs import ConfigError, load
from flows.math_mt_ppo import math_mt_ppo
from flows.rollout import rollout
from flows.run.workspace import open_leased
from storage import layout
from storage.errors import StorageError
from storage.maintenance import gc as garbage
from storage.maintenance.gc import Rules
from storage.maintenance.verify import check_logs, verify
from storage.objects.store import Store
from storage.records import EXCLUSION_SCHEMA, Exclusion, Problem
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft
from tasks.problems import exclusions
from tasks.problems.exclusions import Excluded, commit_exclusions, left_of, read_exclusions, set_aside
from tasks.problems.problem_set import key
from tasks.provenance.questions import impact, propose_ids, propose_problem, training_data
from tests.support.chain_helpers import commit_text
from tests.support.provenance_helpers import ONE, OTHER, TWO, Place, Played, caller, two_runs
from tests.support.train_helpers import make_trainer, random_rows, save_tiny, weights
from tests.support.waiting_engine import WaitingEngine, opens

WHY = "the gold answer is wrong"
UNSEEN = Problem("7", "What is 7 + 7?", ["15"])


@pytest.fixture
def family(tmp_path: Path) -> Place:
    return two_runs(Place(Store(str(tmp_path / "store"))))


def test_a_problem_is_excluded_with_all_that_was_played_of_it(family: Place, tmp_path: Path) -> None:
    """The version verifies, names its data sets as parents, and is read back unchanged.

    Repetition and order of rows do not change it; another reason does.
    """
    proposal = propose_problem(family.store, key(ONE), tmp_path, WHY)
    version = commit_exclusions(family.store, proposal.rows)
    assert commit_exclusions(family.store, proposal.rows[::-1]) == version
    assert exclusions.exclusions_version([replace(row, reason="other") for row in proposal.rows]) != version
    with pytest.raises(ValueError, match="at least one row"):
        commit_exclusions(family.store, [])
    rows = [Exclusion(**row) for row in datasets.rows(family.store, version, tmp_path)]
    names = [("a/000001/1/0", 1), ("a/000001/1/1", 1), ("a/000001/1/2", 1), ("a/000002/1/0", 2)]
    assert rows == [
        Exclusion(name, layout.trajectories("a", number), "a", number, "1", key(ONE), whole_problem=True, reason=WHY)
        for name, number in names
    ]
    assert proposal.trained == [layout.checkpoint("a", 2)]
    parents = [parent.version for parent in manifests.read(family.store, version).parents]
    assert parents == [layout.trajectories("a", number) for number in (1, 2)]
    assert verify(family.store, [version], deep=True, ancestors=False).findings == []
    assert read_exclusions(family.store, [version], tmp_path) == Excluded(
        frozenset((row.data_set, row.trajectory_id) for row in rows), frozenset([key(ONE)])
    )


def test_trajectories_are_excluded_by_their_ids(family: Place, tmp_path: Path) -> None:
    """Excluded trajectories keep their problems; unknown ids are an error and nothing is committed."""
    rows = propose_ids(family.store, ["b/000000/1/1", "a/000000/2/0", "b/000000/1/1"], tmp_path, WHY).rows
    keys = {"a/000000/2/0": key(TWO), "b/000000/1/1": key(OTHER)}
    assert [(row.trajectory_id, row.problem_key) for row in rows] == [*keys.items()]
    excluded = read_exclusions(family.store, [commit_exclusions(family.store, rows)], tmp_path)
    assert excluded.problems == frozenset()
    assert left_of([ONE, TWO], excluded) == [ONE, TWO]
    family.collect(layout.trajectories("a", 1))
    for ids, why, message in (
        (["a/000000/2/0", "a/000001/1/0", "x"], WHY, "2 ids: a/000001/1/0, x; these are collected or cannot be read"),
        ([], WHY, "no ids are given"),
        (["x"], " ", "no reason is given"),
    ):
        with pytest.raises(ValueError, match=message):
            propose_ids(family.store, ids, tmp_path, why)


def test_a_problem_without_episodes_or_with_collected_data(family: Place, tmp_path: Path) -> None:
    """A problem without trajectories can be excluded; data that gc deleted are reported as unknown."""
    family.problems(UNSEEN)
    proposal = propose_problem(family.store, "7", tmp_path, WHY)
    assert proposal.rows == [Exclusion("", "", "", -1, "7", key(UNSEEN), whole_problem=True, reason=WHY)]
    version = commit_exclusions(family.store, proposal.rows)
    assert manifests.read(family.store, version).parents == []
    assert read_exclusions(family.store, [version], tmp_path) == Excluded(problems=frozenset([key(UNSEEN)]))
    family.collect(layout.trajectories("b", 0))
    proposal = propose_problem(family.store, key(OTHER), tmp_path, WHY)
    assert proposal.unknown == {layout.trajectories("b", 0): "its data were collected by gc"}
    assert [row.trajectory_id for row in proposal.rows] == [""]


def test_a_game_is_excluded_without_the_others_of_its_prompt(family: Place, tmp_path: Path) -> None:
    """Its key has its metadata, but hidden tests. Older programs excluded all games with a prompt: they stay so."""
    games = [Problem(f"g{n}", "Win.", [], metadata=f'{{"seed": {n}, "input_output": {{}}}}') for n in range(2)]
    family.begin("games")
    family.iterate("games", 0, family.problems(*games), Played(games[0]), Played(games[1]))
    proposal = propose_problem(family.store, "g0", tmp_path, WHY)
    assert [(row.trajectory_id, row.problem_key) for row in proposal.rows] == [("games/000000/g0/0", key(games[0]))]
    assert left_of(games, Excluded(problems=frozenset([key(games[0])]))) == [games[1]]
    with pytest.raises(ValueError, match="excludes all 1 training problems, and nothing is left to draw"):
        left_of(games[:1], Excluded(problems=frozenset([key(games[0])])))
    older = Excluded(problems=frozenset([key(Problem("", "Win.", []))]))
    assert [older.has_problem(game) for game in games] == [True, True]
    (use,) = impact(family.store, key(games[1]), tmp_path).uses
    assert use["checkpoint"] == layout.checkpoint("games", 1)


def test_an_update_without_the_excluded_is_one_that_never_had_them(tmp_path: Path) -> None:
    """The update is equal bit for bit to one without the excluded rows.

    Ids are excluded in their own data set only, a problem in every data set.
    """
    rows, scores = random_rows()
    folder, here = save_tiny(tmp_path), "runs/r/trajectories/000000"
    asked = [replace(row, prompt=row.problem_id, solutions=["1"]) for row in rows]
    whole = key(Problem("", "p2", ["1"]))
    names = frozenset([(here, "t001"), ("elsewhere", "t002")])
    marked, ids = set_aside(asked, here, Excluded(names, frozenset([whole])))
    assert ids == ["t001", *(row.trajectory_id for row in rows if row.problem_id == "p2")]
    ours, plain = make_trainer(folder), make_trainer(folder)
    assert ours.update(marked, scores, version=2)["trajectories"] == len(rows) - len(ids)
    plain.update([row for row in rows if row.trajectory_id not in ids], scores, version=2)
    assert all(torch.equal(value, weights(plain)[name]) for name, value in weights(ours).items())
    assert set_aside(asked, here, Excluded()) == (asked, [])


def test_excluded_trajectories_do_not_count_as_trained_on(family: Place, tmp_path: Path) -> None:
    """An excluded trajectory does not count as trained on.

    The lineage does not lead through exclusions to the trajectories that they exclude.
    """
    one = commit_exclusions(family.store, propose_problem(family.store, key(ONE), tmp_path, WHY).rows)
    first = commit_exclusions(family.store, propose_ids(family.store, ["b/000000/1/0"], tmp_path, WHY).rows)
    both = family.problems(ONE, TWO)
    family.begin("d")
    family.play("d", 0, both, Played(ONE), Played(TWO), Played(TWO))
    family.train("d", 0, one, first)
    last = commit_exclusions(family.store, propose_ids(family.store, ["d/000000/2/1"], tmp_path, WHY).rows)
    family.play("d", 1, both, Played(TWO))
    family.train("d", 1, last)
    family.begin("e")
    commit_text(family.store, layout.checkpoint("e", 1), layout.trajectories("d", 0), last)

    names = [layout.checkpoint(*of) for of in (("d", 1), ("d", 2), ("e", 1))]
    for problem, trained in ((key(ONE), [0, None, 1]), ("2", [2, 1, 1])):
        uses = {use["checkpoint"]: use["trained"] for use in impact(family.store, problem, tmp_path).uses}
        assert [uses.get(name) for name in names] == trained
    seen = training_data(family.store, layout.checkpoint("d", 2), tmp_path)
    assert {row["prompt"]: row["trained"] for row in seen.problems} == {ONE.prompt: 0, TWO.prompt: 3}


def test_gc_leaves_exclusions_alone(store: Store, tmp_path: Path) -> None:
    """gc keeps every exclusion under any rule, but deletes the leftovers of failed attempts."""
    two_runs(Place(store))
    version = commit_exclusions(store, propose_problem(store, "2", tmp_path, WHY).rows)
    with Draft(store, version, "exclusions") as draft:
        datasets.write_rows(draft, EXCLUSION_SCHEMA, [], 10)
        path = draft.scratch / "part-00000.parquet"
        path.write_text("left behind")
        dead = draft.add(path, path.name, 0).path
    long_ago = time.time() - 2 * garbage.UNLEASED_S
    for item in store.walk(version):
        os.utime(Path(store.root) / item.path, (long_ago, long_ago))
    collected = garbage.collect(store, Rules(keep_last=1, older_than_s=0))
    assert [found.path for of in collected if of.run is None for found in of.leftovers] == [dead]
    assert verify(store, [version], ancestors=False).findings == []
    assert read_exclusions(store, [version], tmp_path).problems == frozenset([key(TWO)])
    listed = check_logs(store)
    assert (version in listed.versions, listed.findings) == (True, [])


def test_other_versions_than_exclusions_are_refused_before_a_run_starts(store: Store, tmp_path: Path) -> None:
    """Unknown versions, aliases, URIs and other kinds are refused before the run starts, each with a remedy."""
    remedy = r"ls --kind exclusions` lists the existing ones, `python -m tasks.provenance .* exclude` makes one"
    root = [f"storage.root={store.root}", f"storage.cache={tmp_path}/cache"]
    missing = load("smoke", [*root, "problems.exclusions=[exclusions/ab12]"])
    refused = pytest.raises(StorageError, match=f"exclusions/ab12 is no version of exclusions.*{remedy}")
    with refused, open_leased(missing):
        pytest.fail("it began")
    assert list(store.walk()) == []
    for other in ("champion", "./var/exclusions/ab12", "exclusions/AB", "problems/ab12"):
        with pytest.raises(ConfigError, match="should match pattern"):
            load("smoke", [f"problems.exclusions=[{other}]"])


def test_the_command_says_how_to_use_what_it_made(family: Place, tmp_path: Path) -> None:
    """The output names the version and its override. Ids can come from a file."""
    call, arguments = caller(family.store), ["exclude", key(ONE), "--reason", WHY]
    made = json.loads(call("--json", *arguments))
    assert len(made["rows"]) == 4
    assert manifests.committed(family.store, made["version"])
    printed = call(*arguments)
    assert f"'problems.exclusions=[{made['version']}]'" in printed
    assert "4 trajectories in 2 data sets; the problem is no longer drawn" in printed
    (tmp_path / "ids").write_text("b/000000/1/0\n\nb/000000/1/1 \n")
    printed = call("exclude", "--ids", str(tmp_path / "ids"), "--reason", WHY)
    assert printed.startswith("2 trajectories in 1 data set; trained on some of them, and unchanged: 1 checkpoint")
    assert "give either PROBLEM or --ids FILE" in call("exclude", "--reason", WHY, status=1)
    assert "no such file" in call("exclude", "--ids", "none", "--reason", WHY, status=1).lower()


@pytest.mark.usefixtures("prefect_api")
def test_a_run_goes_on_without_what_was_excluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem and an episode excluded after the rollout enter no update; the problem is not drawn again."""
    monkeypatch.setattr("flows.run.resources.open_engine", opens(WaitingEngine(0)))
    settings = [f"storage.root={tmp_path}/var", f"storage.cache={tmp_path}/cache", "run.iterations=2"]
    # Each iteration draws all four problems.
    small = [*settings, "problems.train={kind: arithmetic, low: 0, high: 2, count: 4}"]
    store = Store(f"{tmp_path}/var")
    data_set = rollout("smoke", small, iteration=0)
    rows = list(datasets.trajectories(store, data_set, tmp_path))
    unwanted = rows[0].problem_id
    single = next(row.trajectory_id for row in rows if row.problem_id != unwanted)
    proposals = propose_problem(store, unwanted, tmp_path, WHY), propose_ids(store, [single], tmp_path, WHY)
    versions = [commit_exclusions(store, proposal.rows) for proposal in proposals]
    math_mt_ppo("smoke", [*small, f"problems.exclusions=[{', '.join(versions)}]"])
    first, second = (manifests.read(store, layout.checkpoint("smoke", number)) for number in (1, 2))
    assert (first.metrics["trajectories"], first.metrics["trajectories/excluded"]) == (11, 5)
    assert (second.metrics["trajectories"], second.metrics["trajectories/excluded"]) == (12, 0)
    assert set(versions) <= {parent.version for parent in first.parents}
    drawn = {row.problem_id for row in datasets.trajectories(store, layout.trajectories("smoke", 1), tmp_path)}
    assert drawn == {row.problem_id for row in rows} - {unwanted}
    answer = impact(store, unwanted, tmp_path)
    assert [(use["episodes"], use["trained"]) for use in answer.uses] == [(4, 0)]
    seen = training_data(store, "smoke/latest", tmp_path)
    assert seen.trained == first.metrics["trajectories"] + second.metrics["trajectories"]
    assert seen.tokens == first.metrics["tokens/action"] + second.metrics["tokens/action"]
