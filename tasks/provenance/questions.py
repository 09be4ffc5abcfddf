"""Questions of lineage: who was trained on a problem, what a checkpoint saw, and what falls with a wrong gold answer.

Trajectories tell what was played; a checkpoint's manifest which of them its update had, and by which rules some were
left out: status, age, exclusions. With `ppo.mask_truncated` a trajectory counts as trained on though all its turns
were masked: its group was compared with it.
"""

from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.schema import HELD_OUT
from storage import layout
from storage.errors import StorageError
from storage.logs.catalog import CatalogEntry
from storage.objects.store import Store
from storage.version_names import EvaluationVersion, ExclusionsVersion, ProblemsVersion, select
from storage.versions import aliases, manifests
from tasks.provenance.answers import (
    Affected,
    AffectedEvaluation,
    AffectedTrajectory,
    FirstTrained,
    ScoredAs,
    TrainedOn,
    TrainedProblem,
    TrainingData,
    Unknown,
    Use,
)
from tasks.provenance.asked import FoundProblem, find_problem
from tasks.provenance.family import Family
from tasks.provenance.plays import Plays, open_plays
from tasks.provenance.updates import ancestry, descended

_READERS = 16


def trained_on(
    store: Store, problem: str, cache: Path, *, run: str | None = None, by_prompt: bool = False
) -> TrainedOn:
    """Which checkpoints were trained on a problem, directly or by descent.

    A checkpoint descends from another where its weights went on from it, within a run and where a run began with the
    checkpoint of another.

    Args:
        store: where they lie.
        problem: an id or a key, see `tasks.provenance.asked.find_problem`.
        cache: local folder for objects of a remote root.
        run: only what this run played; what descends from it may be in others.
        by_prompt: `problem` is a part of the prompt.

    Raises:
        ValueError: no problem, or several are meant; there is no such run.
        StorageError: the catalog is damaged.
    """
    family = Family(store, cache)
    with family.plays(run) as plays:
        asked = find_problem(plays, problem, by_prompt=by_prompt)
        plays.load("a.key = ? and t.prompt = ?", asked.key, asked.prompt)
        return _trained_on(family, plays, asked, run)


def affected(store: Store, problem: str, cache: Path, *, run: str | None = None, by_prompt: bool = False) -> Affected:
    """What falls if the problem's gold answers were wrong; see `trained_on`."""
    family = Family(store, cache)
    with family.plays(run, scored=True) as plays:
        asked = find_problem(plays, problem, by_prompt=by_prompt)
        plays.load("a.key = ? and t.prompt = ?", asked.key, asked.prompt)
        answer, fallen, holders = (
            _trained_on(family, plays, asked, run),
            _affected_trajectories(plays),
            plays.holders(asked.key),
        )
        unscored = {family.scores[version] for version in holders if version in family.scores} & plays.unknown.keys()
        unknown = [*answer.unknown, *(Unknown(version, plays.unknown[version]) for version in sorted(unscored))]
    falling = descended(family.updates, _direct(answer.uses))
    return Affected(
        problem=asked,
        trajectories=fallen,
        problem_sets=sorted(select(ProblemsVersion, holders)),
        evaluations=_affected_evaluations(store, family.entries, holders),
        uses=answer.uses,
        first=answer.first,
        checkpoints=sorted(falling),
        aliases=_pointing(store, falling),
        doubtful=answer.doubtful,
        unknown=unknown,
    )


def training_data(store: Store, checkpoint: str, cache: Path) -> TrainingData:
    """What a checkpoint and all those that its weights go back to were trained on.

    Args:
        store: where it lies.
        checkpoint: a version, a URI in this store, or an alias.
        cache: local folder for objects of a remote root.

    Raises:
        StorageError: there is no such checkpoint, or the catalog is damaged.
    """
    version = aliases.resolve_version(store, checkpoint)
    if (kind := manifests.read(store, version).kind) != "checkpoint":
        raise StorageError(f"{store.uri(version)} is a {kind} version: ask what a checkpoint saw")
    family = Family(store, cache)
    lineage = ancestry(family.updates, version)
    behind = [family.updates[each] for each in lineage if each in family.updates]
    data_sets = list(dict.fromkeys(each for update in behind for each in update.data_sets))
    with open_plays(store, data_sets, family.scores, [], cache) as plays:
        plays.load()
        family.use(plays, behind)
        problems, totals = _trained_problems(plays, lineage), _totals(plays)
    lost = {each: "no manifest stands there" for each in lineage if each not in family.updates}
    damaged = {update.checkpoint: update.problem for update in behind if update.problem}
    return TrainingData(
        checkpoint=version,
        lineage=lineage,
        updates=sum(bool(update.data_sets) for update in behind),
        **totals,
        problem_sets=sorted({each for data_set in data_sets for each in family.problem_sets_of(data_set)}),
        began=[f"{update.checkpoint}: {update.origin}" for update in behind if update.origin],
        problems=problems,
        unknown=[Unknown(*each) for each in sorted((plays.unknown | lost | damaged).items())],
    )


def _trained_on(family: Family, plays: Plays, asked: FoundProblem, run: str | None) -> TrainedOn:
    """The answer about the problem whose plays are loaded."""
    family.use(plays, list(family.updates.values()))
    uses = sorted([*_uses(family, plays), *_taught(family, asked, run)], key=lambda use: (use.run, use.iteration))
    unread = family.unread(plays, asked.key)
    suspects = [update.checkpoint for update in family.updates.values() if not unread.isdisjoint(update.data_sets)]
    falling = descended(family.updates, _direct(uses))
    doubtful = descended(family.updates, suspects) - falling
    elsewhere = [*select(ProblemsVersion, plays.unknown), *select(ExclusionsVersion, plays.unknown)]
    unknown: dict[str, str] = {version: plays.unknown[version] for version in (*unread, *elsewhere)}
    unknown |= {update.checkpoint: update.problem for update in family.updates.values() if update.problem}
    return TrainedOn(
        problem=asked,
        uses=uses,
        first=list(_first(family, falling, doubtful)),
        doubtful=sorted(doubtful),
        unknown=[Unknown(*each) for each in sorted(unknown.items())],
    )


