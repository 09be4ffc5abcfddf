"""Which stored trajectories each update trains on. The same data sets, seed and knobs give the same plan.

Only the numbers of rows are in memory, not the rows: a million take 24 MB. Groups stay whole. The files of the data
sets are read in a random order, a few at a time, and the groups of these few are mixed.

Example: two data sets with one file each, of 4 and 2 groups of 16 episodes, and 48 episodes for each update: a first
update with three groups, and a second one with the other three.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs import Config
from configs.score import Score as ScoreSettings
from configs.stored import lost
from storage import layout
from storage.errors import first_few
from storage.grouping import grouped
from storage.objects.store import Store, in_parallel
from storage.version_names import ScoresVersion, TrajectoriesVersion
from storage.versions import manifests
from storage.versions.manifests import Manifest
from tasks.inference.location import identities, model_fingerprints
from tasks.registry import own_code
from tasks.score.scorers import identity
from tasks.score.scoring import scorer_fingerprint
from tasks.tables.db import TrajectoryDb, open_tables
from tasks.tables.sets import LACKED, DataSet, Intake, TargetError, fetch_data_sets, select
from tasks.train.algorithms import make_algorithm
from tasks.train.orders import Part
from tasks.train.samples import Ints

_MIXED = 4
"""Number of files whose groups are mixed: an update reads about so many."""


def select_data(store: Store, config: Config) -> list[DataSet]:
    """Return the data sets that `fit.data` names, if the algorithm can be trained on all of them.

    Each has one version of scores: the one in `fit.scores`, else the one by the configuration's scorer.

    Raises:
        ValueError: a name is unknown, a data set lacks what is needed, or another scorer judged it.
        StorageError: the catalog is damaged.
    """
    if not config.fit.data:
        raise TargetError("nothing to train on: name runs or versions of trajectories with --data")
    data_sets = select(store, config.fit.data)
    uses = _uses(config)
    for each in data_sets:
        _check(each, config, uses)
    if not data_sets:
        raise TargetError(f"{first_few(config.fit.data, 5)} have no trajectories yet")
    named = {layout.trajectories(each.run, each.number): each for each in map(ScoresVersion, config.fit.scores)}
    if unknown := named.keys() - {each.version for each in data_sets}:
        raise ValueError(f"fit.scores: {named[min(unknown)]} are scores of nothing in fit.data")
    fingerprint = scorer_fingerprint(config.score, model_fingerprints(config))

    def scored(each: DataSet) -> DataSet:
        chosen = named.get(TrajectoriesVersion(each.version)) or _scores(store, config, each, fingerprint)
        if chosen not in each.scores:
            raise ValueError(f"fit.scores: there are no {chosen}; {each.version} has {', '.join(each.scores)}")
        return replace(each, scores=[chosen])

    return in_parallel(scored, data_sets)


def _uses(config: Config) -> set[str]:
    """Return what of data the algorithm declares to use (`Algorithm.uses`), and the tokens.

    Raises:
        ValueError: a word of its own means nothing.
    """
    uses = {"tokens", *make_algorithm(config.algorithm, config.sampling.max_new_tokens).uses}
    if unknown := sorted(uses - LACKED.keys()):
        declares = f"algorithm.type={config.algorithm.type} declares that it uses {first_few(unknown, 3)}"
        raise ValueError(f"{declares}: give a tuple with words of {', '.join(LACKED)}")
    return uses


def _check(each: DataSet, config: Config, uses: set[str]) -> None:
    """Raise ValueError if a data set lacks what the algorithm needs."""
    temperature = config.sampling.temperature
    if each.problem or each.manifest is None:
        raise ValueError(f"{each.version} cannot be trained on: {each.problem}")
    if lacking := uses.intersection(each.lacks):
        words = ", ".join(LACKED[what] for what in sorted(lacking))
        declared = f"algorithm.type={config.algorithm.type} needs (`uses` in its class says what it reads)"
        raise ValueError(f"{each.version} lacks {words}, which {declared}")
    if each.is_evaluation:
        raise ValueError(f"{each.version} is an evaluation, on which nothing is trained")
    if not each.scores:
        raise ValueError(f"{each.version} has no scores: run `python -m flows.score` for it first")
    if "logprobs" in uses and (sampled := each.manifest.number("sampling.temperature")) != temperature:
        raise ValueError(f"{each.version} was sampled at the temperature {sampled:g}: set sampling.temperature to it")


def _scores(store: Store, config: Config, data_set: DataSet, fingerprint: str) -> str:
    """Return the scores of a data set by the configuration's scorer.

    These are the scores with the scorer's `fingerprint`. Without them, take the last of `DataSet.scores` whose scorer
    differs only in time limits or in versions of libraries.

    Raises:
        ValueError: all scores are by other scorers; the message says how they differ.
    """
    present = layout.scores(data_set.run, data_set.iteration, fingerprint)
    if present in data_set.scores:
        return present
    differing = {version: _differences(manifests.read(store, version), config) for version in data_set.scores}
    if alike := [version for version, lines in differing.items() if not lines]:
        return alike[-1]
    most_alike = min(differing.values(), key=lambda lines: lines[0].startswith("score.type"))
    raise ValueError(
        f"{data_set.version} was scored by another scorer than this configuration's: {', '.join(most_alike)}. Set "
        "that, score it again by `python -m flows.score` with the section `score` of this configuration, or name its "
        "scores in fit.scores"
    )


def _differences(scores: Manifest, config: Config) -> list[str]:
    """Return how the scorer of stored scores differs from the configuration's."""
    was = ScoreSettings.model_validate(scores.knob("score"))
    if was.by_source != config.score.by_source:
        return [f"score.type={was.type}, not {config.score.type}"]
    models = model_fingerprints(config)
    before, now = identity(was, models), identity(config.score, models)
    known = {f"models.{role}": name for role, name in identities(config).items() if role in config.score.models}
    if any(":" in name for name in config.score.by_source.values()):
        known |= own_code(config, ("score",))
    pairs = {f"score.{name}": (before.get(name), now.get(name)) for name in before.keys() | now.keys()}
    pairs |= {name: (scores.code.get(name, digest), digest) for name, digest in known.items()}
    former = [line for line in lost(scores.config) if line.startswith("score.")]
    return [f"{name}={one}, not {other}" for name, (one, other) in sorted(pairs.items()) if one != other] + former


