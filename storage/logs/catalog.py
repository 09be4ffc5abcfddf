"""The catalog: the log of all attempts to commit, in order. Versions are found in it without listing the store.

An attempt is entered before its manifest is created. So each committed version has an entry. If the version of an entry
has no manifest, the attempt was killed or has not finished.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage import layout
from storage.errors import DamagedError, StorageError
from storage.logs.entries import LOST
from storage.logs.log import Log
from storage.objects.store import Store, in_parallel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One attempt to commit a version, or the creation of an alias.

    Example: CatalogEntry(number=7, kind="scores", version="runs/demo/scores/000003/1f0c", parents=["runs/demo/…"])
    """

    number: int
    kind: str  # a manifest's kind, or `alias`
    version: str  # or the alias's name
    parents: list[str]


def enter(store: Store, version: str, kind: str, parents: Sequence[str], attempt: str) -> None:
    """Append an entry; return when it is stored."""
    Log(store, layout.CATALOG).append(values(version, kind, parents, attempt))


def values(version: str, kind: str, parents: Sequence[str], attempt: str) -> dict[str, Any]:
    """Return the stored fields of an entry."""
    return {"kind": kind, "version": version, "parents": list(parents), "attempt": attempt}


def check_not_empty(store: Store) -> None:
    """Refuse a root without any object, because it is more likely mistyped than empty.

    Raises:
        StorageError: there is no object below the root. S3 has no folders, so a mistyped prefix looks the same.
    """
    if not store.exists(Log(store, layout.CATALOG).key(0)) and next(store.walk(), None) is None:
        raise StorageError(
            f"nothing is stored in {store.root}: check the root (--root, storage.root); the first run creates it"
        )


def newest_first(store: Store) -> Iterator[CatalogEntry | StorageError]:
    """Read all entries lazily, newest first. A damaged entry gives the error that names it.

    A deleted entry may go unnoticed here. `storage.maintenance.check_logs` finds damaged and deleted entries.
    """
    log = Log(store, layout.CATALOG)
    entries = (_entry(log, number) for number in range(log.length() - 1, -1, -1))
    return (entry for entry in entries if entry)


def read_undamaged(store: Store) -> tuple[list[CatalogEntry], list[StorageError]]:
    """Read all entries in parallel. Return the undamaged ones, oldest first, and an error for each damaged one.

    A deleted entry may go unnoticed here. `storage.maintenance.check_logs` finds damaged and deleted entries.
    """
    log = Log(store, layout.CATALOG)
    entries = in_parallel(lambda number: _entry(log, number), range(log.length()))
    return [entry for entry in entries if isinstance(entry, CatalogEntry)], [
        entry for entry in entries if isinstance(entry, Exception)
    ]


def read_all(store: Store) -> list[CatalogEntry]:
    """Read all entries, oldest first.

    Raises:
        StorageError: an entry is damaged.
    """
    entries, damaged = read_undamaged(store)
    if damaged:
        raise damaged[0]
    return entries


def _entry(log: Log, number: int) -> CatalogEntry | StorageError | None:
    """Read an entry. Return an error if it is damaged, and None for a placeholder that `repair` put there."""
    try:
        values = log.read(number)
    except (DamagedError, FileNotFoundError) as error:
        return DamagedError(f"the catalog has lost an entry, `python -m storage repair` replaces it: {error}")
    return (
        None if values["kind"] == LOST else CatalogEntry(number, values["kind"], values["version"], values["parents"])
    )
