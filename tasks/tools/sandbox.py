"""Sandboxes: programs that nobody trusts, started by bubblewrap and killed with everything that they have started.

`Sandboxes.run` gives a program one input and returns its output; `Sandboxes.open` is for a conversation with it.
"""

import asyncio
import contextlib
import os
import platform
import shutil
import signal
import subprocess
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

from tasks.tools.bubblewrap import MACHINE, Launch, Limits, launch, python

Ended = Literal["exited", "time", "output"]
"""Why a program ended: by itself or by a limit of the kernel ("exited"), or killed at the limit of time or output."""
_REMEDY = (
    "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 an AppArmor profile for bwrap "
    "with the rule `userns,`), and in a container mounts, too (Docker: --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined)"
)
_TRIAL = """
import os, socket
try:
    os.fork()
except OSError:
    print("limited")
"""
"""A program for a sandbox with one process."""


class SandboxError(RuntimeError):
    """A sandbox could not be made, although the check before the run could make one. No program has run in it."""


@dataclass(frozen=True, slots=True)
class Result:
    r"""How a program ended.

    Example: Result(status=0, stdout=b"4\n", stderr=b"", ended="exited")
    """

    status: int | None  # 128 + n for signal n; None: killed at the limit of time or output
    stdout: bytes  # cut to the limit
    stderr: bytes  # cut to the limit
    ended: Ended


class Sandbox:
    """A running program. What it writes may be anything."""

    def __init__(self, process: Process, start: Launch) -> None:
        assert process.stdin
        assert process.stdout
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self._process, self._launch = process, start

    async def wait(self, output: bytes | bytearray) -> int:
        """Wait until the program ends by itself; return its exit status, 128 + n for signal n.

        Raises:
            SandboxError: bubblewrap failed, or somebody killed it; with the end of what was written so far.
        """
        await self._process.wait()
        status = self._launch.exit_status()
        if status is None:
            end = output[-500:].decode(errors="replace").strip()
            raise SandboxError(f"bubblewrap ended with status {self._process.returncode} before the program: {end}")
        return status

    async def read(self, source: asyncio.StreamReader, into: bytearray, most: int) -> bool:
        """Read to the end; kill the program and return True if it writes more than `most` bytes."""
        while chunk := await source.read(2**16):
            if len(into) + len(chunk) > most:
                into += chunk[: most - len(into)]
                self.kill()
                return True
            into += chunk
        return False

    async def give(self, data: bytes) -> None:
        """Write to the program's standard input, and close it; the program need not read it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.stdin.write(data)
            await self.stdin.drain()
        self.stdin.close()

    def kill(self) -> None:
        """Kill all of its processes.

        This kills the first process of a namespace, with which the kernel kills all others; bubblewrap waits for it. If
        bubblewrap were killed, zombies would be left in containers whose first process does not wait for orphans.
        """
        if self._process.returncode is not None:
            return
        pid = self._process.pid
        try:
            first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:  # it has ended, or this process may open no more files
            first = []
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if first:
                os.kill(int(first[0]), signal.SIGKILL)
            else:
                os.killpg(pid, signal.SIGKILL)

    async def end(self) -> bytes:
        """Kill all of its processes, wait until they are gone, and return the standard output that nobody has read."""
        self.kill()
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        rest, *_ = await asyncio.gather(*(stream.read() for stream in streams))  # to the end: nobody holds them open
        await self._process.wait()
        return rest


class Sandboxes:
    """The sandboxes of this process; threads and event loops may share it.

    Args:
        most_at_once: number of `slot`s of one event loop.
    """

    def __init__(self, most_at_once: int = 200) -> None:
        self._most_at_once = most_at_once
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def check(self) -> None:
        """Make a sandbox, the first time, and check that its limits hold.

        Raises:
            ValueError: this machine cannot make sandboxes; names the remedy.
        """
        check_host()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more sandbox may work at the same time as others; the slot is free again at the end."""
        async with self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._most_at_once)):
            yield

    @asynccontextmanager
    async def open(
        self, argv: Sequence[str], limits: Limits, *, packages: bool = False, merged: bool = False
    ) -> AsyncIterator[Sandbox]:
        """Start a program; kill it at the end.

        Its limits of time and output are the caller's to hold, and so is a `slot` while it works. With `merged`,
        standard error goes to standard output.

        Raises:
            SandboxError: it cannot be started, for example because this process has too many open files.
        """
        stderr = STDOUT if merged else PIPE
        async with AsyncExitStack() as stack:
            try:
                start = stack.enter_context(launch(argv, limits, packages))
                process = await asyncio.create_subprocess_exec(
                    *start.command, stdin=PIPE, stdout=PIPE, stderr=stderr, limit=limits.output_bytes, **start.options
                )
            except OSError as error:
                raise SandboxError(f"no sandbox can be started: {error}") from error
            sandbox = Sandbox(process, start)
            try:
                yield sandbox
            finally:
                await sandbox.end()

    async def run(self, argv: Sequence[str], given: bytes, limits: Limits, *, packages: bool = False) -> Result:
        """Run a program on one input, in a `slot`, until its end or a limit.

        Raises:
            SandboxError: it was not started.
        """
        out, err = bytearray(), bytearray()
        async with self.slot(), self.open(argv, limits, packages=packages) as sandbox:
            assert sandbox.stderr
            try:
                async with asyncio.timeout(limits.seconds):
                    *full, _ = await asyncio.gather(
                        sandbox.read(sandbox.stdout, out, limits.output_bytes),
                        sandbox.read(sandbox.stderr, err, limits.output_bytes),
                        sandbox.give(given),
                    )
                    if any(full):
                        return Result(None, bytes(out), bytes(err), "output")
                    return Result(await sandbox.wait(err), bytes(out), bytes(err), "exited")
            except TimeoutError:
                return Result(None, bytes(out), bytes(err), "time")


@cache
def check_host() -> None:
    """Make a sandbox, the first time that a process asks.

    Raises:
        ValueError: it cannot be made, or its number of processes is not limited; names the remedy.
    """
    if platform.machine() != MACHINE:
        raise ValueError(f"sandboxes filter system calls by the numbers of {MACHINE}, not {platform.machine()}")
    if missing := [program for program in ("bwrap", "prlimit", "setpriv") if not shutil.which(program)]:
        raise ValueError(f"sandboxes need {', '.join(missing)}: apt-get install bubblewrap util-linux")
    with launch(python(_TRIAL), Limits()) as start:
        done = subprocess.run(start.command, capture_output=True, text=True, timeout=60, **start.options)
    if done.returncode:
        raise ValueError(f"bubblewrap cannot make a sandbox here: {done.stderr.strip()[-500:]}; {_REMEDY}")
    if done.stdout != "limited\n":
        linux = f"Linux {platform.release()}: it must be 5.14 or newer"
        raise ValueError(f"sandboxes cannot limit the number of processes on {linux}")
