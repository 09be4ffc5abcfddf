"""The commands of `python -m storage`: their output for people and scripts, and their exit status."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage import layout
from storage.__main__ import main
from storage.commands.store import COMMANDS
from storage.objects.store import Store
from storage.versions import aliases
from tests.support.chain_helpers import commit_run, commit_text
from tests.support.programs import call_program


def call(root: str, *arguments: str, status: int = 0) -> str:
    """Run a command and check its exit status. Return standard output; if `status` is not 0, also standard error."""
    out, errors = call_program(main, "--root", root, *arguments, status=status)
    return out + (errors if status else "")


def data(root: str, *arguments: str, status: int = 0) -> Any:
    """Run a command with `--json` and return the parsed JSON. Progress goes to standard error and is ignored."""
    printed = call(root, "--json", *arguments, status=status)
    return json.JSONDecoder().raw_decode(printed)[0]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store with a run: two checkpoints, the data set between them, and the alias `r/latest`."""
    store, first = Store(str(tmp_path_factory.mktemp("filled"))), {"ppo": {"eps_clip": 0.2}}
    (checkpoint,) = commit_run(store, "r", 1, first)
    rows = commit_text(store, layout.trajectories("r", 0), checkpoint, config=first)
    second, metrics = {"ppo": {"eps_clip": 0.3}}, {"loss": 0.25, "[x]": 1}
    commit_text(store, layout.checkpoint("r", 1), checkpoint, rows, config=second, metrics=metrics)
    aliases.advance(store, "r/latest", layout.checkpoint("r", 1))
    return Path(store.root)


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Store:
    return Store(str(shutil.copytree(template, tmp_path / "root")))


def test_a_uri_names_the_root(filled: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint, alias = layout.checkpoint("r", 1), "of/runs/mine"
    assert f"/root/{checkpoint}" in call_program(main, "show", filled.uri(checkpoint))[0]
    call_program(main, "diff", filled.uri(checkpoint), filled.uri(layout.checkpoint("r", 0)))
    call_program(main, "alias", "set", alias, filled.uri(checkpoint))
    assert checkpoint in call_program(main, "--root", filled.root, "show", alias)[0]


def test_ls(filled: Store) -> None:
    """Versions are listed newest first; options limit them to a run, to a kind and to the last N."""
    assert [row["version"] for row in data(filled.root, "ls")] == [
        layout.checkpoint("r", 1),
        layout.trajectories("r", 0),
        layout.checkpoint("r", 0),
        layout.run("r"),
    ]
    assert len(data(filled.root, "ls", "-n", "2", f"storage.root={filled.root}")) == 2  # as the flows call it
    assert [row["kind"] for row in data(filled.root, "ls", "--kind", "trajectories")] == ["trajectories"]
    assert data(filled.root, "ls", "--run", "other") == []
    assert "runs/r/trajectories/000000" in call(filled.root, "ls")


def test_show_diff_and_lineage(filled: Store) -> None:
    """They print one version, the differences between two, and those around one; URIs and aliases are accepted."""
    shown = data(filled.root, "show", "r/latest")
    assert shown["version"] == layout.checkpoint("r", 1)
    assert "config" not in shown
    assert data(filled.root, "show", "r/latest", "--config")["config"] == {"ppo": {"eps_clip": 0.3}}
    printed = call(filled.root, "show", filled.uri(layout.checkpoint("r", 1)))
    assert "model/model.safetensors" in printed
    assert "[x]" in printed  # printed unchanged, not read as markup
    difference = data(filled.root, "diff", layout.checkpoint("r", 0), "r/latest")
    metrics = {"[x]": [None, 1], "loss": [None, 0.25]}
    assert difference == {"config": {"algorithm.eps_clip": [0.2, 0.3]}, "metrics": metrics, "own_code": {}}
    up = data(filled.root, "lineage", layout.trajectories("r", 0), "--up")
    assert [row["version"] for row in up] == [layout.checkpoint("r", 1)]
    assert len(data(filled.root, "lineage", "r/latest")) == 4


def test_verify_ends_with_1_after_damage(filled: Store) -> None:
    """Scripts see the status. The output names the damaged object, whether it belongs to the version or an ancestor."""
    command = ["verify", layout.trajectories("r", 0), "--alone"]
    assert data(filled.root, *command)["findings"] == []
    path = next(Path(filled.root).glob("runs/r/trajectories/000000/*/data"))
    path.write_text("x" * path.stat().st_size)
    damaged = str(path.relative_to(filled.root))
    assert [finding["object"] for finding in data(filled.root, *command, status=1)["findings"]] == [damaged]
    printed = call(filled.root, "verify", "r/latest", status=1)
    assert damaged in printed
    assert "1/4 " not in printed  # progress, which is for terminals


def test_alias_commands(filled: Store) -> None:
    """One command each sets an alias, sets it only after an expected move, rolls it back, and shows its history."""
    root = filled.root
    call(root, "alias", "set", "champion", layout.checkpoint("r", 0), "--reason", "first")
    call(root, "alias", "set", "champion", "r/latest")
    assert data(root, "alias", "rollback", "champion")[0]["version"] == layout.checkpoint("r", 0)
    moves = data(root, "alias", "history", "champion")
    assert [move["reason"] for move in moves] == ["first", "", "roll back to move 0"]
    assert set(data(root, "alias")) == {"champion", "r/latest"}


def test_gc_deletes_only_if_asked(filled: Store) -> None:
    """Without `--delete` gc only shows what it would delete."""
    killed = filled.path(f"{layout.checkpoint('r', 2)}/0123456789ab/data")
    Path(killed).parent.mkdir(parents=True)
    Path(killed).touch()
    assert "nothing was deleted: --delete does it" in call(filled.root, "gc", "--older-than-hours", "0")
    assert Path(killed).exists()
    call(filled.root, "gc", "--older-than-hours", "0", "--delete")
    assert not Path(killed).exists()
    assert "nothing to collect" in call(filled.root, "gc", "--keep-last", "1")


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("show ../../etc/passwd", 1, "climbs out of the root"),
        ("lineage nobody", 1, "was never committed; `python -m storage ls` lists versions"),
        ("alias history nobody", 1, "there is no alias 'nobody'; there are: r/latest"),
        ("gc --keep-last 0", 2, "argument --keep-last: '0' is not a whole number of at least 1"),
        ("gc --older-than-hours nan", 2, "argument --older-than-hours: 'nan' is not a whole number of at least 0"),
    ],
)
def test_mistakes_are_reported_without_a_traceback(filled: Store, line: str, status: int, message: str) -> None:
    """Meaningless numbers would keep more or fewer versions than intended, or fail with an obscure error."""
    printed = call(filled.root, *line.split(), status=status)
    assert message in printed
    assert "Traceback" not in printed


