"""Files opened so that reading them ends, and their lines, of which none fills memory."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from configs.regular import open_regular
from tasks.problems.problem_set import ProblemError, RowError

_HOPELESS = 64
"""A line of so many times the longest is no line of a file of problems; what follows it is not looked for."""
_CHUNK = 2**20


@contextmanager
def open_file(path: str, *, read_ahead: bool = True) -> Iterator[IO[Any]]:
    """A file, local or remote, for reading its bytes; of the local ones regular ones only.

    Args:
        path: as fsspec has it.
        read_ahead: whether fsspec may fetch more of a remote file than is asked for, which pays where it is read from
            its beginning to its end.

    Raises:
        ProblemError: it cannot be opened, or, within the block, not be read.
    """
    with explained(path):
        outermost, local = fsspec.core.url_to_fs(path.rpartition("::")[2])  # of a chained URL, such as the archive
        if isinstance(outermost, LocalFileSystem):
            with open_regular(local) as file:
                if "::" not in path:
                    yield file
                    return
        system, inner = fsspec.core.url_to_fs(path)  # held here: that of an archive closes its files when it is deleted
        with system.open(inner, "rb", **({} if read_ahead else {"cache_type": "none"})) as file:
            yield file


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Any error within the block, of whatever kind a file system or a format has, is told as one of `path`."""
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
    """The lines of `file` without their ends; a `RowError` for each of more than `longest` bytes.

    Raises:
        ValueError: a line is so long that the file has none, it seems.
    """
    reader = io.BufferedReader(_Raw(file), _CHUNK)
    while line := reader.readline(longest + 2):  # b"\r\n"
        whole = line.endswith(b"\n") or len(line) < longest + 2
        bare = line.removesuffix(b"\n").removesuffix(b"\r")
        if whole and len(bare) <= longest:
            yield bare
            continue
        if not whole:
            _pass_over(reader, longest)
        yield RowError(f"line of more than {longest / 2**20:g} MB: set max_line_mb if it is whole")


def _pass_over(reader: BinaryIO, longest: int) -> None:
    """Read to the end of the line."""
    for _ in range(_HOPELESS * max(1, longest // _CHUNK)):
        part = reader.readline(_CHUNK)
        if not part or part.endswith(b"\n"):
            return
    raise ValueError(f"a line does not end within {_HOPELESS} times max_line_mb: a file of JSON lines has shorter ones")


class _Raw(io.RawIOBase):
    """A file of fsspec, or a local one up to the size that it has now: somebody may be writing to it."""

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
