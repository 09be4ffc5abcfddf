"""Lost entries of a log are found and repaired. Until then gc deletes no version that it would otherwise keep."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease, own_identity
from storage.logs.log import Log, check_entry
from storage.maintenance import gc as garbage
from storage.maintenance.gc import Rules
from storage.maintenance.verify import check_logs, repair
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance

VERSIONS = [layout.run("r"), *(layout.checkpoint("r", number) for number in range(5))]
MOVES = [VERSIONS[number] for number in (5, 4, 3, 1, 5, 2)]
"""The targets of the moves of `champion`: so many that the search for the end of its log skips some of them."""
CURRENT = MOVES[-1]


def entry_key(log: str, number: int) -> str:
    return f"{log}/{number:08d}.json"


def fill(store: Store) -> Store:
    """Commit a run and five checkpoints, each made from the version before, and move `champion` through `MOVES`.

    Return the store opened again, so that it remembers no log's length.
    """
    parents: list[str] = []
    for version in VERSIONS:
        with Draft(store, version, "run" if version == layout.run("r") else "checkpoint") as draft:
            path = draft.scratch / "data"
            path.write_text(version)
            draft.add(path, "data")
            draft.commit(Provenance(config={}), parents)
            parents = [version]
    for number, version in enumerate(MOVES):
        aliases.move(store, "champion", version, number - 1 if number else None)
    return Store(store.root)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fill(Store(str(tmp_path_factory.mktemp("filled")))).root)


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(template, tmp_path / "root")))


def catalog_names(store: Store) -> list[str]:
    return [entry.version for entry in catalog.read_all(Store(store.root))]


def findings(store: Store) -> set[tuple[str, str]]:
    return {(finding.version, finding.object) for finding in check_logs(Store(store.root)).findings}


def planned_by_gc(store: Store) -> set[str]:
    """Return the versions that gc would collect; none if it refuses a damaged log.

    Checkpoints 0 and 4 always stay: number 0 and the last. The alias keeps checkpoint 1 and its ancestors.
    """
    try:
        plans = garbage.plan(Store(store.root), Rules(keep_last=1))
    except StorageError as error:
        if "`python -m storage " not in str(error):
            raise
        return set()
    return {manifest.version for plan in plans for manifest in plan.versions}


def test_an_undamaged_store(any_store: Store) -> None:
    """An undamaged store has no findings, and `repair` changes nothing. Other files in the same folder are ignored."""
    filled = fill(any_store)
    filled.write("cache/manifest.json", b"{")
    filled.write(f"cache/scratch/{layout.manifest(VERSIONS[0])}", b"{")
    filled.write("aliases/champion (old)/00000000.json", b"{")
    filled.write("aliases/note", b"{")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert check_logs(filled).findings == []
    assert repair(filled) == ([], [])
    assert catalog_names(filled) == VERSIONS
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


@pytest.mark.parametrize("number", [0, 3, len(VERSIONS) - 1])
@pytest.mark.parametrize("damage", ["changed", "deleted"])
def test_a_lost_entry_of_the_catalog(filled: Store, number: int, damage: str) -> None:
    """Any entry may be lost: gc deletes nothing that it would otherwise keep, and `repair` restores the entry."""
    key = entry_key(layout.CATALOG, number)
    if damage == "changed":
        filled.write(key, filled.read(key).replace(b"kind", b"Kind"))
        with pytest.raises(StorageError, match="python -m storage repair"):
            catalog_names(filled)
    else:
        filled.delete(key)
    assert planned_by_gc(filled) <= {VERSIONS[3], VERSIONS[4]}
    is_last = number == len(VERSIONS) - 1 and damage == "deleted"  # the log then looks undamaged and one entry shorter
    lost = VERSIONS[number]
    assert findings(filled) == {(lost, layout.CATALOG)} | (set() if is_last else {(layout.CATALOG, key)})
    assert repair(filled) == ([] if is_last else [key], [lost])
    assert catalog_names(filled) == [*VERSIONS[:number], *VERSIONS[number + 1 :], lost]
    assert findings(filled) == set()
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


def test_a_store_that_never_had_a_catalog(any_store: Store) -> None:
    """Stores from before the catalog existed: `repair` enters all versions in order of creation."""
    filled = fill(any_store)
    for item in list(filled.walk(layout.CATALOG)):
        filled.delete(item.path)
    assert catalog_names(filled) == []
    assert repair(filled) == ([], VERSIONS)
    assert catalog_names(filled) == VERSIONS
    assert [entry.parents for entry in catalog.read_all(filled)][:3] == [[], [VERSIONS[0]], [VERSIONS[1]]]


def test_a_run_that_was_moved_and_linked(filled: Store, tmp_path: Path) -> None:
    """Listing a store does not follow links, but versions that the catalog names are checked all the same."""
    runs = Path(filled.root) / "runs"
    runs.rename(tmp_path / "elsewhere")
    runs.symlink_to(tmp_path / "elsewhere")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert findings(filled) == set()


@pytest.mark.parametrize("number", [0, 2, len(MOVES) - 2])
def test_a_deleted_move_of_an_alias(filled: Store, number: int) -> None:
    """A deleted move may hide later ones, but not from gc; a move at its number shows them again."""
    key = entry_key(layout.alias("champion"), number)
    filled.delete(key)
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}
    (finding,) = check_logs(Store(filled.root)).findings
    assert (finding.object, f"--expect {number - 1}`" in finding.problem) == (key, True)
    if (hidden := aliases.current(Store(filled.root), "champion")) is None or hidden.version != CURRENT:
        aliases.move(Store(filled.root), "champion", VERSIONS[1], number - 1 if number else None)
    newest = aliases.current(Store(filled.root), "champion")
    assert newest
    assert newest.version == CURRENT


def test_an_alias_whose_newest_move_is_damaged(filled: Store) -> None:
    """It is unknown where the alias pointed, so gc refuses to work. The error names the command that sets it again."""
    last = len(MOVES) - 1
    filled.write(entry_key(layout.alias("champion"), last), b"{")
    remedy = f"`python -m storage alias set champion VERSION --expect {last}`"
    with pytest.raises(StorageError, match="does not end with its digest") as raised:
        aliases.current(filled, "champion")
    assert remedy in str(raised.value)
    assert [remedy in finding.problem for finding in check_logs(filled).findings] == [True]
    assert planned_by_gc(filled) == set()
    assert repair(filled) == ([], [])
    assert aliases.move(filled, "champion", VERSIONS[3], last) == aliases.current(filled, "champion")
    assert aliases.roll_back(filled, "champion", to=0).version == MOVES[0]  # reads only move 0


@pytest.mark.parametrize(("change", "problem"), [("deleted", "was never committed"), ("another", "was changed after")])
def test_an_alias_whose_version_was_deleted_or_changed(filled: Store, change: str, problem: str) -> None:
    filled.delete(layout.manifest(CURRENT))
    if change == "another":
        with Draft(filled, CURRENT, "checkpoint") as draft:
            draft.commit(Provenance(config={}), [])
    (finding,) = check_logs(filled).findings
    assert finding.object == layout.manifest(CURRENT)
    assert problem in finding.problem


GOOD: dict[str, dict[str, Any]] = {
    layout.CATALOG: {"kind": "checkpoint", "version": "runs/r/checkpoints/000009", "parents": []},
    layout.alias("champion"): {"version": VERSIONS[1], "sha256": "0", "reason": "", "by": "ada", "at": "2026"},
    layout.lease("r"): {"holder": own_identity(), "label": "", "at": "2026", "ttl_s": 60.0},
}
"""A valid entry of each kind of log."""


@pytest.mark.parametrize("log", GOOD)
def test_an_entry_with_wrong_fields_is_damaged(filled: Store, log: str) -> None:
    """A right digest does not show who wrote an entry: wrong fields are reported, and hide no other entry."""
    check_entry(log, GOOD[log], "here")
    for name in GOOD[log]:
        for wrong in (GOOD[log] | {name: None}, {field: value for field, value in GOOD[log].items() if field != name}):
            with pytest.raises(StorageError, match=rf"here has wrong fields \({name}\)"):
                check_entry(log, wrong, "here")
    number = Log(filled, log).append(GOOD[log] | {next(iter(GOOD[log])): 3})
    assert (log, entry_key(log, number)) in findings(filled)
    assert planned_by_gc(filled) <= {VERSIONS[3], VERSIONS[4]}
    if log == layout.CATALOG:
        assert repair(filled) == ([entry_key(log, number)], [])
        assert findings(filled) == set()
    if log == layout.alias("champion"):
        aliases.move(filled, "champion", VERSIONS[3], number)
    if log == layout.lease("r"):
        with Lease(filled, "r", ttl_s=0.5) as lease:
            assert lease.token == number + 1
