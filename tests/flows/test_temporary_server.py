"""The Prefect server of one command is restarted if it dies, and works in spite of proxies."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from flows.launch.prefect_server import healthy, ignore_proxies_on_loopback
from storage.interrupts import LATEST_S
from tests.flows.test_interrupts import SLACK_S
from tests.support.paths import ROOT
from tests.support.soak import scaled

pytestmark = pytest.mark.slow

JOB = """
import sys, time
from pathlib import Path
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_API_URL
from flows.launch.temporary_server import temporary_server
from storage import interrupts

@task(cache_policy=NO_CACHE)
def step(number):
    print(f"step {number}", flush=True)

@flow
def job(stop: str):
    number = 0
    while not Path(stop).exists():
        step(number)
        number += 1
        time.sleep(0.2)

def run():
    with temporary_server():
        print(PREFECT_API_URL.value(), flush=True)
        job(sys.argv[1])
    print("done", flush=True)

interrupts.run(run)
"""


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Yield a TMPDIR that must be empty at the end. Its path is short, because socket paths must be."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())


@pytest.fixture
def folder(tmp_path: Path, prefect_database: Path) -> Path:
    """Return a folder for a flow's files, where Prefect has been used before."""
    (tmp_path / "home").mkdir()
    shutil.copy(prefect_database, tmp_path / "home")
    return tmp_path


def start(folder: Path, scratch: Path, **environment: str) -> tuple["subprocess.Popen[str]", int]:
    """Start a flow that runs until `folder`/stop exists, with a temporary server; return it and the server's port."""
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    own = {"PREFECT_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder / "stop")],
        cwd=folder,
        env={**kept, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    address = job.stdout.readline()
    assert address, job.communicate()[1]
    return job, int(address.removesuffix("/api\n").rpartition(":")[2])


def await_steps(job: "subprocess.Popen[str]", count: int) -> None:
    assert job.stdout is not None
    seen = [job.stdout.readline() for _ in range(count)]
    assert all(line.startswith("step") for line in seen), seen


def server_of(job: "subprocess.Popen[str]", port: int) -> list[psutil.Process]:
    """Wait until the server answers; return the supervisor and the server's process."""
    deadline = time.monotonic() + 300
    while not healthy(port):
        assert job.poll() is None, job.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return psutil.Process(job.pid).children(recursive=True)


def starting(job: "subprocess.Popen[str]") -> list[psutil.Process]:
    """Return the supervisor and the server's process as soon as both exist, seconds before the server answers."""
    while len(family := psutil.Process(job.pid).children(recursive=True)) < 2:
        assert job.poll() is None, job.communicate()[1]
        time.sleep(0.01)
    return family


def test_a_server_that_dies_is_restarted(folder: Path, scratch: Path) -> None:
    """The flow continues: its requests wait and ask no proxy. At the end no process and no file is left."""
    http, socks = "http://127.0.0.1:9", "socks5h://127.0.0.1:9"
    silent = {"http_proxy": http, "HTTP_PROXY": http, "all_proxy": socks}
    job, port = start(folder, scratch, **silent, no_proxy="", NO_PROXY="")
    await_steps(job, 3)
    killed = list[psutil.Process]()
    victims = [(0, True), (1, False), *scaled([], [(1, True)])]
    for victim, answers in victims:  # kill the supervisor, the server before it answers, and the server after that
        family = server_of(job, port) if answers else starting(job)
        family[victim].kill()
        psutil.wait_procs(family, timeout=60)
        killed += family
    family = server_of(job, port)
    family[1].suspend()  # it then answers nothing and would not end either
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    last = server_of(job, port)
    await_steps(job, 10)
    (folder / "stop").touch()
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert out.endswith("done\n")
    assert err.count("restarting it") == len(victims) + 1
    assert err.count("killed or stopped while it started") >= 1
    _, alive = psutil.wait_procs([*killed, *last], timeout=60)
    assert not alive


def test_a_server_that_cannot_be_restarted_ends_the_command(folder: Path, scratch: Path) -> None:
    """The command ends soon and with a reason. It waits neither for Prefect's retries nor for its shutdown."""
    job, port = start(folder, scratch)
    await_steps(job, 3)
    for path in (folder / "home").glob("prefect.db*"):
        path.unlink()
    (folder / "home/prefect.db").mkdir()
    server_of(job, port)[1].kill()
    assert job.stderr is not None
    lines = list[str]()
    while not any("cannot be restarted" in line for line in lines):
        lines.append(job.stderr.readline())
        assert lines[-1], lines
    reported = time.monotonic()
    job.communicate(timeout=300)
    assert time.monotonic() - reported < LATEST_S + SLACK_S
    assert job.returncode == 1
    assert any(line.startswith("error: the temporary Prefect server has died") for line in lines)


def test_two_first_commands_at_once_make_the_database_once(tmp_path: Path, scratch: Path) -> None:
    """Prefect's migrations fail if a second server begins them at the same time."""
    with ThreadPoolExecutor() as pool:
        started = list(pool.map(lambda _: start(tmp_path, scratch), range(2)))
    (tmp_path / "stop").touch()
    for job, _ in started:
        out, err = job.communicate(timeout=300)
        assert job.returncode == 0, err
        assert out.endswith("done\n")


def without_loopback() -> list[str]:
    """Return a command prefix for a network without any active interface; skip the test if that is not allowed."""
    isolated = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("no name spaces for users here")
    return isolated


def test_a_machine_that_does_not_reach_itself_is_reported_at_once(tmp_path: Path, scratch: Path) -> None:
    """A sandbox may have no loopback interface. The command does not wait for a server that it cannot reach."""
    own = {"PREFECT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [*without_loopback(), sys.executable, "-m", "flows.score", "smoke"]
    done = subprocess.run(command, cwd=tmp_path, env={**kept, **own}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.match(r"error: .*127\.0\.0\.1.*Network is unreachable.*ip link set lo up", done.stderr), done.stderr


@pytest.mark.parametrize(
    "setting",
    [{"all_proxy": "socks://me:topsecret@127.0.0.1:9/"}, {"http_proxy": "http://h:none"}, {"no_proxy": "[::1]"}],
)
def test_a_proxy_that_cannot_be_used_is_reported_before_anything_starts(
    setting: dict[str, str], tmp_path: Path, scratch: Path
) -> None:
    """Desktops write `socks://`, which httpx does not know. The error does not repeat the password."""
    own = {"PREFECT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    own |= setting
    command = [sys.executable, "-m", "flows.score", "smoke"]
    done = subprocess.run(command, cwd=tmp_path, env={**kept, **own}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert re.match(rf"error: .*{next(iter(setting))}.*cannot use one of them .*socks5h://", done.stderr), done.stderr
    assert "topsecret" not in done.stderr
    assert not (tmp_path / "home/temporary-server.log").exists()


@pytest.mark.parametrize(
    ("lower", "upper", "becomes"),
    [
        (None, None, "127.0.0.1,localhost"),
        (None, "minio.internal", "minio.internal,127.0.0.1,localhost"),
        ("a, b", "c", "a,b,127.0.0.1,localhost"),
        ("localhost,127.0.0.1", None, "localhost,127.0.0.1"),
        ("*", None, "*"),
    ],
)
def test_proxies_for_other_hosts_stay(
    lower: str | None, upper: str | None, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that were reached without a proxy still are."""
    for name, value in (("no_proxy", lower), ("NO_PROXY", upper)):
        monkeypatch.setenv(name, value or "")
    ignore_proxies_on_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == becomes
