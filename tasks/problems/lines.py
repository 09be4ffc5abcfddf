"""Open files (local ones must be regular files) and read their lines. A limit on line length bounds the memory."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from configs.safety import open_regular
from tasks.problems.problem_set import ProblemError, RowError

LONGEST_MB = 16
"""A longer line, or row of a Parquet file, is a bad row; otherwise a file without line ends would fill the memory."""
_HOPELESS = 64
"""A line of more than this many times `longest` is an error: the file is no file of problems. Reading stops there."""
_CHUNK = 2**20


@contextmanager
def open_file(path: str, *, read_ahead: bool = True) -> Iterator[IO[Any]]:
    """Open a local or remote file to read its bytes. A local file must be a regular file.

    Args:
        path: a path or URL of fsspec.
        read_ahead: whether fsspec may fetch more of a remote file than is asked for, which is faster if the file is
            read from start to end.

    Raises:
        ProblemError: the file cannot be opened, or an error occurs within the block.
    """
    with explained(path):
        outermost, local = fsspec.core.url_to_fs(path.rpartition("::")[2])  # in a chained URL the archive, for example
        if isinstance(outermost, LocalFileSystem):
            with open_regular(local) as file:
                if "::" not in path:
                    yield file
                    return
        system, inner = fsspec.core.url_to_fs(path)  # kept: if deleted, an archive's file system closes its files
        with system.open(inner, "rb", **({} if read_ahead else {"cache_type": "none"})) as file:
            yield file


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Raise every error within the block as a ProblemError that names `path`; file systems raise errors of any kind."""
    try:
        yield
    except ProblemError:
        raise
    except Exception as error:
        raise ProblemError(
            f"{path} cannot be read ({type(error).__name__}: {error}): "
            "check path, permissions and kind (jsonl or parquet)"
        ) from error


def lines(file: IO[Any], longest: int) -> Iterator[bytes | RowError]:
    """Yield the lines of `file` without their ends, and a `RowError` for each line of more than `longest` bytes.

    Raises:
        ValueError: a line is so long that the file seems to have no line ends.
    """
    reader = io.BufferedReader(_Raw(file), _CHUNK)
    while line := reader.readline(longest + 2):  # b"\r\n"
        whole = line.endswith(b"\n") or len(line) < longest + 2
        bare = line.removesuffix(b"\n").removesuffix(b"\r")
        if whole and len(bare) <= longest:
            yield bare
            continue
        if not whole:
            _skip_line(reader, longest)
        yield RowError(f"line of more than {longest / 2**20:g} MB: too long for a problem")


def _skip_line(reader: BinaryIO, longest: int) -> None:
    """Read to the end of the line, at most `_HOPELESS` times `longest` bytes."""
    for _ in range(_HOPELESS * max(1, longest // _CHUNK)):
        part = reader.readline(_CHUNK)
        if not part or part.endswith(b"\n"):
            return
    raise ValueError(
        f"a line does not end within {_HOPELESS * longest / 2**20:g} MB: a file of JSON lines has shorter ones"
    )


class _Raw(io.RawIOBase):
    """A file of fsspec, or a local file limited to its present size, since another process may be writing to it."""

    def __init__(self, file: IO[Any]) -> None:
        self._file = file
        self._left = os.fstat(file.fileno()).st_size if isinstance(file, io.BufferedReader) else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer) if self._left is None else min(len(buffer), self._left)
        data = self._file.read(wanted) if wanted else b""
        if self._left is not None:
            self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)
