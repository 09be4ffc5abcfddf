"""The local folder in which objects of a remote store are kept, under their keys, so that each is fetched once."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from storage import layout

RECENT_S = 600.0
"""What was used so recently may be in use, and stays."""


def touch(path: Path) -> None:
    """Note that `path` was used."""
    os.utime(path)


def trim(folder: Path, limit_bytes: int, keep: Iterable[str] = ()) -> int:
    """Delete what was not used for longest until `limit_bytes` are left; returns the number of bytes deleted.

    Args:
        folder: the cache.
        limit_bytes: what may stay.
        keep: versions in use, which stay.
    """
    held = tuple(f"{folder / version}/" for version in keep)
    files = [(status, path) for status, path in _files(folder) if not str(path).startswith(held)]
    excess = sum(status.st_size for status, _ in files) - limit_bytes
    deleted = 0
    for status, path in sorted(files, key=lambda file: file[0].st_mtime):
        if deleted >= excess or status.st_mtime > time.time() - RECENT_S:
            break
        path.unlink(missing_ok=True)
        deleted += status.st_size
    return deleted


def _files(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    for area in layout.AREAS:
        for path in (folder / area).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # another flow's, gone by now
                if path.is_file():
                    yield path.stat(), path
