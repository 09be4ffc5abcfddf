"""Aliases: names that point at versions and can be moved, such as `champion`, `demo/latest` or the user's own names.

An alias is a numbered log. Each entry (a move) names the version that the alias points at from then on. So moving an
alias is a compare-and-swap, and its history is kept. Aliases are found by listing their folder.
"""

import os
from dataclasses import dataclass
from datetime import UTC, datetime

from storage import layout
from storage.errors import AliasMovedError, DamagedError, StorageError, counted
from storage.logs.log import Log
from storage.objects.store import Store
from storage.versions.manifests import as_parent, committed, refuse_collected


@dataclass(frozen=True, slots=True)
class Move:
    """One entry of an alias's history.

    Example: Move(number=2, version="runs/demo/checkpoints/000100", sha256="9a…", reason="", by="ada", at="2026-…")
    """

    number: int
    version: str
    sha256: str  # of the version's manifest
    reason: str
    by: str
    at: str


def current(store: Store, name: str, at_least: int = 0) -> Move | None:
    """Read the newest move of `name`; None if there is no such alias. The caller knows of `at_least` so many moves.

    Raises:
        DamagedError: the newest move is damaged.
    """
    log = _log(store, name)
    newest = log.length(at_least) - 1
    try:
        return _read(log, newest) if newest >= 0 else None
    except DamagedError as error:
        raise DamagedError(f"the newest move of alias {name!r} cannot be read: {error}; {remedy(name)}") from error


def remedy(name: str) -> str:
    """Return the remedy for an alias whose newest move is lost or damaged."""
    return f"`python -m storage alias set {name} VERSION` points it somewhere again"


def moves(store: Store, name: str) -> int:
    """Return the number of moves of `name`, damaged ones included."""
    return _log(store, name).length()


def history(store: Store, name: str) -> list[Move]:
    """Read all moves of `name`, oldest first."""
    log = _log(store, name)
    return [_read(log, number) for number in range(log.length())]


def move(store: Store, name: str, version: str, expected: int | None, reason: str = "", by: str = "") -> Move:
    """Point `name` at `version` if its newest move is number `expected` (None: there is no such alias yet).

    Raises:
        AliasMovedError: another writer has moved the alias.
        StorageError: `version` does not exist or was collected by gc, or `name` is not a valid alias name.
    """
    log, target = _log(store, name), as_parent(store, version)
    number, at = 0 if expected is None else expected + 1, datetime.now(UTC).isoformat(timespec="seconds")
    by = by or os.environ.get("USER") or os.environ.get("LOGNAME") or f"user {os.getuid()}"
    entry = {"version": target.version, "sha256": target.sha256, "reason": reason, "by": by, "at": at}
    refuse_collected(store, version)
    if log.length() != number or not log.put(number, entry):
        raise AliasMovedError(
            f"alias {name!r} was moved by another writer: `python -m storage alias history {name}` says where it points"
        )
    refuse_collected(store, version)  # again: gc first marks what it collects and then reads the aliases
    return Move(number, **entry)


def advance(store: Store, name: str, version: str, by: str = "") -> None:
    """Point `name` at `version` unless it already points there or at a later version of the same kind and run."""
    series = layout.series_of(version)
    while (newest := current(store, name)) is None or (
        layout.series_of(newest.version) != series or newest.version < version
    ):
        try:
            move(store, name, version, newest.number if newest else None, "newest of its run", by)
        except AliasMovedError:
            continue


def roll_back(store: Store, name: str, to: int | None = None, reason: str = "") -> Move:
    """Point `name` where it pointed before its newest move, or where it pointed after its move `to`.

    A rollback is a new move, so the history keeps everything.

    Raises:
        StorageError: there is no such alias or move, or the version is gone.
    """
    log = _log(store, name)
    moves = log.length()
    number = moves - 2 if to is None else to
    if not 0 <= number < moves:
        raise StorageError(
            f"alias {name!r} has {counted(moves, 'move')} in its history: there is no such move to go back to"
        )
    target = _read(log, number)
    return move(store, name, target.version, moves - 1, reason or f"roll back to move {target.number}")


def names(store: Store) -> dict[str, int]:
    """Find all aliases and their numbers of moves by listing, even if a log lost entries."""
    moves: dict[str, int] = {}
    for item in store.walk(layout.alias("").rstrip("/")):
        if (entry := layout.entry_of(item.path)) and (name := name_of(entry[0])):
            moves[name] = max(moves.get(name, 0), entry[1] + 1)
    return dict(sorted(moves.items()))


def newest(store: Store) -> dict[str, Move]:
    """Read the newest move of each alias. Raises DamagedError as `current` does."""
    found = {name: current(store, name, length) for name, length in names(store).items()}
    return {name: move for name, move in found.items() if move}


def name_of(log: str) -> str | None:
    """Return the alias whose log has the prefix `log`; None if it is not the log of an alias."""
    prefix = layout.alias("")
    name = log.removeprefix(prefix)
    return name if log.startswith(prefix) and layout.is_alias(name) else None


def resolve_version(store: Store, reference: str) -> str:
    """Return the version that `reference` means: an alias, a version, or a version's URI in this store.

    Raises:
        StorageError: `reference` is neither an alias nor a committed version.
    """
    name = reference.removeprefix(store.uri("x").removesuffix("x")).rstrip("/")
    if layout.is_alias(name) and (newest := current(store, name)):
        return newest.version
    if not committed(store, layout.check_key(name)):
        others = "`python -m storage ls` lists versions, `python -m storage alias` other names"
        raise DamagedError(f"{store.uri(name)} was never committed; {others}")
    return name


def _log(store: Store, name: str) -> Log:
    if not layout.is_alias(name):
        raise StorageError(f"alias name {name!r}: use letters, digits, '.', '_', '-' and '/', and not a version's name")
    return Log(store, layout.alias(name))


def _read(log: Log, number: int) -> Move:
    entry = log.read(number)
    return Move(number, entry["version"], entry["sha256"], entry["reason"], entry["by"], entry["at"])
