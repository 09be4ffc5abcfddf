"""Answers questions of provenance: `impact` of a problem, `training_data` of a checkpoint, and what to exclude: a
problem with all its trajectories, or trajectories by their ids.

The answers are plain records, which the commands print as JSON. In `unknown` each has the versions that cannot be read
any more and may matter, such as {"runs/demo/trajectories/000003": "its data were collected by gc"}. A problem is named
by an id, a key or a part of the prompt. Ids may be row numbers, which different sets give to different problems. So two
problems are the same if their content is the same.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.evaluate import HELD_OUT
from configs.safety import check_plain
from storage import layout
from storage.errors import DamagedError, StorageError, counted, first_few
from storage.grouping import grouped
from storage.objects.store import Store
from storage.records import Exclusion
from storage.version_names import EvaluationVersion, ExclusionsVersion, ProblemsVersion, TrajectoriesVersion, select
from storage.versions import aliases, manifests
from storage.visible import visible
from tasks.provenance.index import WARM_START, TrainingIndex

_MOST_CANDIDATES = 10
_MOST_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class FoundProblem:
    """A problem, identified by its content, with all ids that it has.

    Example: FoundProblem(key="9f3a…", problem_ids=["12+7"], prompt="What is 12 + 7?", solutions=["19"])
    """

    key: str  # see tasks.problems.problem_set
    problem_ids: list[str]
    prompt: str
    solutions: list[str]


@dataclass(frozen=True, slots=True)
class Impact:
    """The checkpoints that a problem trained, directly or by descent, and what else its gold answers decided.

    A checkpoint descends from another if its training started from the other's weights: the checkpoint before it in
    its run, or the checkpoint of another run that its run began with.
    """

    problem: FoundProblem
    uses: list[dict[str, Any]]  # updates over data sets with the problem: checkpoint, run, iteration, data_set;
    # episodes: its trajectories there; trained: how many of them entered the update
    first: list[dict[str, Any]]  # the first of `checkpoints` in each run: run, checkpoint; checkpoints: their number in
    # the run; clean: the newest earlier checkpoint that is certainly free of the problem and not collected, or empty
    checkpoints: list[str]  # all that were trained on it, or descend from one that was
    doubtful: list[str]  # other checkpoints whose training may have had the problem, because of `unknown` versions
    aliases: dict[str, str]  # those that point at one of `checkpoints`, with the version
    trajectories: list[dict[str, Any]]  # trajectory_id, data_set, run, iteration, problem_id; outcome by its scores:
    # right, wrong or unscored; trained: checkpoints whose update it entered
    problem_sets: list[str]  # all that contain the problem
    evaluations: list[dict[str, str]]  # on sets that contain it: version, policy, name of the set, problem_set
    unknown: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training data of a checkpoint and of all checkpoints it descends from."""

    checkpoint: str
    lineage: list[str]  # the checkpoint and those it descends from, nearest first
    updates: int  # in `lineage`; the numbers below do not include data sets in `unknown`
    trajectories: int
    trained: int  # trajectories that entered an update
    tokens: int  # sampled tokens of the trajectories that entered an update
    problem_sets: list[str]
    began: list[str]  # where the first checkpoints of `lineage` came from
    problems: list[dict[str, Any]]  # the most recently played first: key, problem_id (one of its ids), prompt,
    # solutions, episodes, trained (those that entered an update), updates (with one or more of them), first and last
    # (run and iteration in which it was played)
    unknown: dict[str, str]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Rows for `tasks.problems.exclusions.commit_exclusions`."""

    rows: list[Exclusion]  # 1 or more
    problem: FoundProblem | None  # the problem that is excluded as a whole
    trained: list[str]  # checkpoints that were trained on any of the rows; they stay unchanged
    unknown: dict[str, str]  # data sets that cannot be read, so that rows of them may be missing, with the reason


def impact(store: Store, problem: str, cache: Path) -> Impact:
    """Find everything that depends on a problem.

    Args:
        store: the store of the checkpoints.
        problem: an id or a key, see `find_problem`.
        cache: local folder for objects of a remote root.

    Raises:
        ValueError: `problem` means no problem or several.
        StorageError: the catalog is damaged.
    """
    index = TrainingIndex(store, cache)
    with index.opened():
        found = find_problem(index, problem)
        index.load(None, "a.key = ? and t.prompt = ?", found.key, found.prompt)
        versions = index.versions_with(found.key)
        uses, trajectories = index.records("uses"), index.records("trajectories")
        unreadable = index.unreadable_data_sets(found.key)
    taught = {each.checkpoint for each in index.updates.values() if each.origin == WARM_START}
    suspects = [each.checkpoint for each in index.updates.values() if not unreadable.isdisjoint(each.data_sets)]
    trained = index.descended(use["checkpoint"] for use in uses if use["trained"])
    doubtful = index.descended([*suspects, *taught]) - trained
    scores = {index.scores[version] for version in versions if version in index.scores}
    others = {*select(ProblemsVersion, index.unknown), *select(ExclusionsVersion, index.unknown)}
    unknown = {version: why for version, why in index.unknown.items() if version in unreadable | others | scores}
    unknown |= {update.checkpoint: update.problem for update in index.updates.values() if update.problem}
    unknown |= dict.fromkeys(taught, "an older program taught it generated problems")
    current = {name: aliases.current(store, name) for name in aliases.names(store)}
    return Impact(
        problem=found,
        uses=uses,
        first=list(_first_trained(index, trained, doubtful)),
        checkpoints=sorted(trained),
        doubtful=sorted(doubtful),
        aliases={name: move.version for name, move in current.items() if move and move.version in trained},
        trajectories=trajectories,
        problem_sets=sorted(select(ProblemsVersion, versions)),
        evaluations=_evaluations(index, versions),
        unknown=dict(sorted(unknown.items())),
    )


def training_data(store: Store, checkpoint: str, cache: Path) -> TrainingData:
    """Find what a checkpoint and all checkpoints it descends from were trained on.

    Args:
        store: the store of the checkpoint.
        checkpoint: a version, a URI in this store, or an alias.
        cache: local folder for objects of a remote root.

    Raises:
        StorageError: there is no such checkpoint, or the catalog is damaged.
    """
    version = aliases.resolve_version(store, checkpoint)
    if (kind := manifests.read(store, version).kind) != "checkpoint":
        raise StorageError(f"{store.uri(version)} is a {kind} version, not a checkpoint: name a checkpoint")
    index = TrainingIndex(store, cache)
    checkpoints = index.ancestry(version)
    updates = [index.updates[each] for each in checkpoints if each in index.updates]
    data_sets = list(dict.fromkeys(data_set for update in updates for data_set in update.data_sets))
    with index.opened(data_sets):
        index.load(updates)
        problems = index.records("trained_problems", checkpoints, checkpoints)
        totals = "count(*), count(*) filter (entered), coalesce(sum(tokens) filter (entered), 0)::bigint"
        trajectories, trained, tokens = index.database.one(f"select {totals} from update_inputs")
    lost = {each: "its manifest is missing" for each in checkpoints if each not in index.updates}
    damaged = {update.checkpoint: update.problem for update in updates if update.problem}
    return TrainingData(
        checkpoint=version,
        lineage=checkpoints,
        updates=sum(bool(update.data_sets) for update in updates),
        trajectories=trajectories,
        trained=trained,
        tokens=tokens,
        problem_sets=sorted({name for data_set in data_sets for name in index.problem_sets_of(data_set)}),
        began=[f"{update.checkpoint}: {update.origin}" for update in updates if update.origin],
        problems=problems,
        unknown=dict(sorted((index.unknown | lost | damaged).items())),
    )


def _first_trained(
    index: TrainingIndex, trained: Collection[str], doubtful: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield the first of the `trained` checkpoints of each run, in the order of the runs' names.

    `clean` is the newest checkpoint before it that is readable, not doubtful and not collected.
    """
    runs = grouped((each.run, each.number) for each in (index.updates[version].checkpoint for version in trained))
    for run, numbers in sorted(runs.items()):
        before = (index.updates.get(layout.checkpoint(run, each)) for each in range(min(numbers) - 1, -1, -1))
        sound = (each.checkpoint for each in before if each and not each.problem and each.checkpoint not in doubtful)
        clean = next((each for each in sound if not index.store.exists(layout.tombstone(each))), "")
        first = layout.checkpoint(run, min(numbers))
        yield {"run": run, "checkpoint": first, "checkpoints": len(numbers), "clean": clean}


