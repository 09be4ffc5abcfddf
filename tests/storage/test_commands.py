"""`python -m storage`: what people and scripts read about a store."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.__main__ import COMMANDS, main
from storage.errors import StorageError
from storage.logs.catalog import check_not_empty
from storage.logs.log import Log
from storage.objects.store import Store
from storage.versions import aliases
from storage.versions.drafts import Draft, Provenance
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def call(root: str, *arguments: str, status: int = 0) -> str:
    """Output of a command, which must end with `status`; with 0 the standard output alone."""
    command = [sys.executable, "-m", "storage", "--root", root, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + (done.stderr if status else "")


def data(root: str, *arguments: str, status: int = 0) -> Any:
    """What a command prints for scripts; progress is beside it, in standard error."""
    printed = call(root, "--json", *arguments, status=status)
    return json.JSONDecoder().raw_decode(printed)[0]


@pytest.fixture
def filled(store: Store) -> Store:
    """A run of two checkpoints and the data set between."""

    def commit(version: str, kind: Any, parents: list[str], eps: float, metrics: dict[str, Any]) -> None:
        with Draft(store, version, kind) as draft:
            path = draft.scratch / "data"
            path.write_text(version)
            draft.add(path, "notes/data", rows=3 if kind == "trajectories" else None)
            draft.commit(Provenance(config={"ppo": {"eps_clip": eps}}), parents, metrics)

    commit(layout.run("r"), "run", [], 0.2, {})
    commit(layout.checkpoint("r", 0), "checkpoint", [layout.run("r")], 0.2, {})
    commit(layout.trajectories("r", 0), "trajectories", [layout.checkpoint("r", 0)], 0.2, {"solved": 0.5})
    commit(
        layout.checkpoint("r", 1),
        "checkpoint",
        [layout.checkpoint("r", 0), layout.trajectories("r", 0)],
        0.3,
        {"loss": 0.25, "[x]": 1},
    )
    aliases.advance(store, "r/latest", layout.checkpoint("r", 1))
    return store


def test_ls(filled: Store) -> None:
    """Newest first, filtered by run and kind; the last N only."""
    assert [row["version"] for row in data(filled.root, "ls")] == [
        layout.checkpoint("r", 1),
        layout.trajectories("r", 0),
        layout.checkpoint("r", 0),
        layout.run("r"),
    ]
    assert len(data(filled.root, "ls", "-n", "2")) == 2
    assert [row["rows"] for row in data(filled.root, "ls", "--kind", "trajectories")] == [3]
    assert data(filled.root, "ls", "--run", "other") == []
    assert "runs/r/trajectories/000000" in call(filled.root, "ls")


def test_show_and_diff(filled: Store) -> None:
    """One version, and what differs between two, by name or alias."""
    shown = data(filled.root, "show", "r/latest")
    assert shown["version"] == layout.checkpoint("r", 1)
    assert "config" not in shown
    assert data(filled.root, "show", "r/latest", "--config")["config"] == {"ppo": {"eps_clip": 0.3}}
    printed = call(filled.root, "show", filled.uri(layout.checkpoint("r", 1)))
    assert "notes/data" in printed
    assert "[x]" in printed  # shown as it is, not taken for markup
    difference = data(filled.root, "diff", layout.checkpoint("r", 0), "r/latest")
    assert difference == {"config": {"ppo.eps_clip": [0.2, 0.3]}, "metrics": {"[x]": [None, 1], "loss": [None, 0.25]}}


def test_lineage_both_ways(filled: Store) -> None:
    """Down to the run's beginning, and up to what came of a data set."""
    down = [row["version"] for row in data(filled.root, "lineage", "r/latest")]
    assert set(down) == {
        layout.checkpoint("r", 1),
        layout.checkpoint("r", 0),
        layout.trajectories("r", 0),
        layout.run("r"),
    }
    up = [row["version"] for row in data(filled.root, "lineage", layout.trajectories("r", 0), "--up")]
    assert layout.checkpoint("r", 1) in up
    assert layout.checkpoint("r", 0) not in up


