"""Aliases: moved by compare-and-swap, with a history, and back."""

import contextlib
import threading

import pytest

from storage import aliases
from storage.aliases import AliasMovedError
from storage.drafts import Draft, Provenance
from storage.store import StorageError, Store


def commit(store: Store, number: int) -> str:
    version = f"runs/r/scores/{number:06d}/a"
    with Draft(store, version, "scores") as draft:
        draft.commit(Provenance(config={}), [])
    return version


def test_a_move_names_the_one_it_replaces(any_store: Store) -> None:
    """Who has not seen the newest move cannot overwrite it."""
    first, second = commit(any_store, 1), commit(any_store, 2)
    assert aliases.current(any_store, "champion") is None
    aliases.move(any_store, "champion", first, None)
    aliases.move(any_store, "champion", second, 0, reason="better", by="ada")
    with pytest.raises(AliasMovedError, match=f"points at {second} by move 1 of ada"):
        aliases.move(any_store, "champion", first, 0)
    with pytest.raises(AliasMovedError):
        aliases.move(any_store, "champion", first, None)
    assert [move.version for move in aliases.history(any_store, "champion")] == [first, second]
    assert aliases.names(any_store) == ["champion"]


def test_one_of_many_movers_wins(any_store: Store) -> None:
    """Eight promotions at once: one move, the others are told."""
    versions = [commit(any_store, number) for number in range(8)]
    aliases.move(any_store, "champion", versions[0], None)
    start, won = threading.Barrier(8), list[str]()

    def move(version: str) -> None:
        store = Store(any_store.root)
        start.wait()
        with contextlib.suppress(AliasMovedError):
            won.append(aliases.move(store, "champion", version, 0).version)

    threads = [threading.Thread(target=move, args=(version,)) for version in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    standing = aliases.current(any_store, "champion")
    assert standing
    assert won == [standing.version]


def test_back_and_forth(store: Store) -> None:
    """A roll-back is a move of its own, so it can be rolled back, and the history tells both."""
    versions = [commit(store, number) for number in range(3)]
    for number, version in enumerate(versions):
        aliases.move(store, "champion", version, number - 1 if number else None)
    assert aliases.roll_back(store, "champion").version == versions[1]
    assert aliases.roll_back(store, "champion", to=0).version == versions[0]
    reasons = [move.reason for move in aliases.history(store, "champion")]
    assert reasons == ["", "", "", "roll back to move 1", "roll back to move 0"]
    with pytest.raises(StorageError, match="none to go back to"):
        aliases.roll_back(store, "champion", to=9)
    with pytest.raises(StorageError, match="none to go back to"):
        aliases.roll_back(store, "nobody")


def test_latest_never_goes_back(store: Store) -> None:
    """A run that is continued does not move its alias to what was before."""
    first, second = commit(store, 1), commit(store, 2)
    for version in (second, first, second):
        aliases.advance(store, "r/latest", version)
    assert [move.version for move in aliases.history(store, "r/latest")] == [second]


def test_only_what_exists_can_be_pointed_at(store: Store) -> None:
    """An alias of something uncommitted, or with a name that climbs, is refused."""
    with pytest.raises(StorageError, match="never committed"):
        aliases.move(store, "champion", "runs/r/scores/000009/a", None)
    for name in ("../champion", "", "a//b", "/a", "a b", "runs/r/run", "a/00000000.json"):
        with pytest.raises(StorageError, match="alias name"):
            aliases.move(store, name, commit(store, 1), None)
    assert aliases.names(store) == []


def test_references(store: Store) -> None:
    """A version is found by its name, its URI and its aliases; anything else is told."""
    version = commit(store, 1)
    aliases.move(store, "r/best", version, None)
    for reference in (version, store.uri(version), "r/best", f"{version}/"):
        assert aliases.resolve(store, reference) == version
    with pytest.raises(StorageError, match="never committed"):
        aliases.resolve(store, "r/wurst")
