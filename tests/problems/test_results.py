import itertools
import random
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import duckdb
import pytest

from configs.problems import ProblemSampling
from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.maintenance.verify import verify
from storage.objects.seal import seal
from storage.objects.store import Store
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA, Fault, Problem, ProblemHistory, Score, Status, Trajectory
from storage.versions import checkpoints, datasets, manifests
from storage.versions.checkpoints import Canary
from storage.versions.drafts import Draft, Provenance
from tasks.problems.curriculum import all_runs, commit_history, plan_curriculum, read_history, summarise_run
from tasks.problems.problem_set import key
from tests.support.chain_helpers import commit_chain, provenance, rewrite
from tests.support.train_helpers import make_scores, make_trajectory

SUCCESS_RATES = """
    select any_value(problem_id) as problem_id, any_value(prompt) as prompt, sum(episodes) as episodes,
           sum(first_turn) / sum(episodes) as first_turn, sum(any_turn) / sum(episodes) as any_turn
    from (select distinct on (run, iteration, problem_key) *
          from read_parquet('{root}/runs/*/history/*/*/*.parquet'))
    group by problem_key order by any_turn, episodes desc
"""
"""The query of the README. `distinct on`, because a later history repeats the rows of the earlier ones."""

Row = tuple[Trajectory, list[Score]]


def episode(problem: str, sample: int, *successes: int, part: int = 0, status: Status = "completed") -> Row:
    """Return a trajectory of a problem, whose prompt contains its name, with its scores."""
    name = f"r/0/{problem}/{sample}" + (f"/{part}" if part else "")
    row = make_trajectory(name, [[7]] * len(successes), problem=problem, status=status)
    row = replace(row, prompt=f"What is {problem}?", solutions=[problem], run="r", sample=sample, policy_version=3)
    return row, make_scores(name, *map(float, successes))


def summary(*rows: Row) -> list[ProblemHistory]:
    return summarise_run([asdict(row) for row, _ in rows], [asdict(score) for _, scores in rows for score in scores])


def counts(rows: Iterable[ProblemHistory]) -> dict[str, tuple[int, int, int]]:
    return {row.problem_id: (row.episodes, row.first_turn, row.any_turn) for row in rows}


def test_games_with_one_prompt_are_counted_apart() -> None:
    """Their histories have one row for each; a table of the history finds them by their keys, having no metadata."""
    games = [Problem(f"g{n}", "Win.", [], metadata=f'{{"seed": {n}}}') for n in range(2)]
    rows = [
        (replace(row, prompt="Win.", solutions=[], metadata=games[n].metadata), scores)
        for n, (row, scores) in enumerate([episode("g0", 0, 1), episode("g1", 0, 0)])
    ]
    history = summary(*rows)
    assert counts(history) == {"g0": (1, 1, 1), "g1": (1, 0, 0)}
    known = plan_curriculum(games, history, ProblemSampling())
    assert [entry.episodes for entry in known] == [1, 1]
    keys = [row.problem_key for row in history]
    untold = [Problem(row.problem_id, row.prompt, row.solutions) for row in history]
    assert {entry.problem_key for entry in plan_curriculum(untold, history, ProblemSampling(), keys)} == set(keys)
    assert set(keys) == {entry.problem_key for entry in known}


def test_first_and_any_turn_are_counted_over_played_episodes() -> None:
    """Rejected and truncated episodes count; failed ones do not; an episode without an answer is not solved."""
    rows = [
        episode("a", 0, 1),
        episode("a", 1, 0, 1),
        episode("a", 2, 0, 0, status="truncated"),
        episode("a", 3, 1, status="rejected"),
        episode("a", 4, 1, status="failed"),
        episode("a", 5, status="rejected"),
        episode("b", 0, 1, status="failed"),
    ]
    (found,) = summary(*rows)
    content = key(Problem("a", "What is a?", ["a"]))
    counted = ProblemHistory(content, "a", "What is a?", ["a"], "r", 0, 3, episodes=5, first_turn=2, any_turn=3)
    assert found == counted


