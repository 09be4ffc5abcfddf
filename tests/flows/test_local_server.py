"""`make up` and `make down` with damaged files, reused process numbers, and processes that do not end.

The tests of their ordinary work are in test_flows.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from flows.launch.background import Background
from storage.processes.identity import identity
from tests.flows.test_temporary_server import without_loopback
from tests.support.paths import ROOT
from tests.support.s3_server import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a copy of the code that the command needs; its processes and files are there."""
    for name in ("flows", "storage", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "var/prefect").mkdir(parents=True)
    return tmp_path


def begin(project: Path, *arguments: str, before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return subprocess.Popen(
        [*before, sys.executable, "-m", "flows.launch.local_server", *arguments],
        cwd=project,
        env={**kept, "PYTHONPATH": str(project), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(command: "subprocess.Popen[str]", status: int = 0) -> str:
    """Wait for the command to end with `status`; return its output, which must hold no traceback."""
    try:
        printed, _ = command.communicate(timeout=100)
    finally:
        command.kill()
    assert "Traceback" not in printed, printed
    assert command.returncode == status, printed
    return printed


class Session:
    """A shell and its child in a new session: one as `make up` starts it (`marked`), or an unrelated one."""

    def __init__(self, project: Path, marked: bool) -> None:
        kept = {key: value for key, value in os.environ.items() if key != "PREFECT_HOME"}
        own = {"PREFECT_HOME": str(project / "var/prefect")} if marked else {}
        self.shell = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True, env={**kept, **own})
        self.pid = self.shell.pid
        while not (children := psutil.Process(self.pid).children()):
            time.sleep(0.01)
        self.child = children[0]

    def kill_shell(self) -> None:
        self.shell.kill()
        self.shell.wait()

    def lives(self) -> tuple[bool, bool]:
        """Return whether the shell runs, and whether its child does; a zombie does not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return self.shell.poll() is None, self.child.status() != psutil.STATUS_ZOMBIE
        return self.shell.poll() is None, False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.shell.wait()


@pytest.fixture
def session(project: Path) -> Iterator[Callable[[bool], Session]]:
    """Yield a function that starts sessions, which end with the test."""
    started: list[Session] = []

    def start(marked: bool) -> Session:
        started.append(Session(project, marked))
        return started[-1]

    yield start
    for each in started:
        each.end()


def note(project: Path, name: str, text: str | bytes) -> Path:
    path = project / f"var/prefect/{name}.pid"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


DAMAGED = [
    b"", b"7", b"server", b"\xff\xfe", b"9" * 30, b"true", b"1.5", b"null", b"[]", b"{}",
    b"[" * 3000, b'{"pid": "7", "machine": "m", "started": 1}', b'{"pid": 7}',
]  # fmt: skip


def test_damaged_notes_of_processes_are_reported_and_removed(
    project: Path, session: Callable[[bool], Session], tmp_path: Path
) -> None:
    """This holds for any content, and an unrelated process is not harmed."""
    unrelated = session(False)
    for text in [*DAMAGED, str(unrelated.pid).encode()[:-1] + b"\x00"]:
        damaged = note(project, "worker", text)
        assert f"{damaged} is damaged" in ended(begin(project, "down"))
        assert not damaged.exists()
    assert unrelated.lives() == (True, True)


def test_a_damaged_note_does_not_keep_the_other_process_from_being_ended(
    project: Path, session: Callable[[bool], Session]
) -> None:
    server = session(True)
    notes = note(project, "worker", ""), note(project, "server", json.dumps(identity(server.pid)))
    printed = ended(begin(project, "down"))
    assert f"{notes[0]} is damaged" in printed
    assert "server ended" in printed
    assert server.lives() == (False, False)
    assert not any(path.exists() for path in notes)


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_note_that_is_not_a_file_is_reported(project: Path, command: str) -> None:
    """A folder, or a pipe that would block, may have another purpose, so it is left there."""
    path = project / "var/prefect/server.pid"
    path.mkdir()
    assert f"{path} is not a file: remove it" in ended(begin(project, command), status=1)
    path.rmdir()
    os.mkfifo(path)
    assert f"{path} is not a file: remove it" in ended(begin(project, command), status=1)


def test_the_users_own_settings_stay(project: Path) -> None:
    """`up` reports the user's file and starts nothing, because it would write the same file. `down` leaves it."""
    settings = project / "prefect.toml"
    for text in ('[api]\nurl = "https://prefect.example/api"\n', "[logging]\nlevel = 'DEBUG'\n", "[api", "\x00"):
        settings.write_text(text)
        assert f"error: {settings} is not what" in ended(begin(project, "up", "--port", str(free_port())), status=1)
        assert not list((project / "var/prefect").glob("*.pid"))
        assert f"{settings} " in ended(begin(project, "down"))
        assert settings.read_text() == text
    for text in ("", '[api]\nurl = "http://127.0.0.1:4200/api"\nauth_string = "admin:x"\n'):
        settings.write_text(text)
        assert not ended(begin(project, "down"))
        assert not settings.exists()


@pytest.mark.parametrize("text", [None, "", "[api", '[api]\nurl = "http://127.0.0.1:99/api"\n'])
def test_up_with_a_server_whose_password_is_lost_says_what_to_do(
    project: Path, text: str | None, session: Callable[[bool], Session]
) -> None:
    """It does not end the server by itself, because that would end flow runs."""
    if text is not None:
        (project / "prefect.toml").write_text(text)
    running = {name: session(True) for name in ("server", "worker")}
    for name, each in running.items():
        note(project, name, json.dumps(identity(each.pid)))
    printed = ended(begin(project, "up"), status=1)
    assert printed.startswith(f"error: {project / 'prefect.toml'} ")
    assert "type `make down` and `make up`" in printed
    assert [each.lives() for each in running.values()] == [(True, True)] * 2


def test_down_spares_an_unrelated_process_with_the_same_number(
    project: Path, session: Callable[[bool], Session]
) -> None:
    """This holds after the unrelated shell has ended, too."""
    unrelated = session(False)
    right = identity(unrelated.pid)
    for noted in (right | {"started": right["started"] - 1}, right | {"machine": "another"}):
        note(project, "server", json.dumps(noted))
        assert not ended(begin(project, "down"))
        assert unrelated.lives() == (True, True)
    unrelated.kill_shell()
    note(project, "server", json.dumps(right))
    assert not ended(begin(project, "down"))
    assert unrelated.lives() == (False, True)


@pytest.mark.parametrize("shell_lives", [False, True])
def test_down_ends_the_session_that_was_noted(
    project: Path, session: Callable[[bool], Session], shell_lives: bool
) -> None:
    """This holds for flow runs whose worker was killed, too."""
    ours = session(True)
    noted = note(project, "worker", json.dumps(identity(ours.pid)))
    if not shell_lives:
        ours.kill_shell()
    assert ended(begin(project, "down")) == "worker ended\n"
    assert ours.lives() == (False, False)
    assert not noted.exists()


UNREAPED = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], start_new_session=True); time.sleep(600)"


