"""Commands that run in the background, found again by the noted identity of their process, never by name."""

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
from storage import interrupts
from storage.processes import identity, is_alive

CLOCK_SECONDS = 60
"""Largest difference by which an adjusted clock may put a process's start after the writing of its number."""
STOP_SECONDS = 20
"""Time that a flow run has to end its vLLM server, before all processes that are left are killed."""
KILLED_SECONDS = 10
"""Time that killed processes have to end. One that waits in the kernel, for a disk say, may never end."""
_MOST = 2**22
"""No process of Linux has a higher number."""


class Background:
    """A Python command in a session of its own, which its flow runs inherit.

    Its note `NAME.pid` in `folder`, which is also its `PREFECT_HOME`, holds the identity of its first process as JSON.
    Former versions noted the number alone, which is JSON as well.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._folder = folder
        self._note = folder / f"{name}.pid"

    def start(
        self, arguments: Iterable[str], cwd: Path, environment: Mapping[str, str], inherits: Iterable[socket.socket]
    ) -> None:
        with self.log.open("w") as log, interrupts.held():
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
            except OSError:
                os.killpg(process.pid, signal.SIGKILL)  # nobody would find it
                raise

    def wait(self, ready: Callable[[], bool]) -> None:
        """Returns when it is ready.

        Raises:
            ValueError: it has ended, or takes too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            if not self.members() or time.monotonic() > deadline:
                end = self.log.read_text(errors="replace")[-2000:]
                raise ValueError(f"the {self.name} did not start; its log {self.log} ends:\n{end}")
            time.sleep(0.5)

    def runs(self) -> bool:
        """Return whether its first process lives: flow runs may outlive a worker that was killed."""
        noted = self._noted()
        return noted is not None and noted["pid"] in [process.pid for process in self.members()]

    def members(self) -> list[psutil.Process]:
        """The living processes of its session, also when the first is gone; none where somebody else has its number."""
        noted = self._noted()
        if noted is None or ("machine" in noted and is_alive(noted) is None):  # after a reboot, or in another container
            return []
        members = [process for process in psutil.process_iter() if _session_id(process) == noted["pid"]]
        first = next((process for process in members if process.pid == noted["pid"]), None)
        if first is None:
            return [process for process in members if self._is_marked(process)]
        return members if self._is_noted(first, noted) else []

    def stop(self) -> list[psutil.Process]:
        """End flow runs first, while worker and server can still record it, then the command itself.

        Returns:
            Processes that do not end. As long as there are any, the note stays.
        """
        if (noted := self._noted()) is None and self._note.exists():
            print(f"{self._note} is damaged: if the {self.name} still runs, end it by hand")
        members = self.members()
        flow_runs = [process for process in members if noted and process.pid != noted["pid"]]
        forced, left = 0, list[psutil.Process]()
        for processes in (flow_runs, [process for process in members if process not in flow_runs]):
            killed, alive = _end(processes)
            forced, left = forced + killed, left + alive
        if left:
            return left
        self._note.unlink(missing_ok=True)
        if members:
            print(f"{self.name} ended" + (f", {forced} processes by force" if forced else ""))
        return []

    def _noted(self) -> dict[str, Any] | None:
        """Identity, or as former versions noted it the number, of the first process; None without a whole note."""
        if self._note.exists() and not self._note.is_file():
            raise ValueError(f"{self._note} is not a file: remove it")
        try:
            noted = json.loads(self._note.read_bytes())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        match noted:
            case int(pid) if 1 < pid <= _MOST:
                return {"pid": pid}
            case {"pid": int(pid), "machine": str(), "started": int() | None} if 1 < pid <= _MOST:
                return dict(noted)
        return None

    def _is_noted(self, process: psutil.Process, noted: dict[str, Any]) -> bool:
        """Return whether a living process is the one that was noted, and not a later one with the same number."""
        if "machine" in noted:
            return is_alive(noted) is True
        try:
            began = process.create_time()
        except psutil.NoSuchProcess:
            return False
        return began <= self._note.stat().st_mtime + CLOCK_SECONDS and self._is_marked(process)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("PREFECT_HOME") == str(self._folder)
        except (psutil.Error, OSError):  # ended while we looked, or not ours to see
            return False


def _end(processes: list[psutil.Process]) -> tuple[int, list[psutil.Process]]:
    """Ask the processes to end; after `STOP_SECONDS` kill them and their descendants.

    Returns:
        How many it killed, and those that live on.
    """
    family = {child for process in processes for child in _children(process)} | set(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.terminate()
    killed = _wait(family, STOP_SECONDS)
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    return len(killed), _wait(killed, KILLED_SECONDS)


def _wait(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait until all have ended, so long at most; returns those that live on."""
    deadline = time.monotonic() + seconds
    while (living := [process for process in processes if _lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return living


def _lives(process: psutil.Process) -> bool:
    """Return False for a zombie as well: it stays until its parent reaps it, which may be never."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _session_id(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid) if _lives(process) else None
    except (ProcessLookupError, PermissionError):
        return None  # ended while we looked, or not ours to see


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
