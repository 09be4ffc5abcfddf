"""Data sets: rows in Parquet shards under one manifest, written and read as a stream."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import DamagedError
from storage.objects.store import Store, in_parallel
from storage.records import SCHEMA_VERSION, Trajectory, to_table, to_trajectory
from storage.versions.drafts import Draft
from storage.versions.fetch import fetch, fetch_file
from storage.versions.manifests import File, Manifest, read

_BATCH_ROWS = 256
_FETCHED_AT_ONCE = 4


class ShardWriter:
    """A writer that collects rows and adds a Parquet shard to the draft each time it has `rows_per_shard` rows.

    It keeps the rows of one shard in memory. Leaving the context writes the remaining rows. Writers of one
    version in several processes need names of their own: another `prefix` each.
    """

    def __init__(self, draft: Draft, schema: pa.Schema, rows_per_shard: int, prefix: str = "part") -> None:
        self._draft, self._schema, self._rows_per_shard = draft, schema, rows_per_shard
        self._names = (f"{prefix}-{number:05d}.parquet" for number in itertools.count())
        self._rows: list[Any] = []
        self._notes: list[Any] = []
        self._taken = {file.name for file in draft.files}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.flush()

    def write(self, row: Any) -> None:
        self.write_group([row])

    def write_group(self, rows: Iterable[Any], note: Any = None) -> None:
        """Write rows that stay in one shard. The journal keeps `note` with the shard, for a continued rollout."""
        self._rows += rows
        if note is not None:
            self._notes.append(note)
        if len(self._rows) >= self._rows_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write the collected rows as a shard."""
        if not self._rows:
            return
        name = next(name for name in self._names if name not in self._taken)
        path = self._draft.scratch / name
        write_parquet(to_table(self._rows, self._schema), path)
        self._draft.add_shard(path, name, len(self._rows), self._notes)
        path.unlink()
        self._rows, self._notes = [], []


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write with zstd, dictionaries for repeated text, split byte streams for logprobs, and checksums of pages.

    The checksums detect flipped bits.
    """
    split = ["logprobs.list.element"] if "logprobs" in table.column_names else []
    dictionary = [
        f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name
        for field in table.schema
        if field.name not in ("logprobs", "turns")
    ]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=1,
        use_dictionary=dictionary,  # type: ignore[arg-type]  # the stubs know only bool
        use_byte_stream_split=split,  # type: ignore[arg-type]
        write_page_checksum=True,
    )


def shards(store: Store, version: str, cache: Path) -> tuple[Manifest, list[Path]]:
    """Read the manifest of a data set version and fetch its Parquet files, verified."""
    manifest = read(store, version)
    names = [file.name for file in manifest.files if file.name.endswith(".parquet")]
    return manifest, in_parallel(lambda name: fetch(store, manifest, name, cache), names, _FETCHED_AT_ONCE)


def rows(store: Store, version: str, cache: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of a data set version as dictionaries, with one batch in memory at a time.

    Raises:
        StorageError: a file is missing, damaged, or written with a newer schema.
    """
    _, paths = shards(store, version, cache)
    for path in paths:
        yield from read_parquet(path, columns)


def rows_at(store: Store, version: str, name: str, places: Sequence[int], cache: Path) -> list[dict[str, Any]]:
    """Read the rows at some places of one file of a data set version; other rows are not made Python objects.

    Raises:
        StorageError: see `rows`.
    """
    with _opened(fetch(store, read(store, version), name, cache)) as file:
        return list(file.read().take(places).to_pylist())


def rows_with(
    store: Store, version: str, name: str, column: str, values: Collection[str], cache: Path
) -> list[dict[str, Any]]:
    """Read the rows of one file of a data set version whose column has one of the values, as `rows_at` does."""
    known = pa.array(values, pa.string())
    with _opened(fetch(store, read(store, version), name, cache)) as file:
        return list(file.read().filter(pc.is_in(pc.field(column), value_set=known)).to_pylist())


def read_parquet(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of one local shard and verify its page checksums.

    Raises:
        DamagedError: the file is not Parquet, damaged, or written with a newer schema.
    """
    with _opened(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            yield from batch.to_pylist()


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a shard. Raises DamagedError as `read_parquet` does, also for what goes wrong in the block."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            check_schema(file.schema_arrow, path)
            yield file
    except (pa.ArrowException, OSError, IndexError) as error:
        raise DamagedError(f"{path} cannot be read as Parquet: {error}") from error


def trajectories(store: Store, version: str, cache: Path) -> Iterator[Trajectory]:
    """Stream the trajectories of a version."""
    return map(to_trajectory, rows(store, version, cache))


def adopted(draft: Draft) -> Iterator[Trajectory]:
    """Stream the trajectories of the shards that a draft took over, verified."""
    return map(to_trajectory, drafted(draft, draft.adopted))


def drafted(draft: Draft, files: Sequence[File] | None = None) -> Iterator[dict[str, Any]]:
    """Read the rows of some shards of a draft; default: of all that it has so far."""
    for file in draft.files if files is None else files:
        yield from read_parquet(fetch_file(draft.store, file, draft.scratch))


def write_rows(draft: Draft, schema: pa.Schema, items: Iterable[Any], rows_per_shard: int) -> None:
    """Stream `items` into shards of `draft`."""
    with ShardWriter(draft, schema, rows_per_shard) as writer:
        for item in items:
            writer.write(item)


def check_schema(schema: pa.Schema, path: Path) -> None:
    """Raise DamagedError if the file was written with a newer schema."""
    if (written := schema_version(schema)) > SCHEMA_VERSION:
        raise DamagedError(f"{path} was written with schema {written}; this code knows {SCHEMA_VERSION}: upgrade")


def schema_version(schema: pa.Schema) -> int:
    return int((schema.metadata or {}).get(b"schema_version", b"0"))
