"""A real S3 server for tests: Ceph's object gateway (RGW), one monitor and one disk, on loopback and in one folder."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import pytest

from storage.processes.child import tail

KEY = "testkey"
SECRET = "testsecret"

_TIMEOUT_S = 600
_MONITOR, _DISK, _GATEWAY = "ceph-mon", "ceph-osd", "radosgw"
_DAEMONS = {_MONITOR: ["-i", "a"], _DISK: ["-i", "0"], _GATEWAY: ["-n", "client.rgw"]}

# The kernel ends a daemon with the thread that started it (PR_SET_PDEATHSIG, see `setpriv`), so that no daemon outlives
# a killed test run. This thread lives as long as the process, so it starts the daemons for all threads.
_STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="s3-server")

# The gateway's cache is off, because gateways notify each other of cached objects, and a new one waits 30 s for a
# killed one. The second paragraph cuts the start from 16 s to under 2 s: by default the monitor gathers changes for a
# second before it commits them (a pool is several changes), closing the block device waits for a poll of 250 ms, a new
# disk is checked, and a client that finds the disk down asks again after 5 s. The third limits memory and threads.
_CONFIG = """\
[global]
fsid = {fsid}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
mon data = {folder}/mon
mon data avail crit = 0
mon allow pool size one = true
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = 42949672960
rgw data = {folder}/rgw
rgw frontends = beast tcp_nodelay=1 endpoint={gateway}
rgw enable apis = s3
rgw cache enabled = false
run dir = {folder}
crash dir = {folder}
admin socket =
log file =
log to stderr = true
mon cluster log to file = false

paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default pg num = 1
osd pool default pg autoscale mode = off
bdev aio poll ms = 10
bluestore fsck on mkfs = false
objecter tick interval = 0.1

bluestore cache autotune = false
bluestore cache size = 67108864
rgw thread pool size = 64
"""


def available() -> str | None:
    """Return None if `Rgw` can be started, otherwise the reason and the remedy."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if not missing:
        return None
    return (
        f"no S3 server to test against, {', '.join(missing)} not found: apt-get install radosgw ceph-mon ceph-osd, "
        "or set S3_TEST_ENDPOINT and the ordinary AWS credentials"
    )


def make_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a new bucket; return its name. Set the ordinary AWS variables for the server. The bucket is not deleted."""
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    if not os.environ.get("S3_TEST_ENDPOINT"):  # of somebody's server there are credentials already
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    S3FileSystem.clear_instance_cache()  # fsspec caches file systems by their arguments and ignores the environment
    name = f"test-{secrets.token_hex(8)}"
    S3FileSystem().call_s3("create_bucket", Bucket=name)
    return name


class Rgw:
    """Ceph RGW at `endpoint`, for `KEY` and `SECRET`. A context manager that starts it on entry and kills it on exit.

    The folder holds everything: data and `<daemon>.log`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._config = self.folder / "ceph.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._make()
            self._start_gateway()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._running.values():
            daemon.kill()
            daemon.wait()

    def _start_gateway(self) -> None:
        """Start the gateway; return when it answers."""
        self._spawn(_GATEWAY)
        limit = time.monotonic() + _TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):  # URLError is one
                urllib.request.urlopen(self.endpoint, timeout=10).close()
                return
            if self._running[_GATEWAY].poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"{_GATEWAY} does not answer:\n{self._logs()}")
            time.sleep(0.02)

    def _make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir(parents=True)
        monitor, gateway = f"[v2:127.0.0.1:{free_port()}]", f"127.0.0.1:{free_port()}"
        self.endpoint, fsid, disk = f"http://{gateway}", str(uuid.uuid4()), str(uuid.uuid4())
        self._config.write_text(_CONFIG.format(fsid=fsid, monitor=monitor, gateway=gateway, folder=self.folder))
        members = str(self.folder / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", monitor, "--fsid", fsid, members)
        self._run(_MONITOR, *_DAEMONS[_MONITOR], "--mkfs", "--monmap", members)
        self._spawn(_MONITOR)
        self._run("ceph", "--connect-timeout", "300", "osd", "new", disk, "0")
        self._run(_DISK, *_DAEMONS[_DISK], "--mkfs", "--osd-uuid", disk)
        self._spawn(_DISK)
        user = ["--uid", "test", "--display-name", "test", "--access-key", KEY, "--secret", SECRET]
        self._run("radosgw-admin", *_DAEMONS[_GATEWAY], "user", "create", *user)

    def _run(self, *command: str) -> None:
        """Run one of Ceph's tools to its end."""
        line = [command[0], "-c", str(self._config), *command[1:]]
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}\n{self._logs()}")

    def _spawn(self, name: str) -> None:
        line = ["setpriv", "--pdeathsig", "KILL", name, "-c", str(self._config), "-f", *_DAEMONS[name]]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = _STARTER.submit(_popen, line, log.fileno()).result()

    def _logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {log.name}\n{tail(log)}" for log in self.folder.glob("*.log"))


def _popen(line: list[str], output: int) -> subprocess.Popen[bytes]:
    # A new session, so that Ctrl-C reaches only pytest, which then ends the daemons.
    return subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)


def free_port() -> int:
    """Return a free port below the kernel's range for outgoing connections, so none takes it while a server is down."""
    while True:
        port = secrets.choice(range(15000, 32768))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
