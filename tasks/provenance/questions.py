"""Answer questions of lineage: `trained_on`, `training_data`, and `affected` for a wrong gold answer.

The data sets say what was played. A checkpoint's manifest says which data sets its update had, and by which rules the
update left trajectories out: status, staleness, unknown return, exclusions. With `ppo.mask_truncated` a trajectory
counts as trained on although all its turns are masked, because its group was compared with it.
"""

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.evaluate import HELD_OUT
from storage import layout
from storage.errors import StorageError
from storage.logs.catalog import CatalogEntry
from storage.objects.store import Store
from storage.version_names import EvaluationVersion, ExclusionsVersion, ProblemsVersion, select
from storage.versions import aliases, manifests
from tasks.problems.arithmetic import generate
from tasks.problems.problem_set import key
from tasks.provenance.answers import (
    Affected,
    AffectedEvaluation,
    AffectedTrajectory,
    FirstTrained,
    ProblemUse,
    ScoredAs,
    TrainedOn,
    TrainedProblem,
    TrainingData,
    Unknown,
)
from tasks.provenance.played_trajectories import PlayedTrajectories, open_played_trajectories
from tasks.provenance.problem_lookup import FoundProblem, find_problem
from tasks.provenance.store_lineage import StoreLineage
from tasks.provenance.updates import ancestry, descended

_READERS = 16


def trained_on(
    store: Store, problem: str, cache: Path, *, run: str | None = None, by_prompt: bool = False
) -> TrainedOn:
    """Find the checkpoints that were trained on a problem, directly or by descent.

    A checkpoint descends from another if its training started from the other's weights: the checkpoint before it in
    its run, or the checkpoint of another run that its run began with.

    Args:
        store: the store of the checkpoints.
        problem: an id or a key, see `tasks.provenance.problem_lookup.find_problem`.
        cache: local folder for objects of a remote root.
        run: consider only trajectories of this run; checkpoints that descend from it may be in other runs.
        by_prompt: `problem` is a part of the prompt.

    Raises:
        ValueError: `problem` means no problem or several, or there is no such run.
        StorageError: the catalog is damaged.
    """
    lineage = StoreLineage(store, cache)
    with lineage.played_trajectories(run) as played:
        found = find_problem(played, problem, by_prompt=by_prompt)
        played.load("a.key = ? and t.prompt = ?", found.key, found.prompt)
        return _trained_on(lineage, played, found, run)


