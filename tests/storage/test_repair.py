"""Lost entries of a log are found and repaired. Until then gc deletes no version that it would otherwise keep."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.entries import check_entry
from storage.logs.leases import Lease
from storage.logs.log import Log
from storage.maintenance import gc as garbage
from storage.maintenance.check_logs import check_logs, repair
from storage.maintenance.gc import Rules
from storage.objects.store import Store
from storage.processes.identity import own_identity
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance

VERSIONS = [layout.run("r"), *(layout.checkpoint("r", number) for number in range(5))]
MOVES = [VERSIONS[number] for number in (5, 4, 3, 1, 5, 2)]
"""The targets of the moves of `champion`: so many that the search for the end of its log skips some of them."""
CURRENT = MOVES[-1]
ENTRIES = [*VERSIONS, "champion"]
"""The names in the catalog, in its order."""
ABSENT = object()
"""The value of a field that an entry lacks."""


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
    assert catalog_names(filled) == ENTRIES
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


@pytest.mark.parametrize("number", [0, 3, len(ENTRIES) - 1])
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
    is_last = number == len(ENTRIES) - 1 and damage == "deleted"  # the log then looks undamaged and one entry shorter
    name = layout.alias("champion") if ENTRIES[number] == "champion" else ENTRIES[number]
    assert findings(filled) == {(name, layout.CATALOG)} | (set() if is_last else {(layout.CATALOG, key)})
    assert repair(filled) == ([] if is_last else [key], [ENTRIES[number]])
    assert catalog_names(filled) == ENTRIES  # at its old place
    assert findings(filled) == set()
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


def test_the_lost_entry_of_a_killed_attempt_becomes_a_placeholder(filled: Store) -> None:
    """The store has no other record of an attempt that never committed, so `repair` puts a placeholder there."""
    catalog.enter(filled, "runs/r/scores/000000/dead", "scores", [], "")
    filled.write(entry_key(layout.CATALOG, len(ENTRIES)), b"{")
    progress: list[str] = []
    assert repair(Store(filled.root), progress.append) == ([entry_key(layout.CATALOG, len(ENTRIES))], [])
    assert progress == [f"filled {entry_key(layout.CATALOG, len(ENTRIES))}"]
    assert catalog_names(filled) == ENTRIES
    assert findings(filled) == set()


def test_a_store_that_never_had_a_catalog(any_store: Store) -> None:
    """Stores from before the catalog existed: `repair` enters all versions in order of creation, then the aliases."""
    filled = fill(any_store)
    for item in list(filled.walk(layout.CATALOG)):
        filled.delete(item.path)
    assert catalog_names(filled) == []
    assert repair(filled) == ([], ENTRIES)
    assert catalog_names(filled) == ENTRIES
    assert [entry.parents for entry in catalog.read_all(filled)][:3] == [[], [VERSIONS[0]], [VERSIONS[1]]]


def test_a_run_that_was_moved_and_linked(filled: Store, tmp_path: Path) -> None:
    """Listing a store does not follow links, but versions that the catalog names are checked all the same."""
    runs = Path(filled.root) / "runs"
    runs.rename(tmp_path / "elsewhere")
    runs.symlink_to(tmp_path / "elsewhere")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert findings(filled) == set()


def test_commits_while_the_store_is_listed(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version committed after the catalog is listed and before its run is listed is not reported as missing."""
    walk = Store.walk

    def walk_and_commit(self: Store, folder: str = "") -> list[object]:
        listed = [item for item in walk(self, folder) if item.path.startswith(layout.CATALOG)]
        late = layout.checkpoint("r", 5)
        with Draft(Store(self.root), late, "checkpoint") as draft:
            draft.commit(Provenance(config={}), [VERSIONS[-1]])
        return [*listed, *(item for item in walk(self, folder) if not item.path.startswith(layout.CATALOG))]

    monkeypatch.setattr(Store, "walk", walk_and_commit)
    report = check_logs(filled)
    assert report.findings == []
    assert layout.checkpoint("r", 5) in report.versions


def test_a_damaged_manifest_is_not_entered(store: Store) -> None:
    """`repair` does not enter a version whose manifest is damaged, because its kind is unknown. `verify` reports it."""
    store.write(layout.manifest(VERSIONS[0]), b"{")
    report = check_logs(store)
    assert (report.versions, report.findings) == ([VERSIONS[0]], [])
    assert repair(store) == ([], [])


