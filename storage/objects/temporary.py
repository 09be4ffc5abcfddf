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

_PREFIX = "math-mt-ppo_"


class TemporaryFolder:
    """A folder for files of this process. If it is killed, the next process that makes one in this place removes it.

    The process holds a lock on its folder, which the kernel releases at its end.

    Args:
        parent: the place; default: TMPDIR.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(parent)
        self._made, lock = _make(parent)
        self.path = Path(self._made.name)
        self._unlock = weakref.finalize(self, os.close, lock)

    def remove(self) -> None:
        """Remove it with everything in it."""
        self._made.cleanup()
        self._unlock()


def _make(parent: str) -> tuple["tempfile.TemporaryDirectory[str]", int]:
    """Make and lock a folder; another process may remove it before it is locked."""
    while True:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
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