def _evaluations(index: TrainingIndex, versions: set[str]) -> list[dict[str, str]]:
    """Return the committed evaluations on one of the problem sets in `versions`."""
    found = {
        version: {"version": version, "policy": version.policy, "name": version.set_name or HELD_OUT, "problem_set": of}
        for entry in index.entries
        for version in select(EvaluationVersion, [entry.version])
        for of in select(ProblemsVersion, versions.intersection(entry.parents))
    }
    return [found[version] for version in sorted(found) if manifests.committed(index.store, version)]


def results(store: Store, cache: Path, leave_out: str, most: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Count how often policies solved each problem, for the curriculum.

    Episodes of runs with a checkpoint count, but not those of imports, of data sets without scores, or of what gc
    collected. Those that failed count only if the policy is at fault. An episode with several trajectories is solved if
    any of them is.

    Args:
        store: the store of the data sets.
        cache: local folder for objects of a remote root.
        leave_out: the name of a run whose episodes do not count; they are not read.
        most: whole iterations count, newest first, until they have so many episodes of the problem.

    Returns:
        by the problem's key the episodes and how many of them were right in any turn; and the newest checkpoint of each
        run that counts.

    Raises:
        DamagedError: trajectories or scores that count cannot be read.
    """
    index = TrainingIndex(store, cache)
    others = {update.checkpoint.run for update in index.updates.values()} - {leave_out}
    with index.opened([each for each in index.data_sets if layout.run_of(each) in others]):
        for version, why in index.unknown.items():
            if not store.exists(layout.tombstone(version)):
                raise DamagedError(f"{store.uri(version)} cannot be read: {why}")
        index.load([])
        rows = index.records("results", most)
        runs = index.database.all("select distinct split_part(version, '/', 2) from played order by 1")
    newest = {run: max(each for each in index.updates if layout.run_of(each) == run) for (run,) in runs}
    counts = {row["key"]: (row["episodes"], row["solved"]) for row in rows}
    return counts, [*newest.values()]


def find_problem(index: TrainingIndex, text: str) -> FoundProblem:
    """Return the one problem that `text` means: a key, an id or a whole prompt.

    Raises:
        ValueError: `text` means no problem, or several (the message lists them), or cannot be stored.
    """
    check_plain({"PROBLEM": text})
    for reading in ("key = ?", "problem_id = ?", "prompt = ?"):
        query = f"""select key, list(distinct problem_id order by problem_id), min(prompt), min(solutions)
            from problem_ids join problem_contents using (key)
            where key in (select key from problem_ids join problem_contents using (key) where {reading})
            group by key order by 3, key"""
        if len(rows := index.database.all(query, text)) > 1:
            lines = [
                f"  {name}  {visible(', '.join(ids[:3]))}: {visible(' '.join(prompt.split()), _MOST_CHARACTERS)} -> "
                f"{visible('; '.join(solutions), _MOST_CHARACTERS)}"
                for name, ids, prompt, solutions in rows[:_MOST_CANDIDATES]
            ]
            means = f"{text!r} means {len(rows)} different problems: give the key of one"
            raise ValueError("\n".join([means, *lines]))
        if rows:
            return FoundProblem(*rows[0])
    count = int(index.database.number("select count(distinct key) from problem_ids"))
    raise ValueError(f"none of the {count} known problems has {text!r} as id, key or prompt")


def propose_problem(store: Store, problem: str, cache: Path, reason: str) -> Proposal:
    """Propose to exclude a whole problem, and list its trajectories.

    Args:
        store: the store of the data sets.
        problem: an id or a key, see `find_problem`.
        cache: local folder for objects of a remote root.
        reason: why the problem is excluded, for later readers.

    Raises:
        ValueError: `problem` means no problem or several, or the reason is empty or cannot be stored.
    """
    _check(reason)
    index = TrainingIndex(store, cache)
    with index.opened():
        found = find_problem(index, problem)
        index.load(None, "a.key = ? and t.prompt = ?", found.key, found.prompt)
        rows, trained = _excluded(index, reason, whole=True)
        unknown = {version: index.unknown[version] for version in sorted(index.unreadable_data_sets(found.key))}
    unplayed = Exclusion("", "", "", -1, found.problem_ids[0], found.key, whole_problem=True, reason=reason)
    return Proposal(rows or [unplayed], found, trained, unknown)


def propose_ids(store: Store, ids: Sequence[str], cache: Path, reason: str) -> Proposal:
    """Propose to exclude trajectories by their ids. Other trajectories of the same problems stay in training.

    Raises:
        ValueError: no id is given, an id belongs to no trajectory that was played for training, or for the reasons of
            `propose_problem`.
    """
    _check(reason)
    distinct_ids = list(dict.fromkeys(ids))
    if not distinct_ids:
        raise ValueError("no ids are given: give one id in each line")
    index = TrainingIndex(store, cache)
    with index.opened():
        index.load(None, "t.trajectory_id in (select unnest(?::varchar[]))", distinct_ids)
        rows, trained = _excluded(index, reason, whole=False)
    unreadable = select(TrajectoriesVersion, index.unknown)
    found = {row.trajectory_id for row in rows}
    if missing := [name for name in distinct_ids if name not in found]:
        lost = f"; these are collected or cannot be read: {first_few(sorted(unreadable))}"
        raise ValueError(
            f"{store.root} has no trajectories that were played for training with {counted(len(missing), 'id')}: "
            f"{visible(first_few(missing))}{lost if unreadable else ''}. Remove these ids; "
            "evaluations are never trained on"
        )
    return Proposal(rows, None, trained, {})


def _check(reason: str) -> None:
    if not reason.strip():
        raise ValueError("no reason is given: say why the rows are excluded, for later readers")
    check_plain({"reason": reason})


def _excluded(index: TrainingIndex, reason: str, *, whole: bool) -> tuple[list[Exclusion], list[str]]:
    """Return a row for each loaded trajectory, and the checkpoints that were trained on any of them."""
    query = """select distinct trajectory_id, version, split_part(version, '/', 2),
        split_part(version, '/', 4)::integer, problem_id, key, ?::boolean, ?::varchar
        from played order by version, trajectory_id"""
    rows = [Exclusion(*row) for row in index.database.all(query, whole, reason)]
    trained = index.database.all("select distinct checkpoint from update_inputs where entered order by 1")
    return rows, [checkpoint for (checkpoint,) in trained]
