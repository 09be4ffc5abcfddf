"""JSONL and Parquet files, local or remote: find the files of a pattern, and read their numbered rows."""

import json
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.problems.lines import explained, lines, open_file
from tasks.problems.problem_set import NoFilesError, PartOfRow, Row, RowError

_ROWS = 64
"""Rows of a Parquet file in memory at once; each may be as large as `longest`."""
_BUFFER = 2**20
"""Bytes of a column read at once."""


def find(path: str) -> list[tuple[str, str]]:
    """Find the files of a pattern; return the name and the path of each, sorted.

    The name is the part of the path from the first folder or file that contains a wildcard. Patterns are those of
    fsspec, with `*`, `[` or `?` (`?` is no wildcard in HTTP URLs); chained URLs (`zip://…::…`) are not expanded. Hidden
    files are skipped, since they may be unfinished. A path without wildcards, or a pattern that is itself the name of a
    file, gives one file with an empty name.

    Raises:
        NoFilesError: no file matches the pattern.
        ProblemError: the folder cannot be listed.
    """
    if not _is_pattern(path):
        return [("", path)]
    with explained(path):
        system, pattern = fsspec.core.url_to_fs(path)
        system.invalidate_cache()  # a process that runs for days must see new files
        matches = system.glob(pattern, detail=True).items()
        matched = sorted(file for file, info in matches if info["type"] != "directory" and not _hidden(file))
        is_file = not matched and system.isfile(pattern)
    if not matched and not is_file:
        raise NoFilesError(f"{path} matches no file: check folder and pattern")
    return [("", path)] if is_file else [_named(path, pattern, file) for file in matched]


def _is_pattern(path: str) -> bool:
    marks = "*[" if path.startswith(("http://", "https://")) else "*?["
    return "::" not in path and any(mark in path for mark in marks)


def _hidden(file: str) -> bool:
    return PurePosixPath(file).name.startswith(".")


def _named(path: str, pattern: str, file: str) -> tuple[str, str]:
    """Return name and path of a file that matches `pattern`, which is `path` without its protocol."""
    fixed = next(index for index, part in enumerate(PurePosixPath(pattern).parts) if _is_pattern(part))
    protocol, mark, _ = path.rpartition("://")
    prefix = "" if "://" in file else protocol + mark
    return "/".join(PurePosixPath(file).parts[fixed:]), prefix + file


def read_jsonl(path: str, longest: int) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the number, from 1, and the row of each line; skip blank lines.

    The file is streamed. A line that is not a JSON object in UTF-8, or longer than `longest` bytes, is a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read, is not a regular file, or has no line ends.
    """
    with open_file(path) as file:
        for line, raw in enumerate(lines(file, longest), 1):
            if isinstance(raw, RowError):
                yield line, raw
            elif raw.strip():
                yield line, _parse(raw)


def read_parquet(path: str, longest: int, columns: Sequence[str]) -> Iterator[tuple[int, Row | RowError]]:
    """Yield the number, from 1, of each row and those `columns` that the file has; read no other column.

    A column may lie inside of another: `reward_model.ground_truth`.

    A row of more than `longest` bytes, or with values that Python cannot represent, such as text that is not UTF-8, is
    a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read, is not a regular file, or is not Parquet.
    """
    with open_file(path, read_ahead=False) as file:  # columns are read in turns, from different places in the file
        line = 0
        opened = pq.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False)  # True reads whole columns of a row group
        names = opened.schema_arrow.names
        there = [column for column in columns if column in names or column.split(".")[0] in names]
        for batch in opened.iter_batches(batch_size=_ROWS, columns=there):
            for row in _batch_rows(batch, longest):
                line += 1
                yield line, row if isinstance(row, RowError) else PartOfRow(row, names)


def _batch_rows(batch: pa.RecordBatch, longest: int) -> Sequence[Row | RowError]:
    try:
        if batch.nbytes <= longest:
            return batch.to_pylist()
    except (ValueError, OverflowError, NotImplementedError):  # does not name the row, so read them one by one
        pass
    return [_row(batch.slice(index, 1), longest) for index in range(batch.num_rows)]


def _row(single: pa.RecordBatch, longest: int) -> Row | RowError:
    if single.nbytes > longest:
        return RowError(f"row of more than {longest / 2**20:g} MB: too long for a problem")
    try:
        row: Row = single.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowError(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, OverflowError, NotImplementedError) as error:  # such as a date out of Python's range
        return RowError(f"a value cannot be read: {error}")
    return row


def _parse(raw: bytes) -> Row | RowError:
    try:
        row = json.loads(raw.rstrip().decode("utf-8-sig"))  # -sig: some editors write a byte order mark
    except UnicodeDecodeError as error:
        return RowError(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return RowError(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, lists a thousand deep
        return RowError(f"JSON that Python refuses: {error}")
    if not isinstance(row, dict):
        return RowError(f"a JSON {type(row).__name__} where an object is needed")
    return row
