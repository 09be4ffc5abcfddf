"""Temporary folders that do not stay for ever if their process is killed."""

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "math-mt-ppo-draft-"


class TemporaryFolder:
    """A folder for files of this process. If it is killed, the next process that makes one here removes it.

    The process holds a lock on its folder, which the kernel releases at its end.
    """

    def __init__(self) -> None:
        _remove_abandoned(tempfile.gettempdir())
        self._made, lock = _make()
        self.path = Path(self._made.name)
        self._unlock = weakref.finalize(self, os.close, lock)

    def remove(self) -> None:
        """Remove it with everything in it."""
        self._made.cleanup()
        self._unlock()


def _make() -> tuple["tempfile.TemporaryDirectory[str]", int]:
    """Make and lock a folder; another process may remove it before it is locked."""
    while True:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(made.name, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody else can lock it, either
                fcntl.flock(lock, fcntl.LOCK_EX)
            if Path(made.name).exists():
                return made, lock
            os.close(lock)


@functools.cache
def _remove_abandoned(parent: str) -> None:
    """Remove the folders of killed processes, once in this process."""
    for path in Path(parent).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path):  # another user's, or one in use
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)
