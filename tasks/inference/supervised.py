"""A command that ends with this process, however that ends, and its folder, which no other user may enter."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from storage.objects.temporary import TemporaryFolder
from tasks.inference import supervisor

_LONGEST_PARENT = 40
"""Most bytes of the path of the parent folder. A socket's path has at most 107: our folder's name takes 20, vLLM 37."""
_KILLED_S = 10.0
"""Longest wait for the end of killed processes."""


class Supervised:
    """A command under `supervisor`; it can be started again after it has ended.

    Attributes:
        log: file that receives the command's output.
        folder: the command's TMPDIR, with mode 0700. It stays until `close`: no other user can take its place.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._made = TemporaryFolder(_parent())
        self.folder = self._made.path
        self._process: subprocess.Popen[bytes] | None = None
        self._using = threading.RLock()  # one thread may close it while another restarts it
        self._closed = False

    @property
    def alive(self) -> bool:
        """Return whether the supervisor runs; it ends with the command."""
        return self._process is not None and self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Return whether a signal ended the command or the supervisor; then the command itself has no fault."""
        status = self._process.poll() if self._process else None
        return status is not None and (status < 0 or status > 128)  # the supervisor's exit status is one byte

    @property
    def succeeded(self) -> bool:
        """Return whether the command has ended with status 0."""
        return self._process is not None and self._process.poll() == 0

    @property
    def is_stopped(self) -> bool:
        """Return whether SIGSTOP stopped the command, so that it does not answer; False for a slow command."""
        try:
            return psutil.Process(self._group()).status() == psutil.STATUS_STOPPED
        except (OSError, psutil.Error):  # gone, or not visible at the moment, for example with too many open files
            return False

    @property
    def pid(self) -> int | None:
        """The process id of the supervisor, the parent of the command's process group."""
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
        with self._using:
            if self._closed:
                return
            # A new session: Ctrl-C in the terminal reaches only the pipeline, which then ends the command.
            self._process = subprocess.Popen(
                [sys.executable, "-P", supervisor.__file__, str(self.log), str(self.folder), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**environment, "TMPDIR": str(self.folder)},
                start_new_session=True,
                pass_fds=pass_fds,
                cwd=cwd,
            )

    def stop(self) -> None:
        """End the process group and wait until it is gone."""
        with self._using:
            if self._process is None:
                return
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self._process.stdin.write(supervisor.STOP)
                self._process.stdin.close()
            try:
                self._process.wait(timeout=supervisor.GRACE_S + 10)
            except subprocess.TimeoutExpired:  # a signal (SIGSTOP) has stopped the supervisor
                self._process.kill()
                self._process.wait()
            finally:
                self._process = None
                self._kill_orphans()

    def close(self) -> None:
        """End the process group for good and remove the folder."""
        with self._using:
            self._closed = True
            self.stop()
            self._made.remove()

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _group(self) -> int:
        """Return the id of the process group, which is the id of the command's first process."""
        return int((self.folder / supervisor.GROUP).read_text())

    def _kill_orphans(self) -> None:
        """Kill the processes that a killed supervisor has left."""
        note = self.folder / supervisor.GROUP
        if not note.exists():
            return
        group = self._group()
        if not _is_another(group, note.stat().st_mtime):
            deadline = time.monotonic() + _KILLED_S
            while supervisor.signal_group(group, signal.SIGKILL) and time.monotonic() < deadline:
                time.sleep(0.05)  # the GPU's memory is free only after they have ended
        supervisor.empty(self.folder)


def _is_another(leader: int, noted: float) -> bool:
    """Return whether the id of the group's first process now belongs to a process that began after `noted`."""
    try:
        return psutil.Process(leader).create_time() > noted + 1
    except psutil.NoSuchProcess:
        return False


def _parent() -> str:
    """Return a parent folder for the folders of sockets."""
    for parent in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        if parent and len(os.fsencode(parent)) <= _LONGEST_PARENT and os.access(parent, os.W_OK | os.X_OK):
            return parent
    raise OSError(
        f"no folder for sockets: set TMPDIR to a writable folder with a path of at most {_LONGEST_PARENT} bytes"
    )
