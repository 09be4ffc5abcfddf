"""Who was asked what: trajectories and problem sets of a store as tables of DuckDB, without their tokens.

sets      data_set (number), version, searched (whether a problem is looked for there)
named     key, problem_id, version: under which id a problem stands in a data set or problem set
asked     prompt, solutions, key: each content that was met; `key` is that of `tasks.problems.difference`
plays     one for each trajectory that was loaded: data_set, version, trajectory_id, problem_id, key, status, tokens
          (sampled), cut (the context ended it, nobody knows how many turns before its end), oldest (policy version that
          sampled one of them), first and best: success of its first turn and of its best one, null without scores
used      one for each play and update over its data set: checkpoint, data_set, trajectory_id, key, tokens, first, best,
          entered (whether the update trained on it)

A version that cannot be read is in `Plays.unknown`, with the reason.
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
from tasks.problems.difference import key
from tasks.problems.exclusions import Excluded
from tasks.provenance.updates import Update
from tasks.trajectory_db import TrajectoryDb, open_trajectory_db

_FETCHED_AT_ONCE = 4
_TRAINABLE = "('completed', 'truncated')"


class Plays:
    """What was found; `load` fills `plays`, after it `use` fills `used`."""

    def __init__(self, database: TrajectoryDb, unknown: dict[str, str]) -> None:
        self.database, self.unknown = database, unknown

    def load(self, condition: str = "true", *parameters: Any) -> None:
        """Read the trajectories `t` with contents `a` (columns of `asked`) for which `condition` holds."""
        self.database.connection.execute(
            f"""create or replace table plays as
            with found as (
                select t.data_set, s.version, t.trajectory_id, t.problem_id, a.key, t.status,
                       list_count(list_filter(t.action_mask, lambda m: m))::integer as tokens,
                       coalesce(t.status = 'truncated' and t.reason <> '{LAST_TURN_CUT}', false)
                           and coalesce(t.unplayed_turns, -1) < 0 as cut,
                       list_min(list_filter(t.versions, lambda v: v >= 0)) as oldest
                from trajectories t join asked a using (prompt, solutions) join sets s using (data_set)
                where {condition}
            ), judged as (
                select data_set, trajectory_id, max(success) filter (turn = 0) as first, max(success) as best
                from scores semi join found using (data_set, trajectory_id) group by all
            )
            select f.*, j.first, j.best from found f left join judged j using (data_set, trajectory_id)""",
            parameters,
        )

    def holders(self, key: str) -> set[str]:
        """Data sets and problem sets in which the problem stands."""
        return {version for (version,) in self.database.all("select version from named where key = ?", key)}

    def use(self, updates: Sequence[Update], excluded: Mapping[str, Sequence[Excluded]]) -> None:
        """Say which plays entered which of `updates`; `excluded` is by checkpoint."""
        connection = self.database.connection
        columns = "checkpoint varchar, version varchar, oldest integer, cut_too boolean, idle boolean"
        connection.execute(f"create table updates ({columns})")
        rows = [(u.checkpoint, version, u.oldest, u.cut_too, u.idle) for u in updates for version in u.data_sets]
        self.database.insert("updates", rows)
        connection.execute("create table apart (checkpoint varchar, version varchar, trajectory_id varchar)")
        connection.execute("create table barred (checkpoint varchar, key varchar)")
        for update in updates:
            left_out, name = excluded.get(update.checkpoint, ()), update.checkpoint
            pairs = {pair for each in left_out for pair in each.trajectories if pair[0] in update.data_sets}
            self.database.insert("apart", [(name, *pair) for pair in pairs])
            self.database.insert("barred", [(name, key) for key in {key for each in left_out for key in each.problems}])
        connection.execute(
            f"""create table used as
            select o.checkpoint, p.data_set, p.version, p.trajectory_id, p.key, p.tokens, p.first, p.best,
                   p.status in {_TRAINABLE} and p.tokens > 0 and p.oldest >= o.oldest and not o.idle
                   and (o.cut_too or not p.cut)
                   and a.checkpoint is null and b.checkpoint is null as entered
            from plays p join updates o using (version)
            left join apart a on a.checkpoint = o.checkpoint and a.version = p.version
                and a.trajectory_id = p.trajectory_id
            left join barred b on b.checkpoint = o.checkpoint and b.key = p.key"""
        )


@contextmanager
def open_plays(
    store: Store,
    data_sets: Collection[str],
    scores: Mapping[str, str],
    problem_sets: Collection[str],
    cache: Path,
    searched: Collection[str] | None = None,
) -> Iterator[Plays]:
    """The tables `sets`, `named` and `asked`; all are gone when the block is left.

    Args:
        store: where everything lies.
        data_sets: versions of trajectories; attempts that died are passed over.
        scores: by data set the version that judges it; of others there is no success.
        problem_sets: versions of problem sets.
        cache: local folder for objects of a remote root.
        searched: those of both in which `tasks.provenance.asked` looks for problems; None: all.

    Raises:
        UnavailableError: the store does not answer.
    """
    unknown: dict[str, str] = {}
    judging = {version: scores[version] for version in data_sets if version in scores}
    trajectories = _fetch(store, data_sets, "trajectories", cache, unknown)
    judged = _fetch(store, judging.values(), "scores", cache, unknown)
    asked = _fetch(store, problem_sets, "problems", cache, unknown)
    numbers = {version: number for number, version in enumerate([*data_sets, *problem_sets])}
    judged_sets = {version: judged.get(scored, []) for version, scored in judging.items()}
    with open_trajectory_db(Audit().memory_gib) as database:
        database.connection.execute("create table sets (data_set integer, version varchar, searched boolean)")
        rows = [(number, version, searched is None or version in searched) for version, number in numbers.items()]
        database.insert("sets", rows)
        database.add_view("trajectories", TRAJECTORY_SCHEMA, _numbered(numbers, trajectories))
        database.add_view("scores", SCORE_SCHEMA, _numbered(numbers, judged_sets))
        database.add_view("problems", PROBLEM_SCHEMA, _numbered(numbers, asked))
        _name(database)
        yield Plays(database, unknown)


def _fetch(
    store: Store, versions: Iterable[str], kind: str, cache: Path, unknown: dict[str, str]
) -> dict[str, list[Path]]:
    """Local Parquet files of each version that can be read; of the others the reason goes to `unknown`."""
    wanted = list(dict.fromkeys(versions))
    with ThreadPoolExecutor(_FETCHED_AT_ONCE) as fetching:
        looks = list(fetching.map(lambda version: _look(store, version, kind, cache), wanted))
    unknown |= {version: why for version, (_, why) in zip(wanted, looks, strict=True) if why}
    return {version: paths for version, (paths, why) in zip(wanted, looks, strict=True) if not why}


def _look(store: Store, version: str, kind: str, cache: Path) -> tuple[list[Path], str]:
    """The files, none of an attempt that died; or why they cannot be read."""
    try:
        if not manifests.committed(store, version):
            return [], ""
        if store.exists(layout.tombstone(version)):
            return [], "its data were collected by gc"
        manifest, paths = datasets.shards(store, version, cache)
    except DamagedError as error:
        return [], str(error)
    files = [file for file in manifest.files if file.name.endswith(".parquet")]
    strange = [text for f, path in zip(files, paths, strict=True) for text in contents.parquet(path, kind, f.rows)]
    return paths, "; ".join(strange)


def _numbered(numbers: Mapping[str, int], files: Mapping[str, Sequence[Path]]) -> list[tuple[int, Path]]:
    return [(numbers[version], path) for version, paths in files.items() for path in paths]


def _name(database: TrajectoryDb) -> None:
    """The tables `asked` and `named`."""
    met = "select {columns} from trajectories union select {columns} from problems"
    contents_ = database.all(met.format(columns="prompt, solutions"))
    names = [key(Problem("", prompt, solutions)) for prompt, solutions in contents_]
    columns = {
        "prompt": pa.array([prompt for prompt, _ in contents_], pa.string()),
        "solutions": pa.array([solutions for _, solutions in contents_], pa.list_(pa.string())),
        "key": pa.array(names, pa.string()),
    }
    database.connection.register("contents", pa.table(columns))
    database.connection.execute("create table asked as select * from contents")
    places = met.format(columns="problem_id, prompt, solutions, data_set")
    database.connection.execute(
        f"""create table named as select distinct a.key, m.problem_id, s.version
        from ({places}) m join asked a using (prompt, solutions) join sets s using (data_set)"""
    )
