"""A log that lost entries is noticed, and made whole from what is there; gc takes nothing on its word."""

from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.errors import StorageError
from storage.logs import catalog
from storage.logs.leases import Lease
from storage.logs.log import Log
from storage.maintenance import gc as garbage
from storage.maintenance.check_logs import check_logs
from storage.maintenance.repair import repair
from storage.maintenance.retention import Rules
from storage.objects.store import Store
from storage.processes import own_identity
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance

VERSIONS = [layout.run("r"), *(layout.checkpoint("r", number) for number in range(5))]
MOVES = [VERSIONS[number] for number in (5, 4, 3, 1, 5, 2)]
"""Of the alias `champion`: more than a search for its end looks at one by one."""
STANDING = MOVES[-1]
ENTRIES = [*VERSIONS, "champion"]
"""Of the catalog."""
ABSENT = object()


def entry(log: str, number: int) -> str:
    return f"{log}/{number:08d}.json"


def fill(store: Store) -> Store:
    """Five checkpoints, each made from the one before, and an alias; returned as one who knows no log's length."""
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


@pytest.fixture
def filled(store: Store) -> Store:
    return fill(store)


def listed(store: Store) -> list[str]:
    return [found.version for found in catalog.read_all(Store(store.root))]


def problems(store: Store) -> set[tuple[str, str]]:
    return {(finding.version, finding.object) for finding in check_logs(Store(store.root)).findings}


def taken_by_gc(store: Store) -> set[str]:
    """0 always stays, and the last; with ancestors the alias keeps 1. Nothing where gc refuses to work."""
    try:
        plans = garbage.plan(Store(store.root), Rules(keep_last=1))
    except StorageError as error:
        if "`python -m storage " not in str(error):
            raise
        return set()
    return {manifest.version for plan in plans for manifest in plan.versions}


def test_a_whole_store(any_store: Store) -> None:
    """Nothing is found, and mending changes nothing. A cache or a copy in the same folder is no part of it."""
    filled = fill(any_store)
    filled.write("cache/manifest.json", b"{")
    filled.write(f"cache/scratch/{layout.manifest(VERSIONS[0])}", b"{")
    filled.write("aliases/champion (old)/00000000.json", b"{")
    filled.write("aliases/note", b"{")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert check_logs(filled).findings == []
    assert repair(filled) == ([], [])
    assert listed(filled) == ENTRIES
    assert taken_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


@pytest.mark.parametrize("number", range(len(ENTRIES)))
@pytest.mark.parametrize("damage", ["changed", "deleted"])
def test_a_lost_entry_of_the_catalog(filled: Store, number: int, damage: str) -> None:
    """Whichever it is; gc takes nothing that it would keep otherwise, and afterwards all is known again."""
    key = entry(layout.CATALOG, number)
    if damage == "changed":
        filled.write(key, filled.read(key).replace(b"kind", b"Kind"))
        with pytest.raises(StorageError, match="python -m storage repair"):
            listed(filled)
    else:
        filled.delete(key)
    assert taken_by_gc(filled) <= {VERSIONS[3], VERSIONS[4]}
    is_last = number == len(ENTRIES) - 1 and damage == "deleted"  # then the log is one shorter, and looks whole
    name = layout.alias("champion") if ENTRIES[number] == "champion" else ENTRIES[number]
    assert problems(filled) == {(name, layout.CATALOG)} | (set() if is_last else {(layout.CATALOG, key)})
    assert repair(filled) == ([] if is_last else [key], [ENTRIES[number]])
    assert listed(filled) == ENTRIES  # in its old place
    assert problems(filled) == set()
    assert taken_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}


def test_attempts_that_died_are_not_mourned(filled: Store) -> None:
    """What a lost entry said of one is not to be found out: an empty entry stands in its place."""
    catalog.enter(filled, "runs/r/scores/000000/dead", "scores", [], "")
    filled.write(entry(layout.CATALOG, len(ENTRIES)), b"{")
    told: list[str] = []
    assert repair(Store(filled.root), told.append) == ([entry(layout.CATALOG, len(ENTRIES))], [])
    assert told == [f"filled {entry(layout.CATALOG, len(ENTRIES))}"]
    assert listed(filled) == ENTRIES
    assert problems(filled) == set()


def test_a_store_that_never_had_a_catalog(any_store: Store) -> None:
    """As pipelines of before have left them: all is entered, in the order in which it came to be."""
    filled = fill(any_store)
    for found in list(filled.walk(layout.CATALOG)):
        filled.delete(found.path)
    assert listed(filled) == []
    assert repair(filled) == ([], ENTRIES)
    assert listed(filled) == ENTRIES
    assert [found.parents for found in catalog.read_all(filled)][:3] == [[], [VERSIONS[0]], [VERSIONS[1]]]


def test_a_run_that_was_moved_and_linked(filled: Store, tmp_path: Path) -> None:
    """Links are not followed when the store is listed; what the catalog knows is looked at all the same."""
    runs = Path(filled.root) / "runs"
    runs.rename(tmp_path / "elsewhere")
    runs.symlink_to(tmp_path / "elsewhere")
    assert sorted(check_logs(filled).versions) == sorted(VERSIONS)
    assert problems(filled) == set()


