"""Stored data sets as tables of DuckDB, for the audit, the reader, provenance and training from stored data.

`open_trajectory_db` has the words of `words.sql`, and views of Parquet files; `open_tables` also the tables of
`tables.sql`. The database is a temporary file, which bounds memory use; it is removed at the end of the block.
"""

import glob
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.processes.folder import TemporaryFolder
from storage.records import SCORE_SCHEMA, TRAJECTORY_SCHEMA
from storage.version_names import PolicyVersion, ProblemsVersion, select
from tasks.tables.sets import DataSet, Intake

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_THREADS = 2
_WORDS, _TABLES = (Path(__file__).with_name(name) for name in ("words.sql", "tables.sql"))


class DatabaseError(RuntimeError):
    """A failed query in DuckDB, or a lack of memory or disk space."""


class TrajectoryDb:
    """A connection, and the folder of its database file; callers may keep other files in this folder.

    The queries of several threads run one after the other.
    """

    def __init__(self, connection: "DuckDBPyConnection", folder: Path) -> None:
        self.connection, self.folder = connection, folder
        self._lock = threading.Lock()

    def all(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._lock:
            return self.connection.execute(query, parameters).fetchall()

    def records(self, query: str, *parameters: Any) -> list[dict[str, Any]]:
        """Return all rows of a query by the names of their columns."""
        with self._lock:
            result = self.connection.execute(query, parameters)
            names = [column[0] for column in result.description]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def integers(self, query: str, *parameters: Any) -> npt.NDArray[np.int64]:
        """Return the only column of a query, perhaps a million numbers."""
        with self._lock:
            (column,) = self.connection.execute(query, parameters).fetchnumpy().values()
        return np.asarray(column, np.int64)

    def one(self, query: str, *parameters: Any) -> tuple[Any, ...]:
        """Return the only row of a query."""
        (row,) = self.all(query, *parameters)
        return row

    def number(self, query: str, *parameters: Any) -> float:
        """Return the only value of a query, 0 for null."""
        return float(self.one(query, *parameters)[0] or 0)

    def count(self, rows: str) -> int:
        """Count the rows of a table or of a subquery in brackets."""
        return int(self.number(f"select count(*) from {rows}"))

    def create(self, table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Create a table with these rows."""
        self.connection.execute(f"create table {table} ({columns})")
        self.insert(table, rows)

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert all rows at once: DuckDB's `executemany` takes a millisecond per row."""
        if rows:
            columns = {f"c{index}": list(values) for index, values in enumerate(zip(*rows, strict=True))}
            self.connection.register("inserted", pa.table(columns))
            self.connection.execute(f"insert into {table} select * from inserted")
            self.connection.unregister("inserted")

    def add_view(self, name: str, schema: pa.Schema, files: Sequence[tuple[int, Path]]) -> None:
        """Create the view `name` of all files, with the columns of `schema` and the columns `data_set` and `row`.

        `data_set` is the number given with the file. `row` is unique to each row, even if ids repeat. Without files
        the view is empty, with the same types. The table `<name>_files` has the columns file, data_set and filename.
        """
        self.connection.register(f"no_{name}", schema.empty_table())
        rows = [(file, data_set, str(path)) for file, (data_set, path) in enumerate(files)]
        self.create(f"{name}_files", "file bigint, data_set integer, filename varchar", rows)
        query = f"select *, null::integer as data_set, null::bigint as row from no_{name}"
        if files:
            # DuckDB takes paths for patterns.
            names = ", ".join("'" + glob.escape(str(path)).replace("'", "''") + "'" for _, path in files)
            query += f""" union all by name
                select p.* exclude (filename, file_row_number), f.data_set, (f.file << 32) + p.file_row_number as row
                from read_parquet([{names}], union_by_name = true, filename = true, file_row_number = true) p
                join {name}_files f using (filename)"""
        if "sequence_starts" in schema.names:  # files of schema 1 have one sequence a row
            query = f"select * replace (coalesce(sequence_starts, [0]) as sequence_starts) from ({query})"
        self.connection.execute(f"create temp view {name} as {query}")


@contextmanager
def open_trajectory_db(memory_gib: float) -> Iterator[TrajectoryDb]:
    """Open a database without tables.

    Args:
        memory_gib: DuckDB writes data beyond this limit to the disk, or fails if it cannot.

    Raises:
        DatabaseError: a query in the block failed, or memory or disk ran out.
    """
    import duckdb

    with TemporaryFolder() as folder:
        connection = duckdb.connect(str(folder / "trajectories.duckdb"))
        try:
            connection.execute(f"set memory_limit = '{memory_gib}GiB'; set temp_directory = '{folder}/spill'")
            connection.execute(f"set threads = {_THREADS}; set preserve_insertion_order = false")
            connection.execute("set enable_progress_bar = false")
            connection.execute(_WORDS.read_text(encoding="utf-8"))
            yield TrajectoryDb(connection, folder)
        except duckdb.Error as error:
            raise DatabaseError(
                f"the database of trajectories: {error}. If memory ran out, raise audit.memory_gib. If the disk is "
                f"full, make room in {tempfile.gettempdir()}, or name another folder with TMPDIR"
            ) from error
        finally:
            connection.close()


@contextmanager
def open_tables(data_sets: Sequence[DataSet], intake: Intake, memory_gib: float) -> Iterator[TrajectoryDb]:
    """Open the tables of `data_sets`, which `tables.sql` describes. They are deleted when the block ends.

    Raises:
        DatabaseError: see `open_trajectory_db`.
    """
    with open_trajectory_db(memory_gib) as database:
        database.add_view("trajectories", TRAJECTORY_SCHEMA, intake.trajectories)
        database.add_view("scores", SCORE_SCHEMA, intake.scores)
        columns = """data_set integer, version varchar, run varchar, iteration integer, evaluation boolean,
            allowed integer, policy varchar, policies varchar[], problem_set varchar, tries varchar,
            scorers map(varchar, varchar)"""
        database.create("data_sets", columns, [])
        if data_sets:  # executemany refuses an empty list
            database.connection.executemany(
                "insert into data_sets values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, map(?::varchar[], ?::varchar[]))",
                [_row(each) for each in data_sets],
            )
        database.connection.execute(_TABLES.read_text(encoding="utf-8"))
        yield database


def _row(data_set: DataSet) -> tuple[Any, ...]:
    manifest, scorer = data_set.manifest, data_set.scorer
    parents = manifest.parent_names if manifest else []
    policies, problem_sets = select(PolicyVersion, parents), select(ProblemsVersion, parents)
    scorers = scorer if isinstance(scorer, dict) else {"default": scorer}  # as in `Score.by_source`
    return (
        *(data_set.number, data_set.version, data_set.run, data_set.iteration, data_set.is_evaluation),
        int(manifest.number("rollout.max_head_offpolicyness")) if manifest else 0,
        *(next(iter(policies), ""), policies, next(iter(problem_sets), ""), data_set.tries),
        *(list(scorers), list(scorers.values())),
    )