def plan_updates(store: Store, config: Config, data_sets: list[DataSet], cache: Path) -> list[tuple[Part, ...]]:
    """Return the rows of each update.

    Raises:
        ValueError: nothing meets `fit.where`, or it is no SQL.
        StorageError: files are missing or damaged.
        DatabaseError: memory or disk ran out.
    """
    intake = fetch_data_sets(store, data_sets, cache)
    for case in [*intake.damaged, *intake.foreign]:
        raise ValueError(f"{case.data_set} cannot be trained on: {case.detail}")
    for version in intake.collected_scores:
        raise ValueError(f"{version} cannot be trained on: gc has deleted its scores; leave it out")
    files = [path.name for _, path in intake.trajectories]
    with open_tables(data_sets, intake, config.audit.memory_gib) as database:
        of_scores = _score_files(database, [path.name for _, path in intake.scores])
        _choose(database, config.fit.where)
        rows, groups = (database.integers(f"select {name} from chosen order by row") for name in ("row", '"group"'))
    if not len(rows):
        raise ValueError(f"fit.where={config.fit.where!r} chooses none of the trajectories")
    numbers = [number for number, _ in intake.trajectories]  # of each file's data set
    batches = _batches(rows, groups, len(files), config)
    return [_parts(rows[batch], numbers, files, of_scores, data_sets) for batch in batches]


def check_condition(config: Config) -> None:
    """Check that `fit.where` is a condition on the table `episodes`, which is empty here.

    Raises:
        ValueError: it is none.
    """
    with open_tables([], Intake(), config.audit.memory_gib) as database:
        _choose(database, config.fit.where)


def _choose(database: TrajectoryDb, where: str | None) -> None:
    """Create the table `chosen`; from then on the database reads and writes no file, and reaches no network.

    It has for each chosen trajectory its `row` (the file's number, and its place in it), and the number of its group.

    Raises:
        ValueError: the condition is no SQL, more than one expression, or has a query in it.
    """
    import duckdb

    condition = f"where (\n{where}\n)" if where else ""
    try:
        if where:
            duckdb.SQLExpression(where)  # an error unless it is a single one
            if '"class":"SUBQUERY"' in str(database.one("select json_serialize_sql('select ' || ?)", where)):
                remedy = "give a condition on the columns of `episodes`"
                raise ValueError(f"fit.where={where!r} has a query in it: {remedy}")
        database.connection.execute("set enable_external_access = false; set lock_configuration = true")
        database.connection.execute(
            f"""create table chosen as select row,
            dense_rank() over (order by data_set, problem_id) as "group" from episodes {condition} order by row"""
        )
    except duckdb.Error as error:
        raise ValueError(f"fit.where={where!r}: {error}") from None


def _score_files(database: TrajectoryDb, files: Sequence[str]) -> dict[int, list[str]]:
    """Return for each file of trajectories those with their scores."""
    pairs = database.all(
        """select distinct t.row >> 32, s.row >> 32 from scores s
        join (select row, data_set, trajectory_id from episodes) t using (data_set, trajectory_id) order by all"""
    )
    return grouped((file, files[of_scores]) for file, of_scores in pairs)


def _batches(rows: Ints, groups: Ints, files: int, config: Config) -> list[Ints]:
    """Cut the places in `rows` into the updates of all epochs."""
    _, first, size = np.unique(groups, return_index=True, return_counts=True)
    members = np.split(np.argsort(groups, kind="stable"), np.cumsum(size)[:-1])
    batches = list[Ints]()
    for epoch in range(config.fit.epochs):
        draw = np.random.default_rng([config.run.seed % 2**64, epoch])
        turn = draw.permutation(files) // _MIXED
        order = np.lexsort((draw.random(len(first)), turn[rows[first] >> 32]))
        ends = np.cumsum(size[order])
        number = (ends - 1) // config.fit.episodes_per_update  # of the update in which a group ends
        updates = np.split(order, np.flatnonzero(np.diff(number)) + 1)  # where the number changes
        batches += [np.concatenate([members[group] for group in of_update]) for of_update in updates]
    return batches


def _parts(
    rows: Ints, numbers: Sequence[int], files: Sequence[str], of_scores: dict[int, list[str]], data_sets: list[DataSet]
) -> tuple[Part, ...]:
    """Return the parts of an update: one for each data set that it has rows of."""
    places = defaultdict[int, dict[int, list[int]]](dict)
    for file in np.unique(rows >> 32).tolist():
        within = np.sort(rows[rows >> 32 == file] & 0xFFFFFFFF)
        places[numbers[file]][file] = within.tolist()
    return tuple(
        Part(
            trajectories=TrajectoriesVersion(data_sets[number].version),
            scores=ScoresVersion(data_sets[number].scores[-1]),
            rows={files[file]: within for file, within in of_set.items()},
            score_files=sorted({name for file in of_set for name in of_scores.get(file, ())}),
        )
        for number, of_set in sorted(places.items())
    )
