"""Histories of runs: the results of each problem in each iteration, counted from trajectories and scores."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import layout
from storage.logs.catalog import CatalogEntry
from storage.logs.log import first_free
from storage.objects.store import Store
from storage.records import HISTORY_SCHEMA, Problem, ProblemHistory
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.lineage import trained_on
from tasks.problems.difference import key

_ROWS_PER_SHARD = 50_000
_EPISODE = ["trajectory_id", "problem_id", "sample", "status", "fault"]  # files before schema 5 have no fault
_TRAJECTORY_COLUMNS = [*_EPISODE, "run", "iteration", "prompt", "solutions", "policy_version"]
_SCORE_COLUMNS = ["trajectory_id", "turn", "verdict", "success"]

Row = dict[str, Any]


@dataclass(slots=True)
class _Episode:
    row: Row  # the first of its trajectories
    first: bool = False  # the first graded turn is right
    any: bool = False  # any turn is right


def summarise_run(trajectories: Iterable[Row], scores: Iterable[Row]) -> list[ProblemHistory]:
    """Count the successes of one iteration by problem, ordered by key.

    Rejected and truncated episodes were played, so they count, and so do those that failed by the policy's own fault.
    Other failed episodes are not counted. An episode may have several trajectories, with the same problem and sample:
    they count once, as right if any of them is right. Problems with the same content count as one.

    Args:
        trajectories: rows of a trajectory data set.
        scores: rows of its scores.
    """
    first, any_right = dict[str, tuple[int, bool]](), set[str]()
    for score in scores:
        if score["verdict"] != "none":
            name, result = score["trajectory_id"], (score["turn"], score["success"] > 0)
            first[name] = min(first.get(name, result), result)
            any_right |= {name} if score["success"] > 0 else set()
    played: dict[tuple[str, int], _Episode] = {}
    for row in trajectories:
        if row["status"] != "failed" or row.get("fault") == "policy":
            episode = played.setdefault((row["problem_id"], row["sample"]), _Episode(row))
            episode.first |= first.get(row["trajectory_id"], (0, False))[1]
            episode.any |= row["trajectory_id"] in any_right
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


def commit_history(
    store: Store, run: str, cache: Path, provenance: Provenance, entries: Iterable[CatalogEntry]
) -> str | None:
    """Commit a run's history over all its iterations, unless it exists; return its version, or None without iterations.

    Rows of an older history of the run are copied, so only later iterations are read, and iterations stay in the
    history after gc has deleted their data. Iterations whose data gc deleted before they were counted are left out, and
    counted in the metrics as `collected`.

    Args:
        store: the store of the run.
        run: its name.
        cache: keeps objects of a remote root.
        provenance: who writes the history.
        entries: the entries of the catalog, in which older histories are found.

    Raises:
        StorageError: a version of the run is damaged.
    """
    iterations = first_free(lambda number: manifests.committed(store, layout.checkpoint(run, number + 1)))
    if iterations == 0:
        return None
    version = layout.history(run, iterations)
    if manifests.committed(store, version):
        return version
    older = _older(store, run, iterations, entries)
    rows, collected = _rows(store, run, older, iterations, cache)
    metrics = {
        "iterations": iterations,
        "collected": collected,
        "problems": len({row.problem_key for row in rows}),
        "episodes": sum(row.episodes for row in rows),
    }
    # The caller's lease, if any, is the lease of another run, so its token has no meaning for this run.
    unfenced = provenance.model_copy(update={"fence": None})
    with Draft(store, version, "history") as draft:
        datasets.write_rows(draft, HISTORY_SCHEMA, rows, _ROWS_PER_SHARD)
        draft.commit(unfenced, [layout.checkpoint(run, iterations), *([older] if older else [])], metrics)
    return version


def _older(store: Store, run: str, iterations: int, entries: Iterable[CatalogEntry]) -> str | None:
    """Find the newest committed history of the run with fewer than `iterations` iterations."""
    histories = {e.version for e in entries if e.kind == "history" and layout.run_of(e.version) == run}
    before = [version for version in sorted(histories, reverse=True) if version < layout.history(run, iterations)]
    return next((version for version in before if manifests.committed(store, version)), None)


def _rows(store: Store, run: str, older: str | None, iterations: int, cache: Path) -> tuple[list[ProblemHistory], int]:
    """Return the rows, by iteration and key, and the number of iterations that were left out."""
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


def all_runs(store: Store, entries: Iterable[CatalogEntry]) -> list[str]:
    """List the runs with an update, ordered by their newest updates in the catalog's `entries`, oldest first."""
    newest: dict[str, int] = {}
    for entry in entries:
        run = layout.run_of(entry.version)
        if entry.kind == "checkpoint" and run and layout.number_of(entry.version):
            newest[run] = entry.number
    runs = sorted(newest, key=newest.__getitem__)
    return [run for run in runs if manifests.committed(store, layout.checkpoint(run, 1))]


def read_history(store: Store, versions: Sequence[str], cache: Path) -> list[ProblemHistory]:
    """Read histories, one version for each run: rows in the order of `versions`, and by time within each version.

    Raises:
        StorageError: a version is missing, damaged, or written by a newer schema.
    """
    return [ProblemHistory(**row) for version in versions for row in datasets.rows(store, version, cache)]
