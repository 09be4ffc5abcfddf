"""Data sets: rows in Parquet shards under one manifest, written and read as a stream."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DamagedError
from storage.objects.store import Store
from storage.records import SCHEMA_VERSION, Trajectory, to_table, to_trajectory
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch, fetch_file
from storage.versions.manifests import Manifest, read

_BATCH_ROWS = 256
_FETCHED_AT_ONCE = 4


class ShardWriter:
    """Collects rows and adds a Parquet shard to the draft each time `rows_per_shard` are there.

    Memory holds one shard's rows at most. Leaving the context writes the rest.
    """

    def __init__(self, draft: Draft, schema: pa.Schema, rows_per_shard: int) -> None:
        self._draft, self._schema, self._rows_per_shard = draft, schema, rows_per_shard
        self._rows: list[Any] = []
        self._notes: list[Any] = []
        self._taken = {file.name for file in draft.files}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.flush()

    def write(self, row: Any) -> None:
        self.write_group([row])

    def write_group(self, rows: Iterable[Any], note: Any = None) -> None:
        """Rows that stay in one shard; `note` is kept beside it for those who continue a killed attempt."""
        self._rows += rows
        if note is not None:
            self._notes.append(note)
        if len(self._rows) >= self._rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered as a shard."""
        if not self._rows:
            return
        name = next(name for name in map("part-{:05d}.parquet".format, itertools.count()) if name not in self._taken)
        path = self._draft.scratch / name
        write_parquet(to_table(self._rows, self._schema), path)
        self._draft.add_shard(path, name, len(self._rows), self._notes)
        path.unlink()
        self._taken.add(name)
        self._rows, self._notes = [], []


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
    with ThreadPoolExecutor(_FETCHED_AT_ONCE) as fetching:
        return manifest, list(fetching.map(lambda name: fetch(store, manifest, name, cache), names))


def rows(store: Store, version: str, cache: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of a data set version as dictionaries, a batch in memory at a time.

    Raises:
        StorageError: missing, damaged, or written by a newer schema.
    """
    _, paths = shards(store, version, cache)
    for path in paths:
        yield from read_parquet(path, columns)


def read_parquet(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Rows of one local shard, page checksums verified.

    Raises:
        StorageError: no Parquet, damaged, or written by a newer schema.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_schema(file.schema_arrow, path)
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DamagedError(f"{path} cannot be read as Parquet: {error}") from error


def trajectories(store: Store, version: str, cache: Path) -> Iterator[Trajectory]:
    """The trajectories of a version, streamed."""
    return (to_trajectory(row) for row in rows(store, version, cache))


def adopted(draft: Draft) -> Iterator[Trajectory]:
    """The trajectories in shards that a draft took over, streamed and verified."""
    for file in draft.adopted:
        path = fetch_file(draft.store, file, draft.scratch)
        yield from (to_trajectory(row) for row in read_parquet(path))


def write_rows(draft: Draft, schema: pa.Schema, items: Iterable[Any], rows_per_shard: int) -> None:
    """Stream `items` into shards of `draft`."""
    with ShardWriter(draft, schema, rows_per_shard) as writer:
        for item in items:
            writer.write(item)


def check_schema(schema: pa.Schema, path: Path) -> None:
    """Raises StorageError where the file was written by a newer schema."""
    found = int((schema.metadata or {}).get(b"schema_version", b"0"))
    if found > SCHEMA_VERSION:
        raise DamagedError(f"{path} was written with schema {found}; this code knows {SCHEMA_VERSION}: upgrade")