def test_help() -> None:
    for command in COMMANDS:
        assert f"usage: python -m storage {command}" in call(".", command, "--help")


@pytest.mark.parametrize("damage", ["entry", "manifest"])
def test_damage_is_named_and_hides_no_other_version(filled: Store, damage: str) -> None:
    """`ls` lists the rest and ends with status 1; it names the remedy of a damaged catalog, `repair`."""
    versions = [row["version"] for row in data(filled.root, "ls")]
    lost = {"entry": versions[2], "manifest": versions[1]}[damage]
    damaged = f"{layout.CATALOG}/00000001.json" if damage == "entry" else layout.manifest(lost)
    filled.write(damaged, b"{")
    printed = call(filled.root, "ls", status=1)
    assert damaged in printed
    assert "Traceback" not in printed
    assert [row["version"] for row in data(filled.root, "ls", status=1)] == [v for v in versions if v != lost]
    assert damaged in call(filled.root, "verify", status=1)
    if damage == "entry":
        assert "`python -m storage repair` replaces it" in printed
        assert data(filled.root, "repair") == {"filled": [damaged], "entered": [lost]}
        assert data(filled.root, "verify")["findings"] == []
        assert len(data(filled.root, "ls")) == 4


@pytest.mark.parametrize("command", ["ls", "verify", "repair"])
@pytest.mark.parametrize("make", [Path.exists, Path.mkdir, Path.touch])
def test_a_root_without_objects_is_refused(command: str, make: Callable[[Path], object], tmp_path: Path) -> None:
    """The root is most likely mistyped: no command reports it as an undamaged store or creates anything there."""
    root = tmp_path / "vra"
    make(root)
    printed = call(str(root), command, status=1)
    remedy = "check the root (--root, storage.root); the first run creates it"
    assert printed == f"error: nothing is stored in {root}: {remedy}\n"
    assert not list(tmp_path.glob("vra/*"))
