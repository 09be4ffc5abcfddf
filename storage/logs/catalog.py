"""The catalog: the log of all attempts to commit, in order. Versions are found in it without listing the store.

An attempt is entered before its manifest is created. So each committed version has an entry. If the version of an entry
has no manifest, the attempt was killed or has not finished.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from storage import layout
from storage.errors import DamagedError, StorageError
from storage.logs.log import ALIAS, LOST, Log
from storage.objects.store import Store, in_parallel


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One attempt to commit a version. Earlier programs also entered aliases, which readers leave out.

    Example: CatalogEntry(number=7, kind="scores", version="runs/demo/scores/000003/1f0c", parents=["runs/demo/…"])
    """

    number: int
    kind: str  # a manifest's kind
    version: str
    parents: list[str]


def enter(store: Store, version: str, kind: str, parents: Sequence[str], attempt: str) -> None:
    """Append an entry; return when it is stored."""
    Log(store, layout.CATALOG).append({"kind": kind, "version": version, "parents": [*parents], "attempt": attempt})


def check_not_empty(store: Store) -> None:
    """Refuse a root without any object, because it is more likely mistyped than empty.

    Raises:
        StorageError: there is no object below the root. S3 has no folders, so a mistyped prefix looks the same.
    """
    if not store.exists(Log(store, layout.CATALOG).key(0)) and next(store.walk(), None) is None:
        raise StorageError(
            f"nothing is stored in {store.root}: check the root (--root, storage.root); the first run creates it"
        )


def newest_first(store: Store) -> Iterator[CatalogEntry | DamagedError]:
    """Read all entries lazily, newest first. A damaged entry gives the error that names it.

    A deleted entry may go unnoticed here. `storage.maintenance.verify` finds damaged and deleted entries.
    """
    log = Log(store, layout.CATALOG)
    entries = (_entry(log, number) for number in range(log.length() - 1, -1, -1))
    return (entry for entry in entries if entry)


def read_all(store: Store) -> list[CatalogEntry]:
    """Read all entries, oldest first; those that were read from this `store` before are not read again.

    A deleted entry may go unnoticed here. `storage.maintenance.verify` finds damaged and deleted entries.

    Raises:
        StorageError: an entry is damaged.
    """
    log, known = Log(store, layout.CATALOG), store.entries
    length = log.length()
    unread = [number for number in range(length) if number not in known]
    entries = in_parallel(lambda number: _entry(log, number), unread)
    for damaged in (entry for entry in entries if isinstance(entry, DamagedError)):
        raise damaged
    known.update(zip(unread, entries, strict=True))
    return [known[number] for number in range(length) if known[number]]


def _entry(log: Log, number: int) -> CatalogEntry | DamagedError | None:
    """Read an entry. Return an error if it is damaged, and None for an alias or a placeholder of `repair`."""
    try:
        values = log.read(number)
    except (DamagedError, FileNotFoundError) as error:
        return DamagedError(f"the catalog has lost an entry, `python -m storage repair` replaces it: {error}")
    if values["kind"] in (LOST, ALIAS):
        return None
    return CatalogEntry(number, values["kind"], values["version"], values["parents"])