def _direct(uses: Iterable[Use]) -> list[str]:
    return [use.checkpoint for use in uses if use.counts]


def _uses(family: Family, plays: Plays) -> Iterator[Use]:
    for checkpoint, data_set, episodes, trained in plays.database.all(
        "select checkpoint, version, count(*), count(*) filter (entered) from used group by 1, 2"
    ):
        update = family.updates[checkpoint]
        yield Use(checkpoint, update.run, update.number - 1, "update", data_set, episodes, trained)


def _taught(family: Family, asked: FoundProblem, run: str | None) -> Iterator[Use]:
    """Warm starts whose generator makes the problem."""
    from tasks.problems.arithmetic import generate
    from tasks.problems.difference import key

    known: dict[str, bool] = {}
    for update in family.updates.values():
        if update.taught and (not run or update.run == run):
            source = update.taught.model_dump_json()
            if source not in known:
                same = (problem for problem in generate(update.taught) if problem.prompt == asked.prompt)
                known[source] = any(key(problem) == asked.key for problem in same)
            if known[source]:
                yield Use(update.checkpoint, update.run, -1, "warm start", "", 0, 0)


def _first(family: Family, falling: Collection[str], doubtful: Collection[str]) -> Iterator[FirstTrained]:
    """By run."""
    runs: dict[str, list[int]] = {}
    for version in falling:
        runs.setdefault(family.updates[version].run, []).append(family.updates[version].number)
    for run, numbers in sorted(runs.items()):
        first = min(numbers)
        yield FirstTrained(run, layout.checkpoint(run, first), len(numbers), _clean(family, run, first, doubtful))


def _clean(family: Family, run: str, number: int, doubtful: Collection[str]) -> str:
    """The newest checkpoint of the run before `number` that can be gone back to."""
    before = [family.updates.get(layout.checkpoint(run, each)) for each in range(number - 1, -1, -1)]
    sound = [each.checkpoint for each in before if each and not each.problem and each.checkpoint not in doubtful]
    return next((each for each in sound if not family.store.exists(layout.tombstone(each))), "")


def _affected_trajectories(plays: Plays) -> list[AffectedTrajectory]:
    rows = plays.database.all(
        """select p.trajectory_id, p.version, p.problem_id, p.best,
        coalesce(list(u.checkpoint order by u.checkpoint) filter (u.entered), [])
        from plays p left join used u using (version, trajectory_id) group by all order by p.version, p.trajectory_id"""
    )
    return [
        AffectedTrajectory(
            name, version, layout.run_of(version) or "", layout.number_of(version) or 0, problem, _outcome(best), by
        )
        for name, version, problem, best, by in rows
    ]


def _outcome(best: float | None) -> ScoredAs:
    return "unscored" if best is None else "right" if best > 0 else "wrong"


def _affected_evaluations(store: Store, entries: Iterable[CatalogEntry], holders: set[str]) -> list[AffectedEvaluation]:
    """Committed evaluations on one of `holders`."""
    found = dict[str, AffectedEvaluation]()
    for entry in entries:
        for version in select(EvaluationVersion, [entry.version]):
            for parent in select(ProblemsVersion, holders.intersection(entry.parents)):
                found[version] = AffectedEvaluation(version, version.policy, version.set_name or HELD_OUT, parent)
    with ThreadPoolExecutor(_READERS) as readers:
        stands = list(readers.map(lambda version: manifests.committed(store, version), found))
    return sorted((exam for exam, there in zip(found.values(), stands, strict=True) if there), key=lambda e: e.version)


def _pointing(store: Store, versions: set[str]) -> dict[str, str]:
    """Aliases of `versions`."""
    standing = {name: aliases.current(store, name) for name in aliases.names(store)}
    return {name: move.version for name, move in standing.items() if move and move.version in versions}


def _totals(plays: Plays) -> dict[str, int]:
    row = plays.database.one(
        """select count(*), count(*) filter (entered), coalesce(sum(tokens) filter (entered), 0)::bigint from used"""
    )
    return dict(zip(("trajectories", "trained", "tokens"), row, strict=True))


def _trained_problems(plays: Plays, lineage: list[str]) -> list[TrainedProblem]:
    rows = plays.database.all(
        """with steps as (select unnest(?::varchar[]) as checkpoint, generate_subscripts(?::varchar[], 1) as step),
        placed as (
            select u.*, step, split_part(version, '/', 2) || '/' || split_part(version, '/', 4) as place
            from used u join steps using (checkpoint)
        ), by_problem as (
            select key, count(*) as episodes, count(*) filter (entered) as trained,
                   count(distinct checkpoint) filter (entered) as updates, arg_max(place, step) as first_place,
                   arg_min(place, step) as last_place, min(step) as newest, avg(first) as first_turn,
                   avg(best) as any_turn
            from placed group by key
        ), ids as (select key, min(problem_id) as problem_id from plays group by key)
        select b.key, i.problem_id, a.prompt, a.solutions, b.* exclude (key, newest)
        from by_problem b join ids i using (key)
        join (select distinct on (key) key, prompt, solutions from asked order by solutions) a using (key)
        order by b.newest, i.problem_id""",
        lineage,
        lineage,
    )
    return [TrainedProblem(*row) for row in rows]
