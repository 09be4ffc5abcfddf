"""A catalog that lost entries is noticed, and made whole from what is there; aliases and leases are looked at, too."""

from pathlib import Path

import pytest

from storage import aliases, catalog, garbage, layout
from storage.drafts import Draft, Provenance
from storage.logs import Log
from storage.mending import mend, survey
from storage.retention import Rules
from storage.store import StorageError, Store

VERSIONS = [layout.run("r"), layout.checkpoint("r", 0), layout.checkpoint("r", 1), layout.checkpoint("r", 2)]
ENTRIES = [*VERSIONS, "champion"]
"""Of the catalog."""


def entry(log: str, number: int) -> str:
    return f"{log}/{number:08d}.json"


@pytest.fixture
def filled(store: Store) -> Store:
    """Three checkpoints, and an alias of two moves."""
    return fill(store)


def fill(store: Store) -> Store:
    parents: list[str] = []
    for version in VERSIONS:
        with Draft(store, version, "run" if version == layout.run("r") else "checkpoint") as draft:
            path = draft.scratch / "data"
            path.write_text(version)
            draft.add(path, "data")
            draft.commit(Provenance(config={}), parents)
            parents = [version]
    aliases.move(store, "champion", VERSIONS[1], None)
    aliases.move(store, "champion", VERSIONS[2], 0)
    return Store(store.root)  # which knows no log's length


def listed(store: Store) -> list[str]:
    return [found.version for found in catalog.everything(store)]


def what_gc_would_take(store: Store) -> list[garbage.Plan]:
    """Nothing where it refuses to work. It should take nothing: 0 always stays, 1 is the champion, 2 the last."""
    try:
        return garbage.plan(store, Rules(keep_last=1))
    except StorageError as error:
        if "python -m storage mend" not in str(error):
            raise
        return []


def test_a_whole_store(any_store: Store) -> None:
    """Nothing is found, and mending changes nothing. A cache in the same folder is no part of it."""
    filled = fill(any_store)
    filled.write("cache/manifest.json", b"{")
    filled.write(f"cache/scratch/{layout.manifest(VERSIONS[0])}", b"{")
    found = survey(filled)
    assert (sorted(found.versions), found.findings) == (sorted(VERSIONS), [])
    assert mend(filled) == ([], [])
    assert listed(filled) == ENTRIES


@pytest.mark.parametrize("number", range(len(ENTRIES)))
@pytest.mark.parametrize("damage", ["changed", "deleted"])
def test_a_lost_entry_of_the_catalog(filled: Store, number: int, damage: str) -> None:
    """Whichever it is, and an alias's most of all: gc goes by it. Until it is mended, nobody works with less."""
    key = entry(layout.CATALOG, number)
    if damage == "changed":
        filled.write(key, filled.read(key).replace(b"kind", b"Kind"))
    else:
        filled.delete(key)
    assert what_gc_would_take(Store(filled.root)) == []
    problems = {(finding.version, finding.object) for finding in survey(filled).findings}
    is_last = number == len(ENTRIES) - 1 and damage == "deleted"  # then the log is one shorter, and looks whole
    assert problems == {(ENTRIES[number], layout.CATALOG)} | (set() if is_last else {(layout.CATALOG, key)})
    told: list[str] = []
    assert mend(filled, told.append) == ([] if is_last else [number], [ENTRIES[number]])
    assert len(told) == (1 if is_last else 2)
    assert sorted(listed(Store(filled.root))) == sorted(ENTRIES)
    assert survey(Store(filled.root)).findings == []
    assert aliases.names(Store(filled.root)) == ["champion"]
    assert garbage.plan(Store(filled.root), Rules(keep_last=1)) == []


def test_a_store_that_never_had_a_catalog(any_store: Store) -> None:
    """As pipelines of before have left them: all is entered, in the order in which it came to be."""
    filled = fill(any_store)
    for found in list(filled.walk(layout.CATALOG)):
        filled.delete(found.path)
    store = Store(filled.root)
    assert listed(store) == []
    assert mend(store) == ([], ENTRIES)
    assert listed(store) == ENTRIES
    assert [found.parents for found in catalog.everything(store)][:3] == [[], [VERSIONS[0]], [VERSIONS[1]]]


def test_a_damaged_manifest_is_not_entered(store: Store) -> None:
    """What it is cannot be told; `verify` names it."""
    store.write(layout.manifest(VERSIONS[0]), b"{")
    assert survey(store).versions == [VERSIONS[0]]
    assert mend(store) == ([], [])


def test_an_alias_whose_newest_move_is_damaged(filled: Store) -> None:
    """Where it pointed nobody knows; the command that is named points it somewhere again."""
    filled.write(entry(layout.alias("champion"), 1), b"{")
    with pytest.raises(StorageError, match="does not end with its digest"):
        aliases.current(filled, "champion")
    (finding,) = survey(filled).findings
    assert "`python -m storage alias set champion VERSION --expect 1`" in finding.problem
    aliases.move(filled, "champion", VERSIONS[3], 1)
    standing = aliases.current(filled, "champion")
    assert standing
    assert standing.version == VERSIONS[3]
    with pytest.raises(StorageError, match="does not end"):
        aliases.roll_back(filled, "champion")
    assert aliases.roll_back(filled, "champion", to=0).version == VERSIONS[1]  # reads that move alone


@pytest.mark.parametrize(("change", "problem"), [("deleted", "was never committed"), ("another", "was changed since")])
def test_an_alias_that_points_at_nothing(filled: Store, change: str, problem: str) -> None:
    """Its version was deleted, or is not the one that it was."""
    filled.delete(layout.manifest(VERSIONS[2]))
    if change == "another":
        with Draft(filled, VERSIONS[2], "checkpoint") as draft:
            draft.commit(Provenance(config={}), [])
    (finding,) = survey(filled).findings
    assert finding.object == layout.manifest(VERSIONS[2])
    assert problem in finding.problem


def test_a_lease_that_lost_an_entry(store: Store, tmp_path: Path) -> None:
    """Is told; the run itself goes on with the next number."""
    log = Log(store, layout.lease("r"))
    for _ in range(3):
        log.append({"holder": {}})
    store.delete(log.key(1))
    (finding,) = survey(store).findings
    assert (finding.version, finding.object) == (layout.lease("r"), log.key(1))
    assert "is missing" in finding.problem