def affected(store: Store, problem: str, cache: Path, *, run: str | None = None, by_prompt: bool = False) -> Affected:
    """Find everything that wrong gold answers of a problem affect. See `trained_on` for arguments and errors."""
    lineage = StoreLineage(store, cache)
    with lineage.played_trajectories(run, scored=True) as played:
        found = find_problem(played, problem, by_prompt=by_prompt)
        played.load("a.key = ? and t.prompt = ?", found.key, found.prompt)
        answer, trajectories, versions = (
            _trained_on(lineage, played, found, run),
            _affected_trajectories(played),
            played.versions_with(found.key),
        )
        scores = {lineage.scores[version] for version in versions if version in lineage.scores}
        unreadable_scores = sorted(scores & played.unknown.keys())
        unknown = [*answer.unknown, *(Unknown(version, played.unknown[version]) for version in unreadable_scores)]
    checkpoints = descended(lineage.updates, _directly_trained(answer.uses))
    return Affected(
        problem=found,
        trajectories=trajectories,
        problem_sets=sorted(select(ProblemsVersion, versions)),
        evaluations=_affected_evaluations(store, lineage.entries, versions),
        uses=answer.uses,
        first=answer.first,
        checkpoints=sorted(checkpoints),
        aliases=_aliases_of(store, checkpoints),
        doubtful=answer.doubtful,
        unknown=unknown,
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
    lineage = StoreLineage(store, cache)
    checkpoints = ancestry(lineage.updates, version)
    updates = [lineage.updates[each] for each in checkpoints if each in lineage.updates]
    data_sets = list(dict.fromkeys(data_set for update in updates for data_set in update.data_sets))
    with open_played_trajectories(store, data_sets, lineage.scores, [], cache) as played:
        played.load()
        lineage.add_updates(played, updates)
        problems, totals = _trained_problems(played, checkpoints), _totals(played)
    lost = {each: "its manifest is missing" for each in checkpoints if each not in lineage.updates}
    damaged = {update.checkpoint: update.problem for update in updates if update.problem}
    return TrainingData(
        checkpoint=version,
        lineage=checkpoints,
        updates=sum(bool(update.data_sets) for update in updates),
        **totals,
        problem_sets=sorted({name for data_set in data_sets for name in lineage.problem_sets_of(data_set)}),
        began=[f"{update.checkpoint}: {update.origin}" for update in updates if update.origin],
        problems=problems,
        unknown=[Unknown(*each) for each in sorted((played.unknown | lost | damaged).items())],
    )


def _trained_on(lineage: StoreLineage, played: PlayedTrajectories, problem: FoundProblem, run: str | None) -> TrainedOn:
    """Answer `trained_on` for the problem whose trajectories are loaded."""
    lineage.add_updates(played, list(lineage.updates.values()))
    uses = [*_uses_in_updates(lineage, played), *_uses_in_warm_starts(lineage, problem, run)]
    uses.sort(key=lambda use: (use.run, use.iteration))
    unreadable = lineage.unreadable_data_sets(played, problem.key)
    suspects = [each.checkpoint for each in lineage.updates.values() if not unreadable.isdisjoint(each.data_sets)]
    trained = descended(lineage.updates, _directly_trained(uses))
    doubtful = descended(lineage.updates, suspects) - trained
    others = [*select(ProblemsVersion, played.unknown), *select(ExclusionsVersion, played.unknown)]
    unknown: dict[str, str] = {version: played.unknown[version] for version in (*unreadable, *others)}
    unknown |= {update.checkpoint: update.problem for update in lineage.updates.values() if update.problem}
    return TrainedOn(
        problem=problem,
        uses=uses,
        first=list(_first_trained(lineage, trained, doubtful)),
        doubtful=sorted(doubtful),
        unknown=[Unknown(*each) for each in sorted(unknown.items())],
    )


def _directly_trained(uses: Iterable[ProblemUse]) -> list[str]:
    return [use.checkpoint for use in uses if use.has_trained]


def _uses_in_updates(lineage: StoreLineage, played: PlayedTrajectories) -> Iterator[ProblemUse]:
    for checkpoint, data_set, episodes, trained in played.database.all(
        "select checkpoint, version, count(*), count(*) filter (entered) from update_inputs group by 1, 2"
    ):
        update = lineage.updates[checkpoint]
        yield ProblemUse(checkpoint, update.run, update.number - 1, "update", data_set, episodes, trained)


def _uses_in_warm_starts(lineage: StoreLineage, problem: FoundProblem, run: str | None) -> Iterator[ProblemUse]:
    """Yield the warm starts whose generator makes the problem."""
    makes_problem: dict[str, bool] = {}
    for update in lineage.updates.values():
        if update.taught and (not run or update.run == run):
            source = update.taught.model_dump_json()
            if source not in makes_problem:
                same_prompt = (each for each in generate(update.taught) if each.prompt == problem.prompt)
                makes_problem[source] = any(key(each) == problem.key for each in same_prompt)
            if makes_problem[source]:
                yield ProblemUse(update.checkpoint, update.run, -1, "warm start", "", 0, 0)


def _first_trained(
    lineage: StoreLineage, trained: Collection[str], doubtful: Collection[str]
) -> Iterator[FirstTrained]:
    """Yield the first of the `trained` checkpoints of each run, in the order of the runs' names."""
    runs: dict[str, list[int]] = {}
    for version in trained:
        runs.setdefault(lineage.updates[version].run, []).append(lineage.updates[version].number)
    for run, numbers in sorted(runs.items()):
        first = min(numbers)
        clean = _newest_clean(lineage, run, first, doubtful)
        yield FirstTrained(run, layout.checkpoint(run, first), len(numbers), clean)


def _newest_clean(lineage: StoreLineage, run: str, number: int, doubtful: Collection[str]) -> str:
    """Return the newest checkpoint of the run before `number` that is readable, not doubtful and not collected."""
    before = [lineage.updates.get(layout.checkpoint(run, each)) for each in range(number - 1, -1, -1)]
    sound = [each.checkpoint for each in before if each and not each.problem and each.checkpoint not in doubtful]
    return next((each for each in sound if not lineage.store.exists(layout.tombstone(each))), "")


def _affected_trajectories(played: PlayedTrajectories) -> list[AffectedTrajectory]:
    rows = played.database.all(
        """select p.trajectory_id, p.version, p.problem_id, p.best,
        coalesce(list(u.checkpoint order by u.checkpoint) filter (u.entered), [])
        from played p left join update_inputs u using (version, trajectory_id)
        group by all order by p.version, p.trajectory_id"""
    )
    return [
        AffectedTrajectory(
            name, version, layout.run_of(version) or "", layout.number_of(version) or 0, problem, _outcome(best), by
        )
        for name, version, problem, best, by in rows
    ]


def _outcome(best: float | None) -> ScoredAs:
    return "unscored" if best is None else "right" if best > 0 else "wrong"


def _affected_evaluations(
    store: Store, entries: Iterable[CatalogEntry], versions: set[str]
) -> list[AffectedEvaluation]:
    """Return the committed evaluations on one of the problem sets in `versions`."""
    attempts = dict[str, AffectedEvaluation]()
    for entry in entries:
        for version in select(EvaluationVersion, [entry.version]):
            for parent in select(ProblemsVersion, versions.intersection(entry.parents)):
                attempts[version] = AffectedEvaluation(version, version.policy, version.set_name or HELD_OUT, parent)
    with ThreadPoolExecutor(_READERS) as readers:
        committed = list(readers.map(lambda version: manifests.committed(store, version), attempts))
    evaluations = (each for each, exists in zip(attempts.values(), committed, strict=True) if exists)
    return sorted(evaluations, key=lambda evaluation: evaluation.version)


def _aliases_of(store: Store, versions: set[str]) -> dict[str, str]:
    """Return the aliases that point at one of `versions`, with the version."""
    current = {name: aliases.current(store, name) for name in aliases.names(store)}
    return {name: move.version for name, move in current.items() if move and move.version in versions}


def _totals(played: PlayedTrajectories) -> dict[str, int]:
    row = played.database.one(
        """select count(*), count(*) filter (entered), coalesce(sum(tokens) filter (entered), 0)::bigint
        from update_inputs"""
    )
    return dict(zip(("trajectories", "trained", "tokens"), row, strict=True))


def _trained_problems(played: PlayedTrajectories, checkpoints: list[str]) -> list[TrainedProblem]:
    """Return a record for each problem; `checkpoints` are nearest first."""
    rows = played.database.all(
        """with steps as (select unnest(?::varchar[]) as checkpoint, generate_subscripts(?::varchar[], 1) as step),
        placed as (
            select u.*, step, split_part(version, '/', 2) || '/' || split_part(version, '/', 4) as place
            from update_inputs u join steps using (checkpoint)
        ), by_problem as (
            select key, count(*) as episodes, count(*) filter (entered) as trained,
                   count(distinct checkpoint) filter (entered) as updates, arg_max(place, step) as first_place,
                   arg_min(place, step) as last_place, min(step) as newest, avg(first) as first_turn,
                   avg(best) as any_turn
            from placed group by key
        ), ids as (select key, min(problem_id) as problem_id from played group by key)
        select b.key, i.problem_id, a.prompt, a.solutions, b.* exclude (key, newest)
        from by_problem b join ids i using (key)
        join (select distinct on (key) key, prompt, solutions from problem_contents order by solutions) a using (key)
        order by b.newest, i.problem_id""",
        checkpoints,
        checkpoints,
    )
    return [TrainedProblem(*row) for row in rows]