def test_commits_while_the_store_is_listed(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes between the listing of the catalog and that of its run is not thought absent."""
    walk = Store.walk

    def slow(self: Store, folder: str = "") -> list[object]:
        found = [item for item in walk(self, folder) if item.path.startswith(layout.CATALOG)]
        late = layout.checkpoint("r", 5)
        with Draft(Store(self.root), late, "checkpoint") as draft:
            draft.commit(Provenance(config={}), [VERSIONS[-1]])
        return [*found, *(item for item in walk(self, folder) if not item.path.startswith(layout.CATALOG))]

    monkeypatch.setattr(Store, "walk", slow)
    found = check_logs(filled)
    assert found.findings == []
    assert layout.checkpoint("r", 5) in found.versions


def test_a_damaged_manifest_is_not_entered(store: Store) -> None:
    """What it is cannot be told; `verify` names it."""
    store.write(layout.manifest(VERSIONS[0]), b"{")
    found = check_logs(store)
    assert (found.versions, found.findings) == ([VERSIONS[0]], [])
    assert repair(store) == ([], [])


@pytest.mark.parametrize("number", range(len(MOVES) - 1))
def test_a_deleted_move_of_an_alias(filled: Store, number: int) -> None:
    """It may hide where the alias points, but not from gc; a copy of the next one in its place helps."""
    key = entry(layout.alias("champion"), number)
    filled.delete(key)
    assert taken_by_gc(filled) == {VERSIONS[3], VERSIONS[4]}
    assert problems(filled) == {(layout.alias("champion"), key)}
    assert repair(filled) == ([key], [])
    store = Store(filled.root)
    moves = aliases.history(store, "champion")
    assert [move.version for move in moves] == [*MOVES[:number], MOVES[number + 1], *MOVES[number + 1 :]]
    assert moves[number].reason == "lost; copied from its neighbour"
    assert problems(filled) == set()


def test_an_alias_whose_newest_move_is_damaged(filled: Store) -> None:
    """Where it pointed nobody knows; the command that is named points it somewhere again."""
    last = len(MOVES) - 1
    filled.write(entry(layout.alias("champion"), last), b"{")
    remedy = f"`python -m storage alias set champion VERSION --expect {last}`"
    with pytest.raises(StorageError, match="does not end with its digest") as raised:
        aliases.current(filled, "champion")
    assert remedy in str(raised.value)
    (finding,) = check_logs(filled).findings
    assert remedy in finding.problem
    assert taken_by_gc(filled) == set()
    assert repair(filled) == ([], [])
    aliases.move(filled, "champion", VERSIONS[3], last)
    standing = aliases.current(filled, "champion")
    assert standing
    assert standing.version == VERSIONS[3]
    with pytest.raises(StorageError, match="does not end"):
        aliases.roll_back(filled, "champion")
    assert aliases.roll_back(filled, "champion", to=0).version == MOVES[0]  # reads that move alone


@pytest.mark.parametrize(("change", "problem"), [("deleted", "was never committed"), ("another", "was changed after")])
def test_an_alias_that_points_at_nothing(filled: Store, change: str, problem: str) -> None:
    """Its version was deleted, or is not the one that it was."""
    filled.delete(layout.manifest(STANDING))
    if change == "another":
        with Draft(filled, STANDING, "checkpoint") as draft:
            draft.commit(Provenance(config={}), [])
    (finding,) = check_logs(filled).findings
    assert finding.object == layout.manifest(STANDING)
    assert problem in finding.problem


def test_a_deleted_entry_of_a_lease(store: Store) -> None:
    """Is told, and filled."""
    log = Log(store, layout.lease("r"))
    for number in range(3):
        log.append(GOOD[layout.lease("r")] | {"label": str(number)})
    store.delete(log.key(1))
    assert problems(store) == {(layout.lease("r"), log.key(1))}
    assert repair(store) == ([log.key(1)], [])
    assert [log.read(number)["label"] for number in range(3)] == ["0", "2", "2"]


GOOD: dict[str, dict[str, Any]] = {
    layout.CATALOG: catalog.values("runs/r/checkpoints/000009", "checkpoint", [], ""),
    layout.alias("champion"): {"version": VERSIONS[1], "sha256": "0", "reason": "", "by": "ada", "at": "2026"},
    layout.lease("r"): {"holder": own_identity(), "label": "", "at": "2026", "ttl_s": 60.0},
}
"""An entry of each kind of log."""
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
CASES = [(log, wrong) for log, changes in WRONG.items() for wrong in changes]
CASES += [(log, {field: ABSENT}) for log, values in GOOD.items() for field in values if field not in ("attempt",)]


@pytest.mark.parametrize(("log", "wrong"), CASES)
def test_an_entry_with_wrong_fields_is_damage(filled: Store, log: str, wrong: dict[str, Any]) -> None:
    """A right digest says that it is as it was written, not by whom: it is named, and hides no other."""
    values = {field: value for field, value in (GOOD[log] | wrong).items() if value is not ABSENT}
    number = Log(filled, log).append(values)
    key = entry(log, number)
    found = [finding for finding in check_logs(Store(filled.root)).findings if finding.object == key]
    assert [finding.version for finding in found] == [log]
    assert f"{key} has wrong fields" in found[0].problem
    assert "python -m storage" in found[0].problem or log == layout.lease("r")
    assert taken_by_gc(filled) <= {VERSIONS[3], VERSIONS[4]}
    with pytest.raises(StorageError, match=list(wrong)[-1]):
        Log(filled, log).read(number)
    if log == layout.CATALOG:
        assert repair(filled) == ([key], [])
        assert listed(filled) == ENTRIES
        assert problems(filled) == set()
    if log == layout.alias("champion"):
        aliases.move(filled, "champion", VERSIONS[3], number)
        assert aliases.names(filled) == ["champion"]
    if log == layout.lease("r"):
        with Lease(filled, "r", ttl_s=0.5) as lease:
            assert lease.token == number + 1
