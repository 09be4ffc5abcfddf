"""The trajectories and problem sets of a store as tables of DuckDB, without tokens, and which update trained on which.

sets              data_set (number), version, searched (whether `find_problem` searches this version)
problem_ids       key, problem_id, version: the id that a problem has in a data set or problem set
problem_contents  prompt, solutions, key (of `tasks.problems.problem_set`): each distinct content
played            one row for each loaded trajectory: data_set, version, trajectory_id, problem_id, key, status, tokens
                  (sampled), fault, cut (the context ended it and the number of missing turns is unknown), oldest
                  (lowest policy version of a sampled token), first and best (success of the first and of the best turn,
                  null without scores)
update_inputs     one row for each loaded trajectory and each update over its data set: checkpoint, data_set, version,
                  trajectory_id, key, tokens, first, best, entered (whether the update trained on it)
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from configs.audit import Audit
from storage import layout
from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import LAST_TURN_CUT, PROBLEM_SCHEMA, SCORE_SCHEMA, TRAJECTORY_SCHEMA, Problem
from storage.versions import contents, datasets, manifests
from tasks.problems.exclusions import Excluded
from tasks.problems.problem_set import key
from tasks.provenance.updates import Update
from tasks.trajectory_db import TrajectoryDb, open_trajectory_db

_FETCHED_AT_ONCE = 4
_ENDED_WELL = "p.status in ('completed', 'truncated')"
_TRAINABLE = f"""case when o.unfinished_too then p.fault <> 'set-up' and
                       ({_ENDED_WELL} or p.status = 'failed' and p.fault = 'policy') else {_ENDED_WELL} end"""
"""The condition of `tasks.train.endings.is_trainable`."""


class PlayedTrajectories:
    """The tables, and why a version cannot be read: `unknown` maps it to the reason.

    Call `load`, which fills the table `played`, then `add_updates`, which fills `update_inputs`.
    """

    def __init__(self, database: TrajectoryDb, unknown: dict[str, str]) -> None:
        self.database, self.unknown = database, unknown

    def load(self, condition: str = "true", *parameters: Any) -> None:
        """Read the trajectories that fulfil `condition`: SQL on `trajectories t` and `problem_contents a`."""
        self.database.connection.execute(
            f"""create or replace table played as
            with found as (
                select t.data_set, s.version, t.trajectory_id, t.problem_id, a.key, t.status,
                       coalesce(t.fault, '') as fault,
                       list_count(list_filter(t.action_mask, lambda m: m))::integer as tokens,
                       coalesce(t.status = 'truncated' and t.reason <> '{LAST_TURN_CUT}', false)
                           and coalesce(t.unplayed_turns, -1) < 0 as cut,
                       list_min(list_filter(t.versions, lambda v: v >= 0)) as oldest
                from trajectories t join problem_contents a using (prompt, solutions) join sets s using (data_set)
                where {condition}
            ), judged as (
                select data_set, trajectory_id, arg_min(success, turn) as first, max(success) as best
                from scores semi join found using (data_set, trajectory_id) where verdict <> 'none' group by all
            )
            select f.*, j.first, j.best from found f left join judged j using (data_set, trajectory_id)""",
            parameters,
        )

    def versions_with(self, key: str) -> set[str]:
        """Return the data sets and problem sets that contain the problem with this key."""
        return {version for (version,) in self.database.all("select version from problem_ids where key = ?", key)}

    def add_updates(self, updates: Sequence[Update], excluded: Mapping[str, Sequence[Excluded]]) -> None:
        """Record which loaded trajectories entered which of `updates`.

        Args:
            updates: each may leave out trajectories by status, fault, age, unknown return or exclusion.
            excluded: maps a checkpoint to the exclusions that its update honoured.
        """
        connection = self.database.connection
        columns = "checkpoint varchar, version varchar, oldest integer, cut_too boolean, unfinished_too boolean"
        connection.execute(f"create table updates ({columns}, idle boolean)")
        rows = [
            (u.checkpoint, version, u.oldest, u.cut_too, u.unfinished_too, u.idle)
            for u in updates
            for version in u.data_sets
        ]
        self.database.insert("updates", rows)
        connection.execute(
            "create table excluded_trajectories (checkpoint varchar, version varchar, trajectory_id varchar)"
        )
        connection.execute("create table excluded_problems (checkpoint varchar, key varchar)")
        for update in updates:
            exclusions, name = excluded.get(update.checkpoint, ()), update.checkpoint
            pairs = {pair for each in exclusions for pair in each.trajectories if pair[0] in update.data_sets}
            keys = {key for each in exclusions for key in each.problems}
            self.database.insert("excluded_trajectories", [(name, *pair) for pair in pairs])
            self.database.insert("excluded_problems", [(name, key) for key in keys])
        connection.execute(
            f"""create table update_inputs as
            select o.checkpoint, p.data_set, p.version, p.trajectory_id, p.key, p.tokens, p.first, p.best,
                   {_TRAINABLE} and p.tokens > 0 and p.oldest >= o.oldest and not o.idle
                   and (o.cut_too or o.unfinished_too or not p.cut)
                   and a.checkpoint is null and b.checkpoint is null as entered
            from played p join updates o using (version)
            left join excluded_trajectories a on a.checkpoint = o.checkpoint and a.version = p.version
                and a.trajectory_id = p.trajectory_id
            left join excluded_problems b on b.checkpoint = o.checkpoint and b.key = p.key"""
        )


@contextmanager
def open_played_trajectories(
    store: Store,
    data_sets: Collection[str],
    scores: Mapping[str, str],
    problem_sets: Collection[str],
    cache: Path,
    searched: Collection[str] | None = None,
) -> Iterator[PlayedTrajectories]:
    """Open the tables `sets`, `problem_ids` and `problem_contents`. They are deleted when the block ends.

    Args:
        store: the store of all versions.
        data_sets: versions of trajectories; attempts that were never committed are ignored.
        scores: maps a data set to its scores. Without scores the success of its trajectories is null.
        problem_sets: versions of problem sets.
        cache: local folder for objects of a remote root.
        searched: the data sets and problem sets in which `find_problem` searches; None: all.

    Raises:
        UnavailableError: the store does not answer.
    """
    unknown: dict[str, str] = {}
    scores_of = {version: scores[version] for version in data_sets if version in scores}
    trajectory_files = _fetch(store, data_sets, "trajectories", cache, unknown)
    score_files = _fetch(store, scores_of.values(), "scores", cache, unknown)
    problem_files = _fetch(store, problem_sets, "problems", cache, unknown)
    numbers = {version: number for number, version in enumerate([*data_sets, *problem_sets])}
    scores_by_data_set = {version: score_files.get(scored, []) for version, scored in scores_of.items()}
    with open_trajectory_db(Audit().memory_gib) as database:
        database.connection.execute("create table sets (data_set integer, version varchar, searched boolean)")
        rows = [(number, version, searched is None or version in searched) for version, number in numbers.items()]
        database.insert("sets", rows)
        database.add_view("trajectories", TRAJECTORY_SCHEMA, _numbered(numbers, trajectory_files))
        database.add_view("scores", SCORE_SCHEMA, _numbered(numbers, scores_by_data_set))
        database.add_view("problems", PROBLEM_SCHEMA, _numbered(numbers, problem_files))
        _create_problem_tables(database)
        yield PlayedTrajectories(database, unknown)


def _fetch(
    store: Store, versions: Iterable[str], kind: str, cache: Path, unknown: dict[str, str]
) -> dict[str, list[Path]]:
    """Return the local Parquet files of each readable version. Add the reason for each other version to `unknown`."""
    distinct = list(dict.fromkeys(versions))
    with ThreadPoolExecutor(_FETCHED_AT_ONCE) as fetching:
        fetched = list(fetching.map(lambda version: _fetch_version(store, version, kind, cache), distinct))
    unknown |= {version: why for version, (_, why) in zip(distinct, fetched, strict=True) if why}
    return {version: paths for version, (paths, why) in zip(distinct, fetched, strict=True) if not why}


def _fetch_version(store: Store, version: str, kind: str, cache: Path) -> tuple[list[Path], str]:
    """Return the local files, or why they cannot be read. An attempt that was never committed has no files."""
    try:
        if not manifests.committed(store, version):
            return [], ""
        if store.exists(layout.tombstone(version)):
            return [], "its data were collected by gc"
        manifest, paths = datasets.shards(store, version, cache)
    except DamagedError as error:
        return [], str(error)
    files = [file for file in manifest.files if file.name.endswith(".parquet")]
    problems = [text for f, path in zip(files, paths, strict=True) for text in contents.parquet(path, kind, f.rows)]
    return paths, "; ".join(problems)


def _numbered(numbers: Mapping[str, int], files: Mapping[str, Sequence[Path]]) -> list[tuple[int, Path]]:
    return [(numbers[version], path) for version, paths in files.items() for path in paths]


def _create_problem_tables(database: TrajectoryDb) -> None:
    """Create the tables `problem_contents` and `problem_ids`."""
    union = "select {columns} from trajectories union select {columns} from problems"
    distinct = database.all(union.format(columns="prompt, solutions"))
    keys = [key(Problem("", prompt, solutions)) for prompt, solutions in distinct]
    columns = {
        "prompt": pa.array([prompt for prompt, _ in distinct], pa.string()),
        "solutions": pa.array([solutions for _, solutions in distinct], pa.list_(pa.string())),
        "key": pa.array(keys, pa.string()),
    }
    database.connection.register("contents", pa.table(columns))
    database.connection.execute("create table problem_contents as select * from contents")
    with_ids = union.format(columns="problem_id, prompt, solutions, data_set")
    database.connection.execute(
        f"""create table problem_ids as select distinct a.key, m.problem_id, s.version
        from ({with_ids}) m join problem_contents a using (prompt, solutions) join sets s using (data_set)"""
    )
