"""The catalog: every attempt to commit, in order, so that what exists is found without listing the store.

An attempt is entered before its manifest is created. So each committed version has an entry; an entry whose version
has no manifest is an attempt that died, or has not come to its end.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from storage import layout
from storage.errors import DamagedError, StorageError
from storage.logs.entries import LOST
from storage.logs.log import Log
from storage.objects.store import Store

_READERS = 16


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One attempt.

    Example: CatalogEntry(number=7, kind="scores", version="runs/demo/scores/000003/1f0c", parents=["runs/demo/…"])
    """

    number: int
    kind: str  # a manifest's kind, or `alias`
    version: str  # or the alias's name
    parents: list[str]


def enter(store: Store, version: str, kind: str, parents: Sequence[str], attempt: str) -> None:
    """Add an entry; returns when it stands."""
    Log(store, layout.CATALOG).append(values(version, kind, parents, attempt))


def values(version: str, kind: str, parents: Sequence[str], attempt: str) -> dict[str, Any]:
    """An entry as it is stored."""
    return {"kind": kind, "version": version, "parents": list(parents), "attempt": attempt}


def check_not_empty(store: Store) -> None:
    """Refuse a root without any object, which is more likely mistyped than empty.

    Raises:
        StorageError: there is none. On S3 there are no folders, so an empty prefix is such a place, too.
    """
    if not store.exists(Log(store, layout.CATALOG).key(0)) and next(store.walk(), None) is None:
        raise StorageError(
            f"nothing is stored in {store.root}: check the root (--root, storage.root); a first run makes it"
        )


def newest_first(store: Store) -> Iterator[CatalogEntry | StorageError]:
    """All entries, each read when it is asked for; in place of a damaged one the error that names it.

    One that was deleted may go unnoticed here; `storage.maintenance.check_logs` finds both.
    """
    log = Log(store, layout.CATALOG)
    found = (_entry(log, number) for number in range(log.length() - 1, -1, -1))
    return (entry for entry in found if entry)


def read_undamaged(store: Store) -> tuple[list[CatalogEntry], list[StorageError]]:
    """All entries, oldest first, read many at a time; and of those that are damaged the errors that name them.

    One that was deleted may go unnoticed here; `storage.maintenance.check_logs` finds both.
    """
    log = Log(store, layout.CATALOG)
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda number: _entry(log, number), range(log.length())))
    return [each for each in found if isinstance(each, CatalogEntry)], [
        each for each in found if isinstance(each, Exception)
    ]


def read_all(store: Store) -> list[CatalogEntry]:
    """All entries, oldest first.

    Raises:
        StorageError: one is damaged.
    """
    entries, damaged = read_undamaged(store)
    if damaged:
        raise damaged[0]
    return entries


def _entry(log: Log, number: int) -> CatalogEntry | StorageError | None:
    """None for one that stands where one was damaged."""
    try:
        found = log.read(number)
    except (DamagedError, FileNotFoundError) as error:
        return DamagedError(f"the catalog has lost an entry, `python -m storage repair` makes it whole: {error}")
    return None if found["kind"] == LOST else CatalogEntry(number, found["kind"], found["version"], found["parents"])
