"""The Prefect server of one command ends with it, the command ends with the server, and proxies are in nobody's way."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.launch.prefect_server import ignore_proxies_on_loopback
from tests.storage.test_processes import wait_empty
from tests.support.paths import ROOT
from tests.support.sandbox_helpers import wait_gone

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
        wait_empty(Path(folder))


@pytest.fixture
def folder(tmp_path: Path, prefect_database: Path) -> Path:
    """Return a folder for a flow's files, where Prefect has been used before."""
    (tmp_path / "home").mkdir()
    shutil.copy(prefect_database, tmp_path / "home")
    return tmp_path


def environment_of(folder: Path, scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return kept | {"PREFECT_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}


def start(folder: Path, scratch: Path, **environment: str) -> "subprocess.Popen[str]":
    """Start a flow that runs until `folder`/stop exists, with a temporary server, and wait for its first step."""
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder / "stop")],
        cwd=folder,
        env=environment_of(folder, scratch) | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)][1] == "step 0\n", job.communicate()[1]
    return job


def server_of(job: "subprocess.Popen[str]") -> psutil.Process:
    return next(child for child in psutil.Process(job.pid).children() if "prefect_server.py" in str(child.cmdline()))


@pytest.mark.long
def test_a_flow_and_its_server_end_together(folder: Path, scratch: Path) -> None:
    """A flow whose server dies says why in one sentence, and waits neither for Prefect's retries nor its shutdown.

    The same command can begin again. It asks no proxy; at its end no process and no file is left.
    """
    job = start(folder, scratch)
    server_of(job).kill()
    killed = time.monotonic()
    _, err = job.communicate(timeout=300)
    assert time.monotonic() - killed < 15
    assert job.returncode == 1
    assert re.search(r"^error: the temporary Prefect server has died, see .*; the same command continues$", err, re.M)
    http, socks = "http://127.0.0.1:9", "socks5h://127.0.0.1:9"
    silent = {"http_proxy": http, "HTTP_PROXY": http, "all_proxy": socks}
    again = start(folder, scratch, **silent, no_proxy="", NO_PROXY="")
    server = server_of(again)
    (folder / "stop").touch()
    out, err = again.communicate(timeout=300)
    assert out.endswith("done\n"), err
    wait_gone([server])


def test_a_machine_that_does_not_reach_itself_is_reported_at_once(tmp_path: Path, scratch: Path) -> None:
    """A sandbox may have no loopback interface. The command does not wait for a server that it cannot reach."""
    isolated = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("no name spaces for users here")
    own = environment_of(tmp_path, scratch)
    command = [*isolated, sys.executable, "-m", "flows.score", "smoke"]
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*127\.0\.0\.1.*Network is unreachable.*ip link set lo up.*\n", done.stderr)


def test_proxies_for_other_hosts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that were reached without a proxy still are."""
    own = "127.0.0.1,localhost"
    for lower, upper, becomes in (
        ("", "", own),
        ("", "a.b", f"a.b,{own}"),
        ("a, b", "c", f"a, b,{own}"),
        ("*", "", "*"),
    ):
        monkeypatch.setenv("no_proxy", lower)
        monkeypatch.setenv("NO_PROXY", upper)
        ignore_proxies_on_loopback()
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == becomes


def test_nothing_is_reported_to_the_makers_of_prefect(scratch: Path) -> None:
    """Not even the first import on a terminal: an offline machine would wait, and others do not expect it."""
    asked = (
        "import flows.score; from prefect.settings import PREFECT_SERVER_ANALYTICS_ENABLED as server;"
        "from prefect._internal.analytics import is_telemetry_enabled as client; print(client(), server.value())"
    )
    bare = {"PATH": os.environ["PATH"], "HOME": str(scratch), "PREFECT_HOME": str(scratch)}
    ran = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, env=bare, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
