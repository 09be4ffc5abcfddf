"""Aliases are moved by compare-and-swap, keep their history, and can be rolled back."""

import pytest

from storage import layout
from storage.errors import AliasMovedError, StorageError
from storage.objects.store import Store
from storage.versions import aliases
from tests.support.chain_helpers import commit_text


def commit(store: Store, number: int) -> str:
    return commit_text(store, layout.checkpoint("r", number))


def test_a_move_names_the_move_it_replaces(any_store: Store) -> None:
    """A writer that has not seen the newest move cannot overwrite it."""
    first, second = commit(any_store, 1), commit(any_store, 2)
    assert aliases.current(any_store, "champion") is None
    aliases.move(any_store, "champion", first, None)
    aliases.move(any_store, "champion", second, 0, reason="better", by="ada")
    with pytest.raises(AliasMovedError, match="was moved by another writer: .* alias history champion"):
        aliases.move(any_store, "champion", first, 0)
    with pytest.raises(AliasMovedError):
        aliases.move(any_store, "champion", first, None)
    assert [move.version for move in aliases.history(any_store, "champion")] == [first, second]
    assert aliases.names(any_store) == {"champion": 2}


def test_rollbacks(store: Store) -> None:
    """A rollback is a new move, so it can be rolled back, and the history shows every rollback."""
    versions = [commit(store, number) for number in range(3)]
    for number, version in enumerate(versions):
        aliases.move(store, "champion", version, number - 1 if number else None)
    assert aliases.roll_back(store, "champion").version == versions[1]
    assert aliases.roll_back(store, "champion", to=0).version == versions[0]
    reasons = [move.reason for move in aliases.history(store, "champion")]
    assert reasons == ["", "", "", "roll back to move 1", "roll back to move 0"]
    with pytest.raises(StorageError, match="no such move to go back to"):
        aliases.roll_back(store, "champion", to=9)
    with pytest.raises(StorageError, match="no such move to go back to"):
        aliases.roll_back(store, "nobody")


def test_latest_never_goes_back(store: Store) -> None:
    """A run that is continued does not move its alias `latest` to an earlier version."""
    first, second = commit(store, 1), commit(store, 2)
    for version in (second, first, second):
        aliases.advance(store, "r/latest", version)
    assert [move.version for move in aliases.history(store, "r/latest")] == [second]


def test_uncommitted_versions_and_invalid_names_are_refused(store: Store) -> None:
    """An alias points only at a committed version, and its name must be valid: it cannot climb out of the root."""
    with pytest.raises(StorageError, match="never committed"):
        aliases.move(store, "champion", layout.checkpoint("r", 9), None)
    for name in ("../champion", "", "a//b", "/a", "a b", "runs/r/run", "a/00000000.json"):
        with pytest.raises(StorageError, match="alias name"):
            aliases.move(store, name, commit(store, 1), None)
    assert aliases.names(store) == {}
