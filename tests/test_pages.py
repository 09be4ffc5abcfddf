"""Command lines on pages are those that programs take, and links have targets."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

import flows.metrics
import storage.__main__
import tasks.provenance.__main__
from tests.support.paths import ROOT

PAGES = [
    page
    for page in sorted(ROOT.rglob("*.md"))
    if page.relative_to(ROOT).parts[0] in ("flows", "tasks", "storage", "configs", "tests") or page.parent == ROOT
]
_COMMAND = re.compile(r"(make|python|prefect|source|export|ray|kubectl|RAY_AUTH_MODE=\S+|PYTHONPATH=\S+|apt-get) .*")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)(?:#[^)]*)?\)")

PROGRAMS = {
    "storage": storage.__main__.main,
    "tasks.provenance": tasks.provenance.__main__.main,
    "flows.metrics": flows.metrics.main,
}
"""The programs that `test_a_command_line_works_as_its_page_says` runs on a kept store."""


def commands(page: Path) -> list[str]:
    """Return the command lines of a page, without comments: indented ones, and those after a `$` in fenced blocks."""
    lines, fenced = [], False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced and line.startswith("$ "):
            lines.append(line[2:])
        elif not fenced and line.startswith("    ") and _COMMAND.fullmatch(line[4:]):
            lines.append(line[4:])
    return [re.sub(r"\s+# .*", "", line).removesuffix(" &") for line in lines]


ALL = {command: page for page in PAGES for command in commands(page)}
ON_A_KEPT_STORE = [
    command
    for command in ALL
    if command.startswith(tuple(f"python -m {name} " for name in PROGRAMS))
    and "s3://" not in command
    and "demo-tools" not in command
]


@pytest.mark.parametrize("name", ["Mein Projekt", "a#b", "it's", "[a]", "x;y"])
def test_make_works_in_any_folder(name: str, tmp_path: Path) -> None:
    """The path of the checkout is one word of every command; nothing is made elsewhere."""
    checkout = tmp_path / name / "code"
    program = checkout / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    for file in ("Makefile", "requirements-cpu.lock"):
        shutil.copy(ROOT / file, checkout)
    shutil.copy(ROOT / "requirements-cpu.lock", checkout / ".venv")
    program.write_text('#!/bin/sh\necho "$@ in $PREFECT_HOME"\n')
    program.chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "ARGS"}
    made = subprocess.run(["make", "smoke"], cwd=checkout, env=outside, capture_output=True, text=True, check=True)
    assert made.stdout == f"-m flows.math_mt_ppo smoke in {checkout}/var/prefect\n"
    assert [*tmp_path.iterdir()] == [tmp_path / name]


@pytest.mark.parametrize("command", [command for command in ALL if "python -m flows." in command])
def test_a_flow_takes_the_command_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow itself is not run: its own tests do that."""
    began = list[object]()
    monkeypatch.setattr("storage.interrupts.run", lambda act, *_: began.append(act))
    words = [word for word in shlex.split(command) if "PYTHONPATH" not in word]
    monkeypatch.setattr("sys.argv", words[2:])
    runpy.run_module(words[2], run_name="__main__")
    assert len(began) == 1


def test_makefile_has_every_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in ALL if command.startswith("make ")} <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder whose `var` is a kept store with a run `half` and an alias `champion`."""
    folder = tmp_path_factory.mktemp("pages")
    with tarfile.open(ROOT / "tests/kept_stores/2026-11.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "store").rename(folder / "var")
    return folder


@pytest.mark.parametrize("command", ON_A_KEPT_STORE)
def test_a_command_line_works_as_its_page_says(
    command: str, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Command lines of a page succeed in its order and print something. The run of a kept store replaces `demo`."""
    _, _, name, *arguments = shlex.split(command)
    replaced = [argument.replace("demo", "half").replace("0+15", "0+9") for argument in arguments]
    monkeypatch.chdir(kept)
    monkeypatch.setattr("sys.argv", ["command", *replaced])
    assert PROGRAMS[name]() == 0
    assert capsys.readouterr().out
