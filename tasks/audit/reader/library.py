"""Read the reader's data: lists of trajectories that match a filter, and single trajectories with their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from storage.records import Trajectory, to_trajectory
from storage.versions.datasets import check_schema
from tasks.audit.database import AuditDatabase
from tasks.audit.reader.filters import Filter
from tasks.audit.reader.query import ORDERS, where

Rows = npt.NDArray[np.int64]

NOTHING: Rows = np.zeros(0, np.int64)
_ALL = Filter()
_LONGEST_ID = 1000
_CACHED_LISTS = 4  # results of filters, 8 bytes for each trajectory

_TABLES = (
    """create table prompts as
    select row_number() over () as number, prompt as text from (select distinct prompt from trajectories)""",
    # One row for each line of the list; `place` is the default order.
    """create table listing as
    with answers as (
        select row, list(coalesce(verdict, environment_verdict) order by turn) as verdicts,
               max(coalesce(scored_reward, reward)) as reward, arg_max(left(text, 400), turn) as answer
        from turns group by row
    )
    select row_number() over (order by e.data_set, e.problem_id, e.sample, e.row) as place, e.row, e.data_set, e.run,
           e.iteration, e.trajectory_id, e.problem_id, e.sample, e.status, e.turns, e.calls, e.sampled as tokens,
           t.latency_s as latency, s.reward, s.verdicts, s.answer, p.number as prompt,
           count(*) over (partition by e.trajectory_id) > 1 as doubled
    from episodes e join (select row, latency_s, prompt from trajectories) t using (row)
    left join prompts p on p.text = t.prompt left join answers s using (row)
    order by place""",
)


class SharedDatabase(AuditDatabase):
    """A database that many threads may use; it runs their queries one after the other."""

    def __init__(self, database: AuditDatabase) -> None:
        super().__init__(database.connection, database.folder)
        self._lock = Lock()

    def all(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock:
            return super().all(query, *parameters)

    def rows(self, query: str, *parameters: Any) -> Rows:
        """Return the column `row` of a query."""
        with self._lock:
            column = self.connection.execute(query, parameters).fetchnumpy()["row"]
        return np.asarray(column, np.int64)


@dataclass(frozen=True, slots=True)
class ListItem:
    """A line of the list."""

    row: int
    trajectory_id: str
    doubled: bool  # another row has the same id
    version: str
    iteration: int
    problem_id: str
    sample: int
    status: str
    turns: int
    calls: int
    tokens: int  # sampled
    reward: float | None  # of its best turn: from the score, or from the environment without a score
    verdicts: list[str] | None  # of its turns, from the same source
    answer: str | None  # the beginning of the last turn

    def address(self, wanted: Filter = _ALL, **more: str | int) -> str:
        """Return the query of an address for this trajectory and the list in which it was found.

        It has the id, which stays valid after a restart. If the id is not unique, or empty or too long for an address,
        it has the row number.
        """
        fits = 0 < len(self.trajectory_id) < _LONGEST_ID
        names: dict[str, str | int] = {"id": self.trajectory_id} if fits else {}
        if self.doubled or not fits:
            names["row"] = self.row
        return urlencode({**names, **wanted.chosen(), **more})


class Library:
    """The lists and trajectories of one database; creates its tables `listing` and `prompts`.

    Args:
        database: the tables of the data sets.
        cases: Parquet file with an audit's cases; None without an audit.
    """

    def __init__(self, database: AuditDatabase, cases: Path | None = None) -> None:
        self.database = SharedDatabase(database)
        for statement in _TABLES:
            self.database.all(statement)
        if cases:
            columns = "check_name, unit, id, data_set, detail"
            self.database.all(f"insert into cases select {columns} from read_parquet(?)", str(cases))
        self._files = dict(self.database.all("select file, filename from trajectories_files"))
        self.find = lru_cache(_CACHED_LISTS)(self._find)
        self.calls = int(self.database.number("select count(*) from calls"))
        self.most_turns = int(self.database.number("select max(turns) from episodes"))

    def _find(self, wanted: Filter) -> Rows:
        """Return the row numbers of all trajectories that match `wanted`, in its order."""
        condition, parameters = where(wanted)
        query = f"select row from listing where {condition} order by {ORDERS[wanted.order]}"
        return self.database.rows(query, *parameters)

    def count(self, wanted: Filter) -> int:
        """Count the trajectories that match `wanted`, without caching them."""
        condition, parameters = where(wanted)
        return int(self.database.number(f"select count(*) from listing where {condition}", *parameters))

    def entries(self, rows: Sequence[int]) -> list[ListItem]:
        """Return the lines of the list for `rows`, in the same order."""
        found = self.database.all(
            """select row, trajectory_id, doubled, version, l.iteration, problem_id, sample, status, turns, calls,
            tokens, reward, verdicts, answer
            from listing l join data_sets using (data_set) where list_contains(?, row)""",
            list(rows),
        )
        by_row = {columns[0]: ListItem(*columns) for columns in found}
        return [by_row[row] for row in rows if row in by_row]

    def rows_with_id(self, trajectory_id: str) -> list[int]:
        """Return the row numbers of the trajectories with this id: normally one, but none or several are possible."""
        found = self.database.all("select row from listing where trajectory_id = ? order by place", trajectory_id)
        return [row for (row,) in found]

    def group(self, data_set: str, problem_id: str) -> list[int]:
        """Return the row numbers of a group's episodes, by sample."""
        query = """select row from listing join data_sets using (data_set)
            where version = ? and problem_id = ? order by place"""
        return [row for (row,) in self.database.all(query, data_set, problem_id)]

    def trajectories(self, rows: Sequence[int]) -> list[Trajectory]:
        """Read whole trajectories with their tokens, in the order of `rows`.

        Raises:
            StorageError, OSError, ArrowException: a file is missing or damaged since the reader started.
        """
        found: dict[int, Trajectory] = {}
        for file in dict.fromkeys(row >> 32 for row in rows):
            found |= _read(Path(self._files[file]), [row for row in rows if row >> 32 == file])
        return [found[row] for row in rows]


def _read(path: Path, rows: Sequence[int]) -> dict[int, Trajectory]:
    """Read these rows of one file; only they become Python objects."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        check_schema(file.schema_arrow, path)
        chosen = file.read().take([row & 0xFFFFFFFF for row in rows]).to_pylist()
    return {row: to_trajectory(values) for row, values in zip(rows, chosen, strict=True)}
