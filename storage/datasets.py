"""Data sets: rows in Parquet shards under one manifest, written and read as a stream."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.manifests import Draft, Manifest, fetch, read
from storage.records import SCHEMA_VERSION, Trajectory, to_table, to_trajectory
from storage.store import StorageError, Store

_BATCH_ROWS = 256


class ShardWriter:
    """Collects rows and adds a Parquet shard to the draft each time `rows_per_shard` are there.

    Memory holds one shard's rows at most. Leaving the context writes the rest.
    """

    def __init__(self, draft: Draft, schema: pa.Schema, rows_per_shard: int) -> None:
        self._draft, self._schema, self._rows_per_shard = draft, schema, rows_per_shard
        self._rows: list[Any] = []
        self._shards = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.flush()

    def write(self, row: Any) -> None:
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered as a shard."""
        if not self._rows:
            return
        name = f"part-{self._shards:05d}.parquet"
        path = self._draft.scratch / name
        write_parquet(to_table(self._rows, self._schema), path)
        self._draft.add(path, name, rows=len(self._rows))
        path.unlink()
        self._shards += 1
        self._rows = []


def write_parquet(table: pa.Table, path: Path) -> None:
    """zstd, dictionary for repeated text, byte streams split for logprobs, page checksums (flipped bits are found)."""
    split = ["logprobs.list.element"] if "logprobs" in table.column_names else []
    dictionary = [_leaf(field) for field in table.schema if field.name not in ("logprobs", "turns")]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,  # type: ignore[arg-type]  # the stubs know only bool
        use_byte_stream_split=split,  # type: ignore[arg-type]
        write_page_checksum=True,
    )


def _leaf(field: "pa.Field[pa.DataType]") -> str:
    """Parquet's name of a column's values."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def shards(store: Store, version: str, cache: Path) -> tuple[Manifest, list[Path]]:
    """The manifest and local, verified Parquet files of a data set version."""
    manifest = read(store, version)
    names = [file.name for file in manifest.files if file.name.endswith(".parquet")]
    return manifest, [fetch(store, manifest, name, cache) for name in names]


def rows(store: Store, version: str, cache: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a data set version as dictionaries, a batch in memory at a time.

    Raises:
        StorageError: missing, damaged, or written by a newer schema.
    """
    _, paths = shards(store, version, cache)
    for path in paths:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            _check_schema(file.schema_arrow, path)
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()


def trajectories(store: Store, version: str, cache: Path) -> Iterator[Trajectory]:
    """The trajectories of a version, streamed."""
    return (to_trajectory(row) for row in rows(store, version, cache))


def write_rows(draft: Draft, schema: pa.Schema, items: Iterable[Any], rows_per_shard: int) -> None:
    """Stream `items` into shards of `draft`."""
    with ShardWriter(draft, schema, rows_per_shard) as writer:
        for item in items:
            writer.write(item)


def _check_schema(schema: pa.Schema, path: Path) -> None:
    found = int((schema.metadata or {}).get(b"schema_version", b"0"))
    if found > SCHEMA_VERSION:
        raise StorageError(f"{path} was written with schema {found}; this code knows {SCHEMA_VERSION}: upgrade")
