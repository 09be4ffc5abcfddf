"""Which stored trajectories each update trains on. The same data sets, seed and knobs give the same plan.

Only the numbers of rows are in memory, not the rows: a million take 24 MB. Groups stay whole. The files of the data
sets are read in a random order, a few at a time, and the groups of these few are mixed.

Example: two data sets with one file each, of 4 and 2 groups of 16 episodes, and 48 episodes for each update: a first
update with three groups, and a second one with the other three.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from configs import Config
from configs.algorithms import PPO
from storage import layout
from storage.errors import first_few
from storage.objects.store import Store, in_parallel
from storage.version_names import ScoresVersion, TrajectoriesVersion
from storage.versions import manifests
from storage.versions.manifests import Manifest
from tasks.audit.checks import LACKED
from tasks.audit.data_sets import DataSet, Intake, TargetError, fetch_data_sets, select
from tasks.audit.database import AuditDatabase, open_database
from tasks.inference.location import identities, model_fingerprints
from tasks.own_code import own_code
from tasks.score.scoring import scorer_fingerprint
from tasks.train.orders import Part
from tasks.train.samples import Ints

_MIXED = 4
"""Number of files whose groups are mixed: an update reads about so many."""
_DECISIVE = {"type", "args", "reading", "success", "group"}
"""The knobs of `score` that decide verdicts; limits of time do so only rarely."""


def select_data(store: Store, config: Config) -> list[DataSet]:
    """Return the data sets that `fit.data` names, if the algorithm can be trained on all of them.

    Each has the scores that the configuration's scorer gave it, and no others.

    Raises:
        ValueError: a name is unknown, a data set lacks what is needed, or another scorer judged it.
        StorageError: the catalog is damaged.
    """
    if not config.fit.data:
        raise TargetError("nothing to train on: name runs or versions of trajectories with --data")
    data_sets = select(store, config.fit.data)
    for each in data_sets:
        _check(each, config)
    if not data_sets:
        raise TargetError(f"{first_few(config.fit.data, 5)} have no trajectories yet")
    begun, wanted = manifests.find(store, layout.run(config.run.name)), _scorer_of(config)
    present = scorer_fingerprint(config.score, model_fingerprints(config))

    def scored(each: DataSet) -> DataSet:
        own = _scores(store, each, wanted, begun)
        now = layout.scores(each.run, each.iteration, present)
        return replace(each, scores=[now if now in own else own[-1]])

    return in_parallel(scored, data_sets)


def _check(each: DataSet, config: Config) -> None:
    """Raise ValueError if a data set lacks what the algorithm needs."""
    ratios, temperature = isinstance(config.algorithm, PPO), config.sampling.temperature
    if each.problem or each.manifest is None:
        raise ValueError(f"{each.version} cannot be trained on: {each.problem}")
    if lacking := {"tokens", *(["logprobs"] if ratios else [])}.intersection(each.lacks):
        words = ", ".join(LACKED[what] for what in sorted(lacking))
        raise ValueError(f"{each.version} lacks {words}, which algorithm.type={config.algorithm.type} needs")
    if each.is_evaluation:
        raise ValueError(f"{each.version} is an evaluation, on which nothing is trained")
    if not each.scores:
        raise ValueError(f"{each.version} has no scores: run `python -m flows.score` for it first")
    if ratios and (sampled := each.manifest.number("sampling.temperature")) != temperature:
        raise ValueError(f"{each.version} was sampled at the temperature {sampled:g}: set sampling.temperature to it")


def _scorer_of(config: Config) -> dict[str, Any]:
    """Return what a configuration's scorer is: knobs, files of one's own, and models."""
    knobs = {f"score.{name}": value for name, value in config.score.model_dump(mode="json", include=_DECISIVE).items()}
    models = {f"models.{role}": identity for role, identity in identities(config).items() if role != "teacher"}
    return knobs | own_code(config, ("score",)) | models


def _scores(store: Store, data_set: DataSet, wanted: Mapping[str, Any], begun: Manifest | None) -> list[str]:
    """Return the scores of a data set by the `wanted` scorer, those that readers prefer last.

    Scores that came after the run was `begun` count only where there are no others: a run keeps its plan.

    Raises:
        ValueError: all scores are by other scorers; the message says how they differ.
    """

    def differences(scores: Manifest) -> list[str]:
        pairs = ((name, scores.code.get(name, scores.knob(name)), now) for name, now in wanted.items())
        return [f"{name}={was}, not {now}" for name, was, now in pairs if was is not None and was != now]

    found = [manifests.read(store, version) for version in data_set.scores]
    own = [each for each in found if not differences(each)]
    if not own:
        least = min((differences(each) for each in found), key=len)
        told = ", ".join(least)
        raise ValueError(
            f"{data_set.version} was scored by another scorer than this configuration's: {told}. Set that, or score it "
            "again by `python -m flows.score` with the section `score` of this configuration"
        )
    earlier = [each for each in own if begun and each.created_at <= begun.created_at]
    return [each.version for each in earlier or own]


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
    with open_database(data_sets, intake, config.audit) as database:
        rows, groups = _chosen(database, config.fit.where)
        of_scores = _score_files(database, [path.name for _, path in intake.scores])
    numbers = [number for number, _ in intake.trajectories]  # of each file's data set
    batches = _batches(rows, groups, len(files), config)
    return [_parts(rows[batch], numbers, files, of_scores, data_sets) for batch in batches]


def check_condition(config: Config) -> None:
    """Check that `fit.where` is a condition on the table `episodes`, which is empty here.

    Raises:
        ValueError: it is none.
    """
    with open_database([], Intake(), config.audit) as database:
        _choose(database, config.fit.where)


def _chosen(database: AuditDatabase, where: str | None) -> tuple[Ints, Ints]:
    """Return for each chosen trajectory its `row` (the file's number, and its place in it), and that of its group."""
    _choose(database, where)
    rows, groups = (database.integers(f"select {name} from chosen order by row") for name in ("row", '"group"'))
    if not len(rows):
        raise ValueError(f"fit.where={where!r} chooses none of the trajectories")
    return rows, groups


def _choose(database: AuditDatabase, where: str | None) -> None:
    import duckdb

    condition = f"where (\n{where}\n)" if where else ""
    try:
        database.connection.execute(
            f"""create table chosen as select row,
            dense_rank() over (order by data_set, problem_id) as "group" from episodes {condition} order by row"""
        )
    except duckdb.Error as error:
        raise ValueError(f"fit.where={where!r}: {error}") from None


def _score_files(database: AuditDatabase, files: Sequence[str]) -> dict[int, list[str]]:
    """Return for each file of trajectories those with their scores."""
    pairs = database.all(
        """select distinct t.row >> 32, s.row >> 32 from scores s
        join (select row, data_set, trajectory_id from episodes) t using (data_set, trajectory_id) order by all"""
    )
    found = defaultdict[int, list[str]](list)
    for file, of_scores in pairs:
        found[file].append(files[of_scores])
    return found


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
        batches += [np.concatenate([members[group] for group in of_update]) for of_update in _runs(order, number)]
    return batches


def _runs(values: Ints, keys: Ints) -> list[Ints]:
    """Split `values` where the sorted `keys` change."""
    return np.split(values, np.flatnonzero(np.diff(keys)) + 1)


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
