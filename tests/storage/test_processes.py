"""What a process has started ends with it, however it ends, and its folders go; a hostile neighbour changes nothing."""

import asyncio
import contextlib
import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import uvicorn

from storage.processes import folder as folders
from storage.processes import peers
from storage.processes.child import Child
from storage.processes.folder import TemporaryFolder
from storage.processes.limits import allow_open_files
from tests.support.killed_flow import MARK, no_process_left
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone
from tests.test_layers import modules

LEAVES_ITS_GROUP = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""
OWNER = f"""
import os, sys, time
from pathlib import Path
from storage.processes.child import Child
child = Child(Path(sys.argv[1]))
child.start([sys.executable, "-c", {LEAVES_ITS_GROUP!r}], os.environ)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Yield a TMPDIR with a short path, which must be empty at the end; this process looks there as a new one would."""
    assert tmp_path.exists()  # not in this place
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr(tempfile, "tempdir", made)
        folders._remove_abandoned.cache_clear()
        yield Path(made)
        assert list(Path(made).iterdir()) == []


def wait_empty(folder: Path) -> None:
    """Wait until the reaper, which needs some seconds after the end of a process, has removed its folders."""
    deadline = time.monotonic() + 10
    while list(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def family(command: int) -> list[psutil.Process]:
    """Wait until the command has started its child; return both."""
    process = psutil.Process(command)
    while not (children := process.children()):
        time.sleep(0.02)
    return [process, *children]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_what_has_left_the_group_ends_with_the_command(end: str, place: Path) -> None:
    """A command may give its children sessions of their own. They also end if something killed the command."""
    child = Child(place / "log")
    child.start([sys.executable, "-c", LEAVES_ITS_GROUP], os.environ)
    assert child.pid
    processes = family(child.pid)
    assert stat.S_IMODE(child.folder.stat().st_mode) == 0o700
    if end == "killed":
        processes[0].kill()
    child.close()
    wait_gone(processes)
    assert not child.alive
    child.log.unlink()


@pytest.mark.slow
def test_everything_ends_with_a_killed_owner(place: Path) -> None:
    """No process and no folder is left, and nobody else has to start for that."""
    command = [sys.executable, "-c", OWNER, str(place / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout
        processes = family(int(owner.stdout.readline()))
        owner.kill()
    wait_gone(processes, within_s=10)
    (place / "log").unlink()
    wait_empty(place)


POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from storage.processes.child import end_with_parent, for_pools
pool = ProcessPoolExecutor(4, for_pools(), end_with_parent, (os.getpid(),))
print("starts", flush=True)
for _ in range(4):
    pool.submit(time.sleep, 600)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_pools_processes_end_with_an_owner_that_is_killed_at_any_moment(place: Path) -> None:
    """Also before they have imported what they begin with: then nothing in them could end them."""
    environment = {**os.environ, MARK: str(place)}
    for number in range(12):
        with subprocess.Popen([sys.executable, "-c", POOL], cwd=ROOT, env=environment, stdout=subprocess.PIPE) as owner:
            assert owner.stdout
            owner.stdout.readline()
            time.sleep(0.02 * number)
            owner.kill()
    no_process_left(str(place), within_s=10)


LOST = """
import time
from storage.processes.child import for_pools
lost = for_pools().Process(target=time.sleep, args=(600,))
lost.daemon = False
lost.start()
"""


@pytest.mark.slow
def test_a_process_that_a_pool_has_lost_delays_no_end() -> None:
    """An interrupt can come between the start of a process and the pool's note of it."""
    assert subprocess.run([sys.executable, "-c", LOST], cwd=ROOT, timeout=60, check=False).returncode == 0


MAIN = """
import multiprocessing, sys, time
from storage.processes.child import for_pools
print("imported", flush=True)
if __name__ == "__main__":
    process = {"pool": for_pools, "other": lambda: multiprocessing.get_context("spawn")}[sys.argv[1]]().Process(
        target=time.sleep, args=(0,)
    )
    process.start()
    process.join()
    print(process.exitcode)
"""


@pytest.mark.parametrize(("context", "printed"), [("pool", ["imported", "0"]), ("other", ["imported"] * 2 + ["0"])])
def test_only_the_processes_of_pools_do_not_import_the_main_module(
    context: str, printed: list[str], tmp_path: Path
) -> None:
    """That of a flow imports Prefect, which took two thirds of a verifier's start."""
    (tmp_path / "main.py").write_text(MAIN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "main.py"), context]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == printed


def test_every_pool_is_made_with_that_context() -> None:
    """The context of `for_pools` is what makes its processes end with a killed owner."""
    made = re.compile(r"get_context\(|set_start_method|multiprocessing\.(Pool|Process)\b|ProcessPool(Executor)?\(")
    sources = {path: path.read_text().splitlines() for path in modules() if path.name != "child.py"}
    lines = [(path, line) for path, all_of_it in sources.items() for line in all_of_it if made.search(line)]
    assert [each for each in lines if "for_pools()" not in each[1]] == []


def test_a_command_that_ended_can_be_started_again(place: Path) -> None:
    """It finds an empty folder: a socket of the first one would be in its way."""
    child = Child(place / "log")
    for number in range(2):
        child.start(["sh", "-c", f'test -z "$(ls $TMPDIR)" && echo {number} && touch $TMPDIR/socket'], os.environ)
        while child.alive:
            time.sleep(0.01)
        assert child.status == 0, child.log_tail()
        child.stop()
    assert child.log_tail(1) == "1"
    child.close()
    child.log.unlink()


MAKE = """
from storage.processes.folder import TemporaryFolder
kept = TemporaryFolder()
(kept.path / "file").write_text("x")
print(kept.path, flush=True)
input()
"""


def test_a_folder_outlives_its_process_only_until_the_next_one(place: Path) -> None:
    """A job that is killed as a whole leaves its folder, perhaps with a checkpoint. One in use is left alone."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAKE], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout
        made = Path(other.stdout.readline().strip())
        first = TemporaryFolder()
        assert sorted(place.iterdir()) == sorted([made, first.path])
        other.kill()
        other.wait()
        assert made.exists()
        folders._remove_abandoned.cache_clear()  # as in a new process
        second = TemporaryFolder()
    assert sorted(place.iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def nest(folder: Path, depth: int) -> None:
    """Make folders in folders, too deep for a path, with a file in the last one."""
    inner = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=inner)
        outer, inner = inner, os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(outer)
    os.close(os.open("file", os.O_CREAT, dir_fd=inner))
    os.close(inner)


@pytest.mark.slow
def test_whatever_lies_there_is_removed_or_left_alone(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent's command leaves what it likes: folders 3,000 deep or closed to everybody, links, pipes.

    In a shared TMPDIR a pipe of our name would hang whoever opens it, a link would lead elsewhere, and folders of
    others are not ours to remove.
    """
    (tmp_path / "kept").mkdir()
    left, pipe, link, theirs = (place / f"math-mt-ppo_{name}" for name in ("left", "pipe", "link", "theirs"))
    for folder in (left, theirs):
        folder.mkdir()
    nest(left, 3000)
    (left / "closed" / "inner").mkdir(parents=True)
    (left / "closed").chmod(0)
    for to in (left / "link", link):
        to.symlink_to(tmp_path)
    for fifo in (left / "pipe", pipe):
        os.mkfifo(fifo)
    if is_root := os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    TemporaryFolder().remove()
    assert (tmp_path / "kept").exists()
    assert sorted(place.iterdir()) == sorted([pipe, link, *([theirs] if is_root else [])])
    assert capsys.readouterr().err == ""
    for path in (pipe, link):
        path.unlink()
    if is_root:
        theirs.rmdir()


@pytest.mark.parametrize("home", ["own", "none", *(["another's"] if os.geteuid() == 0 else [])])
def test_torchs_folder_is_nobody_elses(home: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home, or in one of another user's, it is a new folder of this process. What the user has set stays."""
    if home == "another's":
        os.chown(tmp_path, 65534, 65534)
    monkeypatch.setenv("HOME", "/nonexistent" if home == "none" else str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    choose = folders.keep_compiled_code_private.__wrapped__
    assert choose() is None
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    made = choose()
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    if home == "own":
        assert chosen == tmp_path / ".cache/math-mt-ppo/torchinductor"
    else:
        assert made
        assert chosen == made.path
        assert chosen.parent == place
        assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
        made.remove()


@pytest.mark.parametrize(("hard", "most"), [(4096, 4096), (resource.RLIM_INFINITY, 2**20)])
def test_open_files(hard: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised to the hard one, for the connections of episodes and of their agents."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, hard))
    monkeypatch.setattr("resource.setrlimit", limit := Mock())
    allow_open_files()
    limit.assert_called_once_with(resource.RLIMIT_NOFILE, (most, hard))


async def test_whose_connections_are_closed_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as those of a user who forwards a port by SSH to pages that root serves: they learn why from the log."""
    monkeypatch.setattr(peers, "user_of", lambda *_: 4321)
    config = uvicorn.Config(lambda: None, http=peers.only_own())
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config, uvicorn.server.ServerState(), {}),  # type: ignore[call-arg]
        "127.0.0.1",
    )
    async with server:
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    assert [line for line in caplog.messages if "4321" in line] == [
        f"connections of the user 4321 are closed: this server is for the user {os.getuid()} and root"
    ]