def test_down_does_not_wait_for_zombies(project: Path) -> None:
    """A process that its parent does not reap stays a zombie, for ever in a container without an init process."""
    home = {**os.environ, "PREFECT_HOME": str(project / "var/prefect")}
    with subprocess.Popen([sys.executable, "-c", UNREAPED, "sleep", "600"], env=home) as parent:
        while not (children := psutil.Process(parent.pid).children()) or children[0].name() != "sleep":
            time.sleep(0.01)
        note(project, "server", json.dumps(identity(children[0].pid)))
        assert ended(begin(project, "down")) == "server ended\n"
        assert children[0].status() == psutil.STATUS_ZOMBIE
        parent.kill()


def test_a_process_that_cannot_be_killed_is_reported(
    project: Path,
    session: Callable[[bool], Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that waits in the kernel gets no signal. Its note stays, so that the next `down` ends it."""
    unkillable, folder = session(True), project / "var/prefect"
    noted = note(project, "worker", json.dumps(identity(unkillable.pid)))
    with monkeypatch.context() as patched:
        for name in ("STOP_SECONDS", "KILLED_SECONDS"):
            patched.setattr(f"flows.launch.background.{name}", 0.1)
        for name in ("terminate", "kill"):
            patched.setattr(psutil.Process, name, lambda process: None)
        left = Background("worker", folder).stop()
    assert {process.pid for process in left} == {unkillable.pid, unkillable.child.pid}
    assert noted.exists()
    assert not Background("worker", folder).stop()
    assert not noted.exists()


def test_only_one_up_or_down_works_at_a_time(project: Path) -> None:
    """The second one waits and prints that it waits."""
    with (project / "var/prefect/make.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = begin(project, "down")
        assert second.stdout is not None
        assert "waiting for another `make up` or `make down`" in second.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(timeout=0.5)
    assert not ended(second)


def test_up_on_a_machine_that_does_not_reach_itself_says_so(project: Path) -> None:
    """Otherwise it would wait for a quarter of an hour."""
    printed = ended(begin(project, "up", before=tuple(without_loopback())), status=1)
    assert printed.startswith("error: ")
    assert "ip link set lo up" in printed


def test_flow_runs_of_a_killed_worker_are_not_taken_for_a_worker(
    project: Path, session: Callable[[bool], Session]
) -> None:
    """They are in its session and only it could cancel them, so they are ended before another worker starts."""
    ours = session(True)
    note(project, "worker", json.dumps(identity(ours.pid)))
    worker = Background("worker", project / "var/prefect")
    assert worker.runs()
    ours.kill_shell()
    assert worker.members() == [ours.child]
    assert not worker.runs()
