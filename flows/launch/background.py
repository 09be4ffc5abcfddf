"""Commands in the background. A note identifies the process of each; processes are never found by name."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from flows.launch.prefect_server import START_SECONDS
from storage.processes.child import tail
from storage.processes.identity import identity, is_alive

STOP_SECONDS = 20
"""Time for a flow run to end its vLLM server; then all remaining processes are killed."""
KILLED_SECONDS = 10
"""Time for killed processes to end. A process that waits in the kernel, for a disk for example, may never end."""
_MOST = 2**22
"""Highest process id on Linux."""


class Background:
    """A Python command in its own session, which its flow runs inherit.

    The note `NAME.pid` in `folder` contains the identity of the first process as JSON; `folder` is also the command's
    `PREFECT_HOME`.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._note = folder / f"{name}.pid"

    def start(
        self, arguments: Iterable[str], cwd: Path, environment: Mapping[str, str], inherits: Iterable[socket.socket]
    ) -> None:
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env={**environment, "PREFECT_HOME": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[inherited.fileno() for inherited in inherits],
            )
        try:
            self._note.write_text(json.dumps(identity(process.pid)))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # without a note, `stop` could not find it
            raise

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait until the command is ready.

        Raises:
            ValueError: the command has ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if not self.members() or time.monotonic() > deadline:
                raise ValueError(f"the {self.name} did not start; its log {self.log} ends:\n{tail(self.log)}")
            time.sleep(0.5)

    def runs(self) -> bool:
        """Return whether the first process lives; flow runs alone do not count, they may outlive a killed worker."""
        noted = self._read_note()
        return noted is not None and is_alive(noted) is True

    def members(self) -> list[psutil.Process]:
        """Return the living processes of the session, even if the first one is gone.

        The list is empty if another process has taken the first one's id.
        """
        noted = self._read_note()
        if noted is None or is_alive(noted) is None:  # after a reboot, or in another container
            return []
        members = [process for process in psutil.process_iter() if _session_id(process) == noted["pid"]]
        if is_alive(noted):
            return members
        taken = noted["pid"] in [process.pid for process in members]
        return [] if taken else [process for process in members if self._is_marked(process)]

    def stop(self) -> list[psutil.Process]:
        """End the flow runs first, while worker and server can still record it, then the command itself.

        Returns:
            Processes that do not end. As long as there are any, the note stays.
        """
        if (noted := self._read_note()) is None and self._note.exists():
            print(f"{self._note} is damaged: if the {self.name} still runs, end it by hand")
        members = self.members()
        first = [process for process in members if noted and process.pid == noted["pid"]]
        forced, left = 0, list[psutil.Process]()
        for processes in ([process for process in members if process not in first], first):
            killed, alive = _end(processes)
            forced, left = forced + killed, left + alive
        if left:
            return left
        self._note.unlink(missing_ok=True)
        if members:
            print(f"{self.name} ended" + (f", {forced} processes by force" if forced else ""))
        return []

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("PREFECT_HOME") == str(self._folder)
        except (psutil.Error, OSError):  # it has just ended, or belongs to another user
            return False

    def _read_note(self) -> dict[str, Any] | None:
        """Read the identity of the first process; None without a valid note."""
        if self._note.exists() and not self._note.is_file():
            raise ValueError(f"{self._note} is not a file: remove it")
        try:
            noted = json.loads(self._note.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        match noted:
            case {"pid": int(pid), "machine": str(), "started": int() | None} if 1 < pid <= _MOST:
                return dict(noted)
        return None


def _end(processes: list[psutil.Process]) -> tuple[int, list[psutil.Process]]:
    """Ask the processes to end, which end what they have started; after `STOP_SECONDS` kill them.

    Returns:
        The number of killed processes, and the processes that still live.
    """
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.terminate()
    killed = _wait(processes, STOP_SECONDS)
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    return len(killed), _wait(killed, KILLED_SECONDS)


def _wait(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all processes have ended, for at most `seconds`; return those that still live."""
    deadline = time.monotonic() + seconds
    while (living := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return living


def _lives(process: psutil.Process) -> bool:
    """Return whether a process lives. A zombie does not: it stays until its parent reaps it, perhaps for ever."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _session_id(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if _lives(process) else None
    except (ProcessLookupError, PermissionError):
        return None  # it has just ended, or belongs to another user