@pytest.mark.parametrize("number", [0, 2, len(MOVES) - 2])
def test_a_deleted_move_of_an_alias(filled: Store, number: int) -> None:
    """A deleted move may hide later ones, but not from gc. `repair` puts a copy of the next move there."""
    key = entry_key(layout.alias("champion"), number)
    filled.delete(key)
    assert planned_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}
    assert findings(filled) == {(layout.alias("champion"), key)}
    assert repair(filled) == ([key], [])
    store = Store(filled.root)
    moves = aliases.history(store, "champion")
    assert [move.version for move in moves] == [*MOVES[:number], MOVES[number + 1], *MOVES[number + 1 :]]
    assert moves[number].reason == "lost; copied from its neighbour"
    assert findings(filled) == set()


def test_an_alias_whose_newest_move_is_damaged(filled: Store) -> None:
    """It is unknown where the alias pointed, so gc refuses to work and `repair` changes nothing.

    The error names the command that points the alias at a version again.
    """
    last = len(MOVES) - 1
    filled.write(entry_key(layout.alias("champion"), last), b"{")
    remedy = f"`python -m storage alias set champion VERSION --expect {last}`"
    with pytest.raises(StorageError, match="does not end with its digest") as raised:
        aliases.current(filled, "champion")
    assert remedy in str(raised.value)
    (finding,) = check_logs(filled).findings
    assert remedy in finding.problem
    assert planned_by_gc(filled) == set()
    assert repair(filled) == ([], [])
    aliases.move(filled, "champion", VERSIONS[3], last)
    newest = aliases.current(filled, "champion")
    assert newest
    assert newest.version == VERSIONS[3]
    with pytest.raises(StorageError, match="does not end"):
        aliases.roll_back(filled, "champion")
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


def test_a_deleted_entry_of_a_lease(store: Store) -> None:
    """A deleted entry of a lease is reported, and `repair` puts a copy of the next one there."""
    log = Log(store, layout.lease("r"))
    for number in range(3):
        log.append(GOOD[layout.lease("r")] | {"label": str(number)})
    store.delete(log.key(1))
    assert findings(store) == {(layout.lease("r"), log.key(1))}
    assert repair(store) == ([log.key(1)], [])
    assert [log.read(number)["label"] for number in range(3)] == ["0", "2", "2"]


GOOD: dict[str, dict[str, Any]] = {
    layout.CATALOG: catalog.values("runs/r/checkpoints/000009", "checkpoint", [], ""),
    layout.alias("champion"): {"version": VERSIONS[1], "sha256": "0", "reason": "", "by": "ada", "at": "2026"},
    layout.lease("r"): {"holder": own_identity(), "label": "", "at": "2026", "ttl_s": 60.0},
}
"""A valid entry of each kind of log."""
WRONG: dict[str, list[dict[str, Any]]] = {
    layout.CATALOG: [
        {"kind": 3},
        {"kind": None},
        {"version": ["a"]},
        {"version": "../a"},
        {"version": ""},
        {"parents": {"a": 1}},
        {"parents": [1]},
        {"kind": "alias", "version": "no name"},
    ],
    layout.alias("champion"): [{"version": 3}, {"version": "../a"}, {"sha256": None}, {"reason": ["x"]}, {"at": 3}],
    layout.lease("r"): [{"holder": []}, {"holder": {}}, {"ttl_s": "x"}, {"ttl_s": float("nan")}, {"at": None}],
}


@pytest.mark.parametrize("log", GOOD)
def test_an_entry_with_wrong_fields_is_damaged(filled: Store, log: str) -> None:
    """A right digest does not show who wrote an entry: wrong fields are reported, and hide no other entry."""
    absent = [{field: ABSENT} for field in GOOD[log] if field != "attempt"]
    for wrong in (*WRONG[log], *absent):
        values = {field: value for field, value in (GOOD[log] | wrong).items() if value is not ABSENT}
        with pytest.raises(StorageError, match=rf"here has wrong fields .*{list(wrong)[-1]}"):
            check_entry(log, values, "here")
    number = Log(filled, log).append(GOOD[log] | WRONG[log][0])
    key = entry_key(log, number)
    (reported,) = [finding for finding in check_logs(Store(filled.root)).findings if finding.object == key]
    assert reported.version == log
    assert f"{key} has wrong fields" in reported.problem
    assert "python -m storage" in reported.problem or log == layout.lease("r")
    assert planned_by_gc(filled) <= {VERSIONS[3], VERSIONS[4]}
    with pytest.raises(StorageError, match="has wrong fields"):
        Log(filled, log).read(number)
    if log == layout.CATALOG:
        assert repair(filled) == ([key], [])
        assert catalog_names(filled) == ENTRIES
        assert findings(filled) == set()
    if log == layout.alias("champion"):
        aliases.move(filled, "champion", VERSIONS[3], number)
        assert aliases.names(filled) == ["champion"]
    if log == layout.lease("r"):
        with Lease(filled, "r", ttl_s=0.5) as lease:
            assert lease.token == number + 1
