"""Commands that end with this process, however it ends, together with everything that they have started."""

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker, spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from storage.processes import folder, reaper

_VARIABLE = "MATH_MT_PPO_OWNER"
_GRACE_S = 5.0
"""Time for a command to end by itself; then it is killed."""
_KILLED_S = 10.0
"""Longest wait for the end of killed processes: only then the memory of their GPUs is free."""


def mark() -> dict[str, str]:
    """Return the environment variables by which a new process ends with this one."""
    return _start_reaper(os.getpid())


@functools.cache
def _start_reaper(owner: int) -> dict[str, str]:
    """Start the reaper, once in this process; return the mark."""
    token = secrets.token_hex(16)
    nothing = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    command = [sys.executable, "-I", "-S", reaper.__file__, str(owner), f"{_VARIABLE}={token}", *folder.parents()]
    os.posix_spawn(sys.executable, command, {}, file_actions=nothing, setsid=True)
    # The second variable keeps `setproctitle`, which vLLM and Ray call, from writing over the first.
    return {_VARIABLE: token, "SPT_NOENV": "1"}


_all_preparations, _of_pool = spawn.get_preparation_data, threading.local()


def _preparations(name: str) -> dict[str, Any]:
    """Return what a process of multiprocessing does first; one of a pool leaves out the import of the main module."""
    prepared = _all_preparations(name)
    if getattr(_of_pool, "starts", False):
        return {key: value for key, value in prepared.items() if not key.startswith("init_main")}
    return prepared


spawn.get_preparation_data = _preparations


class _PoolProcess(SpawnProcess):
    """A process that multiprocessing terminates at exit. For others it waits, also for one that an interrupt lost.

    It does not import the main module: no function of a pool is there, and a flow's imports Prefect for seconds.
    """

    def start(self) -> None:
        _of_pool.starts = True  # in this thread: what others start meanwhile imports it
        try:
            super().start()
        finally:
            _of_pool.starts = False

    @property
    def daemon(self) -> bool:
        return True

    @daemon.setter
    def daemon(self, _: bool) -> None: ...


class _PoolContext(SpawnContext):
    Process = _PoolProcess


def for_pools() -> SpawnContext:
    """Return the context for a pool of processes, which end with this one though they cannot end themselves yet.

    They bear the mark from their first moment. So does whatever else this process starts from now on.
    """
    resource_tracker.ensure_running()  # without the mark: it removes what a killed process leaves in /dev/shm
    os.environ.update(mark())
    return _PoolContext()


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when the thread that started it ends; end now if the process `parent` has."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1: PR_SET_PDEATHSIG of linux/prctl.h
    if parent not in (None, os.getppid()):
        os._exit(1)


def kill_until_gone(variable: str) -> None:
    """Kill the processes with a variable, `NAME=value`, in their environment, and wait until they are gone."""
    deadline = time.monotonic() + _KILLED_S
    while reaper.kill_marked(variable) and time.monotonic() < deadline:
        time.sleep(0.02)


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2**16))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


class Child:
    """A command in a session of its own, so that it gets no Ctrl-C; it can be started again after it has ended.

    Attributes:
        log: file that receives the command's output.
        folder: the command's TMPDIR. It stays until `close`: no other user can make another one of this name.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._made = folder.TemporaryFolder(folder.for_sockets())
        self.folder = self._made.path
        self._process: subprocess.Popen[bytes] | None = None
        self._using = threading.RLock()  # one thread may close it while another restarts it
        self._closed = False

    @property
    def alive(self) -> bool:
        return self._process is not None and self.status is None

    @property
    def status(self) -> int | None:
        """The exit status of the command, -n for signal n; None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        cwd: Path | None = None,
    ) -> None:
        """Start the command without waiting, unless `close` was called; it inherits the open files in `pass_fds`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self._using, self.log.open("ab") as log:
            if self._closed:
                return
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**environment, **mark(), "TMPDIR": str(self.folder)},
                start_new_session=True,
                pass_fds=pass_fds,
                cwd=cwd,
            )

    def stop(self) -> None:
        """End the command, and kill everything that it has started; wait until they are gone."""
        with self._using:
            if self._process is None:
                return
            process, self._process = self._process, None
            try:
                _signal_group(process.pid, signal.SIGTERM)
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                _signal_group(process.pid, signal.SIGKILL)  # also what outlives the command in its group
                process.wait()
                kill_until_gone(f"TMPDIR={self.folder}")
                self._made.empty()

    def close(self) -> None:
        """End the command for good, and remove the folder."""
        with self._using:
            self._closed = True
            self.stop()
            self._made.remove()

    def log_tail(self, lines: int = 15) -> str:
        return tail(self.log, lines)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, number)
