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
from storage.maintenance import verify
from storage.maintenance.gc import Rules
from storage.maintenance.verify import check_logs, repair
from storage.objects.store import Store
from storage.versions import aliases
from tests.support.chain_helpers import commit_run, commit_text

CHECKPOINTS = [layout.checkpoint("r", number) for number in range(4)]
VERSIONS = [layout.run("r"), CHECKPOINTS[0]]
for _number in range(3):
    VERSIONS += [layout.trajectories("r", _number), CHECKPOINTS[_number + 1]]
MOVES = [CHECKPOINTS[number] for number in (3, 2, 1, 0, 3, 1)]
"""The targets of the moves of `champion`: so many that the search for the end of its log skips some of them."""
GARBAGE = {CHECKPOINTS[2]}
"""The checkpoint that gc collects of an undamaged store: 0 is the first, 1 what `champion` points at, 3 the last."""


def entry_key(log: str, number: int) -> str:
    return f"{log}/{number:08d}.json"


def fill(store: Store) -> Store:
    """Commit `VERSIONS`, and move `champion` through `MOVES`; return the store without what it remembers of logs."""
    commit_run(store, "r", 4)
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


def found_by_gc(store: Store) -> set[str]:
    """Return the versions that gc would collect; none if it refuses a damaged log."""
    try:
        found = garbage.find_garbage(Store(store.root), Rules(keep_last=1))
    except StorageError as error:
        if "`python -m storage " not in str(error):
            raise
        return set()
    return {manifest.version for of_run in found for manifest in of_run.versions}


def test_an_undamaged_store(any_store: Store) -> None:
    """An undamaged store has no findings, and `repair` changes nothing. Other files in the same folder are ignored.

    In a store from before the catalog existed, `repair` enters all versions in order of creation.
    """
    filled = fill(any_store)
    for other in ("cache/manifest.json", f"cache/scratch/{layout.manifest(VERSIONS[0])}", "aliases/note"):
        filled.write(other, b"{")
    filled.write("aliases/champion (old)/00000000.json", b"{")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert check_logs(filled).findings == []
    assert repair(filled) == ([], [])
    assert catalog_names(filled) == VERSIONS
    assert found_by_gc(filled) == GARBAGE
    before = [entry.parents for entry in catalog.read_all(filled)]
    for item in list(filled.walk(layout.CATALOG)):
        filled.delete(item.path)
    filled = Store(filled.root)
    assert repair(filled) == ([], VERSIONS)
    assert [entry.parents for entry in catalog.read_all(filled)] == before


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
    assert found_by_gc(filled) <= GARBAGE
    is_last = number == len(VERSIONS) - 1 and damage == "deleted"  # the log then looks undamaged and one entry shorter
    lost = VERSIONS[number]
    assert findings(filled) == {(lost, layout.CATALOG)} | (set() if is_last else {(layout.CATALOG, key)})
    assert repair(filled) == ([] if is_last else [key], [lost])
    assert catalog_names(filled) == [*VERSIONS[:number], *VERSIONS[number + 1 :], lost]
    assert findings(filled) == set()
    assert found_by_gc(filled) == GARBAGE


def test_a_version_that_is_entered_during_a_repair_stays(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer finds the gap between the check and the fill; only what is filled is returned."""
    key, check = entry_key(layout.CATALOG, 0), verify.check_logs
    filled.delete(key)

    def overtaken(store: Store) -> verify.LogReport:
        report = check(store)
        catalog.enter(Store(store.root), VERSIONS[0], "checkpoint", [], "n")
        return report

    monkeypatch.setattr(verify, "check_logs", overtaken)
    assert repair(filled)[0] == []
    assert Log(filled, layout.CATALOG).read(0)["version"] == VERSIONS[0]


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
    assert found_by_gc(filled) == GARBAGE
    (finding,) = check_logs(Store(filled.root)).findings
    assert (finding.object, "storage alias set champion VERSION`" in finding.problem) == (key, True)
    hidden = aliases.current(Store(filled.root), "champion")
    if hidden is None or hidden.version != MOVES[-1]:
        aliases.move(Store(filled.root), "champion", CHECKPOINTS[0], number - 1 if number else None)
    newest = aliases.current(Store(filled.root), "champion")
    assert newest
    assert newest.version == MOVES[-1]


def test_a_damaged_older_move_has_no_remedy(filled: Store) -> None:
    """The alias is read as before, so nothing needs to point it somewhere again."""
    filled.write(entry_key(layout.alias("champion"), 0), b"{")
    assert ["alias set" in finding.problem for finding in check_logs(filled).findings] == [False]


def test_an_alias_whose_newest_move_is_damaged(filled: Store) -> None:
    """It is unknown where the alias pointed, so gc refuses to work. The error names the command that sets it again."""
    last, remedy = len(MOVES) - 1, "`python -m storage alias set champion VERSION`"
    filled.write(entry_key(layout.alias("champion"), last), b"{")
    with pytest.raises(StorageError, match=rf"does not end with its digest.*{remedy}"):
        aliases.current(filled, "champion")
    assert [remedy in finding.problem for finding in check_logs(filled).findings] == [True]
    assert found_by_gc(filled) == set()
    assert repair(filled) == ([], [])
    assert aliases.move(filled, "champion", CHECKPOINTS[2], last) == aliases.current(filled, "champion")
    assert aliases.roll_back(filled, "champion", to=0).version == MOVES[0]  # reads only move 0


@pytest.mark.parametrize(("change", "problem"), [("deleted", "was never committed"), ("another", "was changed after")])
def test_an_alias_whose_version_was_deleted_or_changed(filled: Store, change: str, problem: str) -> None:
    filled.delete(layout.manifest(MOVES[-1]))
    if change == "another":
        commit_text(filled, MOVES[-1])
    (finding,) = check_logs(filled).findings
    assert finding.object == layout.manifest(MOVES[-1])
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
    assert found_by_gc(filled) <= GARBAGE
    if log == layout.CATALOG:
        assert repair(filled) == ([entry_key(log, number)], [])
        assert findings(filled) == set()
    if log == layout.alias("champion"):
        aliases.move(filled, "champion", CHECKPOINTS[2], number)
    if log == layout.lease("r"):
        with Lease(filled, "r", ttl_s=0.5) as lease:
            assert lease.token == number + 1
