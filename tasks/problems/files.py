"""Numbered rows of JSONL and Parquet files, local or remote."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.problems.problem_set import ProblemError, Row, RowError


def read_jsonl(path: str) -> Iterator[tuple[int, Row | RowError]]:
    """Line number, from 1, and row of each line; blank lines are passed over.

    The file is streamed. A line that is not a JSON object in UTF-8 is a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read.
    """
    with _open(path) as file:
        for line, raw in enumerate(file, 1):
            if raw.strip():
                yield line, _parse(raw)


def read_parquet(path: str) -> Iterator[tuple[int, Row | RowError]]:
    """Row number, from 1, and row of each row; text that is not UTF-8 is a `RowError`.

    Raises:
        ProblemError: the file cannot be opened or read, or is not Parquet.
    """
    with _open(path) as file:
        line = 0
        for batch in pq.ParquetFile(file).iter_batches():
            for row in _batch_rows(batch):
                line += 1
                yield line, row


def _batch_rows(batch: pa.RecordBatch) -> Sequence[Row | RowError]:
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:  # does not say which row: look at each by itself
        return [_row(batch.slice(index, 1)) for index in range(batch.num_rows)]


def _row(single: pa.RecordBatch) -> Row | RowError:
    try:
        row: Row = single.to_pylist()[0]
    except UnicodeDecodeError as error:
        return RowError(f"text is not UTF-8: {error.reason} at byte {error.start}")
    return row


def _parse(raw: bytes) -> Row | RowError:
    try:
        row = json.loads(raw.rstrip().decode("utf-8-sig"))  # -sig: some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        return RowError(f"text is not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return RowError(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, lists a thousand deep
        return RowError(f"JSON that Python refuses: {error}")
    if not isinstance(row, dict):
        return RowError(f"a JSON {type(row).__name__} where an object is needed")
    return row


@contextmanager
def _open(path: str) -> Iterator[IO[Any]]:
    try:
        with fsspec.open(path, "rb") as file:
            yield file
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: a protocol that fsspec does not know
        raise ProblemError(
            f"{path} cannot be read ({type(error).__name__}: {error}): "
            "check path, permissions and kind (jsonl or parquet)"
        ) from error
