"""The curriculum: how often a run draws each problem, by the results of the runs before it.

The results are histories: one version for each run counts how many episodes of each problem were right in each
iteration. They are made from trajectories and scores, and outlive these.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import get_args

from configs.problems import ProblemSampling
from storage import layout
from storage.logs.catalog import CatalogEntry
from storage.logs.log import first_free
from storage.objects.store import Store
from storage.records import HISTORY_SCHEMA, CurriculumEntry, Problem, ProblemHistory, Standing
from storage.versions import datasets, manifests
from storage.versions.drafts import Draft, Provenance
from storage.versions.lineage import trained_on
from tasks.problems.problem_set import Row, key, setting
from tasks.tables.words import any_turn, first_turn, graded

LEAST_EPISODES = 16
"""A problem with fewer episodes has no known success rate yet; it is drawn like a problem of the middle."""
LAST_EPISODES = 64
"""The success rate of a problem counts about so many of its newest episodes."""
FLOOR = 0.05
"""The least weight of a problem that is not left out. No problem is lost for ever, because the policy changes."""

_ROWS_PER_SHARD = 50_000
_EPISODE = ["trajectory_id", "problem_id", "sample", "status", "fault"]  # files before schema 5 have no fault
_TRAJECTORY_COLUMNS = [*_EPISODE, "run", "iteration", "prompt", "solutions", "metadata", "policy_version"]
_SCORE_COLUMNS = ["trajectory_id", "turn", "verdict", "success"]
_OF_PROBLEM = ("problem_id", "prompt", "solutions", "run", "iteration", "policy_version")


def plan_curriculum(
    problems: Sequence[Problem], history: Sequence[ProblemHistory], settings: ProblemSampling, keys: Sequence[str] = ()
) -> list[CurriculumEntry]:
    """Compute standing and weight of each problem, in their order.

    The success rate p is over about the newest `LAST_EPISODES` episodes: whole rows of the history, the newest first,
    until there are enough. With `prefer: middle` the weight is 4 p (1 - p), which is the variance of a success divided
    by its maximum, and at least `FLOOR`. A problem with too few episodes has weight 1, like p = 1/2. With
    `prefer: all` the weight is 1. A problem that is left out has weight 0.

    Args:
        problems: the problems that the run may draw.
        history: the history of the runs before it, oldest first; problems are matched by content, not by id.
        settings: `problems.sampling`.
        keys: of the problems, if they come from a history, which has no settings; empty: they are computed.

    Raises:
        ValueError: every problem would be left out.
    """
    counts: dict[str, tuple[int, int]] = {}  # episodes, and those with any turn right
    for row in reversed(history):
        episodes, solved = counts.get(row.problem_key, (0, 0))
        if episodes < LAST_EPISODES:
            counts[row.problem_key] = (episodes + row.episodes, solved + row.any_turn)
    entries = []
    for problem, content in zip(problems, keys or map(key, problems), strict=True):
        episodes, solved = counts.get(content, (0, 0))
        rate = solved / episodes if episodes else 0.0
        standing, weight = _standing(episodes, rate, settings)
        entries.append(CurriculumEntry(problem.problem_id, content, episodes, rate, standing, weight))
    if entries and not any(entry.weight for entry in entries):
        remedy = "Set problems.sampling.leave_out_suspects=false, or add problems"
        raise ValueError(f"problems.sampling leaves out all {len(entries)} problems: none was ever solved. {remedy}")
    return entries


def _standing(episodes: int, rate: float, settings: ProblemSampling) -> tuple[Standing, float]:
    """Return the standing and the weight of a problem."""
    if episodes < LEAST_EPISODES:
        return "unknown", 1.0
    if settings.retire_at is not None and rate >= settings.retire_at:
        return "retired", FLOOR
    weight = 1.0 if settings.prefer == "all" else max(FLOOR, 4 * rate * (1 - rate))
    if rate == 0:
        return "suspect", 0.0 if settings.leave_out_suspects else weight
    return "middle", weight


def standing_rows(rows: Sequence[CurriculumEntry]) -> list[dict[str, str]]:
    """Make a table: for each standing the numbers of problems and episodes, and the mean success rate of a problem."""
    table = []
    for standing in get_args(Standing):
        counted = [row for row in rows if row.standing == standing]
        rates, episodes = [row.success_rate for row in counted if row.episodes], sum(row.episodes for row in counted)
        row = {"standing": standing, "problems": str(len(counted)), "episodes": str(episodes)}
        table.append(row | {"mean rate": f"{fmean(rates):.3f}" if rates else ""})
    return table


def suspect_rows(rows: Iterable[CurriculumEntry], problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Make a table of the problems that were never solved, those with the most episodes first.

    Their gold answers may be wrong. Prompts are on one line. `problems` are those of the rows, in their order.
    """
    unsolved = [(row, problem) for row, problem in zip(rows, problems, strict=True) if row.standing == "suspect"]
    table = []
    for row, problem in sorted(unsolved, key=lambda pair: (-pair[0].episodes, pair[0].problem_id)):
        shown = {"problem": row.problem_id, "prompt": " ".join(problem.prompt.split())}
        table.append(shown | {"gold answers": "; ".join(problem.solutions), "episodes": str(row.episodes)})
    return table