def test_an_episode_that_the_policy_ended_is_not_solved() -> None:
    """A problem on which the policy fills its context is hard, not unplayed; an error of the set-up says nothing."""
    rows = [episode("a", sample, status="failed") for sample in range(3)]
    faults: list[Fault] = ["policy", "set-up", "policy"]
    assert counts(
        summary(*((replace(row, fault=fault), scores) for (row, scores), fault in zip(rows, faults, strict=True)))
    ) == {"a": (2, 0, 0)}


def test_an_episode_of_several_trajectories_counts_once() -> None:
    """The trajectories `x` and `x/1` are one episode, solved if either is."""
    assert counts(summary(episode("a", 0, 0), episode("a", 0, 0, 1, part=1))) == {"a": (1, 0, 1)}
    assert counts(summary(episode("a", 0, 0), episode("a", 0, 1, part=1))) == {"a": (1, 1, 1)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A placeholder for a checkpoint's folder; no test loads it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def chain(store: Store, model: Path) -> Store:
    """A store with run `r` of one iteration: one problem, one episode, solved in its second turn."""
    return commit_chain(store, model, model, Canary([1, 2], [-1.0]))


def play(store: Store, model: Path, run: str, iterations: Iterable[int]) -> None:
    """Commit iterations of 4 problems with 3 episodes each; run name and iteration decide the outcomes."""
    for iteration in iterations:
        luck = random.Random(f"{run} {iteration}")
        rows = [
            episode(f"p{(iteration + place) % 6}", sample, luck.randint(0, 1), luck.randint(0, 1))
            for place, sample in itertools.product(range(4), range(3))
        ]
        commit_iteration(store, model, run, iteration, rows)


def commit_iteration(store: Store, model: Path, run: str, iteration: int, rows: list[Row]) -> None:
    trajectories, scores = layout.trajectories(run, iteration), layout.scores(run, iteration, "5c0e")
    played = [replace(row, run=run, iteration=iteration, policy_version=iteration) for row, _ in rows]
    with Draft(store, trajectories, "trajectories") as draft:
        datasets.write_rows(draft, TRAJECTORY_SCHEMA, played, rows_per_shard=5)
        draft.commit(provenance(0), [])
    with Draft(store, scores, "scores") as draft:
        datasets.write_rows(draft, SCORE_SCHEMA, [score for _, scores in rows for score in scores], rows_per_shard=5)
        draft.commit(provenance(0), [trajectories])
    update, parents = layout.checkpoint(run, iteration + 1), (trajectories, scores)
    checkpoints.commit(store, update, model, None, Canary([1, 2], [-1.0]), provenance(0), parents, {})


def collect(store: Store, version: str) -> None:
    """Delete a version's data like gc: tombstone first, then the data."""
    store.write(layout.tombstone(version), seal({"version": version}))
    for file in manifests.read(store, version).files:
        store.delete(file.path)


def history(store: Store, run: str, tmp_path: Path) -> tuple[str, list[ProblemHistory]]:
    version = commit_history(store, run, tmp_path, Provenance(config={}), catalog.read_all(store))
    return version, read_history(store, [version], tmp_path)


def test_history_of_a_chain(chain: Store, tmp_path: Path) -> None:
    """Three rows of one problem and sample are one episode; the version names its checkpoint and verifies."""
    version, rows = history(chain, "r", tmp_path)
    assert version == layout.history("r", 1)
    assert counts(rows) == {"p": (1, 0, 1)}
    found = manifests.read(chain, version)
    assert [parent.version for parent in found.parents] == [layout.checkpoint("r", 1)]
    assert found.metrics == {"iterations": 1, "collected": 0, "problems": 1, "episodes": 1}
    report = verify(chain, [version], deep=True, ancestors=False)
    assert (report.findings, report.objects) == ([], 1)


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 4)])
def test_a_continued_history_equals_a_new_one(store: Store, model: Path, tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """A continued history equals one computed from all data, wherever it was committed in between.

    The last history before it is a parent.
    """
    for begin, end in itertools.pairwise([0, *cuts, 5]):
        play(store, model, "r", range(begin, end))
        version, rows = history(store, "r", tmp_path)
    fresh = Store(str(tmp_path / "fresh"))
    play(fresh, model, "r", range(5))
    assert rows == history(fresh, "r", tmp_path)[1]
    assert len(rows) == 5 * 4
    assert [row.iteration for row in rows] == sorted(row.iteration for row in rows)
    parents = [parent.version for parent in manifests.read(store, version).parents]
    assert parents == [layout.checkpoint("r", 5), *(layout.history("r", cut) for cut in cuts[-1:])]
    assert history(store, "r", tmp_path)[0] == version


def test_a_continued_history_keeps_collected_iterations(store: Store, model: Path, tmp_path: Path) -> None:
    """A continued history keeps the rows of collected data; a new one leaves them out and counts them."""
    play(store, model, "r", range(2))
    early = history(store, "r", tmp_path)[1]
    play(store, model, "r", range(2, 4))
    for gone in (layout.trajectories("r", 0), layout.scores("r", 2, "5c0e")):
        collect(store, gone)
    version, rows = history(store, "r", tmp_path)
    assert {row.iteration for row in rows} == {0, 1, 3}
    assert rows[: len(early)] == early
    assert manifests.read(store, version).metrics["collected"] == 1

    play(store, model, "other", range(3))
    for iteration in range(3):
        collect(store, layout.trajectories("other", iteration))
    version, rows = history(store, "other", tmp_path)
    assert rows == []
    assert manifests.read(store, version).metrics["collected"] == 3


def test_a_checkpoint_that_names_no_scores_is_an_error(chain: Store, tmp_path: Path) -> None:
    """A checkpoint without scores is an error that names the checkpoint and the remedy."""
    rewrite(chain, layout.checkpoint("r", 1), lambda values: values["parents"].pop())
    with pytest.raises(StorageError, match=r"1 trajectories and 0 scores.*storage show runs/r/checkpoints/000001"):
        commit_history(chain, "r", tmp_path, Provenance(config={}), catalog.read_all(chain))


def test_all_runs_are_those_with_an_update(store: Store, model: Path, tmp_path: Path) -> None:
    """Runs are ordered by their last update; failed attempts and runs without an update are left out.

    So are those that trained on episodes of other runs (`flows.fit`): they have played nothing.
    """
    play(store, model, "long", range(1))
    play(store, model, "short", range(2))
    play(store, model, "long", range(1, 2))
    checkpoints.commit(store, layout.checkpoint("new", 0), model, None, Canary([1, 2], [-1.0]), provenance(0), [], {})
    play(store, model, "dead", range(1))
    store.delete(layout.manifest(layout.checkpoint("dead", 1)))
    parents, canary = (layout.trajectories("short", 1), layout.scores("short", 1, "5c0e")), Canary([1, 2], [-1.0])
    checkpoints.commit(store, layout.checkpoint("fitted", 1), model, None, canary, provenance(0), parents, {})
    assert all_runs(store, catalog.read_all(store)) == ["short", "long"]
    versions = [history(store, run, tmp_path)[0] for run in all_runs(store, catalog.read_all(store))]
    assert [row.run for row in read_history(store, versions, tmp_path)] == ["short"] * 8 + ["long"] * 8


def test_success_rates_by_one_query(store: Store, model: Path, tmp_path: Path) -> None:
    """One query of any Parquet reader gives the rates over all runs, even with several histories of a run."""
    for run in ("r", "s"):
        for iteration in range(2):
            play(store, model, run, [iteration])
            history(store, run, tmp_path)
    with duckdb.connect() as connection:
        found = connection.execute(SUCCESS_RATES.format(root=tmp_path / "store")).fetchall()
    rows = [row for run in ("r", "s") for row in history(store, run, tmp_path)[1]]
    expected = {}
    for name in {row.problem_id for row in rows}:
        selected = [row for row in rows if row.problem_id == name]
        episodes, first, right = (
            sum(c) for c in zip(*((r.episodes, r.first_turn, r.any_turn) for r in selected), strict=True)
        )
        expected[name] = (f"What is {name}?", episodes, first / episodes, right / episodes)
    assert {name: tuple(values) for name, *values in found} == expected
    assert [row[4] for row in found] == sorted(row[4] for row in found)
    assert sum(row[2] for row in found) == 2 * 2 * 4 * 3