def test_verify_ends_with_1_where_something_is_wrong(filled: Store) -> None:
    """For scripts; the damaged object is named, whether it is the version's own or an ancestor's."""
    sound = ["verify", layout.trajectories("r", 0), "--alone"]
    assert data(filled.root, *sound)["findings"] == []
    path = next(Path(filled.root).glob("runs/r/trajectories/000000/*/notes/data"))
    path.write_text("x" * path.stat().st_size)
    assert [finding["object"] for finding in data(filled.root, *sound, status=1)["findings"]] == [
        str(path.relative_to(filled.root))
    ]
    assert "notes/data" in call(filled.root, "verify", "r/latest", status=1)


def test_alias_commands(filled: Store) -> None:
    """Set, expect, history and back in one command each."""
    root = filled.root
    call(root, "alias", "set", "champion", layout.checkpoint("r", 0), "--reason", "first")
    call(root, "alias", "set", "champion", "r/latest", "--expect", "0")
    assert "moved by another writer" in call(root, "alias", "set", "champion", "r/latest", "--expect", "0", status=1)
    assert data(root, "alias", "back", "champion")[0]["version"] == layout.checkpoint("r", 0)
    assert [move["reason"] for move in data(root, "alias", "history", "champion")] == [
        "first",
        "",
        "roll back to move 0",
    ]
    assert set(data(root, "alias")) == {"champion", "r/latest"}
    assert "there is no alias 'nobody'" in call(root, "alias", "history", "nobody", status=1)


def test_gc_does_nothing_unasked(filled: Store) -> None:
    """A dry run by default; with --delete it is done and told."""
    arguments = ["gc", "--keep-last", "1", "--kind", "trajectories", "--kind", "checkpoint"]
    before = {found.path for found in filled.walk()}
    assert "nothing to collect" in call(filled.root, *arguments)  # numbers 0 stay
    assert {found.path for found in filled.walk()} == before


def test_doctor(tmp_path: Path) -> None:
    """Says that a sound place is sound, and leaves nothing behind."""
    root = str(tmp_path / "new")
    assert all(check["ok"] is not False for check in data(root, "doctor"))
    assert [path for path in Path(root).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "runs/r/checkpoints/000007"], "was never committed"),
        (["show", "../../etc/passwd"], "climbs out of the root"),
        (["lineage", "nobody"], "was never committed"),
    ],
)
def test_mistakes_are_told_in_one_line(filled: Store, arguments: list[str], message: str) -> None:
    """What is wrong, and no traceback."""
    printed = call(filled.root, *arguments, status=1)
    assert message in printed
    assert "Traceback" not in printed


def test_help() -> None:
    """Every command explains itself."""
    for command in COMMANDS:
        assert "usage: python -m storage" in call(".", command, "--help")


def test_mend(filled: Store) -> None:
    """A damaged catalog stops who reads it with the command that helps, and after that command all is seen again."""
    filled.write(f"{layout.CATALOG}/00000001.json", b"{")
    assert "`python -m storage repair` replaces it" in call(filled.root, "ls", "-n", "9", status=1)
    found = data(filled.root, "verify", status=1)["findings"]  # beside these: contents that are none
    assert [finding["object"] for finding in found[:2]] == [f"{layout.CATALOG}/00000001.json", layout.CATALOG]
    assert data(filled.root, "mend") == {
        "filled": [f"{layout.CATALOG}/00000001.json"],
        "entered": [layout.checkpoint("r", 0)],
    }
    assert not [finding for finding in data(filled.root, "verify", status=1)["findings"] if "catalog" in str(finding)]
    assert len(data(filled.root, "ls")) == 4