def summarise_run(trajectories: Iterable[Row], scores: Iterable[Row]) -> list[ProblemHistory]:
    """Count the successes of one iteration by problem, ordered by key.

    Rejected and truncated episodes were played, so they count, and so do those that failed by the policy's own fault.
    Other failed episodes are not counted. An episode may have several trajectories, with the same problem and sample:
    they count once, as right if any of them is right. Problems with the same content count as one.

    Args:
        trajectories: rows of a trajectory data set.
        scores: rows of its scores.

    Raises:
        ValueError: a turn has two scores.
    """
    successes = {name: [score["success"] for score in of_row] for name, of_row in graded(scores).items()}
    played: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in trajectories:
        if row["status"] != "failed" or row.get("fault") == "policy":
            problem = Problem("", row["prompt"], row["solutions"], metadata=row.get("metadata", "{}"))
            row = {**row, "metadata": setting(problem) or "{}"}  # hidden tests of all episodes would fill the memory
            played[row["problem_id"], row["sample"]].append(row)
    counted: dict[str, ProblemHistory] = {}
    for episode in sorted(played):
        row, of_rows = played[episode][0], [successes.get(each["trajectory_id"], []) for each in played[episode]]
        content = key(Problem(row["problem_id"], row["prompt"], row["solutions"], metadata=row["metadata"]))
        about = {name: row[name] for name in _OF_PROBLEM}
        found = counted.get(content) or ProblemHistory(content, **about, episodes=0, first_turn=0, any_turn=0)
        first, solved = found.first_turn + any(map(first_turn, of_rows)), found.any_turn + any(map(any_turn, of_rows))
        counted[content] = replace(found, episodes=found.episodes + 1, first_turn=first, any_turn=solved)
    return [counted[content] for content in sorted(counted)]


def commit_history(store: Store, run: str, cache: Path, provenance: Provenance, entries: Iterable[CatalogEntry]) -> str:
    """Commit a run's history over all its iterations, unless it exists; return its version.

    Rows of an older history of the run are copied, so only later iterations are read, and iterations stay in the
    history after gc has deleted their data. Iterations whose data gc deleted before they were counted are left out, and
    counted in the metrics as `collected`.

    Args:
        store: the store of the run.
        run: its name; it is one of `all_runs`.
        cache: keeps objects of a remote root.
        provenance: who writes the history.
        entries: the entries of the catalog, in which older histories are found.

    Raises:
        StorageError: a version of the run is damaged.
    """
    iterations = first_free(lambda number: manifests.committed(store, layout.checkpoint(run, number + 1)))
    version = layout.history(run, iterations)
    if manifests.committed(store, version):
        return version
    histories = sorted({e.version for e in entries if e.kind == "history" and layout.run_of(e.version) == run})
    before = [older for older in histories if older < version and manifests.committed(store, older)][-1:]
    rows, begin, collected = read_history(store, before, cache), 0, 0
    for older in before:
        begin, collected = layout.number_of(older) or 0, manifests.read(store, older).metrics["collected"]
    for iteration in range(begin, iterations):
        trajectories, scores = trained_on(store, run, iteration)
        if any(store.exists(layout.tombstone(each)) for each in (trajectories, scores)):
            collected += 1
            continue
        played = datasets.rows(store, trajectories, cache, _TRAJECTORY_COLUMNS)
        rows += summarise_run(played, datasets.rows(store, scores, cache, _SCORE_COLUMNS))
    metrics = {"iterations": iterations, "collected": collected, "problems": len({row.problem_key for row in rows})}
    metrics["episodes"] = sum(row.episodes for row in rows)
    with Draft(store, version, "history") as draft:
        datasets.write_rows(draft, HISTORY_SCHEMA, rows, _ROWS_PER_SHARD)
        draft.commit(provenance, [layout.checkpoint(run, iterations), *before], metrics)
    return version


def all_runs(store: Store, entries: Iterable[CatalogEntry]) -> list[str]:
    """List the runs with an update on episodes of their own, ordered by the newest ones in the catalog, oldest first.

    Runs of `flows.fit` trained on those of other runs, and have played nothing.
    """
    newest: dict[str, int] = {}
    for entry in entries:
        run, number = layout.run_of(entry.version), layout.number_of(entry.version)
        if entry.kind == "checkpoint" and run and number and layout.trajectories(run, number - 1) in entry.parents:
            newest[run] = entry.number
    runs = sorted(newest, key=newest.__getitem__)
    return [run for run in runs if manifests.committed(store, layout.checkpoint(run, 1))]


def read_history(store: Store, versions: Sequence[str], cache: Path) -> list[ProblemHistory]:
    """Read histories, one version for each run: rows in the order of `versions`, and by time within each version.

    Raises:
        StorageError: a version is missing, damaged, or written by a newer schema.
    """
    return [ProblemHistory(**row) for version in versions for row in datasets.rows(store, version, cache)]
