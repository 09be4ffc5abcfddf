"""Two hosts on this machine: network namespaces that a cable connects, each with a name and a folder of its own."""

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.support.paths import ROOT

ADDRESSES = ("10.0.0.1", "10.0.0.2")
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_WAIT_S = 300.0


_NAMESPACES = ("--net", "--uts", "--mount", "--pid")
_NEW = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc")


def _missing() -> str | None:
    """Return None if namespaces can be made here, otherwise the reason."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter", "setpriv"))):
        return "needs root and the commands ip, unshare, nsenter and setpriv, to make network namespaces"
    made = subprocess.run([*_NEW, "true"], capture_output=True, check=False)
    return "network namespaces are not permitted here" if made.returncode else None


need_namespaces = pytest.mark.skipif(bool(_missing()), reason=_missing() or "")


class Hosts:
    """Two hosts, at `ADDRESSES`; a context manager that ends them. The kernel ends them with this process.

    Both see all files of this machine. `own` is another folder on each, and its home.

    Args:
        folder: receives `host-0.log` and `host-1.log`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = tempfile.TemporaryDirectory(prefix="hosts-")
        self.own = Path(self._made.name) / "own"
        self._first: list[subprocess.Popen[bytes]] = []
        """The command that holds each host's namespaces; its child is the first process in them."""

    def __enter__(self) -> Self:
        self.own.mkdir()
        for host in range(len(ADDRESSES)):
            self.folder(host).mkdir()
            self._first.append(self._boot(host))
        a, b = map(self._init, self._first)
        self._ip("link", "add", "v0", "netns", a, "type", "veth", "peer", "name", "v0", "netns", b)
        for host, address in enumerate(ADDRESSES):
            self.type(host, f"ip addr add {address}/24 dev v0; ip link set lo up; ip link set v0 up")
            self.type(host, "ip route add default dev v0")
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(len(self._first)):
            self.kill(host)
        self._made.cleanup()

    def _boot(self, host: int) -> subprocess.Popen[bytes]:
        """Start the first process of a host, which waits for those that lose their parent."""
        mounts = f'mount --bind /dev/null /etc/resolv.conf; mount --bind "{self.folder(host)}" "{self.own}"'
        script = f"hostname host-{host}; {mounts}; echo up; sleep infinity & wait"
        command = ["setpriv", "--pdeathsig", "KILL", *_NEW, "bash", "-ec", script]
        first = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert first.stdout
        assert first.stdout.readline() == b"up\n"
        return first

    def folder(self, host: int) -> Path:
        """Return the folder that a host sees as `own`."""
        return Path(self._made.name) / f"of-{host}"

    def start(self, host: int, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a host whose name resolves nowhere; its output goes to the host's log."""
        inside = ["nsenter", "--target", self._init(self._first[host]), *_NAMESPACES, f"--wd={ROOT}", "--"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"HOME": str(self.own), "PATH": path, "PYTHONPATH": str(ROOT)}
        with (self._folder / f"host-{host}.log").open("ab") as log:
            return subprocess.Popen([*inside, *command], stdout=log, stderr=log, env=os.environ | own | environment)

    def type(self, host: int, line: str, **environment: str) -> None:
        """Run a command line, as its page has it, to its end."""
        assert self.start(host, "sh", "-c", line, **environment).wait(_WAIT_S) == 0, self.log(host)

    def kill(self, host: int) -> None:
        """End all processes of a host, as if it had lost power."""
        self._first[host].kill()
        self._first[host].communicate()

    def cable(self, state: str) -> None:
        """Cut or connect the cable: `down`, `up`."""
        self.type(0, f"ip link set v0 {state}")
        if state == "up":
            self.type(0, "ip route replace default dev v0")

    def log(self, host: int) -> str:
        return (self._folder / f"host-{host}.log").read_text()

    def wait_for(self, text: str, host: int = 0) -> None:
        deadline = time.monotonic() + _WAIT_S
        while text not in self.log(host):
            assert time.monotonic() < deadline, self.log(0)[-4000:] + self.log(1)[-4000:]
            time.sleep(0.1)

    @contextmanager
    def reaching(self, *ports: int) -> Iterator[None]:
        """Let both hosts reach servers of this machine at the same ports of their own loopback, whatever the cable."""
        listeners = [(port, self._listener(first, port)) for first in self._first for port in ports]
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="two-hosts", daemon=True)
        thread.start()
        for port, listener in listeners:
            asyncio.run_coroutine_threadsafe(_forward(listener, port), loop).result()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            for _, listener in listeners:
                listener.close()

    def _listener(self, first: subprocess.Popen[bytes], port: int) -> socket.socket:
        """Return a socket that listens in a namespace: a socket stays where its thread was when it was made."""
        made = list[socket.socket]()

        def listen() -> None:
            with Path(f"/proc/{self._init(first)}/ns/net").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server(("127.0.0.1", port)))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return made[0]

    def _init(self, first: subprocess.Popen[bytes]) -> str:
        """Return the id, on this machine, of the first process in a host's namespaces."""
        return str(psutil.Process(first.pid).children()[0].pid)

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)


async def _forward(listener: socket.socket, port: int) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the other direction notices it, too
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    await asyncio.start_server(connect, sock=listener)


def family(*processes: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return processes and all their descendants."""
    return [
        each
        for process in processes
        for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))
    ]
