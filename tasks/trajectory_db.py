"""Parquet files of trajectories, scores and problems as views in DuckDB, for the audit, the reader and provenance.

The database is a temporary file, which bounds memory use; it is removed at the end of the block.
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

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_THREADS = 2


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
        self.connection.execute(f"create table {name}_files (file bigint, data_set integer, filename varchar)")
        self.insert(f"{name}_files", [(file, data_set, str(path)) for file, (data_set, path) in enumerate(files)])
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
    """Open an empty database.

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
            yield TrajectoryDb(connection, folder)
        except duckdb.Error as error:
            raise DatabaseError(
                f"the database of trajectories: {error}. If memory ran out, raise audit.memory_gib. If the disk is "
                f"full, make room in {tempfile.gettempdir()}, or name another folder with TMPDIR"
            ) from error
        finally:
            connection.close()
