"""What became of each problem in the iterations of past runs: counted from their trajectories and scores, and kept."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import layout
from storage.logs import catalog
from storage.logs.log import first_free
from storage.objects.store import Store
from storage.records import HISTORY_SCHEMA, Problem, ProblemHistory
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.lineage import trained_on
from tasks.problems.difference import key

_ROWS_PER_SHARD = 50_000
_EPISODE = ["trajectory_id", "problem_id", "sample", "status"]
_TRAJECTORY_COLUMNS = [*_EPISODE, "run", "iteration", "prompt", "solutions", "policy_version"]
_SCORE_COLUMNS = ["trajectory_id", "turn", "success"]

Row = dict[str, Any]


@dataclass(slots=True)
class _Episode:
    row: Row  # the first of its trajectories
    first: bool = False
    any: bool = False


def summarise_run(trajectories: Iterable[Row], scores: Iterable[Row]) -> list[ProblemHistory]:
    """Successes by problem of one iteration, ordered by key.

    Rejected and truncated episodes were played, so they count; failed ones do not. Several trajectories of one
    episode, which is what has one problem and sample, count once: right where any of them is. Problems of the same
    content count as one.

    Args:
        trajectories: rows of a trajectory data set.
        scores: rows of its scores.
    """
    right = [(score["trajectory_id"], score["turn"]) for score in scores if score["success"] > 0]
    first, ever = {name for name, turn in right if turn == 0}, {name for name, _ in right}
    played: dict[tuple[str, int], _Episode] = {}
    for row in trajectories:
        if row["status"] != "failed":
            episode = played.setdefault((row["problem_id"], row["sample"]), _Episode(row))
            episode.first |= row["trajectory_id"] in first
            episode.any |= row["trajectory_id"] in ever
    return _by_problem(played.values())


def _by_problem(played: Iterable[_Episode]) -> list[ProblemHistory]:
    keys: dict[str, str] = {}
    groups: dict[str, list[_Episode]] = defaultdict(list)
    for episode in played:
        name = episode.row["problem_id"]
        if name not in keys:
            keys[name] = key(Problem(name, episode.row["prompt"], episode.row["solutions"]))
        groups[keys[name]].append(episode)
    return [_count(content, groups[content]) for content in sorted(groups)]


def _count(content: str, episodes: list[_Episode]) -> ProblemHistory:
    row = min((episode.row for episode in episodes), key=lambda row: (row["problem_id"], row["sample"]))
    return ProblemHistory(
        problem_key=content,
        problem_id=row["problem_id"],
        prompt=row["prompt"],
        solutions=row["solutions"],
        run=row["run"],
        iteration=row["iteration"],
        policy_version=row["policy_version"],
        episodes=len(episodes),
        first_turn=sum(episode.first for episode in episodes),
        any_turn=sum(episode.any for episode in episodes),
    )


def commit_history(store: Store, run: str, cache: Path, provenance: Provenance) -> str | None:
    """The version of a run's history over all its iterations, committed now unless it stands; None without iterations.

    Rows of an older history of the run are taken over, so only the iterations since are read, and those whose data
    gc took meanwhile stay known. What gc had taken before is left out and counted in the metrics.

    Raises:
        StorageError: a version of the run is damaged.
    """
    iterations = first_free(lambda number: manifests.committed(store, layout.checkpoint(run, number + 1)))
    if iterations == 0:
        return None
    version = layout.history(run, iterations)
    if manifests.committed(store, version):
        return version
    older = _older(store, run, iterations)
    rows, collected = _rows(store, run, older, iterations, cache)
    metrics = {
        "iterations": iterations,
        "collected": collected,
        "problems": len({row.problem_key for row in rows}),
        "episodes": sum(row.episodes for row in rows),
    }
    # The caller's lease, if any, is that of another run; its token would say nothing among this run's.
    unfenced = provenance.model_copy(update={"fence": None})
    with Draft(store, version, "history") as draft:
        datasets.write_rows(draft, HISTORY_SCHEMA, rows, _ROWS_PER_SHARD)
        draft.commit(unfenced, [layout.checkpoint(run, iterations), *([older] if older else [])], metrics)
    return version


def _older(store: Store, run: str, iterations: int) -> str | None:
    """The newest committed history of the run that ends before `iterations`."""
    found = {e.version for e in catalog.read_all(store) if e.kind == "history" and layout.run_of(e.version) == run}
    before = [version for version in sorted(found, reverse=True) if version < layout.history(run, iterations)]
    return next((version for version in before if manifests.committed(store, version)), None)


def _rows(store: Store, run: str, older: str | None, iterations: int, cache: Path) -> tuple[list[ProblemHistory], int]:
    """Rows by iteration and key, and the number of iterations that were left out."""
    rows, begin, collected = list[ProblemHistory](), 0, 0
    if older:
        rows, begin = read_history(store, [older], cache), layout.number_of(older) or 0
        collected = manifests.read(store, older).metrics["collected"]
    for iteration in range(begin, iterations):
        trajectories, scores = trained_on(store, run, iteration)
        if any(store.exists(layout.tombstone(version)) for version in (trajectories, scores)):
            collected += 1
            continue
        rows += summarise_run(
            datasets.rows(store, trajectories, cache, _TRAJECTORY_COLUMNS),
            datasets.rows(store, scores, cache, _SCORE_COLUMNS),
        )
    return rows, collected


def all_runs(store: Store) -> list[str]:
    """Names of the runs with an update, the one whose newest update is the oldest first.

    Raises:
        StorageError: the catalog is damaged.
    """
    newest: dict[str, int] = {}
    for entry in catalog.read_all(store):
        run = layout.run_of(entry.version)
        if entry.kind == "checkpoint" and run and layout.number_of(entry.version):
            newest[run] = entry.number
    found = sorted(newest, key=newest.__getitem__)
    return [run for run in found if manifests.committed(store, layout.checkpoint(run, 1))]


def read_history(store: Store, versions: Sequence[str], cache: Path) -> list[ProblemHistory]:
    """Rows of histories, one of each run, in the order of `versions` and, within one, of time.

    Raises:
        StorageError: one is missing, damaged, or written by a newer schema.
    """
    return [ProblemHistory(**row) for version in versions for row in datasets.rows(store, version, cache)]
