"""The local cache: a folder that keeps objects of a remote root under their keys, so that each is fetched once."""

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from configs.storage import Storage
from storage import layout
from storage.errors import StorageError
from storage.objects.store import Store

logger = logging.getLogger(__name__)
RECENT_S = 600.0
"""A file that was used within so many seconds may still be in use, so it stays."""


def scratch_of(folder: Path, run: str) -> Path:
    """Make and return the folder of a cache for a run's files before they are stored.

    Raises:
        StorageError: it cannot be created.
    """
    scratch = folder / "scratch" / run
    try:
        scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"storage.cache={str(folder)!r} cannot be used: {error}") from error
    return scratch


def touch(path: Path) -> None:
    """Record that `path` was used now, in its modification time."""
    os.utime(path)


def trim(folder: Path, limit_bytes: int, keep: Iterable[str] = ()) -> int:
    """Delete the files that were unused for longest until at most `limit_bytes` are left.

    Args:
        folder: the cache.
        limit_bytes: how many bytes may stay. Files of the versions in `keep` do not count.
        keep: versions in use; their files stay.

    Returns:
        The number of bytes deleted.
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


def trim_to_limit(store: Store, storage: Storage, keep: Iterable[str] = ()) -> None:
    """Delete from the cache of a remote root what exceeds `storage.cache_gib`, but not the versions in `keep`."""
    if store.is_local:
        return
    try:
        trim(Path(storage.cache), int(storage.cache_gib * 2**30), keep)
    except OSError as error:  # it must not end the stage, whose work is done
        logger.warning("storage.cache=%s was not trimmed to storage.cache_gib: %s", storage.cache, error)


def _files(folder: Path) -> Iterator[tuple[os.stat_result, Path]]:
    for area in layout.AREAS:
        for path in (folder / area).rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # another flow run has deleted it by now
                if path.is_file():
                    yield path.stat(), path
