"""Load a source of the configuration as a problem set: JSONL or Parquet files, local or remote, or the hub.

Files come from users, so nothing in them may hang or fill this process: local ones must be regular files, and the
length of a line and the size of a row are limited.
"""

import glob
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from configs.problems import FileSource, GuessSource, HubSource, Source, StoredSource
from configs.safety import brief, open_regular
from storage.records import Problem
from tasks.problems.generated import Generated, generate
from tasks.problems.problem_set import NoFilesError, PartOfRow, ProblemError, ProblemSet, Row, RowError, Where, collect
from tasks.problems.rows import COLUMNS, MAPPINGS, PRESETS, columns_of, from_fields

LONGEST_MB = 16
"""A longer line is an error, and a longer row of a Parquet file is a bad row: a file without line ends would fill the
memory."""
_CHUNK = 2**20
"""Bytes of a file, or of a column, that are read at once."""
_ROWS = 64
"""Rows of a Parquet file in memory at once."""

_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b'\x04"M\x18': "lz4"}
_NO_LINES = {b"[": "one JSON array: write its items on lines of their own, such as by jq -c '.[]'"}
_NO_LINES |= {b"PAR1": "Parquet, not JSONL", b"PK": "an archive: unpack it", b"\xfd7z": "an archive: unpack it"}
_NO_LINES |= dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{"), "UTF-16: write it in UTF-8, such as by iconv")
"""First bytes of files, and what they are."""

UseOfSolutions = Literal["needs", "may read", "ignores"]
"""What a scorer does with the solutions of problems."""


def load_problems(
    source: Source, max_bad_share: float, use_of_solutions: Callable[[str], UseOfSolutions] = lambda source: "may read"
) -> ProblemSet:
    """Load the problems of `source`, in its order. Its `count` limits the rows read from all files, including bad rows.

    >>> load_problems(ArithmeticSource(kind="arithmetic", count=1), 0.0).problems[0].prompt
    'What is 11 + 19?'

    Args:
        source: the section of the configuration.
        max_bad_share: from 0 to 1.
        use_of_solutions: of the scorer of a source (`Problem.source`). Where it needs solutions, a row without any is
            bad; where it may read them, if the source has a column for them.

    Raises:
        ProblemError: the source cannot be read, holds no usable problem or too few, or a larger fraction of its rows
            than `max_bad_share` is bad.
    """
    if isinstance(source, GuessSource) and use_of_solutions("") == "needs":
        raise ProblemError("games have no solutions, and their scorer reads them: set score.type=environment")
    if isinstance(source, Generated):
        return ProblemSet(generate(source), bad=[])
    assert not isinstance(source, StoredSource)  # it is read from the store
    name, found = source.name if isinstance(source, HubSource) else source.path, Counter[str]()
    fields = MAPPINGS.get(source.preset or "", source.fields)
    to_problem = from_fields(fields, found, source.preset or "") if fields else PRESETS[source.preset or ""]
    refused = ("needs", "may read") if "solutions" in fields and source.preset != "verifiers" else ("needs",)

    def gradable(row: Row, number: str) -> Problem:
        problem = to_problem(row, number)
        if not problem.solutions and use_of_solutions(problem.source) in refused:
            raise RowError(
                "it has no solutions, and its scorer reads them: name their column (fields.solutions); for problems "
                "without any set another score.type, such as environment"
            )
        return problem

    loaded = collect(islice(_rows(source), source.count), gradable, name, max_bad_share)
    kept = columns_of({"metadata": source.fields.get("metadata", [])})
    if absent := [column for column in kept if not found[column]]:
        raise ProblemError(f"{name}: no row has the column {absent[0]!r}, which fields.metadata names: check its name")
    return loaded


def _rows(source: FileSource | HubSource) -> Iterator[tuple[Where, Row | RowError]]:
    if isinstance(source, HubSource):
        yield from ((Where(line), row) for line, row in _read_hub(source.name, source.subset, source.split))
        return
    columns = COLUMNS.get(source.preset or "") or columns_of(MAPPINGS.get(source.preset or "", source.fields))
    for name, path in find(source.path):
        for line, row in read_jsonl(path) if source.kind == "jsonl" else read_parquet(path, columns):
            yield Where(line, name), row


def find(path: str) -> list[tuple[str, str]]:
    """Find the files of a pattern; return the name and the path of each, sorted.

    The name is the part of the path from the first folder or file that contains a wildcard. Patterns are those of
    fsspec, with `*`, `[` or `?` (`?` is no wildcard in HTTP URLs); chained URLs (`zip://…::…`) are not expanded. Hidden
    files are skipped, since they may be unfinished. A part of the path that is the name of a file or folder there, such
    as `train[1].jsonl`, is no pattern. A path without wildcards gives one file with an empty name.

    Raises:
        NoFilesError: no file matches the pattern.
        ProblemError: the folder cannot be listed.
    """
    if not _is_pattern(path):
        return [("", path)]
    with explained(path):
        system, pattern = fsspec.core.url_to_fs(path)
        system.invalidate_cache()  # a process that runs for days must see new files
        parts = pattern.split("/")
        patterns = (n for n, part in enumerate(parts) if _is_pattern(part))
        wildcards = (n for n in patterns if not system.exists("/".join(parts[: n + 1])))
        if (wild := next(wildcards, len(parts))) == len(parts) and system.isfile(pattern):
            return [("", path)]
        escaped = "/".join([*map(glob.escape, parts[:wild]), *parts[wild:]])
        kinds = {file: info["type"] for file, info in system.glob(escaped, detail=True).items()}
    hidden = {file for file in kinds if PurePosixPath(file).name.startswith(".")}
    if not (matched := sorted(file for file in kinds.keys() - hidden if kinds[file] != "directory")):
        raise NoFilesError(f"{path} matches no file: check folder and pattern")
    protocol, mark, _ = path.rpartition("://")
    fixed = len(PurePosixPath("/".join(parts[:wild])).parts)
    names = ["/".join(PurePosixPath(file).parts[fixed:]) for file in matched]
    paths = [file if "://" in file else protocol + mark + file for file in matched]
    return list(zip(names, paths, strict=True))


def _is_pattern(path: str) -> bool:
    marks = "*[" if path.startswith(("http://", "https://")) else "*?["
    return "::" not in path and any(mark in path for mark in marks)


def read_jsonl(path: str) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the number, from 1, and the row of each line; skip blank lines.

    The file is streamed. It may be packed (gz, zst, bz2, lz4). A line that is not a JSON object in UTF-8,
    or that has a key twice, is a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read, is not a regular file, holds no lines but an array or so, or
            has a line of more than `LONGEST_MB`.
    """
    longest = LONGEST_MB * 2**20
    with open_file(path) as file:
        lines = _unpacked(path, file)
        for line, raw in enumerate(iter(lambda: lines.readline(longest + 2), b""), 1):  # 2: b"\r\n"
            if len(raw.rstrip(b"\r\n")) > longest:
                raise ProblemError(f"{path}: line {line} has more than {LONGEST_MB} MB, too long for a row")
            if raw.strip():
                yield line, _parse(raw)


def _unpacked(path: str, file: Any) -> io.BufferedReader:
    """Return a file as it is unpacked. Raises ProblemError: it holds no lines."""
    lines = _buffered(file)
    if codec := _begins(lines, _PACKED):
        lines = _buffered(pa.CompressedInputStream(lines, codec))
    if what := _begins(lines, _NO_LINES):
        raise ProblemError(f"{path} is {what}")
    return lines


def _buffered(file: Any) -> io.BufferedReader:
    return io.BufferedReader(file, _CHUNK)  # fsspec's files have a `readline` without a bound


def _begins(lines: io.BufferedReader, kinds: dict[bytes, str]) -> Any:
    """Return what of `kinds` the first bytes say; None if nothing."""
    head = lines.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()
    return next((kind for first, kind in kinds.items() if head.startswith(first)), None)


def read_parquet(path: str, columns: Sequence[str] | None = None) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the number, from 1, of each row and those `columns` that the file has; read no other column. None: all.

    A column may lie inside of another: `reward_model.ground_truth`. A row of more than `LONGEST_MB`, or with values
    that Python cannot represent, such as text that is not UTF-8, is a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read, is not a regular file, or is not Parquet.
    """
    with open_file(path) as file:
        opened = pq.ParquetFile(file, buffer_size=_CHUNK, pre_buffer=False)  # True reads whole columns of a row group
        names = opened.schema_arrow.names
        wanted = names if columns is None else columns
        there = [column for column in wanted if column in names or column.split(".")[0] in names]
        batches = opened.iter_batches(batch_size=_ROWS, columns=there)
        singles = (batch.slice(index, 1) for batch in batches for index in range(batch.num_rows))
        yield from enumerate((_row(single, names) for single in singles), 1)  # errors of a batch would name no row


def _row(single: pa.RecordBatch, names: Sequence[str]) -> Row | RowError:
    if single.nbytes > LONGEST_MB * 2**20:
        return RowError(f"row of more than {LONGEST_MB} MB")
    try:
        return PartOfRow(single.to_pylist()[0], names)
    except (ValueError, OverflowError, NotImplementedError) as error:  # such as a date out of Python's range
        return RowError(f"a value cannot be read: {error}")


def _parse(raw: bytes) -> Row | RowError:
    try:
        text = raw.rstrip().decode("utf-8-sig")  # -sig: some editors write a byte order mark
        row = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # also integers of thousands of digits, or lists a thousand deep
        return RowError(f"not JSON: {error}")
    return row if isinstance(row, dict) else RowError(f"a JSON {type(row).__name__} where an object is needed")


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Make the dictionary of a JSON object. Raises ValueError: a key is there twice, and either value may be meant."""
    if len(made := dict(pairs)) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {brief(twice)} is there twice")
    return made


@contextmanager
def open_file(path: str) -> Iterator[IO[Any]]:
    """Open a local or remote file to read its bytes. A local file must be a regular file.

    Raises:
        ProblemError: the file cannot be opened, or an error occurs within the block.
    """
    with explained(path):
        system, inner = fsspec.core.url_to_fs(path)  # kept: if deleted, an archive's file system closes its files
        with open_regular(inner) if isinstance(system, LocalFileSystem) else system.open(inner, "rb") as file:
            yield file


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Raise every error within the block as a ProblemError that names `path`; file systems raise errors of any kind."""
    try:
        yield
    except ProblemError:
        raise
    except Exception as error:
        why, check = f"{type(error).__name__}: {error}", "check path, permissions and kind (jsonl or parquet)"
        raise ProblemError(f"{path} cannot be read ({why}): {check}") from error


def _read_hub(name: str, subset: str | None, split: str) -> Iterator[tuple[int, Row]]:
    """Yield the number, from 1, and the content of each row of a data set on the hub or in a local folder.

    Raises:
        ProblemError: the data set cannot be loaded.
    """
    import datasets  # here, because the import takes seconds and only this source needs it

    try:
        data = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # its own, those of HTTP clients and of file readers, which have no common base
        what, why = f"data set {name!r} (subset {subset!r}, split {split!r})", f"{type(error).__name__}: {error}"
        remedy = "check the three names; without a network, download its files and use kind jsonl or parquet"
        raise ProblemError(f"{what} cannot be loaded ({why}): {remedy}") from error
    yield from enumerate(data, 1)
