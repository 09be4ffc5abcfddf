"""Folders for files of this process, which no other user may enter."""

import contextlib
import fcntl
import functools
import os
import tempfile
import weakref
from pathlib import Path

from storage.processes import reaper

_LONGEST_PARENT = 40
"""Most bytes of the path in which a folder for sockets is made: of the 107 of a socket's path our name takes 20, and
vLLM's 37."""


class TemporaryFolder:
    """A new folder with mode 0700, which is removed at the end of this process at the latest; `with` gives its path.

    If the process is killed, the next one that makes a folder in the same parent removes it. The process holds a lock
    on it for this purpose, which the kernel releases.

    Args:
        parent: the folder in which it is made; default: TMPDIR.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(parent)
        self.path, self._folder = _make(parent)
        self._remove = weakref.finalize(self, _remove, self.path, self._folder)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def empty(self) -> None:
        """Delete everything in it."""
        reaper.empty(self._folder)

    def remove(self) -> None:
        """Remove it with everything in it."""
        self._remove()


def parents() -> list[str]:
    """Return the folders in which ours are made, the best first."""
    return list(dict.fromkeys(filter(None, (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"))))


def for_sockets() -> str:
    """Return the parent for a folder with sockets, whose paths must be short."""
    for parent in parents():
        if len(os.fsencode(parent)) <= _LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise OSError(
        f"no folder for sockets: set TMPDIR to a writable folder with a path of at most {_LONGEST_PARENT} bytes"
    )


@functools.cache  # which keeps the folder
def keep_compiled_code_private() -> TemporaryFolder | None:
    """Choose the folder that torch makes when transformers is imported, and loads compiled code from: before that.

    The default is a fixed name in TMPDIR, which another user may have made before. Without a home of the user's own, it
    is a folder of this process.
    """
    home = os.path.expanduser("~")
    own = os.access(home, os.W_OK) and os.stat(home).st_uid == os.geteuid()
    made = None if own or "TORCHINDUCTOR_CACHE_DIR" in os.environ else TemporaryFolder()
    place = str(made.path) if made else f"{home}/.cache/math-mt-ppo/torchinductor"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", place)
    return made


_remove_abandoned = functools.cache(reaper.remove_abandoned)  # once in this process


def _make(parent: str) -> tuple[Path, int]:
    """Make and lock a folder; another process may remove it before it is locked."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=reaper.PREFIX, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # a file system without locks: nobody else can lock it, either
                fcntl.flock(folder, fcntl.LOCK_EX)
            if path.exists():
                return path, folder
            os.close(folder)


def _remove(path: Path, folder: int) -> None:
    reaper.remove(path, folder)
    os.close(folder)