@pytest.mark.parametrize("damage", ["digest", "fields", "manifest"])
def test_ls_names_what_it_cannot_read_beside_the_rest(filled: Store, damage: str) -> None:
    """One bad entry, or one bad manifest, hides no other version; scripts see it by the status."""
    versions = [row["version"] for row in data(filled.root, "ls")]
    if damage == "fields":
        bad = f"{layout.CATALOG}/{Log(filled, layout.CATALOG).append({'kind': 'run', 'version': 7}):08d}.json"
    elif damage == "digest":
        bad, versions = f"{layout.CATALOG}/00000001.json", [versions[0], versions[1], versions[3]]
        filled.write(bad, b"{")
    else:
        bad, versions = layout.manifest(layout.trajectories("r", 0)), [versions[0], versions[2], versions[3]]
        filled.write(bad, b"{")
    printed = call(filled.root, "ls", status=1)
    assert bad in printed
    assert "Traceback" not in printed
    assert [row["version"] for row in data(filled.root, "ls", status=1)] == versions
    assert bad in call(filled.root, "verify", status=1)


def test_alias_names_what_it_cannot_read_beside_the_rest(filled: Store) -> None:
    """So the alias that is whole can still be looked up; that of the catalog's bad entry is unknown."""
    aliases.move(filled, "champion", layout.checkpoint("r", 0), None)
    number = Log(filled, layout.alias("champion")).append({"version": 7})
    assert set(data(filled.root, "alias", status=1)) == {"r/latest"}
    printed = call(filled.root, "alias", status=1)
    assert f"aliases/champion/{number:08d}.json" in printed
    assert "Traceback" not in printed
    assert "there are: champion, r/latest" in call(filled.root, "alias", "history", "nobody", status=1)


@pytest.mark.parametrize(
    ("command", "make"),
    [
        ("ls", Path.exists),
        ("ls", Path.mkdir),
        ("verify", Path.exists),
        ("alias", Path.exists),
        ("gc", Path.exists),
        ("mend", Path.exists),
        ("show runs/r/run", Path.exists),
    ],
)
def test_a_root_where_nothing_is_no_empty_store(command: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    """Most likely it is mistyped: a script must not take it for a store that is whole, and nothing is made there."""
    root = tmp_path / "vra"
    make(root)
    printed = call(str(root), *command.split(), status=1)
    remedy = "check the root (--root, storage.root); the first run creates it"
    assert printed == f"error: nothing is stored in {root}: {remedy}\n"
    assert not list(tmp_path.glob("vra/*"))


def test_a_file_is_no_root(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    printed = call(f"{tmp_path}/file", "ls", status=1)
    assert printed.endswith("Not a directory: a file is in the way; check the store's root\n")


def test_a_prefix_without_objects_is_no_empty_store(any_store: Store) -> None:
    """On S3 there are no folders: what holds no object is not there. A single object will do, whatever it is."""
    with pytest.raises(StorageError, match="nothing is stored in"):
        check_not_empty(any_store)
    any_store.write("doctor/0a/left", b"x")
    check_not_empty(any_store)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("gc --keep-last -1", "argument --keep-last: '-1' is not a whole number of at least 1"),
        ("gc --keep-last 0", "argument --keep-last: '0' is not a whole number of at least 1"),
        ("gc --keep-every -2", "argument --keep-every: '-2' is not a whole number of at least 0"),
        ("gc --older-than-hours nan", "argument --older-than-hours: 'nan' is not a number of at least 0"),
        ("gc --older-than-hours inf", "argument --older-than-hours: 'inf' is not a number of at least 0"),
        ("gc --older-than-hours -1", "argument --older-than-hours: '-1' is not a number of at least 0"),
        ("gc --older-than-hours x", "argument --older-than-hours: 'x' is not a number of at least 0"),
        ("ls -n -1", "argument -n/--last: '-1' is not a whole number of at least 1"),
        ("ls -n x", "argument -n/--last: 'x' is not a whole number of at least 1"),
        ("ls -n 9999999999", "argument -n/--last: '9999999999' is too large: 1,000,000,000 at most"),
        ("alias set a b --expect -2", "argument --expect: '-2' is not a whole number of at least -1"),
        ("alias rollback a --to -1", "argument --to: '-1' is not a whole number of at least 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command, before anything is looked at; they would keep more or less than was thought, or end oddly."""
    monkeypatch.setattr(sys, "argv", ["storage", "--root", "nowhere", *line.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
